"""What all Triton kernels share: programmatic dependent launch, and the plain fallback.

Under programmatic dependent launch (compute capability 9.0 and newer) a kernel's blocks may start
while the kernel before it still runs: they fetch what does not depend on it, wait, and go on. Every
kernel of a forward pass calls `wait_for_inputs` before it reads or writes anything that another
kernel writes, so that waiting for the last one is waiting for all.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl

IS_INTERPRETED = triton.knobs.runtime.interpret
"""TRITON_INTERPRET=1: kernels run in NumPy, on CPU tensors."""


@functools.cache
def has_dependent_launch(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 9


def launch_options(device: torch.device) -> dict[str, bool]:
    """Keyword arguments of every launch: the constexpr USE_PDL and the launch attribute."""
    use_pdl = has_dependent_launch(device)
    return {"USE_PDL": use_pdl, "launch_pdl": use_pdl} if use_pdl else {"USE_PDL": False}


@triton.jit
def wait_for_inputs(USE_PDL: tl.constexpr):
    """From here on, what earlier kernels wrote may be read and overwritten."""
    if USE_PDL:
        tl.extra.cuda.gdc_wait()


@triton.jit
def let_next_start(USE_PDL: tl.constexpr):
    """The next kernel may start once all blocks of this one have come here."""
    if USE_PDL:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def prefetch_to_l2(pointers):
    """Bring the lines at these addresses closer without waiting for them."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
        "=r,l",
        [pointers.to(tl.int64)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def prefetch_share_to_l2(
    ptr, num_bytes, share, NUM_SHARES: tl.constexpr, NUM_THREADS: tl.constexpr
):
    """Read a word of every line of one of NUM_SHARES equal parts of the bytes at ptr, which brings
    the lines to L2. Prefetch instructions do not: of 24 MiB asked for they leave most in HBM."""
    line = (share * NUM_THREADS + tl.arange(0, NUM_THREADS)) * 128
    for at in tl.range(0, num_bytes, NUM_SHARES * NUM_THREADS * 128):
        offset = at + line
        tl.inline_asm_elementwise(
            """{
            .reg .pred is_there;
            setp.ne.s32 is_there, $2, 0;
            mov.b32 $0, 0;
            @is_there ld.volatile.global.L2::128B.b32 $0, [$1];
            }""",
            "=r,l,r",
            [ptr.to(tl.int64) + offset, (offset < num_bytes).to(tl.int32)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
