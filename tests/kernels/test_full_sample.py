"""The full sampler and its log-probabilities on the device, against plain PyTorch and the CPU's
Sampler."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from pico_vllm.kernels import candidates
from pico_vllm.kernels.candidates import RowScratch
from pico_vllm.kernels.full_sample import (
    NUM_NUMBERS,
    AskedRows,
    full_sample,
    full_sample_reference,
)
from pico_vllm.kernels.head_sample import HeadScratch, sample_logits
from pico_vllm.kernels.penalty_counts import IN_PROMPT, rebuild_counts, rebuild_counts_reference
from pico_vllm.kernels.token_logprobs import num_words, token_logprobs, token_logprobs_reference
from pico_vllm.sampler import philox
from pico_vllm.sampler.sampler import Sampler
from pico_vllm.sampling_params import SamplingParams
from pico_vllm.step import BAD_LOGITS, NewRow

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
MAX_TOP = 20
PLAIN: dict[str, Any] = {"temperature": 1.0}


class Rows:
    """Requests with their logits, in rows of the batch state in reverse order, and padding."""

    def __init__(self, logits_RV: Tensor, asked: list[dict[str, Any]], vocab_size: int) -> None:
        """asked: keywords of full_sample_reference, `logprobs`, and `is_partial` for a prompt that
        is not complete."""
        R, W = len(asked), len(asked) + 3
        self.asked = asked
        self.vocab_size = vocab_size
        self.logits = torch.cat([logits_RV, logits_RV[:1]]).to(DEVICE)
        self.rows = torch.tensor([*range(W - 2, W - 2 - R, -1), W - 1], dtype=torch.int32)
        self.positions = torch.tensor([*range(7, 7 + R), 0], dtype=torch.int32)
        self.seeds = torch.arange(W) * 77 - 5
        self.samples = torch.arange(W) % 3
        self.temperatures = torch.zeros(W)
        numbers = np.zeros((W, NUM_NUMBERS.value), np.int32)
        floats = numbers.view(np.float32)
        numbers[:, 11] = -1
        columns = -(-vocab_size // candidates.BLOCK_V) * candidates.BLOCK_V
        counts = torch.full((W, columns), 123456, dtype=torch.int32)
        bias_ids, biases = torch.zeros(W, 300, dtype=torch.int32), torch.zeros(W, 300)
        ending_ids = torch.zeros(W, 8, dtype=torch.int32)
        for r, each in enumerate(asked):
            row = int(self.rows[r])
            self.temperatures[row] = each["temperature"]
            numbers[row, 0] = each.get("top_k", 0)
            floats[row, 1:6] = [
                each.get("top_p", 1.0), each.get("min_p", 0.0), each.get("presence", 0.0),
                each.get("frequency", 0.0), each.get("repetition", 1.0),
            ]  # fmt: skip
            if "counts_V" in each:
                numbers[row, 6] = 1
                counts[row, :vocab_size] = each["counts_V"]
            for i, (token_id, bias) in enumerate(each.get("biases", {}).items()):
                bias_ids[row, i], biases[row, i] = token_id, bias
                numbers[row, 7] = i + 1
            for i, token_id in enumerate(each.get("ending_ids", ())):
                ending_ids[row, i] = token_id
                numbers[row, 8:10] = i + 1, int(self.positions[r]) + 1
            numbers[row, 10] = int(self.positions[r]) + each.get("is_partial", 0)
            numbers[row, 11] = each.get("logprobs", -1)
        for name in ("rows", "positions", "seeds", "samples", "temperatures"):
            setattr(self, name, getattr(self, name).to(DEVICE))
        self.state = AskedRows(
            *(t.to(DEVICE) for t in (torch.from_numpy(numbers), bias_ids, biases, ending_ids)),
            counts.to(DEVICE),
        )
        self.last_tokens = torch.full((W,), -7, device=DEVICE)
        self.out = torch.full((R + 1,), -7, device=DEVICE)
        self.head_scratch = HeadScratch.allocate(DEVICE)
        self.scratch = RowScratch.allocate(R + 1, vocab_size, DEVICE)

    def run(self) -> list[int]:
        common: dict[str, Any] = {
            "vocab_size": self.vocab_size,
            "rows_R": self.rows,
            "positions_R": self.positions,
            "temperatures_W": self.temperatures,
            "seeds_W": self.seeds,
            "sample_indices_W": self.samples,
            "last_tokens_W": self.last_tokens,
            "out_R": self.out,
        }
        sample_logits(self.logits, scratch=self.head_scratch, **common)
        self.scratch.values_RC.fill_(float("nan"))
        full_sample(self.logits, asked=self.state, scratch=self.scratch, **common)
        found = self.out[:-1].tolist()
        assert self.last_tokens[self.rows[:-1].long()].tolist() == [max(0, i) for i in found]
        return found

    def logprobs(self) -> Tensor:
        out = torch.full((len(self.asked) + 1, num_words(MAX_TOP)), -7, dtype=torch.int32)
        out = out.to(DEVICE)
        token_logprobs(
            self.logits, vocab_size=self.vocab_size, rows_R=self.rows, positions_R=self.positions,
            numbers_WF=self.state.numbers_WF, chosen_R=self.out, scratch=self.scratch, out_RN=out,
        )  # fmt: skip
        return out[:-1].cpu()

    def noise(self, r: int) -> Tensor:
        row = int(self.rows[r])
        return philox.gumbel_noise(
            self.seeds[row, None], self.samples[row, None], self.positions[r, None].long(),
            self.vocab_size,
        )[0]  # fmt: skip

    def wanted(self) -> list[int]:
        found = []
        for r, each in enumerate(self.asked):
            keywords = {k: v for k, v in each.items() if k not in ("logprobs", "is_partial")}
            if each.get("is_partial"):
                keywords = {"temperature": each["temperature"]}
            if "counts_V" in keywords:
                keywords["counts_V"] = keywords["counts_V"].to(DEVICE)
            logits = self.logits[r, : self.vocab_size]
            found.append(full_sample_reference(logits, self.noise(r), **keywords))
        return found


def random_logits(R: int, V: int, seed: int = 0, *, has_ties: bool = False) -> Tensor:
    logits = torch.randn(R, V, generator=torch.Generator().manual_seed(seed)) * 3
    return (logits * 2).round() / 2 if has_ties else logits


@pytest.fixture(autouse=True)
def _small_blocks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small rows are then of many blocks, and lists overflow, as large ones are."""
    if "gpu" not in request.keywords:
        monkeypatch.setattr(candidates, "BLOCK_V", 64)


