from __future__ import annotations

import pytest
import torch

from pico_vllm.bench.read_memory import BLOCKS, read_sums, read_sums_reference

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize(("block", "num_warps"), BLOCKS)
def test_every_element_is_read_once(block: int, num_warps: int) -> None:
    """Each program's sum is that of its own block, with wrap-around."""
    data = torch.randint(-(2**31), 2**31, (3 * block,), dtype=torch.int32).to(DEVICE)
    sums = torch.full((3,), 7, dtype=torch.int32, device=DEVICE)
    read_sums(data, sums, block, num_warps)
    assert torch.equal(sums, read_sums_reference(data, block))


def test_a_part_of_a_block_is_refused() -> None:
    """The kernel has no mask: lengths must fit."""
    data = torch.zeros(100, dtype=torch.int32)
    with pytest.raises(ValueError, match="data is 100"):
        read_sums(data, torch.zeros(1, dtype=torch.int32), 64, 4)


@pytest.mark.gpu
def test_the_read_limit_is_below_what_the_memory_is_sold_with() -> None:
    """A limit that the caches serve, or that skips reads, would be above any HBM of today."""
    from pico_vllm.bench.limits import read_limit_bytes_s

    assert 0.2e12 < read_limit_bytes_s("cuda:0") < 10e12
