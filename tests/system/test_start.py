"""A start that cannot work is refused before it does harm, with numbers and a way out."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import TinyModel

from pico_vllm import LLM
from pico_vllm.errors import ConfigError, ModelLoadError


def test_a_model_larger_than_memory_is_refused_before_it_is_loaded() -> None:
    """The message has what is needed, what is free, and what would help."""
    with pytest.raises(
        ConfigError, match=r"weights in fp32 take 29\.9\d GiB .* GiB are free on cpu"
    ):
        # 8 billion parameters in fp32: more than the machines that run these tests have.
        LLM("llama3.1-8b", load_format="dummy", dtype="float32", device="cpu")


@pytest.mark.parametrize(
    ("settings", "param"),
    [
        ({"num_kv_blocks": 100_000_000}, "num_kv_blocks"),
        ({"num_threads": 100_000}, "num_threads"),
        ({"max_model_len": 1}, "max_model_len"),
        ({"num_kv_blocks": 1, "block_size": 1}, "num_kv_blocks"),
        ({"dtype": ["x"]}, "dtype"),
        ({"kv": "contiguous", "num_kv_blocks": 64}, "num_kv_blocks"),
        ({"kv": "none", "num_kv_blocks": 64}, "num_kv_blocks"),
    ],
)
def test_settings_that_no_machine_can_serve_are_refused(
    settings: dict[str, object], param: str
) -> None:
    """Each names its own parameter."""
    with pytest.raises(ConfigError) as caught:
        LLM("smollm2-135m", **settings)  # type: ignore[arg-type]
    assert caught.value.param == param


def test_the_table_of_angles_is_as_long_as_the_window(
    tiny_model: TinyModel, caplog: pytest.LogCaptureFixture
) -> None:
    """A pool that holds less than the window shortens it before anything of its length is made,
    and says so once."""
    with LLM(str(tiny_model.folder), device="cpu", num_kv_blocks=5, block_size=16) as llm:
        assert llm.engine.max_model_len == llm.config.max_model_len == 80
        assert len(llm.engine._runner._model.rope.cos_PD) == 80
    assert sum("the window shrinks from 256" in line for line in caplog.messages) == 1


def test_weights_that_are_no_numbers_are_refused(tmp_path: Path, tiny_model: TinyModel) -> None:
    """A checkpoint full of NaN does not become an engine that fails at every answer."""
    folder = tmp_path / "nan"
    shutil.copytree(tiny_model.folder, folder)
    tensors = load_file(folder / "model.safetensors")
    broken = {name: torch.full_like(tensor, torch.nan) for name, tensor in tensors.items()}
    save_file(broken, folder / "model.safetensors")
    with pytest.raises(ModelLoadError, match="NaN or infinity"):
        LLM(str(folder), max_model_len=64)


def test_a_start_tells_its_phases(tiny_model: TinyModel) -> None:
    """On a CPU weights are all there is to wait for; they are counted to the last one."""
    seen: list[tuple[str, int, int]] = []
    with LLM(str(tiny_model.folder), max_model_len=64, on_progress=lambda *step: seen.append(step)):
        pass
    num_tensors = len(load_file(tiny_model.folder / "model.safetensors"))
    assert {phase for phase, _, _ in seen} == {"loading weights"}
    assert [done for _, done, _ in seen] == sorted({done for _, done, _ in seen})
    assert seen[-1][1:] == (num_tensors, num_tensors)
