"""llama.cpp beside ours, through its Python binding, on the same GGUF file.

It answers one request at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any

from pico_vllm.config.engine import EngineConfig
from pico_vllm.errors import ConfigError
from pico_vllm.models.hub import resolve_model


class LlamaCppEngine:
    host_clock = None

    def __init__(self, config: EngineConfig, max_total_tokens: int) -> None:
        try:
            import llama_cpp
        except ImportError:
            raise ConfigError(
                "--compare llama-cpp needs its binding; pip install llama-cpp-python (it compiles)",
                param="compare",
            ) from None
        files = resolve_model(config.model)
        if files.kind != "gguf":
            raise ConfigError(f"llama.cpp reads GGUF files, not {files.path}", param="compare")
        self.name = f"llama.cpp (binding {llama_cpp.__version__})"
        assert config.num_threads is not None
        _leave_weights_unpacked(llama_cpp.llama_cpp)
        self._model = llama_cpp.Llama(
            str(files.path),
            n_ctx=max_total_tokens + 8,
            n_batch=512,
            n_threads=config.num_threads,
            n_threads_batch=config.num_threads,
            verbose=False,
        )

    def generate(self, prompts: Sequence[list[int]], num_output_tokens: Sequence[int]) -> None:
        for prompt, count in zip(prompts, num_output_tokens, strict=True):
            self._model.reset()
            tokens = self._model.generate(prompt, temp=0.0, repeat_penalty=1.0)
            for _ in range(count):
                next(tokens)
            tokens.close()


def _leave_weights_unpacked(binding: ModuleType) -> None:
    """Repacking for AMX ends in an illegal instruction; the Llama class has no setting for it."""
    make_params = binding.llama_model_default_params

    def params() -> Any:
        made = make_params()
        made.use_extra_bufts = False
        return made

    binding.llama_model_default_params = params
