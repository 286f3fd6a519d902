"""What the prefix cache costs and saves on the real engine, case by case.

zero-hit    a batch that shares nothing, cache on and off in turn: what it costs who never hits
groups      prompts that begin alike, one after another, one token each: warm minus cold
chat        a few system prompts, each asked once a round: the hit rate
mixed       a batch of mixed lengths behind one long prefix, on and off in turn: output tok/s
turns       conversations of several turns in a pool of a part of what they need: hit rate and TTFT
            with nothing below the pool, with host memory, and with host memory and disk
host-memory long prompts whose KV is in host memory (bench/host_memory.py): TTFT
host-cost   what scheduler and cache take of the host for a request (bench/host_cost.py)

On and off are the same engine, weights, graphs and pool: between runs it gets another scheduler
(`Engine.restart`), with an empty cache. `turns` loads an engine for each depth of tiers, and
`host-memory` one.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from pico_vllm.bench.engine import PicoEngine
from pico_vllm.bench.figures import flat, rounded
from pico_vllm.bench.host_cost import host_costs
from pico_vllm.bench.host_memory import LongPrompts
from pico_vllm.bench.load import greedy
from pico_vllm.bench.memory import free_memory
from pico_vllm.bench.metrics import distribution_ms
from pico_vllm.bench.steps import measured_step
from pico_vllm.bench.tier_figures import tier_figures
from pico_vllm.bench.workload import PromptSource
from pico_vllm.cache.tiers.disk import make_folder
from pico_vllm.config.engine import EngineConfig
from pico_vllm.engine.engine import Engine
from pico_vllm.engine.llm import LLM
from pico_vllm.engine.loading import TORCH_DTYPES
from pico_vllm.errors import ConfigError
from pico_vllm.request import FinishReason

CASES = ("zero-hit", "groups", "chat", "mixed", "turns", "host-memory", "host-cost")
TIERS = ("none", "host", "host+disk")
Figures = dict[str, Any]
Bounds = tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Requests that come all at once, of a length drawn for each, behind one prefix."""

    batch: int
    shared: int
    prompt: Bounds
    out: Bounds
    repeats: int
    """Pairs of on and off; even, so that each goes first as often."""

    @property
    def max_total_tokens(self) -> int:
        return self.shared + self.prompt[1] + self.out[1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Groups:
    """Of prompts that begin alike."""

    groups: int
    """In `chat` asked in turn, in `groups` one after another."""
    requests: int
    """Of each."""
    shared: int
    suffix: Bounds
    out: int = 1

    @property
    def max_total_tokens(self) -> int:
        return self.shared + self.suffix[1] + self.out


@dataclass(frozen=True, slots=True, kw_only=True)
class Turns:
    """Conversations whose turns come in an order drawn before the first one."""

    users: int
    turns: int
    """Of each user."""
    prompt: Bounds
    """New tokens of a turn."""
    out: Bounds
    in_flight: int
    """Turns that run at once; the next starts when one ends."""
    pool_part: float
    """Blocks of the pool over those of all conversations at their end."""
    host_part: float
    """Likewise of host memory, where nobody says how much."""

    @property
    def max_total_tokens(self) -> int:
        return self.turns * (self.prompt[1] + self.out[1])


Shape = Batch | Groups | Turns | LongPrompts


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Of all cases."""

    zero_hit: Batch
    groups: Groups
    chat: Groups
    mixed: Batch
    turns: Turns
    host_memory: LongPrompts
    host_requests: int

    def of(self, case: str) -> Shape:
        found: Shape = getattr(self, case.replace("-", "_"))
        return found


_GROUPS = Groups(groups=20, requests=8, shared=144, suffix=(8, 16))
_CHAT = Groups(groups=3, requests=3, shared=144, suffix=(8, 16), out=16)
SIZES = {
    "gpu": Sizes(
        zero_hit=Batch(batch=256, shared=0, prompt=(100, 1024), out=(100, 1024), repeats=6),
        groups=_GROUPS,
        chat=_CHAT,
        mixed=Batch(batch=256, shared=1024, prompt=(100, 1024), out=(100, 1024), repeats=4),
        turns=Turns(
            users=16,
            turns=8,
            prompt=(50, 200),
            out=(50, 200),
            in_flight=4,
            pool_part=0.25,
            host_part=0.5,
        ),
        host_memory=LongPrompts(prompts=3, rounds=5, shared=8000, suffix=(8, 16)),
        host_requests=400,
    ),
    "cpu": Sizes(
        zero_hit=Batch(batch=8, shared=0, prompt=(32, 128), out=(16, 32), repeats=6),
        groups=_GROUPS,
        chat=_CHAT,
        mixed=Batch(batch=8, shared=1024, prompt=(32, 128), out=(16, 32), repeats=4),
        turns=Turns(
            users=16,
            turns=8,
            prompt=(8, 24),
            out=(8, 24),
            in_flight=4,
            pool_part=0.25,
            host_part=0.5,
        ),
        host_memory=LongPrompts(prompts=3, rounds=3, shared=1024, suffix=(8, 16)),
        host_requests=400,
    ),
    "tiny": Sizes(
        zero_hit=Batch(batch=4, shared=0, prompt=(8, 24), out=(4, 8), repeats=2),
        groups=replace(_GROUPS, groups=3, requests=3),
        chat=replace(_CHAT, out=2),
        mixed=Batch(batch=4, shared=128, prompt=(8, 24), out=(4, 8), repeats=1),
        turns=Turns(
            users=6, turns=4, prompt=(4, 12), out=(4, 8), in_flight=2, pool_part=0.4, host_part=0.2
        ),
        host_memory=LongPrompts(prompts=2, rounds=2, shared=64, suffix=(4, 8)),
        host_requests=20,
    ),
}
"""gpu and cpu are those of the records; tiny is for trying the commands out."""


def run_prefix(
    llm: LLM, cases: Sequence[str], sizes: Sizes, *, seed: int
) -> Iterator[tuple[Figures, EngineConfig]]:
    """One line a case that has no tiers, as soon as it is measured, with the settings that it ran
    with. The engine has nothing else to do, and gets its own settings back."""
    bench = _Bench(llm, seed)
    measures: dict[str, Callable[[Any], Figures]] = {
        "zero-hit": bench.on_and_off,
        "groups": bench.groups,
        "chat": bench.chat,
        "mixed": bench.on_and_off,
    }
    try:
        for case in cases:
            shape = sizes.of(case)
            bench.restart(llm.config)
            figures = measures[case](shape)
            yield (
                {"id": case} | rounded(figures) | flat(shape) | {"seed": seed},
                llm.engine.config,
            )
    finally:
        bench.restart(llm.config)


def run_turns(
    load: Callable[[EngineConfig], LLM], config: EngineConfig, sizes: Sizes, *, seed: int
) -> Iterator[tuple[Figures, EngineConfig]]:
    """The same conversations without tiers below the pool, with host memory, and with disk too: a
    line each, as soon as it is measured, with the settings that it ran with. config: its tiers say
    how large those are, and in which folder another one is made for the disk's file, which goes
    afterwards.

    Raises:
        ConfigError: the pool would hold more blocks than asked for, or not one conversation.
    """
    shape, host_gb = sizes.turns, config.kv_host_gb
    talks = _Talks(shape, seed)
    num_working, num_pool = turns_blocks(config, shape, talks)
    alone = replace(
        config.without_tiers(),
        num_kv_blocks=num_pool,
        max_model_len=min(shape.max_total_tokens, num_pool * config.block_size),
    )
    with ExitStack() as stack:
        for tiers in TIERS:
            below = alone if tiers == "none" else replace(alone, kv_host_gb=host_gb)
            if tiers == "host+disk":
                parent = None
                if config.kv_disk_path is not None:
                    parent = make_folder(config.kv_disk_path)
                folder = tempfile.TemporaryDirectory(prefix="pico-vllm-bench-", dir=parent)
                path = stack.enter_context(folder)
                below = replace(below, kv_disk_path=path, kv_disk_gb=config.kv_disk_gb)
            free_memory()
            with closing(load(below)) as llm:
                if host_gb is None:
                    host_gb = _gib(llm, shape.host_part * num_working)
                figures = {
                    "tiers": tiers,
                    **_play_turns(llm.engine, shape, talks, seed),
                    "working_set_blocks": num_working,
                    "pool_blocks": num_pool,
                }
                name = "turns" if tiers == "none" else f"turns-{tiers.replace('+', '-')}"
                line = {"id": name} | rounded(figures)
                yield line | flat(shape) | {"seed": seed}, llm.config
            del llm


def turns_blocks(config: EngineConfig, shape: Turns, talks: _Talks) -> tuple[int, int]:
    """Of all conversations at their end, and of the pool. Raises ConfigError where it cannot be."""
    blocks = [-(-each // config.block_size) for each in talks.total_tokens()]
    num_pool, most = int(shape.pool_part * sum(blocks)), config.num_kv_blocks
    if num_pool < max(blocks) or (most is not None and most < num_pool):
        there_are = "" if most is None else f"there are {most}, "
        raise ConfigError(
            f"turns needs a pool of {num_pool} KV blocks, {shape.pool_part:g} of what its "
            f"conversations take, and {there_are}the longest conversation taking {max(blocks)}; "
            "give other --num-kv-blocks, --block-size or --sizes, or leave it out with --only",
            param="num_kv_blocks",
        )
    return sum(blocks), num_pool


def _gib(llm: LLM, num_blocks: float) -> float:
    """Host memory for so many blocks, and half of one against rounding."""
    itemsize = TORCH_DTYPES[llm.config.dtype].itemsize
    block_bytes = llm.model_config.kv_bytes_per_token(itemsize) * llm.config.block_size
    return (int(num_blocks) + 0.5) * block_bytes / 2**30


def _play_turns(engine: Engine, shape: Turns, talks: _Talks, seed: int) -> Figures:
    """Twice, each time from empty tiers: the first, of fewer turns, warms up."""
    source = PromptSource(engine.vocab_size, seed)
    for num_turns in (min(2, shape.turns), shape.turns):
        _forget(engine)
        num_before, before = engine.num_preemptions, engine.cache_stats()
        ttft_s = talks.play(engine, source, num_turns)
    stats = engine.cache_stats().since(before)
    num_preemptions = engine.num_preemptions - num_before
    _forget(engine)  # nothing of it is to be kept when the engine ends
    return {
        "hit_rate": stats.hit_rate,
        **distribution_ms("ttft", ttft_s),
        "num_hits": stats.num_hits,
        "num_requests": stats.num_queries,
        "num_evicted_blocks": stats.num_evicted_blocks,
        "num_preemptions": num_preemptions,
        **tier_figures(stats),
    }


def _forget(engine: Engine) -> None:
    # With overlap one more step is under way.
    while engine.has_work():
        engine.step()
    engine.reset_prefix_cache()


def run_host_cost(sizes: Sizes) -> Iterator[Figures]:
    """A line a workload; needs no engine."""
    for name, figures in host_costs(sizes.host_requests):
        yield ({"id": f"host-cost-{name}"} | rounded(figures) | {"requests": sizes.host_requests})


def check_cases(cases: Sequence[str], sizes: Sizes, max_model_len: int | None) -> None:
    """Refuse what does not fit the window. None is not known yet.

    Raises:
        ConfigError: the case, its need, the limit and the way out.
    """
    for case in cases:
        need = sizes.of(case).max_total_tokens
        if max_model_len is not None and need > max_model_len:
            raise ConfigError(
                f"{case} needs {need} tokens a request and the window holds {max_model_len}; raise "
                "--max-model-len, take smaller --sizes, or leave it out with --only",
                param="max_model_len",
            )


class _Bench:
    def __init__(self, llm: LLM, seed: int) -> None:
        self._engine: Engine = llm.engine
        self._config = llm.config
        self._timed = PicoEngine(llm)
        self._source = PromptSource(llm.engine.vocab_size, seed)

    def restart(self, config: EngineConfig) -> None:
        # With overlap one more step is under way; an interrupt leaves news for who is gone.
        while self._engine.has_work():
            self._engine.step()
        self._engine.restart(config)

    def on_and_off(self, shape: Batch) -> Figures:
        """Medians, and that of the ratios of each pair; who goes first changes. Lengths stay the
        same: what is captured for a shape is there once the first pair has run."""
        speeds: dict[str, list[float]] = {"on": [], "off": []}
        hit_rates, num_evicted, source = [], 0, self._source
        lengths = [source.draw(shape.prompt) for _ in range(shape.batch)]
        counts = [source.draw(shape.out) for _ in range(shape.batch)]
        for repeat in range(shape.repeats + 1):
            for caching in ("on", "off") if repeat % 2 else ("off", "on"):
                self.restart(replace(self._config, enable_prefix_caching=caching))
                shared = source.prompt(shape.shared)
                seconds = self._seconds([shared + source.prompt(n) for n in lengths], counts)
                if repeat == 0:  # warms up
                    continue
                speeds[caching].append(sum(counts) / seconds)
                if caching == "on":
                    stats = self._engine.cache_stats()
                    hit_rates.append(stats.hit_rate or 0.0)
                    num_evicted += stats.num_evicted_blocks
        self.restart(self._config)
        ratios = [on / off for on, off in zip(speeds["on"], speeds["off"], strict=True)]
        return {
            "out_tok_s_on": statistics.median(speeds["on"]),
            "out_tok_s_off": statistics.median(speeds["off"]),
            "on_over_off": statistics.median(ratios),
            "hit_rate": statistics.median(hit_rates),
            "num_evicted_blocks": num_evicted,
        }

    def groups(self, shape: Groups) -> Figures:
        """The first request of a group finds nothing, the others its prefix."""
        cold_ms, warm_ms, differences_ms = [], [], []
        before = self._engine.cache_stats()
        for group in range(shape.groups + 1):
            shared = self._source.prompt(shape.shared)
            times_ms = [
                1e3 * self._seconds([self._prompt(shared, shape)], [shape.out])
                for _ in range(shape.requests)
            ]
            if group == 0:  # warms up
                before = self._engine.cache_stats()
                continue
            cold_ms.append(times_ms[0])
            warm_ms.append(statistics.median(times_ms[1:]))
            differences_ms.append(warm_ms[-1] - cold_ms[-1])
        return {
            "cold_ms": statistics.median(cold_ms),
            "warm_ms": statistics.median(warm_ms),
            "warm_minus_cold_ms": statistics.median(differences_ms),
            "hit_rate": self._engine.cache_stats().since(before).hit_rate,
        }

    def chat(self, shape: Groups) -> Figures:
        """All system prompts are asked at once, round by round."""
        system_prompts = [self._source.prompt(shape.shared) for _ in range(shape.groups)]
        for _ in range(shape.requests):
            prompts = [self._prompt(each, shape) for each in system_prompts]
            self._seconds(prompts, [shape.out] * len(prompts))
        stats = self._engine.cache_stats()
        return {
            "hit_rate": stats.hit_rate,
            "num_hits": stats.num_hits,
            "num_requests": stats.num_queries,
            "num_hit_tokens": stats.num_hit_tokens,
        }

    def _prompt(self, shared: list[int], shape: Groups) -> list[int]:
        return shared + self._source.prompt(self._source.draw(shape.suffix))

    def _seconds(self, prompts: list[list[int]], counts: list[int]) -> float:
        start_s = time.perf_counter()
        self._timed.generate(prompts, counts)
        return time.perf_counter() - start_s


class _Talks:
    """Lengths and order of the turns, all drawn by the seed; the words are always fresh."""

    def __init__(self, shape: Turns, seed: int) -> None:
        random = np.random.default_rng(seed % 2**64)
        size = (shape.users, shape.turns)
        self._in_flight = shape.in_flight
        self._prompts = random.integers(*shape.prompt, size=size, endpoint=True).tolist()
        self._outs = random.integers(*shape.out, size=size, endpoint=True).tolist()
        self._order = random.permutation(np.repeat(np.arange(shape.users), shape.turns)).tolist()

    def total_tokens(self) -> list[int]:
        """Of each conversation at its end."""
        return [sum(p) + sum(o) for p, o in zip(self._prompts, self._outs, strict=True)]

    def play(self, engine: Engine, source: PromptSource, num_turns: int) -> list[float]:
        """The first turns of each user; seconds from each turn's sending to its first token."""
        talks: list[list[int]] = [[] for _ in self._prompts]
        num_done = [0] * len(talks)
        to_come = [u for i, u in enumerate(self._order) if self._order[:i].count(u) < num_turns]
        running: dict[str, int] = {}
        sent_s: dict[str, float] = {}
        ttft_s = []
        try:
            while to_come or running:
                while len(running) < self._in_flight:
                    # A user waits for the answer before going on.
                    user = next((each for each in to_come if each not in running.values()), None)
                    if user is None:
                        break
                    to_come.remove(user)
                    turn = num_done[user]
                    talks[user] += source.prompt(self._prompts[user][turn])
                    start_s = time.perf_counter()
                    request = engine.check(talks[user], greedy(self._outs[user][turn]))
                    request_id = engine.add(request)
                    running[request_id], sent_s[request_id] = user, start_s
                events = measured_step(engine)
                now_s = time.perf_counter()
                for request_id, token_id, reason in zip(
                    events.request_ids, events.token_ids, events.finish_reasons, strict=True
                ):
                    if request_id in sent_s:
                        ttft_s.append(now_s - sent_s.pop(request_id))
                    user = running[request_id]
                    talks[user].append(token_id)
                    if reason is not None:
                        assert reason is FinishReason.LENGTH, f"a turn ended with {reason}"
                        num_done[user] += 1
                        del running[request_id]
        finally:
            for request_id in running:
                engine.abort(request_id)
        return ttft_s
