"""The fused head and the choice from logits, against plain PyTorch and sampler/philox.py."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from pairwise import pairwise
from torch import Tensor
from torch.nn import functional

from pico_vllm.kernels import head_sample as module
from pico_vllm.kernels.head_sample import (
    HeadScratch,
    gumbel_noise,
    head_sample,
    head_sample_reference,
    sample_logits,
)
from pico_vllm.sampler import philox

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
NUM_ROWS = 70
SEEDS = [0, 1, -1, 2**63 - 1, -(2**63), 2**32, 42]


@pytest.fixture
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row of few ids is then of several programs, as a large one is: under the interpreter a
    head takes as long as it has rows."""
    monkeypatch.setattr(module, "BLOCK_V", 32)


@dataclass
class Step:
    """The state of a batch, its requests' rows in reverse order."""

    rows_R: Tensor
    positions_R: Tensor
    temperatures_W: Tensor
    seeds_W: Tensor
    sample_indices_W: Tensor
    last_tokens_W: Tensor
    scratch: HeadScratch
    out_R: Tensor

    def noise(self, vocab_size: int) -> Tensor:
        rows = self.rows_R.long()
        return philox.gumbel_noise(
            self.seeds_W[rows], self.sample_indices_W[rows], self.positions_R.long(), vocab_size
        )

    def temperatures(self) -> Tensor:
        return self.temperatures_W[self.rows_R.long()]

    def arguments(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__dataclass_fields__}


