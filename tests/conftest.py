"""Fixtures that tests of several rooms use. This folder is on the path for `tiny` and `smollm2`."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest
import torch

if TYPE_CHECKING:
    from tiny import TinyModel

# Without a GPU Triton's kernels run in its interpreter. Triton reads this when it is imported.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture(autouse=True)
def collector_as_it_was() -> Iterator[None]:
    """A command that loads a model exempts from collection what its process has by then."""
    thresholds = gc.get_threshold()
    yield
    gc.unfreeze()
    gc.set_threshold(*thresholds)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    """Random Qwen2-style model with a byte-level tokenizer: 300 known ids, 320 rows in the head."""
    import tiny

    model = tiny.random_model(tiny.hf_config("qwen2"), seed=7)
    oracle = tiny.Oracle(model)
    folder = tiny.save_model(tmp_path_factory.mktemp("tiny"), model)
    return tiny.TinyModel(folder, oracle, tiny.Canary(oracle))


@pytest.fixture(scope="module")
def llm(tiny_model: TinyModel) -> Iterator[Any]:
    """Fixture T: one engine a file."""
    import tiny

    from pico_vllm import LLM

    with LLM(str(tiny_model.folder), **tiny.FIXTURE_T) as engine:
        yield engine


@pytest.fixture(scope="module")
def small_llm(tiny_model: TinyModel) -> Iterator[Any]:
    """T-small: a pool of 128 tokens."""
    import tiny

    from pico_vllm import LLM

    with LLM(str(tiny_model.folder), **tiny.FIXTURE_T_SMALL) as engine:
        yield engine
