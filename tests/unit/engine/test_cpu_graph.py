"""Decode steps as graphs, where attention goes over several tiles."""

from __future__ import annotations

from typing import Any

import pytest
from tiny import greedy, random_prompts

from pico_vllm import LLM
from pico_vllm.cache import kv_pool
from pico_vllm.kernels.cpu import paged_decode


def test_graphs_of_long_requests_change_nothing(
    tiny_model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests cut into pieces, in several tiles and whole blocks, give the tokens of the oracle,
    as graphs and op by op."""
    monkeypatch.setattr(kv_pool, "tile_tokens", lambda *sizes: 256)
    monkeypatch.setattr(paged_decode, "BLOCKWISE_TOKENS", 48)
    prompts, params = random_prompts([140, 150], seed=21), greedy(60)
    wanted = [tiny_model.oracle.greedy(prompt, 60) for prompt in prompts]
    settings: dict[str, Any] = {"dtype": "float32", "block_size": 8, "num_threads": 1}
    for cpu_graph in ("on", "off"):
        with LLM(str(tiny_model.folder), cpu_graph=cpu_graph, **settings) as llm:
            outputs = llm.generate(prompts, params)
            assert [output.outputs[0].token_ids for output in outputs] == wanted
            alone = llm.generate(prompts[0], params)
            assert alone[0].outputs[0].token_ids == wanted[0]
            if cpu_graph == "on":
                shapes = [shape for _, shape in llm.engine._runner._graphs._graphs]
                assert any(num_pieces > 1 for num_pieces, *_ in shapes)