def counts(V: int) -> Tensor:
    """A fifth of the tokens in the prompt, a fifth generated once or more."""
    random = np.random.default_rng(V)
    found = random.integers(1, 4, V) * (random.random(V) < 0.2)
    return torch.from_numpy(found + (random.random(V) < 0.2) * IN_PROMPT.value).int()


def all_kinds(V: int) -> list[dict[str, Any]]:
    seen = counts(V)
    few, many = {3: 4.0, 0: -100.0, V - 1: 2.5}, {i: (i % 7) * 0.5 for i in range(0, 290, 2)}
    filters = [
        {"top_k": 1}, {"top_k": 2}, {"top_k": 17}, {"top_k": 50}, {"top_k": V - 1},
        {"top_p": 1e-6}, {"top_p": 0.3}, {"top_p": 0.9}, {"top_p": 0.9999},
        {"min_p": 0.1}, {"min_p": 1.0}, {"min_p": 1e-5},
        {"top_k": 10, "top_p": 0.7}, {"top_k": 100, "top_p": 0.5, "min_p": 0.05},
    ]  # fmt: skip
    adjustments: list[dict[str, Any]] = [
        {"counts_V": seen, "repetition": 1.7}, {"counts_V": seen, "repetition": 0.4},
        {"counts_V": seen, "presence": 1.5}, {"counts_V": seen, "frequency": -0.8},
        {"counts_V": seen, "repetition": 1.3, "presence": 0.5, "frequency": 0.25},
        {"biases": few}, {"biases": many}, {"ending_ids": [0, 5, V - 1]},
    ]  # fmt: skip
    every = {
        "counts_V": seen, "repetition": 1.2, "presence": 0.3, "frequency": 0.2, "biases": many,
        "ending_ids": [3, 8], "top_k": 40, "top_p": 0.95, "min_p": 0.01,
    }  # fmt: skip
    both = adjustments[4] | filters[7]
    greedy = [{"temperature": 0.0} | each for each in (*adjustments, {})]
    sampled = [{"temperature": t} | each for t, each in zip([0.6, 1.0, 1.4] * 9, [
        *filters, *adjustments, every, both, {}], strict=False)]  # fmt: skip
    return [*sampled, *greedy]


