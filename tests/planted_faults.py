"""Plants faults, one at a time, and asks whether the tests see them.

    python tests/planted_faults.py [part of a name ...]

Each plant replaces a text that occurs once in a file by a wrong one, in a copy of the project, and
runs the tests of blocks, prefixes, scheduler and batches there. It prints who was killed and who
survived, and ends with status 1 if more than one in fifteen did. Some minutes in all, so no test
runs it; `tests/architecture/test_planted_faults.py` sees that every text is
still there.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
TIMEOUT_S = 120
MAX_SURVIVING = 1 / 15
UNIT_TESTS = (
    "tests/unit/cache/test_radix_tree.py",
    "tests/unit/cache/test_prefix_cache.py",
    "tests/unit/engine/test_prefix_caching.py",
    "tests/unit/engine/test_batch_builder.py",
    "tests/unit/engine/test_device_batch.py",
    "tests/unit/scheduler",
    "tests/unit/cache/test_block_manager.py",
    "tests/unit/engine/test_overlap.py",
    "tests/unit/engine/test_preemption.py",
    "tests/unit/cache/test_lower_tiers.py",
    "tests/unit/engine/test_tiered_engine.py",
)
RUNS = (
    (*UNIT_TESTS, "-k", "not Machine"),
    ("tests/system/test_llm_preemption.py", "tests/system/test_llm_prefix_cache.py"),
    # The state machines last: they take longest, and few plants are left for them.
    (*UNIT_TESTS, "-k", "Machine"),
)
NO_SHRINKING = """
import hypothesis

