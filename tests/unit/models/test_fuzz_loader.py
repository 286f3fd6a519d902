"""Whatever bytes a checkpoint holds, it loads or is refused with a ModelLoadError."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent / "fuzz_loader.py"


def fuzz(folder: Path, count: int, *, seed: int, timeout_s: float) -> None:
    command = [sys.executable, str(SCRIPT), str(folder), str(count), str(seed)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s)
    assert done.returncode == 0, f"exit {done.returncode}: {done.stderr[-2000:]}"
    report = json.loads(done.stdout)
    assert report["num_wrong"] == 0, "\n".join(report["wrong"])
    assert report["slowest_s"] <= 2.0
    assert report["grown_mib"] <= 256
    for target, counts in report["outcomes"].items():
        # Some mutations are harmless, most are not: a target with one outcome tests nothing.
        assert counts["refused"] > count / 20, target
        assert counts["ok"] > 0, target


def test_fuzz(tmp_path: Path) -> None:
    """2,000 mutated files: only ok or ModelLoadError, each within 2 s and 256 MiB."""
    fuzz(tmp_path, 2_000, seed=1, timeout_s=180)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10, 20))
def test_fuzz_release(tmp_path: Path, seed: int) -> None:
    """200,000 mutated files in ten runs."""
    fuzz(tmp_path, 20_000, seed=seed, timeout_s=1200)
