"""Runs the source of a Gluon kernel for Hopper on the CPU.

A thread a partition. What the hardware may do late happens late: copies land after a while, in
memory that is NaN until then, products read their operands when they are waited for, and what was
stored to shared memory reaches products at the fence. So a wait too few gives wrong numbers, one
too many a hang, which is an error after TIMEOUT_S. Layouts do nothing. Shared memory begins as NaN.
Programs come in any order. A kernel that may start early finds NaN in what the kernel before
writes (written_before) until it waits for it, and may itself write nothing.
"""

from __future__ import annotations

import itertools
import math
import random
import threading
import time
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

TIMEOUT_S = 20.0
COPY_DELAYS_S = (0.0, 0.0, 5e-3)
MAX_PRODUCT_DELAY_S = 3e-4
_thread = threading.local()
"""Of a partition: the program's id, products and copies that run, stores that are not fenced, and
whether it has waited for the kernel before; of a program its barriers, and what that kernel
writes."""
_written_before: list[Tensor] = []


@contextmanager
def written_before(*tensors: Tensor) -> Iterator[None]:
    """Tensors that the kernel before the next ones writes."""
    _written_before.extend(tensors)
    try:
        yield
    finally:
        _written_before.clear()


def on_cpu(module: types.ModuleType, *imported: types.SimpleNamespace) -> types.SimpleNamespace:
    """The module's functions, kernels among them, as they run here. imported: of modules that it
    takes kernels from."""
    names = dict(vars(module))
    names |= _LANGUAGE
    for other in imported:
        names |= {
            name: value
            for name, value in vars(other).items()
            if name in names and isinstance(value, _Kernel)
        }
    for name, value in vars(module).items():
        if isinstance(value, gl.constexpr):
            names[name] = value.value
        function = getattr(value, "fn", value)
        if not isinstance(function, types.FunctionType) or function.__module__ != module.__name__:
            continue
        copy = types.FunctionType(function.__code__, names, name, function.__defaults__)
        copy.__kwdefaults__ = function.__kwdefaults__
        names[name] = copy if function is value else _Kernel(copy)
    return types.SimpleNamespace(**names)