def step(temperatures: list[float], position_dtype: torch.dtype = torch.int32) -> Step:
    R = len(temperatures)
    rows = torch.arange(NUM_ROWS - 1, NUM_ROWS - 1 - R, -1, dtype=torch.int32)
    temperatures_W = torch.full((NUM_ROWS,), float("nan"))
    temperatures_W[rows.long()] = torch.tensor(temperatures)
    seeds = torch.tensor([SEEDS[row % len(SEEDS)] ^ row // len(SEEDS) for row in range(NUM_ROWS)])
    made = Step(
        rows,
        torch.arange(3, 3 + R, dtype=position_dtype),
        temperatures_W,
        seeds,
        torch.arange(NUM_ROWS) % 3,
        torch.full((NUM_ROWS,), -7),
        HeadScratch.allocate(DEVICE),
        torch.full((R,), -7),
    )
    return Step(*(v.to(DEVICE) if isinstance(v, Tensor) else v for v in made.arguments().values()))


def inputs(R: int, V: int, E: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    # Made where it is used: a head has up to half a billion numbers.
    generator = torch.Generator(DEVICE).manual_seed(R + V + E)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=DEVICE)

    x_RE, norm_E, head_VE = random(R, E), 1 + 0.1 * random(E), random(V, E) * 3 * E**-0.5
    return x_RE.to(dtype), norm_E.to(dtype), head_VE.to(dtype)


def exact_logits(x_RE: Tensor, norm_E: Tensor, head_VE: Tensor) -> Tensor:
    normed = functional.rms_norm(x_RE.double(), x_RE.shape[1:], norm_E.double(), 1e-6)
    return normed @ head_VE.double().T


def check_ids(made: Step, logits_RV: Tensor, vocab_size: int, allowed: float) -> None:
    """The ids' scores are the best within what rounding may change, and are where they belong."""
    scores = logits_RV[:, :vocab_size].double()
    temperatures = made.temperatures().double()[:, None]
    is_greedy = temperatures < 1e-5
    noise = made.noise(vocab_size).double()
    scores = torch.where(is_greedy, scores, scores / temperatures + noise)
    ids = made.out_R
    assert bool(((ids >= 0) & (ids < vocab_size)).all())
    slack = allowed / temperatures.where(~is_greedy, 1.0)[:, 0] + 1e-5
    chosen = scores.gather(1, ids[:, None])[:, 0]
    assert bool((scores.amax(1) - chosen <= slack).all())
    assert torch.equal(made.last_tokens_W[made.rows_R.long()], ids)
    others = torch.ones(NUM_ROWS, dtype=torch.bool, device=DEVICE)
    others[made.rows_R.long()] = False
    assert bool((made.last_tokens_W[others] == -7).all())
    assert not made.scratch.counters.any()
    assert bool((made.scratch.keys == -(2**63)).all())


def check(
    temperatures: list[float],
    V: int,
    E: int,
    vocab_size: int,
    dtype: torch.dtype,
    position_dtype: torch.dtype = torch.int32,
) -> None:
    made = step(temperatures, position_dtype)
    x_RE, norm_E, head_VE = inputs(len(temperatures), V, E, dtype)
    head_VE[vocab_size:] = 100.0  # rows that are no ids
    exact = exact_logits(x_RE, norm_E, head_VE)
    plain = functional.linear(functional.rms_norm(x_RE, (E,), norm_E, 1e-6), head_VE)
    error = (plain.double() - exact)[:, :vocab_size].abs().max()
    bits = []
    for _ in range(2):  # the second launch meets the keys and counters that the first one left
        head_sample(x_RE, norm_E, 1e-6, head_VE, vocab_size=vocab_size, **made.arguments())
        # The best of two logits that are each off by twice the plain operations' error.
        check_ids(made, exact, vocab_size, 4 * float(error))
        bits.append(made.out_R.clone())
        made.out_R.fill_(-7)
    assert torch.equal(*bits)
    if dtype == torch.float32:
        expected = head_sample_reference(
            plain, made.noise(vocab_size), made.temperatures(), vocab_size=vocab_size
        )
        assert torch.equal(bits[0], expected)


@pytest.mark.usefixtures("_small_blocks")
@pytest.mark.parametrize("temperatures", [[0.0], [0.7], [0.0, 1.0, 0.3], [0.0, 1e-6]])
@pytest.mark.parametrize(
    ("V", "E", "vocab_size"), [(88, 64, 70), pytest.param(67, 72, 67, marks=pytest.mark.memcheck)]
)
def test_greedy_and_sampled(temperatures: list[float], V: int, E: int, vocab_size: int) -> None:
    """Each row's id is the best by its own temperature, among the ids that are tokens."""
    check(temperatures, V, E, vocab_size, torch.float32)


def test_fp16_and_long_positions() -> None:
    """Half precision and positions in int64 give the same rule."""
    check([0.0], 70, 64, 70, torch.float16, torch.int64)
    check([0.5, 0.0], 70, 64, 70, torch.float16, torch.int64)


@triton.jit
def _noise_kernel(seeds_ptr, samples_ptr, positions_ptr, out_ptr, first_id):
    r = tl.program_id(0)
    noise = gumbel_noise(
        first_id, tl.load(seeds_ptr + r), tl.load(positions_ptr + r), tl.load(samples_ptr + r), 64
    )
    tl.store(out_ptr + r * 64 + tl.arange(0, 64), noise)


def test_noise_is_that_of_the_sampler() -> None:
    """Noise is that of sampler/philox.py for every seed, position and sample index."""
    seeds = torch.tensor([*SEEDS, 7], device=DEVICE)
    samples = torch.tensor([0, 1, 2, 127, 0, 3, 2**32 - 1, 5], device=DEVICE)
    positions = torch.tensor([0, 1, 2**31 - 1, 2**31, 2**32 - 1, 9, 77, 100_000], device=DEVICE)
    expected = philox.gumbel_noise(seeds, samples, positions, 1600)
    for first_id in (0, 64, 1536):
        out = torch.full((8, 64), float("nan"), device=DEVICE)
        _noise_kernel[(8,)](seeds, samples, positions, out, first_id)
        wanted = expected[:, first_id : first_id + 64]
        # log of numbers near 1 is good to 2**-22 on a GPU.
        torch.testing.assert_close(out, wanted, atol=4e-6, rtol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_that_exist(dtype: torch.dtype) -> None:
    """sample_logits takes any stride, masks ids and breaks ties towards the lowest."""
    made = step([0.0, 0.9, 0.0])
    logits = torch.randn(3, 1500, generator=torch.Generator().manual_seed(0)).to(DEVICE, dtype)
    logits[2, [700, 40, 1300]] = 9.0
    logits[:, 1400:] = 50.0
    view = logits[:, :1450]
    sample_logits(view, vocab_size=1400, **made.arguments())
    check_ids(made, view.double(), 1400, 0.0)
    expected = head_sample_reference(view, made.noise(1400), made.temperatures(), vocab_size=1400)
    assert torch.equal(made.out_R, expected)
    assert int(made.out_R[2]) == 40


@pytest.mark.usefixtures("_small_blocks")
@pytest.mark.parametrize("num_programs", [1, 2])
def test_programs_of_many_blocks(num_programs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lowest id of the best logit, whichever of a program's blocks and lanes have it, where all
    tokens' logits are below those of ids that are none, and below 0."""
    vocab_size, equals = (
        12 * 32 - 9,
        [(5, 197), (37, 38, 325), (103,), (374,), (330, 74, 106), (200,)],
    )
    monkeypatch.setattr(module, "MOST_PROGRAMS", num_programs * 2 * len(equals))
    logits = torch.randn(
        2 * len(equals), vocab_size + 40, generator=torch.Generator().manual_seed(0)
    )
    logits = -5 - logits.abs()
    logits[:, vocab_size:] = 0.0
    for r, ids in enumerate(equals):
        logits[r, list(ids)] = -1.0
    temperatures = [0.0] * len(equals) + [0.7] * len(equals)
    made = step(temperatures)
    logits = logits.to(DEVICE)
    sample_logits(logits, vocab_size=vocab_size, **made.arguments())
    expected = head_sample_reference(
        logits, made.noise(vocab_size), made.temperatures(), vocab_size=vocab_size
    )
    assert torch.equal(made.out_R, expected)
    assert made.out_R[: len(equals)].tolist() == [min(ids) for ids in equals]


@pytest.mark.usefixtures("_small_blocks")
@pytest.mark.parametrize("R", [1, 3])
def test_ties_of_a_greedy_head_go_to_the_lowest_id(R: int) -> None:
    """Equal logits, within a program and across programs, and 0 beside -0."""
    x_RE, norm_E, head_VE = inputs(R, 70, 64, torch.float32)
    for best in ([66, 31, 33, 69], [5, 4]):
        head_VE[best] = x_RE[0] * norm_E
    made = step([0.0] * R)
    head_sample(x_RE, norm_E, 1e-6, head_VE, vocab_size=70, **made.arguments())
    assert int(made.out_R[0]) == 4
    head_VE.zero_()
    head_VE[:7] = -0.0
    head_sample(x_RE, norm_E, 1e-6, head_VE, vocab_size=70, **made.arguments())
    assert made.out_R.tolist() == [0] * R


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_bad_logits_end_their_row_alone(value: float) -> None:
    """A row with NaN or Inf in x or in its logits gives -2; the others keep their ids."""
    x_RE, norm_E, head_VE = inputs(3, 40, 64, torch.float32)
    made, unharmed = step([0.0, 0.8, 0.8]), step([0.0, 0.8, 0.8])
    head_sample(x_RE, norm_E, 1e-6, head_VE, vocab_size=40, **unharmed.arguments())
    x_RE[1, 5] = value
    head_sample(x_RE, norm_E, 1e-6, head_VE, vocab_size=40, **made.arguments())
    expected = unharmed.out_R.clone()
    expected[1] = -2
    assert torch.equal(made.out_R, expected)
    assert int(made.last_tokens_W[made.rows_R[1].long()]) == 0

    logits = torch.randn(3, 90, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    sample_logits(logits, vocab_size=80, **unharmed.arguments())
    logits[0, 33] = value
    logits[2, 85] = value  # no token
    sample_logits(logits, vocab_size=80, **made.arguments())
    assert made.out_R.tolist() == [-2, *unharmed.out_R[1:].tolist()]


def test_bad_arguments_are_refused() -> None:
    """What does not fit is named."""
    x_RE, norm_E, head_VE = inputs(2, 40, 16, torch.float32)
    made = step([0.0, 0.0]).arguments()
    with pytest.raises(ValueError, match="vocab_size 41"):
        head_sample(x_RE, norm_E, 1e-6, head_VE, vocab_size=41, **made)
    with pytest.raises(ValueError, match="65 rows"):
        many = {**made, "rows_R": made["rows_R"].new_zeros(65)}
        many["positions_R"], many["out_R"] = many["rows_R"], many["rows_R"].long()
        head_sample(x_RE.new_zeros(65, 16), norm_E, 1e-6, head_VE, vocab_size=40, **many)
    with pytest.raises(ValueError, match="dtypes differ"):
        head_sample(x_RE.half(), norm_E, 1e-6, head_VE, vocab_size=40, **made)
    with pytest.raises(ValueError, match="rows has shape"):
        head_sample(x_RE[:1], norm_E, 1e-6, head_VE, vocab_size=40, **made)
    with pytest.raises(ValueError, match="5000 requests"):
        sample_logits(x_RE.new_zeros(5000, 16), vocab_size=16, **made)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("dtype", "R", "head"),
    pairwise(
        [torch.float32, torch.float16, torch.bfloat16],
        [1, 2, 8, 17, 33, 64],
        [(151936, 1536), (128256, 4096), (32003, 100)],
    ),
)
def test_grid(dtype: torch.dtype, R: int, head: tuple[int, int]) -> None:
    """Real heads, all greedy, all sampled and mixed, for every dtype and number of requests:
    pairwise, any two of these values meet in a case."""
    V, E = head
    for temperatures in ([0.0] * R, [0.8] * R, [0.0 if r % 2 else 1.3 for r in range(R)]):
        check(temperatures, V, E, V - 101, dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("R", [1, 65, 256])
def test_many_logits(R: int) -> None:
    """Rows of a real vocabulary, more of them than head_sample takes."""
    global NUM_ROWS
    NUM_ROWS, before = 300, NUM_ROWS
    try:
        made = step([0.0 if r % 3 else 1.0 for r in range(R)])
        logits = torch.randn(R, 151936, device=DEVICE).bfloat16()
        sample_logits(logits, vocab_size=151643, **made.arguments())
        check_ids(made, logits.double(), 151643, 0.0)
    finally:
        NUM_ROWS = before