@pytest.mark.memcheck
@pytest.mark.parametrize(("V", "has_ties"), [(301, False), (320, True)])
def test_every_kind_in_one_batch(V: int, has_ties: bool) -> None:
    """Filters and adjustments, alone and together, sampled and greedy, give the ids of the plain
    definition, beside requests that ask for nothing more; in blocks of which the last is whole, or
    not."""
    asked = all_kinds(V)
    logits = random_logits(len(asked), V + 9, V, has_ties=has_ties)
    logits[:, V:] = 100.0  # rows that are no ids
    rows = Rows(logits, asked, V)
    before = rows.state.counts_WC.clone()
    found = rows.run()
    assert found == rows.wanted()
    for r, each in enumerate(asked):
        row = int(rows.rows[r])
        if "counts_V" in each:
            before[row, found[r]] += 1
    assert torch.equal(before, rows.state.counts_WC)


def test_the_lists_are_large_enough_or_not_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same ids with lists that hold all candidates, and with lists that hold nearly none."""
    V, asked = 300, all_kinds(300)[3:16:3]
    logits = random_logits(len(asked), V, has_ties=True)
    found = []
    for size in (512, 16):
        monkeypatch.setattr(candidates, "BLOCK_V", size)
        found.append(Rows(logits, asked, V).run())
    assert found[0] == found[1] == Rows(logits, asked, V).wanted()


def test_ties_at_the_cut_go_to_the_lower_id() -> None:
    """Among equal logits top-k and top-p keep the lowest ids, also where all are equal."""
    flat = torch.zeros(5, 600)  # more than the list holds, in blocks of 64
    flat[3, 100:] = flat[4, [130, 599]] = 1.0
    asked = [
        {"temperature": 2.0, "top_k": 3},
        {"temperature": 2.0, "top_k": 150},
        {"temperature": 2.0, "top_p": 0.0075},
        {"temperature": 0.001, "top_k": 5},
        {"temperature": 2.0, "top_k": 1},
    ]
    limits = [(0, 3), (0, 150), (0, 5), (100, 105), (130, 131)]
    for is_last_kept in (False, True):
        rows = Rows(flat, asked, 600)
        for r, (low, high) in enumerate(limits[:4]):
            # A seed by which the last id that is kept is chosen, or the first one that is cut would
            # be if it were kept.
            last = high - is_last_kept
            while int(rows.noise(r)[low : last + 1].argmax()) != last - low:
                rows.seeds[rows.rows[r]] += 1
        found = rows.run()
        assert found == rows.wanted()
        for token_id, (low, high) in zip(found, limits, strict=True):
            assert low <= token_id < high


def test_what_adjustments_took_away_is_not_the_largest() -> None:
    """Where the largest logits are lowered, also those of the last ids, filters keep the largest of
    what is left."""
    V = 330
    logits = random_logits(4, V, 3)
    logits[:, [0, 70, 200, V - 1]] = 30.0
    seen = torch.zeros(V, dtype=torch.int32)
    seen[[0, 70, 200, V - 1]] = 2
    ids = [0, 70, 200, V - 1]
    asked = [
        PLAIN | {"top_k": 2, "biases": dict.fromkeys(ids, -60.0)},
        PLAIN | {"min_p": 0.2, "ending_ids": ids},
        PLAIN | {"top_p": 0.5, "counts_V": seen, "frequency": 20.0},
        PLAIN
        | {"top_k": 1, "counts_V": seen, "presence": 1.0, "biases": dict.fromkeys(ids, -40.0)},
    ]
    rows = Rows(logits, asked, V)
    found = rows.run()
    assert found == rows.wanted()
    assert not set(found) & set(ids)


def test_tiny_p_and_k_of_one_are_greedy() -> None:
    """A p that fp32 rounds to 0, and k = 1, leave the most likely token."""
    logits = random_logits(3, 400)
    asked = [PLAIN | {"top_p": 0.0}, PLAIN | {"top_k": 1}, PLAIN | {"min_p": 1.0}]
    assert Rows(logits, asked, 400).run() == logits.argmax(1).tolist()


def test_bad_logits_end_their_row_alone() -> None:
    """NaN and infinity give -2 and count nothing, as does a row whose tokens are all masked."""
    V = 200
    seen = counts(V)
    asked = [PLAIN | {"counts_V": seen, "top_p": 0.9} for _ in range(4)]
    asked += [PLAIN | {"ending_ids": list(range(8))}]
    logits = random_logits(5, V)
    unharmed = Rows(logits, asked, V).run()
    for r, value in ((0, math.nan), (2, math.inf), (3, -math.inf)):
        logits[r, 77] = value
    rows = Rows(logits, asked, V)
    found = rows.run()
    assert found == [-2, unharmed[1], -2, -2, unharmed[4]] == rows.wanted()
    assert torch.equal(rows.state.counts_WC[rows.rows[0].long(), :V].cpu(), seen)
    assert Rows(logits[4:, :8], asked[4:], 8).run() == [BAD_LOGITS]


def test_a_prompt_in_chunks_counts_nothing() -> None:
    """Before its prompt is complete a request's row is left alone."""
    V = 150
    asked = [PLAIN | {"counts_V": counts(V), "top_k": 3, "is_partial": 1, "logprobs": 2}]
    rows = Rows(random_logits(1, V), asked, V)
    before = rows.state.counts_WC.clone()
    assert rows.run() == rows.wanted()
    assert torch.equal(before, rows.state.counts_WC)
    assert bool((rows.logprobs() == -7).all())


