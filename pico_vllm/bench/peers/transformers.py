"""Hugging Face transformers beside ours: the same weights, read from the same file."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from pico_vllm.config.engine import EngineConfig
from pico_vllm.engine.loading import open_model
from pico_vllm.errors import ConfigError
from pico_vllm.models.gguf import GGUFSource
from pico_vllm.models.hub import read_hf_config, resolve_model


class TransformersEngine:
    host_clock = None

    def __init__(self, config: EngineConfig, dtype: torch.dtype) -> None:
        try:
            import transformers
        except ImportError:
            raise ConfigError(
                "--compare transformers needs transformers; pip install 'pico-vllm[compare]'",
                param="compare",
            ) from None
        self.name = f"transformers {transformers.__version__} {str(dtype).removeprefix('torch.')}"
        files = resolve_model(config.model)
        model_config, source, _ = open_model(files, config)
        if isinstance(source, GGUFSource):
            hf_config = source.hf_config()
        else:
            hf_config = read_hf_config(files.path)[0]
        model_class = getattr(transformers, model_config.architecture)
        built = model_class.config_class(**hf_config)
        model = transformers.AutoModelForCausalLM.from_config(built, dtype=dtype)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                source.read_into(name, parameter)
        source.close()
        self._model = model.to(config.device).eval()
        # Nothing may end a request early, and greedy search reads no other setting.
        self._model.generation_config = transformers.GenerationConfig(
            do_sample=False, eos_token_id=None, pad_token_id=0
        )

    @torch.inference_mode()
    def generate(self, prompts: Sequence[list[int]], num_output_tokens: Sequence[int]) -> None:
        assert len({len(prompt) for prompt in prompts}) == 1, (
            "transformers takes equal lengths here"
        )
        ids = torch.tensor(prompts, device=self._model.device)
        count = num_output_tokens[0]
        out = self._model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, min_new_tokens=count
        )
        assert out.shape[1] == ids.shape[1] + count, out.shape
