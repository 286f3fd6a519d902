from __future__ import annotations

import json

import pytest

from pico_vllm.config.engine import EngineConfig
from pico_vllm.config.model import ModelConfig
from pico_vllm.errors import ConfigError
from pico_vllm.models.hub import BUILTIN_CONFIGS

MODEL = ModelConfig.from_hf(json.loads(BUILTIN_CONFIGS["qwen3-0.6b"].read_text()))


def resolved(device: str, **settings: str) -> EngineConfig:
    config = EngineConfig(model="qwen3-0.6b", **settings)
    return config.resolve(MODEL, device=device, has_fast_bf16=True, num_threads=1)


@pytest.mark.parametrize(
    ("device", "kernels", "settled", "uses_triton", "cuda_graph", "overlap"),
    [
        ("cuda:0", "auto", "triton", True, "lazy", "on"),
        ("cuda:0", "attention", "attention", True, "lazy", "on"),
        ("cuda:0", "plain", "plain", False, "off", "off"),
        ("cpu", "auto", "plain", False, "off", "off"),
        ("cpu", "attention", "attention", True, "off", "on"),  # in Triton's interpreter
    ],
)
def test_kernels_settle_graphs_and_overlap(
    device: str, kernels: str, settled: str, uses_triton: bool, cuda_graph: str, overlap: str
) -> None:
    """Whatever has Triton's attention has graphs, on a GPU, and overlap."""
    config = resolved(device, kernels=kernels)
    assert (config.kernels, config.uses_triton) == (settled, uses_triton)
    assert (config.cuda_graph, config.overlap) == (cuda_graph, overlap)


def test_batch_invariant_needs_our_kernels() -> None:
    """It is refused where PyTorch multiplies, with the way out."""
    assert resolved("cuda:0", batch_invariant=True).batch_invariant
    for device, kernels in (("cpu", "auto"), ("cuda:0", "plain"), ("cuda:0", "attention")):
        with pytest.raises(
            ConfigError, match=r"batch_invariant needs kernels triton.*leave it out"
        ):
            resolved(device, kernels=kernels, batch_invariant=True)
    with pytest.raises(ConfigError, match="must be True or False, not 'on'"):
        resolved("cuda:0", batch_invariant="on")


def test_attention_needs_the_paged_cache() -> None:
    """The error names the value; other values are refused with those there are."""
    with pytest.raises(ConfigError, match="kernels attention needs kv paged, not contiguous"):
        resolved("cuda:0", kernels="attention", kv="contiguous")
    with pytest.raises(ConfigError, match="one of auto, triton, attention, plain, not 'cublas'"):
        resolved("cuda:0", kernels="cublas")


@pytest.mark.parametrize("path", ["", "a\0b", "half a \ud800", 5])
def test_a_disk_path_that_no_system_has_is_refused(path: object) -> None:
    """With its name, and before anything is opened."""
    with pytest.raises(ConfigError, match="kv_disk_path must name a folder"):
        EngineConfig(model="m", kv_disk_path=path)  # type: ignore[arg-type]
