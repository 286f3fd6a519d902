"""TierStreams: carries out a plan's stores and loads on a device, beside its steps.

Order, where P is a plan, by streams and events:

- Stores of P run on a stream of their own as soon as P is launched: what they read was written by
  steps, or loads, that the host knows to be done. Everything of P that writes to the pool, its
  loads and its forward pass, waits for them.
- Loads of P run on another stream, after P's stores and the steps before P, which may still write
  to blocks that were freed meanwhile. Nothing waits for them but a plan that says so, and all
  after it: the host asks now and then, and until it knows of the end, or such a plan is launched,
  no plan reads or writes those blocks.
- Host slots are pinned by cache/tiers/lower.py until the host knows of the end of either, so slots
  need no order here.
"""

from __future__ import annotations

from collections import deque

import numpy as np
import torch
from torch import Tensor

from pico_vllm.cache.tiers.host_pool import HostPool
from pico_vllm.kernels.swap_blocks import swap_blocks
from pico_vllm.step import BlockCopies, StepPlan


class TierStreams:
    def __init__(self, device_pool: Tensor, host_pool: HostPool) -> None:
        """Copies a null block there and back, so that the kernels are there."""
        self._device_pool = device_pool
        self._host_pool = host_pool
        self._device = device_pool.device
        self._is_cuda = self._device.type == "cuda"
        self._loading: deque[tuple[int, torch.cuda.Event | None]] = deque()
        """Plans whose loads nobody was told of, and the end of those."""
        if self._is_cuda:
            self._store_stream = torch.cuda.Stream(self._device)
            self._load_stream = torch.cuda.Stream(self._device)
        null = BlockCopies([0], [0])
        self._swap(self._device_pool, self._host_pool.blocks, null)
        self._swap(self._host_pool.blocks, self._device_pool, null)
        if self._is_cuda:
            torch.cuda.synchronize(self._device)

    def launch(self, plan: StepPlan) -> None:
        """Before anything else of the plan."""
        device_pool, host_blocks = self._device_pool, self._host_pool.blocks
        if not self._is_cuda:
            if plan.stores:
                self._swap(device_pool, host_blocks, plan.stores)
            if plan.loads:
                self._swap(host_blocks, device_pool, plan.loads)
                self._loading.append((plan.number, None))
            return
        steps = torch.cuda.current_stream(self._device)
        if plan.awaits_loads:
            steps.wait_stream(self._load_stream)
        if plan.stores:
            with torch.cuda.stream(self._store_stream):
                self._swap(device_pool, host_blocks, plan.stores)
            steps.wait_stream(self._store_stream)
        if plan.loads:
            self._load_stream.wait_stream(steps)
            with torch.cuda.stream(self._load_stream):
                self._swap(host_blocks, device_pool, plan.loads)
                end = torch.cuda.Event()
                end.record()
            self._loading.append((plan.number, end))

    def _swap(self, source: Tensor, target: Tensor, copies: BlockCopies) -> None:
        copies_2C = torch.from_numpy(np.array([copies.sources, copies.targets], np.int32))
        if self._is_cuda:
            # Pinned by PyTorch's allocator, which keeps it until the copy is done.
            copies_2C = copies_2C.pin_memory().to(self._device, non_blocking=True)
        swap_blocks(source, target, copies_2C)

    def take_loaded(self, *, waits: bool = False) -> tuple[int, ...]:
        """Plans whose loads have ended since the last call. waits: for the first, if there is
        one."""
        done = []
        while self._loading:
            number, end = self._loading[0]
            if end is not None and not end.query():
                if not waits:
                    break
                end.synchronize()
            waits = False
            self._loading.popleft()
            done.append(number)
        return tuple(done)

    def wait_for_stores(self) -> None:
        """Those of plans that were launched: a result of such a plan says that they are over. A
        plan with a forward pass need not ask, as that waits for them."""
        if self._is_cuda:
            self._store_stream.synchronize()

    def wait(self) -> None:
        """Let all end; nobody is told of the loads."""
        if self._is_cuda:
            self._store_stream.synchronize()
            self._load_stream.synchronize()
        self._loading.clear()

    def close(self) -> None:
        """The device is idle. What the host pool holds can still be read by the host."""
        self._host_pool.close()
