"""What a prefix cache would do with a trace of prompts: the real scheduler, blocks and cache, and
no model. Host only.

Tiers below the device are the real `LowerTiers` too, over no memory and a disk without a file:
what is copied from or to host memory is there after a step, what is read from disk after another.

A step takes no time of its own here. The clock of the trace goes on by a fixed time a step, and to
the next arrival where nobody is there, so that a run gives the same figures on every machine.
"""

from __future__ import annotations

import zlib
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pico_vllm.bench.prompt_trace import TraceRequest
from pico_vllm.bench.tier_figures import tier_figures
from pico_vllm.cache.prefix_cache import CacheStats
from pico_vllm.cache.radix_tree import TOKEN_BYTES, Node, RadixTree, Tokens
from pico_vllm.cache.tiers.chain import Key
from pico_vllm.cache.tiers.lower import LowerTiers
from pico_vllm.config.engine import EngineConfig
from pico_vllm.request import Request
from pico_vllm.scheduler.scheduler import Scheduler
from pico_vllm.step import NO_TOKEN, StepPlan, StepResult

MADE_UP_IDS = 1 << 15
"""Answers that the trace does not have are ids below."""


@dataclass(frozen=True, slots=True)
class Replay:
    stats: CacheStats
    requests: Sequence[Request]
    """As they ended, in order of arrival."""
    num_steps: int
    num_computed_tokens: int
    """Of prompts, in all steps; what preempted requests had is computed again."""
    num_preemptions: int
    peak_held_blocks: int
    """Most blocks that running requests held at once."""
    peak_cached_blocks: int

    def figures(self) -> dict[str, Any]:
        """Flat, as a line has them. `device_`, `host_` and `disk_` are where hits were found."""
        stats = self.stats
        return {
            "num_requests": len(self.requests),
            "num_hits": stats.num_hits,
            "prompt_tokens": sum(each.num_prompt_tokens for each in self.requests),
            "hit_rate": stats.hit_rate,
            "saved_tokens": stats.num_hit_tokens,
            "computed_tokens": self.num_computed_tokens,
            "output_tokens": sum(len(each.output_token_ids) for each in self.requests),
            "num_steps": self.num_steps,
            "num_nodes": stats.num_nodes,
            "cached_blocks": stats.num_cached_blocks,
            "peak_cached_blocks": self.peak_cached_blocks,
            "peak_held_blocks": self.peak_held_blocks,
            "evicted_blocks": stats.num_evicted_blocks,
            "num_copies": stats.num_copies,
            "num_preemptions": self.num_preemptions,
        } | tier_figures(stats)


@dataclass(frozen=True, slots=True, kw_only=True)
class TierSizes:
    """Of the tiers below the device."""

    num_host_blocks: int
    num_disk_blocks: int = 0
    block_bytes: int = 0
    """For what was moved; 0 is not known."""
    min_host_tokens: int | None = 1
    """From how many on a load takes less time than computing; None is never."""
    min_disk_tokens: int | None = 1

    def tiers(self, block_size: int) -> LowerTiers:
        return LowerTiers(
            self.num_host_blocks,
            block_size=block_size,
            block_bytes=self.block_bytes,
            min_host_tokens=self.min_host_tokens,
            min_disk_tokens=self.min_disk_tokens,
            disk=_Disk(self.num_disk_blocks) if self.num_disk_blocks else None,
            host_memory=np.zeros((self.num_host_blocks, 0), np.uint8),
            is_threaded=False,
        )


class _Disk:
    """The books of a DiskTier without its file: the same blocks go, in the same order."""

    is_alive = True
    num_damaged = 0

    def __init__(self, num_records: int) -> None:
        self.num_records = num_records
        self.num_evicted = 0
        self._records: OrderedDict[Key, tuple[Key, bytes]] = OrderedDict()
        """Parent and tokens; the one whose last use is longest ago first."""

    def __len__(self) -> int:
        return len(self._records)

    def contains(self, key: Key) -> bool:
        return key in self._records

    def write(
        self, key: Key, parent: Key, tokens: bytes, kv: NDArray[np.uint8],
        is_wanted: Callable[[], bool],
    ) -> bool:  # fmt: skip
        if key in self._records or not is_wanted():
            return False
        if len(self._records) == self.num_records:
            self._records.popitem(last=False)
            self.num_evicted += 1
        self._records[key] = (parent, tokens)
        return True

    def read(self, key: Key, parent: Key, tokens: bytes, out: NDArray[np.uint8]) -> bool:
        if self._records.get(key) != (parent, tokens):
            return False
        self._records.move_to_end(key)
        return True

    def clear(self) -> None:
        self._records.clear()

    def close(self) -> None:
        """There is nothing to close."""


