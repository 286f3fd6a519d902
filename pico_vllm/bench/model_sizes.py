"""The configuration of a model by its name, without its weights."""

from __future__ import annotations

from pico_vllm.config.model import ModelConfig
from pico_vllm.models.gguf import GGUFSource
from pico_vllm.models.hub import read_hf_config, resolve_model


def read_model_config(name: str) -> ModelConfig:
    """Raises ModelLoadError as loading the model would."""
    files = resolve_model(name)
    if files.kind != "gguf":
        return ModelConfig.from_hf(*read_hf_config(files.path))
    source = GGUFSource(files.path)
    try:
        return ModelConfig.from_hf(source.hf_config())
    finally:
        source.close()
