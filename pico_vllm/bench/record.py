"""What a measured figure must carry: commit, machine, versions, threads, resolved settings.
Flat."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from contextlib import suppress
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

import pico_vllm
from pico_vllm.config import hardware
from pico_vllm.config.engine import EngineConfig

THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "GLIBC_TUNABLES")


def environment(config: EngineConfig, *, commit: str | None = None) -> dict[str, Any]:
    """Every key of it goes into each line of a record. The config is resolved."""
    settings = {f"config_{name}": getattr(config, name) for name in config.__dataclass_fields__}
    return machine(config.device, commit=commit) | settings


def machine(device: str, *, commit: str | None = None) -> dict[str, Any]:
    """Commit, machine, versions and threads."""
    facts: dict[str, Any] = {
        "date": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        **_commit(commit),
        "pico_vllm": pico_vllm.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": _version("triton"),
        "cuda": torch.version.cuda,
        "cpu": hardware.cpu_name(),
        "cpu_cores": len(os.sched_getaffinity(0)),
        "threads": torch.get_num_threads(),
        "gpu": None,
        "driver": None,
    }
    if device != "cpu":
        facts["gpu"] = torch.cuda.get_device_name(torch.device(device))
        facts["driver"] = _first_line(
            "nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"
        )
    return facts | {name.lower(): os.environ.get(name) for name in THREAD_VARIABLES}


def append_record(path: Path, line: dict[str, Any]) -> None:
    """Add a line to a results file, one JSON object each. The whole line or, where that raises
    OSError, none of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    left = (json.dumps(line, allow_nan=False) + "\n").encode()
    with path.open("ab", buffering=0) as file:
        end = file.tell() if file.seekable() else 0
        try:
            while left:
                left = left[file.write(left) :]
        except OSError:
            with suppress(OSError):  # of what is no file
                file.truncate(end)
            raise


def _commit(given: str | None) -> dict[str, Any]:
    if given is not None:
        return {"commit": given, "dirty": None}
    sha = _first_line("git", "rev-parse", "--short=12", "HEAD")
    status = _first_line("git", "status", "--porcelain", "--untracked-files=no")
    return {"commit": sha, "dirty": None if sha is None else bool(status)}


def _first_line(*command: str) -> str | None:
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=10,
            cwd=Path(__file__).parent,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return (done.stdout.splitlines() or [""])[0].strip() if done.returncode == 0 else None


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
