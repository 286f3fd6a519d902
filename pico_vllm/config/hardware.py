"""What this machine has, asked of the system alone. Host only."""

from __future__ import annotations

import functools
import os


def cpu_threads() -> int:
    """Cores this process may use, or OMP_NUM_THREADS where it is set.

    Physical cores: two threads on one core share its multipliers.
    """
    wanted = os.environ.get("OMP_NUM_THREADS", "")
    if wanted.isdigit() and int(wanted) > 0:
        return int(wanted)
    allowed = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    fields = [line.split(":", 1) for line in _cpu_info().splitlines() if ":" in line]
    siblings = {value.strip() for key, value in fields if key.strip() == "siblings"}
    cores = {value.strip() for key, value in fields if key.strip() == "cpu cores"}
    if len(siblings) == len(cores) == 1:
        per_core = max(1, int(siblings.pop()) // max(1, int(cores.pop())))
        return max(1, allowed // per_core)
    return allowed


def cpu_name() -> str:
    for line in _cpu_info().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return "unknown"


def cpu_has_fast_bf16() -> bool:
    """Whether the CPU multiplies bfloat16 itself; where it does not, float32 is faster."""
    for line in _cpu_info().splitlines():
        if line.startswith(("flags", "Features")):
            flags = set(line.split(":", 1)[1].split())
            return bool(flags & {"avx512_bf16", "amx_bf16", "bf16"})
    return False


def available_memory_bytes() -> int:
    """Memory that can be taken without swapping."""
    with open("/proc/meminfo", encoding="ascii") as file:
        for line in file:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")


@functools.cache
def _cpu_info() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError:
        return ""