def test_same_ids_as_the_cpu_sampler() -> None:
    """Each kind of request as SamplingParams says it gives the ids of sampler/sampler.py, and the
    same log-probabilities and ranks."""
    V = 300
    prompt, output = list(range(0, 90, 3)), [7, 7, 7, 9, 120]
    seen = torch.zeros(1, V, dtype=torch.int32)
    words = torch.tensor([0, len(prompt), len(prompt) + len(output), 4, *prompt, *output])
    rebuild_counts_reference(seen, words.int(), 1)
    penalties = {"presence": 0.4, "frequency": 0.3, "repetition": 1.3}
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.8, "top_k": 12, "logprobs": 3},
        {"temperature": 1.2, "top_p": 0.8, "min_p": 0.02},
        {"temperature": 0.0, **penalties, "logprobs": 20},
        {"temperature": 1.0, **penalties, "biases": {5: 3.0, 7: -9.0}, "top_p": 0.95},
        {"temperature": 0.0, "ending_ids": [3, 250], "logprobs": 0},
    ]
    asked = []
    for kind in kinds:
        asked.append(kind | ({"counts_V": seen[0]} if "presence" in kind else {}))
    logits = random_logits(len(kinds), V, 5)
    logits[4, [3, 250]] = 20.0
    rows = Rows(logits, asked, V)
    found = rows.run()
    words = rows.logprobs()
    sampler = Sampler(len(kinds), V, torch.device("cpu"))
    for r, kind in enumerate(kinds):
        names = {"presence": "presence_penalty", "frequency": "frequency_penalty",
                 "repetition": "repetition_penalty", "biases": "logit_bias"}  # fmt: skip
        given = {names.get(k, k): v for k, v in kind.items() if k != "ending_ids"}
        row = int(rows.rows[r])
        sampler.set_row(
            NewRow(
                row=r, token_ids=np.array(prompt + output, np.int32),
                num_prompt_tokens=len(prompt), params=SamplingParams(
                    **given, min_tokens=10 if "ending_ids" in kind else 0),
                stop_token_ids=frozenset(kind.get("ending_ids", ())),
                seed=int(rows.seeds[row]), sample_index=int(rows.samples[row]),
            )
        )  # fmt: skip
    at = np.arange(len(kinds), dtype=np.int32)
    positions = rows.positions[:-1].cpu().numpy().astype(np.int64)
    wanted, logprobs = sampler.sample(logits.clone(), at, positions)
    assert found == wanted.tolist()
    for r, each in logprobs.items():
        check_logprobs(words[r], list(each.token_ids), list(each.logprobs), each.rank)