@dataclass(frozen=True, slots=True)
class SharedPrefix:
    """A piece that requests found cached, after the pieces that it follows."""

    num_tokens: int
    """From the first token of the prompts to the end of the piece."""
    num_own_tokens: int
    """Of the piece."""
    num_requests: int
    """That found it."""
    begin: list[int]
    """The piece's first ids."""

    @property
    def num_saved_tokens(self) -> int:
        """Those of all pieces add up to what was saved."""
        return self.num_own_tokens * self.num_requests

    def figures(self) -> dict[str, Any]:
        return {
            "saved_tokens": self.num_saved_tokens,
            "num_requests": self.num_requests,
            "prefix_tokens": self.num_tokens,
            "own_tokens": self.num_own_tokens,
        }


def replay(
    requests: Sequence[TraceRequest],
    config: EngineConfig,
    *,
    step_s: float,
    below: TierSizes | None = None,
) -> Replay:
    """Answer all, in order of arrival. config: with num_kv_blocks, max_num_seqs and
    max_num_batched_tokens, in whose pool each request fits; nothing else has to be resolved."""
    tiers = None if below is None else below.tiers(config.block_size)
    scheduler = Scheduler.from_config(config, tiers)
    to_come = deque(
        (each, _request(number, each, config.seed)) for number, each in enumerate(requests)
    )
    answers = {request.request_id: _answer(each) for each, request in to_come}
    all_requests = [request for _, request in to_come]
    by_id = {request.request_id: request for request in all_requests}
    now_s, num_steps, num_computed, peak_held, peak_cached = 0.0, 0, 0, 0, 0
    while to_come or scheduler.has_work():
        if not scheduler.has_work():
            now_s = max(now_s, to_come[0][0].arrival_s)
        while to_come and to_come[0][0].arrival_s <= now_s:
            scheduler.add(to_come.popleft()[1])
        plan = scheduler.schedule()
        # Only who waits for the disk has nothing to run.
        assert plan is not None or tiers is not None, "nothing to run with requests in line"
        if plan is not None:
            peak_held = max(peak_held, scheduler.num_held_blocks)
            loaded = (plan.number,) if plan.loads else ()
            token_ids = _sampled(plan, by_id, answers)
            scheduler.commit(plan, StepResult(token_ids=token_ids, loaded=loaded))
            peak_cached = max(peak_cached, scheduler.num_cached_blocks)
            num_computed += int(plan.query_lens[plan.num_decodes :].sum())
        num_steps += 1
        now_s += step_s
    return Replay(
        scheduler.cache_stats(),
        all_requests,
        num_steps=num_steps,
        num_computed_tokens=num_computed,
        num_preemptions=scheduler.num_preemptions,
        peak_held_blocks=peak_held,
        peak_cached_blocks=peak_cached,
    )


def shared_prefixes(requests: Iterable[Request], count: int) -> list[SharedPrefix]:
    """Those pieces by which most tokens were saved.

    A radix tree of what the requests found, with blocks of one token: its edges part where the
    prefixes do, and count who used them.
    """
    tree = RadixTree(1)
    for request in requests:
        num_cached = request.num_cached_tokens or 0
        if num_cached:
            tokens: Tokens = request.prompt_token_ids[:num_cached].tobytes()
            salt = request.params.cache_salt or ""
            root = tree.lock(tree.match(b"", 0, salt), salt)
            node, _ = tree.insert(root, tokens, [0] * num_cached)
            tree.unlock(node)
    pieces = [node for node in tree.nodes() if node.parent is not None]
    pieces.sort(key=lambda node: len(node.block_ids) * node.num_uses, reverse=True)
    return [
        SharedPrefix(
            num_tokens=_num_tokens(node),
            num_own_tokens=len(node.block_ids),
            num_requests=node.num_uses,
            begin=np.frombuffer(node.tokens[: 32 * TOKEN_BYTES], np.int32).tolist(),
        )
        for node in pieces[:count]
    ]


def _num_tokens(node: Node) -> int:
    total, each = 0, node
    while each.parent is not None:
        total += len(each.block_ids)
        each = each.parent
    return total


def _request(number: int, traced: TraceRequest, seed: int) -> Request:
    assert traced.params.max_tokens is not None
    return Request(
        request_id=str(number),
        prompt_token_ids=traced.prompt,
        params=traced.params,
        max_tokens=traced.params.max_tokens,
        stop_token_ids=frozenset(),
        seed=seed,
    )


def _answer(traced: TraceRequest) -> NDArray[np.int32]:
    """The trace's own, or one that the same prompt always gets."""
    if traced.output is not None:
        return traced.output
    random = np.random.default_rng(zlib.crc32(traced.prompt.tobytes()))
    return random.integers(0, MADE_UP_IDS, traced.params.max_tokens, np.int32)


def _sampled(
    plan: StepPlan, by_id: dict[str, Request], answers: dict[str, NDArray[np.int32]]
) -> NDArray[np.int64]:
    found = np.full(len(plan.request_ids), NO_TOKEN, np.int64)
    for index in np.flatnonzero(plan.is_sampled).tolist():
        request_id = plan.request_ids[index]
        found[index] = answers[request_id][len(by_id[request_id].output_token_ids)]
    return found
