"""A model without weights: the KV of a token is a hash of it, its position and the KV before it,
and the next token is a hash of the last KV. A wrong block, slot, row, position, length or a stale
cell gives a wrong token: what a request answers alone is what it must answer in any company.

`SimulatedRunner` takes the real plans through the real `BatchBuilder`. Like a device it runs a step
some time after its launch, in the order of launches: at the latest when its result is asked for.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from pico_vllm.cache.block_manager import BlockManager
from pico_vllm.cache.prefix_cache import PrefixCache
from pico_vllm.cache.tiers.disk import ALIGNMENT, ENTRY_BYTES, DiskTier
from pico_vllm.cache.tiers.lower import LowerTiers
from pico_vllm.config.engine import EngineConfig
from pico_vllm.engine.batch_builder import BatchBuilder
from pico_vllm.engine.engine import Engine
from pico_vllm.request import FinishReason, Request
from pico_vllm.sampling_params import SamplingParams
from pico_vllm.scheduler.scheduler import Scheduler
from pico_vllm.step import NO_TOKEN, NewRow, StepPlan, StepResult, TokenLogprobs

VOCAB = 1000
MAX_TOKENS = 4096
_BITS = 2**64
_K = 0x9E3779B97F4A7C15
"""KV of a token: KV before it * _K + what the token and its position give, mod 2**64."""
_POWERS = np.array([pow(_K, i, _BITS) for i in range(MAX_TOKENS)], np.uint64)
_INVERSES = np.array([pow(pow(_K, -1, _BITS), i, _BITS) for i in range(MAX_TOKENS)], np.uint64)


def _mixed(token_ids: NDArray[Any], positions: NDArray[Any]) -> NDArray[np.uint64]:
    """Of each token at its position, spread over 64 bits."""
    x = token_ids.astype(np.uint64) * np.uint64(0xBF58476D1CE4E5B9)
    x += (positions.astype(np.uint64) + np.uint64(1)) * np.uint64(0x94D049BB133111EB)
    x ^= x >> np.uint64(31)
    return x * np.uint64(0xD6E8FEB86659FD93)


def _chain(before: int, token_ids: NDArray[Any], first: int) -> NDArray[np.uint64]:
    """KV of tokens that follow each other from a position on; before: the KV in front of them."""
    n = len(token_ids)
    mixed = _mixed(token_ids, np.arange(first, first + n))
    return _POWERS[1 : n + 1] * (np.uint64(before) + np.cumsum(_INVERSES[1 : n + 1] * mixed))


def _next_token(last_kv: int, num_outputs: int, seed: int, sample_index: int) -> int:
    """What is sampled depends on the KV, and on how far which answer of which request is."""
    x = (last_kv ^ (seed * 31 + sample_index * 17 + num_outputs + 1) * 0xD1B54A32D192ED03) % _BITS
    x = (x ^ (x >> 29)) * 0x94D049BB133111EB % _BITS
    return (x >> 33) % VOCAB


def answer_alone(request: Request) -> list[int]:
    """By the definition, until a stop id or the length."""
    prompt = np.array(request.prompt_token_ids)
    last = int(_chain(0, prompt, 0)[-1])
    answer: list[int] = []
    while len(answer) < request.max_tokens:
        answer.append(_next_token(last, len(answer), request.seed, request.sample_index))
        is_stop = answer[-1] in request.stop_token_ids
        if is_stop and len(answer) > request.params.min_tokens:
            break
        at = len(prompt) + len(answer) - 1
        last = int(_chain(last, np.array(answer[-1:]), at)[0])
    return answer


class _Pending:
    def __init__(self, runner: SimulatedRunner, plan: StepPlan) -> None:
        self._runner = runner
        self._plan = plan
        self.found: StepResult | None = None
        self.error: Exception | None = None

    def result(self) -> StepResult:
        while self.found is None and self.error is None:
            self._runner.run_next()
        if self.error is not None:
            raise self.error
        assert self.found is not None
        return self.found


class SimulatedRunner:
    """Keeps what a device would keep: a row's tokens and block table, and the KV by slot."""

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int,
        max_num_seqs: int,
        max_model_len: int,
        host_memory: NDArray[np.uint8] | None = None,
    ) -> None:
        self._size = block_size
        self._builder = BatchBuilder(
            max_num_seqs=max_num_seqs,
            max_model_len=max_model_len,
            block_size=block_size,
            device=torch.device("cpu"),
        )
        self._host = np.zeros((0, 0), np.uint8) if host_memory is None else host_memory
        self._loading: list[tuple[int, int, StepPlan]] = []
        """Loads, in order: the number of the plan with which each is done, and its own plan's."""
        self._hurried: set[int] = set()
        self._named: tuple[int, ...] = ()
        """Loads that a plan awaited: results are to name them."""
        self.load_delay: Callable[[], int] = lambda: 0
        """How many more plans a load takes."""
        num_slots = (num_blocks + 1) * block_size
        self._kv = np.zeros(num_slots, np.uint64)
        self._tokens = np.full(num_slots, -1, np.int64)
        self._new: list[NewRow | None] = [None] * max_num_seqs
        self._last_tokens = np.full(max_num_seqs, -7, np.int64)
        self._launched: deque[tuple[StepPlan, _Pending]] = deque()
        self.slots: list[list[int]] = []
        """Of each request of the last step, where its new tokens went."""
        self.on_run: Callable[[StepPlan], None] = lambda plan: None
        """Called before a step runs; may raise."""

    def launch(self, plan: StepPlan) -> _Pending:
        pending = _Pending(self, plan)
        self._launched.append((plan, pending))
        return pending

    def run(self, plan: StepPlan) -> StepResult:
        return self.launch(plan).result()

    def wait_for_transfers(self) -> None:
        """Loads that are under way end; those of steps that were launched and have not run yet end
        with them, and so do stores."""
        self._load_until(None)
        self._hurried = {plan.number for plan, _ in self._launched}

    def close(self) -> None:
        """Nothing is under way that anybody waits for."""

    def _store(self, plan: StepPlan) -> None:
        for copy in plan.stores:
            slots = np.arange(self._size) + copy.source * self._size
            cells = (self._kv[slots].view(np.uint8), self._tokens[slots].view(np.uint8))
            self._host[copy.target] = np.concatenate(cells)

    def _load_until(self, most: int | None) -> tuple[int, ...]:
        """Do the first loads that are due; all for None."""
        done, self._named = [*self._named], ()
        while self._loading and (most is None or self._loading[0][0] <= most):
            _, number, plan = self._loading.pop(0)
            for copy in plan.loads:
                slots = np.arange(self._size) + copy.target * self._size
                half = self._size * 8
                self._kv[slots] = self._host[copy.source][:half].view(np.uint64)
                self._tokens[slots] = self._host[copy.source][half:].view(np.int64)
            done.append(number)
        return tuple(done)

    def run_next(self) -> None:
        plan, pending = self._launched.popleft()
        try:
            found = self._run(plan)
            self.on_run(plan)
            pending.found = found
        except Exception as error:
            pending.error = error

    def _run(self, plan: StepPlan) -> StepResult:
        if plan.awaits_loads:
            self._named = self._load_until(None)
        self._store(plan)
        # The blocks hold nonsense until the load is done.
        for copy in plan.loads:
            slots = np.arange(self._size) + copy.target * self._size
            self._kv[slots] = 12345
        if plan.loads:
            delay = 0 if plan.number in self._hurried else self.load_delay()
            self._loading.append((plan.number + delay, plan.number, plan))
        if not len(plan.rows):
            # Somebody waits for the first one.
            most = max([plan.number, *(due for due, _, _ in self._loading[:1])])
            return StepResult(token_ids=np.zeros(0, np.int64), loaded=self._load_until(most))
        for new in plan.new_rows:
            self._new[new.row] = new
            self._last_tokens[new.row] = -7
        for copy in plan.copies:
            source, target = (
                np.arange(self._size) + i * self._size for i in (copy.source, copy.target)
            )
            self._kv[target], self._tokens[target] = self._kv[source], self._tokens[source]
        batch = self._builder.build(plan)
        sources = {copy.source for copy in plan.copies}
        assert not sources & {copy.target for copy in plan.copies}, "copied from a copy"
        assert not sources & set((batch.slot_mapping.numpy() // self._size).tolist())
        slots, starts = batch.slot_mapping.numpy(), batch.query_start_loc.numpy()
        inputs, positions = batch.token_ids.numpy(), batch.positions.numpy()
        table, seq_lens = batch.block_table.numpy(), batch.seq_lens.numpy()
        assert len(np.unique(slots)) == len(slots), "two tokens in one slot"
        assert slots.min() >= self._size, "a token in the null block"
        found = np.full(len(plan.rows), NO_TOKEN, np.int64)
        prompt_logprobs = {}
        self.slots = []
        for index, row in enumerate(plan.rows.tolist()):
            own = slice(starts[index], starts[index + 1])
            new, seq_len = self._new[row], int(seq_lens[index])
            assert new is not None
            token_ids, context_len = inputs[own], int(positions[own][0])
            if index < plan.num_decodes:
                # Where the batch lives on a device, a decoding row's input is what it sampled.
                token_ids = self._last_tokens[row : row + 1]
            read = self._slots_of(table[index], seq_len)
            assert read[context_len:].tolist() == slots[own].tolist()
            before = int(self._kv[read[context_len - 1]]) if context_len else 0
            self._kv[slots[own]] = _chain(before, token_ids, context_len)
            self._tokens[slots[own]] = token_ids
            self.slots.append(slots[own].tolist())
            kv = self._kv[read]
            mixed = _mixed(self._tokens[read], np.arange(seq_len))
            # Whatever was written over the context since shows as a break in the chain.
            is_whole = np.array_equal(kv[1:], kv[:-1] * np.uint64(_K) + mixed[1:])
            last = int(kv[-1]) if is_whole and kv[0] == mixed[0] else 0
            if plan.is_sampled[index]:
                num_outputs = seq_len - new.num_prompt_tokens
                found[index] = _next_token(last, num_outputs, new.seed, new.sample_index)
                self._last_tokens[row] = found[index]
            prompt_logprobs |= _prompt_logprobs(index, new, context_len, seq_len)
        self._builder.append(plan, found)
        loaded = self._load_until(plan.number)
        return StepResult(token_ids=found, prompt_logprobs=prompt_logprobs, loaded=loaded)

    def _slots_of(self, table: NDArray[np.int32], seq_len: int) -> NDArray[np.int64]:
        positions = np.arange(seq_len)
        block_ids = table[positions // self._size].astype(np.int64)
        return block_ids * self._size + positions % self._size


def _prompt_logprobs(
    index: int, new: NewRow, context_len: int, seq_len: int
) -> dict[int, list[TokenLogprobs]]:
    """One that names the token, for each prompt token that nothing predicted before."""
    if new.params.prompt_logprobs is None:
        return {}
    first = max(context_len + 1, new.num_prompt_logprobs + 1)
    stop = min(seq_len + 1, new.num_prompt_tokens)
    return {
        index: [
            TokenLogprobs((int(i),), (0.0,), 1) for i in new.token_ids[first : max(first, stop)]
        ]
    }


def make_request(
    number: int,
    prompt: Sequence[int],
    max_tokens: int,
    *,
    stop: Sequence[int] = (),
    min_tokens: int = 0,
    priority: int = 0,
    prompt_logprobs: int | None = None,
    cache_salt: str | None = None,
) -> Request:
    return Request(
        request_id=f"r{number}",
        prompt_token_ids=np.array(prompt, np.int32),
        params=SamplingParams(
            max_tokens=max_tokens,
            min_tokens=min_tokens,
            priority=priority,
            prompt_logprobs=prompt_logprobs,
            cache_salt=cache_salt,
        ),
        max_tokens=max_tokens,
        stop_token_ids=frozenset(stop),
        seed=number * 7,
        sample_index=number % 3,
    )


def simulated_tiers(
    *, block_size: int, num_host_blocks: int, disk: str | None = None, num_records: int = 8,
    **others: Any,
) -> LowerTiers:  # fmt: skip
    """Over memory of the cells of simulated KV: its hashes, then its tokens."""
    block_bytes, disk_tier = block_size * 16, None
    if disk is not None:
        disk_tier = DiskTier(
            disk,
            max_bytes=2 * ALIGNMENT + num_records * (ALIGNMENT + ENTRY_BYTES),
            layout={"block_size": block_size},
            identity=bytes(32),
            block_tokens_bytes=4 * block_size,
            block_bytes=block_bytes,
        )
    return LowerTiers(
        num_host_blocks,
        block_size=block_size,
        block_bytes=block_bytes,
        disk=disk_tier,
        host_memory=np.zeros((num_host_blocks, block_bytes), np.uint8),
        **({"is_threaded": False} | others),
    )


def simulated_engine(
    *,
    num_blocks: int,
    block_size: int,
    max_num_seqs: int,
    budget: int,
    overlap: bool,
    policy: str = "fcfs",
    max_prompt_tokens: int | None = None,
    cache: dict[str, Any] | None = None,
    min_awaited_tokens: int = 1,
    tiers: dict[str, Any] | None = None,
    max_load_delay: int = 0,
) -> Engine:
    """The real engine and scheduler over a simulated model whose window is the pool. cache:
    settings of a PrefixCache; None is without. tiers: of LowerTiers, and `disk`, a folder.
    max_load_delay: most steps that loads take."""
    config = EngineConfig(
        model="simulated",
        max_model_len=num_blocks * block_size,
        block_size=block_size,
        num_kv_blocks=num_blocks,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget,
        overlap="on" if overlap else "off",
        kv_host_gb=None if tiers is None else 1,
    )
    blocks = BlockManager(num_blocks)
    lower, host_memory = None, None
    if tiers is not None:
        assert cache is not None
        lower = simulated_tiers(block_size=block_size, **tiers)
        host_memory, cache = lower._memory, cache | {"tiers": lower}
    prefix_cache = None
    if cache is not None:
        prefix_cache = PrefixCache(blocks, block_size=block_size, **cache)
    scheduler = Scheduler(
        blocks,
        block_size=block_size,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget,
        policy=policy,
        max_prompt_tokens=max_prompt_tokens,
        prefix_cache=prefix_cache,
    )
    if scheduler._prefixes is not None:
        scheduler._prefixes.min_awaited_tokens = min_awaited_tokens
    runner = SimulatedRunner(
        num_blocks=num_blocks,
        block_size=block_size,
        max_num_seqs=max_num_seqs,
        max_model_len=num_blocks * block_size,
        host_memory=host_memory,
    )
    random = np.random.default_rng(num_blocks)
    runner.load_delay = lambda: int(random.integers(0, max_load_delay + 1))
    return Engine(config, scheduler, runner, vocab_size=VOCAB, eos_token_ids=())


class Clients:
    """What the callers of an engine see of their requests."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.requests: dict[str, Request] = {}
        self.answers: dict[str, list[int]] = {}
        self.prompt_tokens: dict[str, list[int]] = {}
        """Those of which log-probabilities came."""
        self.ended: dict[str, FinishReason] = {}

    def add(self, prompt_len: int, max_tokens: int, **others: Any) -> Request:
        """A prompt that shares nothing with any other."""
        number = len(self.requests)
        prompt = np.random.default_rng(number).integers(0, VOCAB, prompt_len).tolist()
        return self.ask(prompt, max_tokens, **others)

    def ask(self, prompt: Sequence[int], max_tokens: int, **others: Any) -> Request:
        number = len(self.requests)
        request = make_request(number, prompt, max_tokens, **others)
        self.requests[request.request_id] = request
        self.answers[request.request_id] = []
        self.prompt_tokens[request.request_id] = []
        self.engine._scheduler.add(request)
        return request

    def abort(self, request_id: str) -> None:
        is_aborted = self.engine.abort(request_id)
        assert is_aborted is (request_id in self.requests and request_id not in self.ended)
        if is_aborted:
            self.ended[request_id] = FinishReason.ABORT

    def step(self) -> None:
        events = self.engine.step()
        self.engine.check_invariants()
        for request_id, values in events.prompt_logprobs.items():
            self.prompt_tokens[request_id] += [value.token_ids[0] for value in values]
        for request_id, token_id, reason in zip(
            events.request_ids, events.token_ids, events.finish_reasons, strict=True
        ):
            if reason is FinishReason.ERROR:
                # Those that had ended when the step failed are named too.
                self.ended.setdefault(request_id, reason)
                continue
            assert request_id not in self.ended, "an event after the last one"
            self.answers[request_id].append(token_id)
            if reason is not None:
                self.ended[request_id] = reason

    def run(self) -> int:
        """Until all have ended: in no more steps than a budget of one token takes, waiting and
        computing again included."""
        num_steps = 0
        num_tokens = sum(
            each.num_prompt_tokens + each.max_tokens
            for request_id, each in self.requests.items()
            if request_id not in self.ended
        )
        while self.engine.has_work():
            self.step()
            num_steps += 1
            assert num_steps < 20_000 + 4 * num_tokens
        return num_steps

    def check(self) -> None:
        """All have ended, each with what it answers alone, and nothing is held."""
        scheduler = self.engine._scheduler
        assert self.requests.keys() == self.ended.keys()
        assert scheduler._num_available_blocks == scheduler._blocks.num_device_blocks
        for request_id, request in self.requests.items():
            answer, wanted = self.answers[request_id], answer_alone(request)
            reason = self.ended[request_id]
            if reason in (FinishReason.ABORT, FinishReason.ERROR):
                assert answer == wanted[: len(answer)]
                continue
            assert answer == wanted, request_id
            is_stop = answer[-1] in request.stop_token_ids
            is_stop = is_stop and len(answer) > request.params.min_tokens
            assert reason is (FinishReason.STOP if is_stop else FinishReason.LENGTH)
            if request.params.prompt_logprobs is not None:
                assert self.prompt_tokens[request_id] == request.prompt_token_ids[1:].tolist()