def check_logprobs(words: Tensor, ids: list[int], logprobs: list[float], rank: int) -> None:
    """ids and logprobs: of the chosen token, then of the most likely ones."""
    n = len(ids) - 1
    floats = words.view(torch.float32)
    found = [float(floats[0]), *floats[2 : 2 + n].tolist()]
    assert found == pytest.approx(logprobs, abs=2e-5)
    assert int(words[1]) == rank
    assert words[2 + MAX_TOP : 2 + MAX_TOP + n].tolist() == ids[1:]
    assert bool((words[2 + n : 2 + MAX_TOP] == -7).all())


@pytest.mark.memcheck
@pytest.mark.parametrize(("V", "has_ties"), [(333, False), (333, True), (4, False)])
def test_logprobs(V: int, has_ties: bool) -> None:
    """The chosen token, its rank and the most likely tokens in order, the lower id first among
    equals; of the raw logits, whatever filters and penalties do; nothing for rows that do not
    ask."""
    asked = [PLAIN | {"logprobs": n, "biases": {1: 50.0}, "top_k": 2} for n in (0, 1, 5, 20)]
    asked += [{"temperature": 0.0, "logprobs": 3}, PLAIN]
    logits = random_logits(len(asked), V, V, has_ties=has_ties)
    logits[2] = -1.0  # all equal: more than the list holds
    rows = Rows(logits, asked, V)
    found, words = rows.run(), rows.logprobs()
    assert found[:4] == [1] * 4 or has_ties
    for r, each in enumerate(asked[:-1]):
        n = min(each["logprobs"], V)
        wanted = token_logprobs_reference(logits[r], found[r], n)
        ids = [found[r], *wanted[2 + n :].int().tolist()]
        values = [float(wanted[0]), *wanted[2 : 2 + n].tolist()]
        check_logprobs(words[r], ids, values, int(wanted[1]))
    assert bool((words[-1] == -7).all())


def test_logprobs_far_below_have_a_floor() -> None:
    """What JSON could not carry is -9999."""
    logits = torch.full((1, 100), -1e30)
    logits[0, 5] = 0.0
    rows = Rows(logits, [{"temperature": 0.0, "biases": {3: 9e30}, "logprobs": 2}], 100)
    assert rows.run() == [3]
    words = rows.logprobs()[0]
    assert words.view(torch.float32)[[0, 2, 3]].tolist() == [-9999.0, 0.0, -9999.0]