class _Barrier:
    """A phase ends when all have arrived and all expected bytes have landed."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.num_phases = self.num_bytes = self.count = self.num_missing = 0

    def init(self, count: int) -> None:
        self.count = self.num_missing = count

    def expect(self, num_bytes: int, pred: Any = True) -> None:
        if pred:
            self._add(num_bytes, 1)

    def arrive(self, count: int, pred: Any = True) -> None:
        if pred:
            self._add(0, count)

    def land(self, num_bytes: int) -> None:
        self._add(-num_bytes, 0)

    def _add(self, num_bytes: int, num_arrivals: int) -> None:
        with self.changed:
            self.num_bytes += num_bytes
            self.num_missing -= num_arrivals
            assert self.num_missing >= 0, "more arrivals than a phase has"
            if self.num_missing == 0 and self.num_bytes == 0:
                self.num_phases += 1
                self.num_missing = self.count
                self.changed.notify_all()

    def wait(self, parity: int) -> None:
        """Until the last phase that ended has this parity."""
        with self.changed:
            has_ended = self.changed.wait_for(
                lambda: self.num_phases % 2 != int(parity) % 2, TIMEOUT_S
            )
        assert has_ended, "a barrier that nobody ends"


class _Barriers:
    def __init__(self, num: int) -> None:
        self.barriers = [_Barrier() for _ in range(num)]
        self.shape = (num, 1)

    def index(self, i: int) -> _Barrier:
        return self.barriers[int(i)]


class _Shared:
    def __init__(self, values: Tensor) -> None:
        self.values = values

    shape = property(lambda self: self.values.shape)
    dtype = property(lambda self: self.values.dtype)

    def index(self, i: int) -> _Shared:
        return _Shared(self.values[int(i)])

    def slice(self, start: int, length: int) -> _Shared:
        return _Shared(self.values[start : start + length])

    def permute(self, order: Sequence[int]) -> _Shared:
        return _Shared(self.values.permute(*order))

    def reinterpret(self, dtype: torch.dtype, shape: Sequence[int], layout: Any) -> _Shared:
        """As much of it as the shape takes."""
        assert dtype == self.dtype and self.values.is_contiguous()
        return _Shared(self.values.view(-1)[: math.prod(shape)].view(*shape))

    def load(self, layout: None) -> Tensor:
        """Threads see their own stores without a fence."""
        memory = _memory_of(self.values).clone()
        for place, stored in _thread.stores:
            if place.untyped_storage().data_ptr() == self.values.untyped_storage().data_ptr():
                memory.as_strided(place.shape, place.stride(), place.storage_offset()).copy_(stored)
        values = self.values
        return memory.as_strided(values.shape, values.stride(), values.storage_offset())

    def store(self, values: Tensor) -> None:
        _thread.stores.append((self.values, values))


class _Number(Tensor):
    """A scalar, whose other names keep their value when one of them is added to."""

    def __iadd__(self, other: Any) -> Tensor:  # type: ignore[override,misc]
        return self + other


def _memory_of(x: Tensor) -> Tensor:
    """All that x is cut from, flat."""
    return x.as_strided((x.untyped_storage().size() // x.element_size(),), (1,), 0)


class _Pointer:
    def __init__(self, base: Tensor, offset: Any = 0) -> None:
        self.base, self.offset = base, offset
        self.dtype = types.SimpleNamespace(element_ty=base.dtype)

    def __add__(self, offset: Any) -> _Pointer:
        return _Pointer(self.base, self.offset + offset)


class _Descriptor:
    def __init__(self, host: TensorDescriptor) -> None:
        self.values = host.base.as_strided(host.shape, host.strides)
        self.dtype, self.layout, self.block_shape = host.base.dtype, host.layout, host.block_shape


class _Product(NamedTuple):
    a: Any
    b: _Shared
    acc: Any
    use_acc: bool
    result: list[Tensor]


class _Kernel:
    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function

    def __call__(self, *arguments: Any, **constants: Any) -> Any:
        return self.function(*arguments, **constants)

    def __getitem__(self, grid: Sequence[int]) -> Callable[..., None]:
        def launch(
            *arguments: Any, num_warps: int, launch_pdl: bool = False, **constants: Any
        ) -> None:
            on_device = [_on_device(x) for x in arguments]
            programs = list(itertools.product(*map(range, grid)))
            for program in random.sample(programs, len(programs)):
                _thread.program, _thread.grid = program, grid
                _thread.products, _thread.stores, _thread.sent, _thread.barriers = [], [], [], []
                _thread.has_waited = not launch_pdl
                _thread.kernel_before = _KernelBefore(_written_before if launch_pdl else [])
                self.function(*on_device, **constants)
                assert _thread.has_waited and not _thread.products and not _thread.sent
                assert not any(barrier.num_bytes for barrier in _thread.barriers)

        return launch


class _KernelBefore:
    """What it writes is NaN until a partition waits for it."""

    def __init__(self, written: Sequence[Tensor]) -> None:
        self.written = list(written)
        self.values = [x.clone() for x in written]
        self.lock = threading.Lock()
        for x in written:
            x.fill_(float("nan"))

    def end(self) -> None:
        with self.lock:
            for x, values in zip(self.written, self.values, strict=True):
                x.copy_(values)
            self.written, self.values = [], []


def _check_that_nothing_runs() -> None:
    assert not _thread.products and not _thread.stores and not _thread.sent


def _on_device(x: Any) -> Any:
    if isinstance(x, Tensor):
        return _Pointer(x)
    return _Descriptor(x) if isinstance(x, TensorDescriptor) else x


def _bring(
    source: _Descriptor, at: Sequence[Any], barrier: _Barrier, to: _Shared, pred: Any = True
) -> None:
    if not pred:
        return
    # Read at once, which before the wait for the kernel before is the worst.
    begins = [int(i) for i in at]
    tile = torch.zeros_like(to.values)
    if min(begins) >= 0:
        inside = source.values[_box(at, to.values)]
        tile[tuple(map(slice, inside.shape))] = inside
    else:
        assert any(i <= -n for i, n in zip(begins, tile.shape, strict=True)), (
            "a tile that begins before the first row and ends behind it"
        )
    to.values.fill_(float("nan"))

    def land() -> None:
        time.sleep(random.choice(COPY_DELAYS_S))
        to.values.copy_(tile)
        barrier.land(to.values.numel() * to.values.element_size())

    threading.Thread(target=land).start()


def _box(at: Sequence[Any], memory: Tensor) -> tuple[slice, ...]:
    return tuple(slice(int(i), int(i) + n) for i, n in zip(at, memory.shape, strict=True))


def _send(to: _Descriptor, at: Sequence[Any], memory: _Shared) -> None:
    assert _thread.has_waited, "a store before the wait for the kernel before"
    _thread.sent.append((to.values[_box(at, memory.values)], memory.values))


def _wait_until_sent(num_outstanding: int) -> None:
    """Read as late as it may be."""
    time.sleep(random.random() * MAX_PRODUCT_DELAY_S)
    while len(_thread.sent) > num_outstanding:
        tile, values = _thread.sent.pop(0)
        tile.copy_(values[tuple(map(slice, tile.shape))])


def _mma(a: Any, b: _Shared, acc: Any, use_acc: bool = True, is_async: bool = False) -> _Product:
    assert is_async
    product = _Product(a, b, acc, use_acc, [])
    _thread.products.append(product)
    return product


def _mma_wait(num_outstanding: int, deps: Sequence[Any]) -> Any:
    time.sleep(random.random() * MAX_PRODUCT_DELAY_S)
    while len(_thread.products) > num_outstanding:
        a, b, acc, use_acc, result = _thread.products.pop(0)
        a = a.values if isinstance(a, _Shared) else a
        product = a.float() @ b.values.float()
        result.append(product + _value(acc) if use_acc else product)
    # One that may still run can only be added to by the next.
    values = tuple(x if num_outstanding and _runs(x) else _value(x) for x in deps)
    return values if len(values) > 1 else values[0]


def _runs(x: Any) -> bool:
    return isinstance(x, _Product) and not x.result


def _wait_for_kernel_before() -> None:
    _thread.has_waited = True
    _thread.kernel_before.end()


def _value(x: Any) -> Tensor:
    if not isinstance(x, _Product):
        return x
    assert x.result, "a product that was not waited for"
    return x.result[0]


def _fence() -> None:
    for memory, values in _thread.stores:
        memory.copy_(values)
    _thread.stores.clear()


def _warp_specialize(
    partitions: Sequence[tuple[Callable[..., None], tuple[Any, ...]]],
    num_warps: Sequence[int],
    num_registers: Sequence[Any],
) -> None:
    assert len(partitions) == len(num_warps) + 1 == len(num_registers) + 1
    _fence()
    program, has_waited, kernel_before = (
        _thread.program, _thread.has_waited, _thread.kernel_before
    )  # fmt: skip
    partitions_waited = []
    errors = []

    def work(function: Callable[..., None], arguments: tuple[Any, ...]) -> None:
        _thread.program, _thread.kernel_before = program, kernel_before
        _thread.products, _thread.stores, _thread.sent = [], [], []
        _thread.has_waited = has_waited
        try:
            function(*arguments)
            _check_that_nothing_runs()
            partitions_waited.append(_thread.has_waited)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=partition) for partition in partitions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    _thread.has_waited = any(partitions_waited)


def _allocate(dtype: torch.dtype, shape: Sequence[Any], layout: Any) -> Any:
    if layout == "barrier":
        barriers = _Barriers(1 if len(shape) == 1 else shape[0])
        _thread.barriers += barriers.barriers
        return barriers.index(0) if len(shape) == 1 else barriers
    return _Shared(torch.full([int(x) for x in shape], float("nan"), dtype=dtype))


def _load(pointer: _Pointer, mask: Any = True, other: Any = 0, cache_modifier: str = "") -> Tensor:
    if not isinstance(pointer.offset, Tensor) or pointer.offset.dim() == 0:
        value = pointer.base.flatten()[int(pointer.offset)] if bool(mask) else other
        return torch.as_tensor(value).long()  # as one, so that it has `to`
    at, mask = torch.broadcast_tensors(pointer.offset, torch.as_tensor(mask))
    values = pointer.base.flatten()[torch.where(mask, at, 0)]
    return torch.where(mask, values, torch.tensor(other, dtype=values.dtype))


def _store(pointer: _Pointer, values: Any, mask: Any = True) -> None:
    assert _thread.has_waited, "a store before the wait for the kernel before"
    base = pointer.base
    memory = _memory_of(base)
    at, mask, values = torch.broadcast_tensors(
        base.storage_offset() + torch.as_tensor(pointer.offset),
        torch.as_tensor(mask),
        torch.as_tensor(values, dtype=base.dtype),
    )
    memory[at[mask]] = values[mask]


def _atomic_add(pointer: _Pointer, value: int, sem: str) -> int:
    assert sem == "acq_rel"
    before = int(pointer.base[int(pointer.offset)])
    _store(pointer, before + value)
    return before


def _atomic_max(pointer: _Pointer, values: Tensor, mask: Tensor, sem: str) -> None:
    _store(pointer, torch.maximum(_load(pointer, mask), values), mask)


def _where(condition: Any, a: Any, b: Any) -> Tensor:
    return torch.where(torch.as_tensor(condition), torch.as_tensor(a), torch.as_tensor(b))


def _inline_asm(code: Any, constraints: str, arguments: Sequence[Any], **options: Any) -> Any:
    """What it computes, or else its first argument."""
    return _ASM.get(getattr(code, "value", code).split(" ")[0], lambda x: x)(arguments[0])


_ASM = {"ex2.approx.ftz.f32": torch.exp2, "rcp.approx.ftz.f32": torch.reciprocal}


def _no_layout(*arguments: Any) -> None:
    return None


_LANGUAGE: dict[str, Any] = {
    "gl": types.SimpleNamespace(
        program_id=lambda axis: torch.tensor(_thread.program[axis]).as_subclass(_Number),
        num_programs=lambda axis: _thread.grid[axis],
        static_range=lambda *bounds: range(*map(int, bounds)),
        load=_load,
        store=_store,
        atomic_add=_atomic_add,
        atomic_max=_atomic_max,
        where=_where,
        maximum=lambda a, b: torch.maximum(torch.as_tensor(a), torch.as_tensor(b)),
        minimum=lambda a, b: torch.minimum(torch.as_tensor(a), torch.as_tensor(b)),
        max=lambda x, axis: x.amax(axis),
        min=lambda x, axis: x.amin(axis),
        sum=lambda x, axis: x.sum(axis),
        exp=torch.exp,
        exp2=torch.exp2,
        rsqrt=torch.rsqrt,
        arange=lambda start, end, layout: torch.arange(start, end),
        zeros=lambda shape, dtype, layout: torch.zeros(shape),
        full=lambda shape, value, dtype, layout: torch.full(shape, value),
        convert_layout=lambda x, layout: x,
        inline_asm_elementwise=_inline_asm,
        split=lambda x: x.unbind(-1),
        join=lambda a, b: torch.stack((a, b), -1),
        allocate_shared_memory=_allocate,
        warp_specialize=_warp_specialize,
        float16=torch.float16,
        float32=torch.float32,
        int32=torch.int32,
        int64=torch.int64,
        BlockedLayout=_no_layout,
        DotOperandLayout=_no_layout,
        NVMMADistributedLayout=_no_layout,
        SliceLayout=_no_layout,
        SwizzledSharedLayout=_no_layout,
        NVMMASharedLayout=gl.NVMMASharedLayout,
        bfloat16=gl.bfloat16,
    ),
    "mbarrier": types.SimpleNamespace(
        MBarrierLayout=lambda: "barrier",
        init=lambda barrier, count: barrier.init(count),
        expect=lambda barrier, num_bytes, pred=True: barrier.expect(num_bytes, pred),
        arrive=lambda barrier, count, pred=True: barrier.arrive(count, pred),
        wait=lambda barrier, parity: barrier.wait(parity),
    ),
    "launch_options": lambda device: {"USE_PDL": True, "launch_pdl": True},
    "gdc_launch_dependents": lambda: None,
    "gdc_wait": _wait_for_kernel_before,
    "mma_v2": lambda a, b, acc: a.float() @ b.float() + acc,
    "sync_threads": lambda: None,
    "bring": _bring,
    "send": _send,
    "wait_until_sent": _wait_until_sent,
    "fence_async_shared": _fence,
    "warpgroup_mma": _mma,
    "warpgroup_mma_init": lambda acc: acc,
    "warpgroup_mma_wait": _mma_wait,
}