hypothesis.settings.register_profile(
    "planted", phases=[hypothesis.Phase.generate], derandomize=True, database=None
)
hypothesis.settings.load_profile("planted")
"""
"""A fault found is enough; the smallest example of it would take minutes."""


@dataclass(frozen=True, slots=True)
class Plant:
    name: str
    file: str
    old: str
    new: str


SCHEDULER = "pico_vllm/scheduler/scheduler.py"
PLAN_MAKER = "pico_vllm/scheduler/plans.py"
ROWS = "pico_vllm/scheduler/rows.py"
QUEUES = "pico_vllm/scheduler/queues.py"
POLICY = "pico_vllm/scheduler/policy.py"
PREFIXES = "pico_vllm/scheduler/prefixes.py"
TREE = "pico_vllm/cache/radix_tree.py"
CACHE = "pico_vllm/cache/prefix_cache.py"
BLOCKS = "pico_vllm/cache/block_manager.py"
BUILDER = "pico_vllm/engine/batch_builder.py"
DEVICE = "pico_vllm/engine/device_batch.py"
SAMPLING = "pico_vllm/engine/sampling_rows.py"
PROMPT = "pico_vllm/engine/prompt_logprobs.py"
SAMPLER = "pico_vllm/sampler/sampler.py"
ENGINE = "pico_vllm/engine/engine.py"
HOST = "pico_vllm/cache/tiers/host.py"
DISK = "pico_vllm/cache/tiers/disk.py"
LOWER = "pico_vllm/cache/tiers/lower.py"
CHAIN = "pico_vllm/cache/tiers/chain.py"

PLANTS = (
    # Preemption.
    Plant("stale result taken", SCHEDULER, "if plan.number < self._last_return:", "if False:"),
    Plant("entry not noted", SCHEDULER, "request.entered_at = self._plans.number", "pass"),
    Plant("oldest preempted", SCHEDULER, "victim = live.pop()", "victim = live.pop(0)"),
    Plant("victim lost", SCHEDULER, "self._waiting.put_back(request)", "pass"),
    Plant(
        "victim at the end of the line",
        SCHEDULER,
        "self._waiting.put_back(request)",
        "self._waiting.push(request)",
    ),
    Plant(
        "victim stays in the plan",
        SCHEDULER,
        "is_kept[index] = False\n            self._preempt(victim)",
        "pass\n            self._preempt(victim)",
    ),
    Plant(
        "victim's blocks not counted",
        SCHEDULER,
        "lacking = int(missing[is_kept].sum()) - self._num_available_blocks",
        "pass",
    ),
    Plant(
        "ending ones not waited for", SCHEDULER, "while lacking > soon_free:", "while lacking > 0:"
    ),
    Plant(
        "anybody preempted for a better one",
        SCHEDULER,
        "if each.place > request.place]",
        "if each.place != request.place]",
    ),
    Plant(
        "outputs not computed again",
        PLAN_MAKER,
        "np.array(request.output_token_ids, np.int32)",
        "np.zeros(0, np.int32)",
    ),
    Plant(
        "outputs taken for prompt",
        PLAN_MAKER,
        "num_prompt_tokens=request.num_prompt_tokens,",
        "num_prompt_tokens=request.num_tokens,",
    ),
    Plant(
        "max_tokens starts again",
        ROWS,
        "request.max_total_tokens - request.num_tokens",
        "request.max_tokens",
    ),
    Plant(
        "only the prompt counted at entry",
        ROWS,
        "self.num_entered[row] = request.num_tokens",
        "self.num_entered[row] = request.num_prompt_tokens",
    ),
    Plant(
        "row keeps its samples",
        ROWS,
        "self.num_sampled[row] = 0",
        "pass",
    ),
    Plant(
        "ending seen late", ROWS, "row] >= self.max_sampled[row]", "row] > self.max_sampled[row]"
    ),
    Plant(
        "prompt log-probabilities twice", PROMPT, "first = new.num_prompt_logprobs + 1", "first = 1"
    ),
    Plant("their count lost", SCHEDULER, "request.num_prompt_logprobs += len(", "_ = ("),
    Plant(
        "outputs' log-probabilities as the prompt's",
        PROMPT,
        "stop = min(seq_len + 1, wanted.positions.stop)",
        "stop = seq_len + 1",
    ),
    Plant(
        "penalties forget outputs",
        SAMPLER,
        "new.token_ids[:n], new.token_ids[n:]",
        "new.token_ids[:n], new.token_ids[:0]",
    ),
    Plant(
        "min_tokens starts again",
        SAMPLER,
        "self._num_prompt_tokens[row] = new.num_prompt_tokens",
        "self._num_prompt_tokens[row] = len(new.token_ids)",
    ),
    Plant(
        "min_tokens starts again on a device",
        SAMPLING,
        "new.num_prompt_tokens + params.min_tokens",
        "len(new.token_ids) + params.min_tokens",
    ),
    Plant("counts not rebuilt on a device", DEVICE, "if has_penalties(new)])", "if False])"),
    # Admission, waiting and progress.
    Plant("no watermark", SCHEDULER, "self._watermark * bool(self._running)", "0"),
    Plant(
        "watermark for one alone",
        SCHEDULER,
        "self._watermark * bool(self._running)",
        "self._watermark",
    ),
    Plant("claims of running ones forgotten", SCHEDULER, "- int(claimed.sum())", ""),
    Plant("watchdog asleep", SCHEDULER, "self._num_fruitless_steps += 1", "pass"),
    Plant(
        "recomputing taken for progress",
        SCHEDULER,
        "> self._rows.num_computed[plan.rows]",
        "> 0",
    ),
    Plant(
        "nobody fails where nobody runs",
        SCHEDULER,
        "elif self._running or len(",
        "elif True or len(",
    ),
    Plant(
        "line by arrival before place",
        QUEUES,
        "(self._line, (rank, request.place[1],",
        "(self._line, (request.place[1], rank,",
    ),
    Plant(
        "best priority last",
        POLICY,
        "return request.params.priority *",
        "return -request.params.priority *",
    ),
    # Plans.
    Plant(
        "a token past the last", SCHEDULER, "is_live = num_sampled <", "is_live = num_sampled <="
    ),
    Plant(
        "prompts before decode rows",
        SCHEDULER,
        "(rows[is_both], rows[is_live & ~is_decoding])",
        "(rows[is_live & ~is_decoding], rows[is_both])",
    ),
    Plant(
        "budget one too large",
        SCHEDULER,
        "np.int32), self._budget_tokens)",
        "np.int32), self._budget_tokens + 1)",
    ),
    Plant(
        "sampled inside a prompt", PLAN_MAKER, "is_sampled = ends == ", "is_sampled = ends + 1 >= "
    ),
    Plant(
        "one token computed twice",
        PLAN_MAKER,
        "state.num_scheduled[rows] = ends",
        "state.num_scheduled[rows] = ends - 1",
    ),
    Plant(
        "last block forgotten",
        SCHEDULER,
        "missing = -(-ends // self._block_size) -",
        "missing = ends // self._block_size -",
    ),
    Plant("table overwritten from its start", PLAN_MAKER, "index=held", "index=0"),
    Plant(
        "one list of blocks for all", PLAN_MAKER, "extend(block_ids[taken])", "extend(block_ids)"
    ),
    # Ends.
    Plant(
        "blocks freed and kept",
        SCHEDULER,
        "self._blocks.free(request.block_ids)\n                request.block_ids = []",
        "self._blocks.free(request.block_ids)",
    ),
    Plant("blocks leaked", SCHEDULER, "self._blocks.free(request.block_ids)", "pass"),
    Plant("row leaked", SCHEDULER, "self._rows.give_back(request.row)", "pass"),
    Plant(
        "stale order of rows",
        ROWS,
        "del self._in_use[row]\n        self._in_order = None",
        "del self._in_use[row]",
    ),
    Plant(
        "min_tokens one short",
        SCHEDULER,
        "num_output_tokens > request.params.min_tokens",
        "num_output_tokens >= request.params.min_tokens",
    ),
    Plant(
        "one token more",
        SCHEDULER,
        "if num_output_tokens >= request.max_tokens:",
        "if num_output_tokens > request.max_tokens:",
    ),
    Plant(
        "waiting requests cannot be aborted",
        SCHEDULER,
        "request = self._waiting.remove(request_id) or self._running.get(request_id)\n"
        "        if request is None:",
        "request = self._running.get(request_id)\n        if request is None:",
    ),
    Plant(
        "a preempted one outlives its failed step",
        SCHEDULER,
        "request = self._waiting.remove(request_id) or self._running.get(request_id)\n"
        "            if",
        "request = self._running.get(request_id)\n            if",
    ),
    Plant(
        "step in flight not waited for", ENGINE, "            self._wait_for_step_in_flight()\n", ""
    ),
    # Blocks.
    Plant(
        "shared block freed",
        BLOCKS,
        "        for block_id in block_ids:\n            ref_counts[block_id] -= 1",
        "        for block_id in block_ids:\n            ref_counts[block_id] = 0",
    ),
    Plant(
        "held block freed",
        BLOCKS,
        "if count <= 1:",
        "if count <= 2:",
    ),
    Plant(
        "last block never given",
        BLOCKS,
        "if count > len(self._free)",
        "if count >= len(self._free)",
    ),
    Plant(
        "null block given",
        BLOCKS,
        "_FreeIds(range(1, num_device_blocks + 1))",
        "_FreeIds(range(num_device_blocks))",
    ),
    Plant(
        "freed block not found again",
        BLOCKS,
        "self._lowest = min(self._lowest, min(ids))",
        "pass",
    ),
    # Cached prefixes.
    Plant(
        "nothing left to compute",
        PREFIXES,
        "max_tokens = request.num_tokens - 1",
        "max_tokens = request.num_tokens",
    ),
    Plant(
        "published before it is full",
        SCHEDULER,
        "publish(request, ends[index])",
        "publish(request, ends[index] + 1)",
    ),
    Plant(
        "last token published uncomputed",
        SCHEDULER,
        "return request.num_tokens - 1 if",
        "return request.num_tokens if",
    ),
    Plant(
        "an error publishes", SCHEDULER, "0 if reason is FinishReason.ERROR else", "0 if False else"
    ),
    Plant("bad KV stays", SCHEDULER, "if FinishReason.ERROR in reasons:", "if False:"),
    Plant(
        "log-probabilities of cached tokens",
        PREFIXES,
        "            max_tokens = 0",
        "            pass",
    ),
    Plant(
        "salt not asked for",
        PREFIXES,
        'self.cache.match(tokens, max_tokens, request.params.cache_salt or "")',
        'self.cache.match(tokens, max_tokens, "")',
    ),
    Plant(
        "exchanged blocks not told", PLAN_MAKER, "        if self._exchanged:", "        if False:"
    ),
    Plant(
        "own blocks kept beside others'",
        PREFIXES,
        "request.block_ids[first : first + len(found)] = found",
        "pass",
    ),
    Plant("cached blocks not told", PLAN_MAKER, "if held and row in entering:", "if False:"),
    Plant(
        "followers forgotten",
        PREFIXES,
        "request.block_ids = request.block_ids, []\n        self._let_go_of(running, None)",
        "request.block_ids = request.block_ids, []",
    ),
    Plant(
        "followers wait to the end",
        PREFIXES,
        "self._let_go_of(running, running.lease.num_blocks)",
        "pass",
    ),
    Plant("nobody follows", PREFIXES, "self._leaders.setdefault(running.key, request_id)", "pass"),
    Plant(
        "lock above the match",
        TREE,
        "node = self._cut(node, match.num_in_last)\n",
        "node = match.path[-2]\n",
    ),
    Plant(
        "locked leaf evicted",
        TREE,
        "                if each.entry:\n                    self._leave_line(each)\n"
        "            each.lock_ref += 1\n            each.last_used",
        "            each.lock_ref += 1\n            each.last_used",
    ),
    Plant(
        "parent of an evicted leaf lost",
        TREE,
        "is_leaf_then = len(parent.children) == 1 and parent.lock_ref == 0",
        "is_leaf_then = False",
    ),
    Plant("cut edge unlocked", TREE, "upper.lock_ref = node.lock_ref", "pass"),
    Plant(
        "part found on one side only",
        TREE,
        "node.keys[max(0, index - 1) : index + 1]",
        "node.keys[index : index + 1]",
    ),
    Plant(
        "old match after an eviction",
        TREE,
        "            self.version += 1\n        return gone",
        "        return gone",
    ),
    Plant("uses not noted", TREE, "            each.last_used = clock\n", ""),
    Plant(
        "source given away",
        CACHE,
        "            self._tree.lock_node(match.source, priority)",
        "            pass",
    ),
    Plant(
        "source of a copy not counted", TREE, "found += len(source.block_ids) - (", "found += 0 * ("
    ),
    Plant(
        "evictable blocks not available",
        CACHE,
        "return self._blocks.num_free_device_blocks + self._tree.num_evictable_blocks",
        "return self._blocks.num_free_device_blocks",
    ),
    Plant("cache without a bound", CACHE, "        if excess > 0:", "        if False:"),
    Plant(
        "old leases publish",
        CACHE,
        "if lease.tree is not self._tree or not block_ids:",
        "if not block_ids:",
    ),
    # Batches.
    Plant(
        "slot off by one",
        BUILDER,
        "+ positions % self._block_size",
        "+ (positions + 1) % self._block_size",
    ),
    Plant(
        "position off by one",
        BUILDER,
        "first_position = np.repeat(context_lens -",
        "first_position = np.repeat(context_lens + 1 -",
    ),
    Plant(
        "length one short",
        BUILDER,
        "seq_lens = context_lens + query_lens",
        "seq_lens = context_lens + query_lens - 1",
    ),
    Plant(
        "token appended one early",
        BUILDER,
        "at = (plan.context_lens + plan.query_lens)[has_token]",
        "at = (plan.context_lens + plan.query_lens - 1)[has_token]",
    ),
    Plant(
        "bad logits appended",
        BUILDER,
        "has_token = token_ids > NO_TOKEN",
        "has_token = token_ids >= NO_TOKEN",
    ),
    Plant("old block table", BUILDER, "self._block_table[new.row] = 0", "pass"),
    Plant(
        "padding at position 0",
        DEVICE,
        "fields.positions[num_tokens:] = -1",
        "fields.positions[num_tokens:] = 0",
    ),
    Plant(
        "padding in row 0",
        DEVICE,
        "fields.token_rows[num_tokens:] = self._null_row",
        "fields.token_rows[num_tokens:] = 0",
    ),
    Plant("a lost step goes unnoticed", DEVICE, "if self._is_begun:", "if False:"),
    Plant(
        "padding in the turn of a step",
        DEVICE,
        "self._words.words[:, 0] = range(TURNS + 1)",
        "self._words.words[:TURNS, 0] = range(TURNS)",
    ),
    Plant(
        "a turn keeps what another plan left", DEVICE, "self._held[turn] is staged", "plan.repeats"
    ),
    # Tiers below the device.
    Plant("tier key without what was before", CHAIN, "sha256(parent + tokens", "sha256(tokens"),
    Plant("tier key without salt", CHAIN, " + salt.encode()", ""),
    Plant(
        "tier chain not cut",
        TREE,
        "upper.chain, node.chain = node.chain[:num_blocks], node.chain[num_blocks:]",
        "upper.chain = node.chain[:num_blocks]",
    ),
    Plant(
        "tier chain not shortened",
        TREE,
        "            del node.chain[num_kept:]",
        "            pass",
    ),
    Plant(
        "tier chain of others given to blocks",
        TREE,
        "node.chain = list(chain[len(found) :])",
        "node.chain = list(chain[: len(block_ids) - len(found)])",
    ),
    Plant(
        "tier chain of the first blocks published",
        PREFIXES,
        "running.keys[first:last]",
        "running.keys[: last - first]",
    ),
    Plant(
        "tier finds other tokens",
        HOST,
        'if tokens.startswith(b"".join(found)):',
        "if True:",
    ),
    Plant(
        "tier run of slots unpinned but once dropped",
        HOST,
        "if block.num_pins > 0 and not block.is_dropped:",
        "if block.num_pins > 0:",
    ),
    Plant(
        "tier found before it is stored",
        LOWER,
        "else parent, of_block)\n                if block is None:\n                    counters",
        "else parent, of_block)\n                if block is not None:\n                    "
        "block.is_ready = True\n                if block is None:\n                    counters",
    ),
    Plant(
        "tier slot not pinned while it is filled",
        HOST,
        "self._free[-1], num_pins=1)",
        "self._free[-1], num_pins=1, is_ready=False)\n        block.num_pins = 0",
    ),
    Plant(
        "tier slot not pinned while it is loaded",
        HOST,
        "            block.num_pins += 1\n            index.move_to_end(key)",
        "            pass",
    ),
    Plant(
        "tier store of a failed step found",
        LOWER,
        "self.host.drop(block)\n            self.host.unpin(block)\n        for load in",
        "block.is_ready = True\n            self.host.unpin(block)\n        for load in",
    ),
    Plant(
        "tier stores forgotten",
        LOWER,
        "        return stores, BlockCopies(slots, device_ids)",
        "        return BlockCopies(), BlockCopies(slots, device_ids)",
    ),
    Plant(
        "tier reset keeps host blocks",
        LOWER,
        "        self.host.clear()  # first: the thread asks whether a block was dropped",
        "        pass",
    ),
    Plant("tier reset keeps disk", LOWER, "            self.disk.clear()", "            pass"),
    Plant(
        "tier load published early",
        LOWER,
        "done = [load for load in self._loads if load.plan_number in plan_numbers]",
        "done = list(self._loads)",
    ),
    Plant(
        "tier load of a failed step published",
        CACHE,
        'tokens = loading.tokens if is_filled else b""',
        "tokens = loading.tokens",
    ),
    Plant(
        "tier loads not awaited",
        PLAN_MAKER,
        "            awaits_loads=self.awaits_loads,",
        "            awaits_loads=False,",
    ),
    Plant(
        "tier trusted loads kept",
        SCHEDULER,
        "            if trusts_loads:\n                self.reset",
        "            if False:\n                self.reset",
    ),
    Plant(
        "tier loads hold blocks that count as lost",
        SCHEDULER,
        "soon_free += self._prefixes.cache.num_loading_blocks",
        "pass",
    ),
    Plant(
        "tier repeated plan without transfers",
        PLAN_MAKER,
        "has_new_transfers:\n            return None",
        "has_new_transfers:\n            pass",
    ),
    Plant(
        "tier waiters not let go",
        PREFIXES,
        "for request_id in coming.request_ids:",
        "for request_id in coming.request_ids[:0]:",
    ),
    Plant(
        "tier joins once too often",
        PREFIXES,
        "            del self._coming_by_key[key]",
        "            pass",
    ),
    Plant("tier small hits loaded", LOWER, "num_tokens >= self._min_host_tokens", "True"),
    Plant(
        "tier steps wait for nothing",
        SCHEDULER,
        "if not len(rows) and not self._has_transfers():",
        "if not len(rows):",
    ),
    Plant("tier disk takes any bytes", DISK, "and crc32(out, crc32(found)) == record.crc", ""),
    Plant("tier disk takes any tokens", DISK, "and found == tokens", ""),
    Plant("tier disk takes any entry", DISK, "if crc32(fields) != crc:", "if False:"),
    Plant("tier disk takes any header", DISK, "if found != header:", "if not found:"),
    Plant("tier disk takes any file", DISK, "if not is_ours:", "if False:"),
    Plant(
        "tier disk grows",
        DISK,
        "        if self._free:\n            index = self._free.pop()",
        "        if True:\n            index = self._num_writes",
    ),
    Plant(
        "tier disk error raised",
        DISK,
        "                self._disable(error)\n                return False",
        "                raise",
    ),
    Plant(
        "tier clear and a write under way", LOWER, "lambda: not block.is_dropped", "lambda: True"
    ),
)


def find(plant: Plant) -> str | None:
    """How the plant was killed, or None if it survived."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        for name in ("pico_vllm", "tests"):
            shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(ROOT / "pyproject.toml", copy)
        with (copy / "tests" / "conftest.py").open("a", encoding="utf-8") as file:
            file.write(NO_SHRINKING)
        path = copy / plant.file
        text = path.read_text("utf-8")
        assert text.count(plant.old) == 1, plant
        path.write_text(text.replace(plant.old, plant.new), "utf-8")
        environment = os.environ | {"PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}
        for tests in RUNS:
            command = [sys.executable, "-m", "pytest", "-x", "-p", "no:cacheprovider", *tests]
            command += ["-m", "not slow and not gpu and not multigpu"]
            try:
                run = subprocess.run(
                    command, cwd=copy, env=environment, timeout=TIMEOUT_S, text=True,
                    capture_output=True,
                )  # fmt: skip
            except subprocess.TimeoutExpired:
                return "hangs"
            if run.returncode != 0:
                found = [line for line in run.stdout.splitlines() if line.startswith("FAILED")]
                return found[0].split(" - ")[0].split("/")[-1] if found else "does not start"
    return None


def main() -> None:
    chosen = [
        plant for plant in PLANTS if not sys.argv[1:] or any(w in plant.name for w in sys.argv[1:])
    ]
    survivors = []
    for plant in chosen:
        started = time.monotonic()
        killer = find(plant)
        if killer is None:
            survivors.append(plant.name)
        took = f"{time.monotonic() - started:4.0f} s"
        print(f"{'SURVIVED' if killer is None else 'killed  '} {took}  {plant.name}: {killer}")
        sys.stdout.flush()
    print(f"{len(chosen) - len(survivors)} of {len(chosen)} killed")
    if len(survivors) > MAX_SURVIVING * len(chosen):
        sys.exit(1)


if __name__ == "__main__":
    main()