def test_distribution_of_top_p() -> None:
    """Over many seeds tokens of the plain definition come as often as they should, and others
    never; a row's id is the definition's."""
    probs = torch.tensor([0.02, 0.3, 0.05, 0.25, 0.03, 0.15, 0.2])
    kept = {1: 0.3, 3: 0.25, 6: 0.2, 5: 0.15}  # the smallest set that reaches 0.8
    num_seeds = 1000
    num_run = 40 if DEVICE.type == "cpu" else num_seeds  # the interpreter is slow
    rows, all_rows = (
        Rows(probs.log().expand(num, -1), [PLAIN | {"top_p": 0.8}] * num, 7)
        for num in (num_run, num_seeds)
    )
    assert rows.run() == rows.wanted()
    drawn = np.bincount(all_rows.wanted(), minlength=7)
    expected = np.array([kept.get(i, 0.0) for i in range(7)]) / 0.9 * num_seeds
    assert not drawn[expected == 0].any()
    is_kept = expected > 0
    chi_square = ((drawn - expected)[is_kept] ** 2 / expected[is_kept]).sum()
    assert chi_square < 16.3  # three degrees of freedom, one in a thousand


@pytest.mark.memcheck
def test_counts_are_rebuilt() -> None:
    """A request that enters has the counts of its own tokens, whatever its row held; other rows
    keep theirs."""
    random = np.random.default_rng(0)
    counts_WC = torch.from_numpy(random.integers(-9, 9, (5, 2100), np.int32)).to(DEVICE)
    expected = counts_WC.clone()
    requests = [(3, 1500, 2500), (0, 4, 4), (1, 1, 40)]
    ids = random.integers(0, 2100, sum(n for *_, n in requests))
    ids[-20:] = ids[-1]
    starts = 12 + np.cumsum([0, 2500, 4])
    headers = [[*request, start] for request, start in zip(requests, starts, strict=True)]
    words = torch.from_numpy(np.append(np.concatenate(headers), ids).astype(np.int32)).to(DEVICE)
    rebuild_counts_reference(expected, words, 3)
    rebuild_counts(counts_WC, words, 3)
    assert torch.equal(counts_WC, expected)
    assert int(counts_WC[1, ids[-1]]) & 0x7FFFFFFF >= 20


def test_bad_arguments_are_refused() -> None:
    """What does not fit is named."""
    rows = Rows(random_logits(2, 100), [PLAIN, PLAIN], 100)
    rows.scratch = RowScratch.allocate(2, 100, DEVICE)
    with pytest.raises(ValueError, match="3 requests"):
        rows.logprobs()
    rows = Rows(random_logits(2, 100), [PLAIN, PLAIN], 100)
    rows.vocab_size = 101
    with pytest.raises(ValueError, match="vocab_size 101"):
        rows.logprobs()
    rows.vocab_size, rows.scratch = 100, RowScratch.allocate(3, 5000, DEVICE)
    with pytest.raises(ValueError, match="the last block of the scratch's"):
        rows.logprobs()
    with pytest.raises(ValueError, match="must be int32"):
        rebuild_counts(torch.zeros(2, 3), torch.zeros(4, dtype=torch.int32), 1)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("R", [1, 37, 256])
@pytest.mark.parametrize("V", [151936, 128256, 32003])
def test_grid(dtype: torch.dtype, R: int, V: int) -> None:
    """Real vocabularies and many rows: the ids of the plain definition, but where rounding
    decides, and log-probabilities."""
    kinds = all_kinds(V - 101)
    asked = [kinds[r % len(kinds)] | {"logprobs": r % 21 - 1} for r in range(R)]
    logits = random_logits(R, V, R).to(dtype)
    rows = Rows(logits, asked, V - 101)
    found, wanted = rows.run(), rows.wanted()
    # A wrong cut or a wrong order would change far more.
    num_different = sum(ours != theirs for ours, theirs in zip(found, wanted, strict=True))
    assert num_different <= R // 50
    words = rows.logprobs()
    for r, each in enumerate(asked):
        if each["logprobs"] >= 0:
            n, row_V = each["logprobs"], rows.logits[r, : V - 101]
            expected = token_logprobs_reference(row_V, found[r], n).cpu()
            ids = [found[r], *expected[2 + n :].int().tolist()]
            values = [float(expected[0]), *expected[2 : 2 + n].tolist()]
            check_logprobs(words[r], ids, values, int(expected[1]))
