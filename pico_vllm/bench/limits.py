"""What this machine can do at best, measured beside what is compared with it."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from pico_vllm.engine.loading import settle_device, why_no_gpu
from pico_vllm.errors import ConfigError

READ_BYTES = 1 << 30
MATMUL_SIZE = 8192
NUM_TRIES = 10


def require_gpu(device: str, command: str) -> torch.device:
    """The GPU of that name; auto is the first.

    Raises:
        ConfigError: there is none, or the CPU was asked for.
    """
    if device == "cpu" or not torch.cuda.is_available():
        why = "was given the CPU"
        if device != "cpu":
            why = f"torch {torch.__version__} {why_no_gpu()}"
        raise ConfigError(
            f"{command} needs a GPU and {why}; bench engine and bench ladder run without one",
            param="device",
        )
    return settle_device(device)


def read_limit_bytes_s(device: str) -> float:
    """Bytes a second that can be read from memory, the best of some readings of 1 GiB.

    On a CPU torch's sum with all threads of this run, on a GPU a kernel of our own: sums of torch
    are bound by more than reading there.

    Raises:
        ConfigError: there is no room for 1 GiB on the GPU.
    """
    if device == "cpu":
        return READ_BYTES / _best_cpu_read_s()
    from pico_vllm.bench.read_memory import BLOCKS, read_sums

    with torch.cuda.device(device):
        try:
            data = torch.arange(READ_BYTES // 4, dtype=torch.int32, device=device)
        except torch.OutOfMemoryError:
            raise ConfigError(
                f"{device} has no room left for the 1 GiB on which its read limit is measured; "
                "lower --gpu-memory-utilization",
                param="gpu_memory_utilization",
            ) from None
        best_ms = float("inf")
        for block, num_warps in BLOCKS:
            sums = torch.empty(data.numel() // block, dtype=torch.int32, device=device)
            times_ms = [
                _behind_itself_ms(lambda b=block, w=num_warps, s=sums: read_sums(data, s, b, w))
                for _ in range(NUM_TRIES + 1)
            ]
            best_ms = min(best_ms, *times_ms[1:])
        return READ_BYTES / best_ms * 1e3


def matmul_limit_flop_s(device: str, dtype: torch.dtype) -> float:
    """Floating-point operations a second of a large square product, the best of some. GPU."""
    size = MATMUL_SIZE
    with torch.cuda.device(device):
        left = torch.randn((size, size), device=device).to(dtype)
        out = torch.empty_like(left)
        times_ms = [
            _behind_itself_ms(lambda: torch.mm(left, left, out=out)) for _ in range(NUM_TRIES + 2)
        ]
        return 2 * size**3 / min(times_ms[2:]) * 1e3


def _behind_itself_ms(run: Callable[[], object]) -> float:
    """cuda_ms of the second of two runs: the host has launched it before its turn comes. The first
    would count from an idle device, and 20 to 30 us of launch are 10 % of reading 1 GiB."""
    run()
    return cuda_ms(run)


def cuda_ms(run: Callable[[], object]) -> float:
    """Milliseconds of what `run` launches on the current stream."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


def _best_cpu_read_s() -> float:
    data = torch.zeros(READ_BYTES // 4, dtype=torch.float32)

    def read_s() -> float:
        start = time.perf_counter()
        data.sum().item()
        return time.perf_counter() - start

    read_s()
    return min(read_s() for _ in range(5))
