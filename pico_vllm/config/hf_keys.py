"""Reading config.json key by key: typed, bounded, and with no key left unread.

A key that this file has never heard of may change what the model computes, so it is refused rather
than skipped. `NEUTRAL` keys are accepted only with the value that changes nothing; `IGNORED` keys
never reach the arithmetic of a forward pass.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from pico_vllm.errors import ModelLoadError, show, show_name

# Bookkeeping, training, generation defaults, output switches: `save_pretrained` of transformers 4
# and 5 writes them, fine-tuning tools add a few, and none takes part in the forward pass.
_IGNORED_NAMES = """
    _attn_implementation _attn_implementation_autoset _attn_implementation_internal _commit_hash
    _experts_implementation _flash_attn_2_enabled _name_or_path architectures attention_dropout
    attn_implementation bad_words_ids begin_suppress_tokens chunk_size_feed_forward
    decoder_start_token_id diversity_penalty do_sample early_stopping embd_pdrop
    encoder_no_repeat_ngram_size exponential_decay_length_penalty finetuning_task
    forced_bos_token_id forced_eos_token_id gradient_checkpointing hidden_dropout id2label
    is_llama_config label2id length_penalty max_length max_new_tokens min_length
    neftune_noise_alpha no_repeat_ngram_size num_beam_groups num_beams num_labels
    num_return_sequences
    output_attentions output_hidden_states output_scores pad_token_id prefix problem_type
    pruned_heads remove_invalid_values repetition_penalty resid_pdrop return_dict
    return_dict_in_generate sep_token_id suppress_tokens task_specific_params temperature
    tf_legacy_loss tokenizer_class top_k top_p torchscript transformers.js_config
    transformers_version typical_p unk_token_id unsloth_fixed unsloth_version use_bfloat16
    use_cache
"""
IGNORED = frozenset(_IGNORED_NAMES.split())

# Keys that would change the computation, with the values that leave it alone.
NEUTRAL: dict[str, tuple[object, ...]] = {
    "activation": ("swiglu",),
    "add_cross_attention": (False,),
    "attn_logit_softcapping": (0, 0.0),
    "auto_map": (),
    "cross_attention_hidden_size": (),
    "custom_pipelines": (),
    "final_logit_softcapping": (0, 0.0),
    "hidden_act": ("silu", "swish"),
    "is_decoder": (False, True),
    "is_encoder_decoder": (False,),
    "logit_scale": (1, 1.0),
    "model_file": (),
    "partial_rotary_factor": (1, 1.0),
    "pretraining_tp": (0, 1),
    "quantization_config": (),
    "rope_interleaved": (False,),
    "tie_encoder_decoder": (False,),
    "use_mrope": (False,),
}

_NO_CODE = "custom code is not supported and never run; use a checkpoint in the plain layout"
WAY_OUT = {
    "auto_map": _NO_CODE,
    "custom_pipelines": _NO_CODE,
    "model_file": _NO_CODE,
    "quantization_config": "use the unquantised checkpoint, or a GGUF file of the same model",
}


class HfKeys:
    """A config.json object; every getter names the key, the value and the limit when it refuses."""

    def __init__(self, values: Mapping[str, object], *, where: str = "config.json") -> None:
        self.values = values
        self.where = where
        self.used: set[str] = set()

    def refuse(self, key: str, problem: str) -> ModelLoadError:
        name = show_name(key)
        return ModelLoadError(f"{self.where}: {name} {problem}", param=name)

    def raw(self, key: str) -> object:
        """The value, None where the key is absent or null."""
        self.used.add(key)
        return self.values.get(key)

    def has(self, key: str) -> bool:
        self.used.add(key)
        return key in self.values

    def integer(self, key: str, default: int | None = None, *, low: int = 1, high: int) -> int:
        value = self.raw(key)
        if value is None:
            if default is None:
                raise self.refuse(key, f"is missing: give an integer from {low} to {high}")
            return default
        if type(value) is not int or not low <= value <= high:
            raise self.refuse(key, f"is {show(value)}: must be an integer from {low} to {high}")
        return value

    def number(
        self, key: str, default: float | None = None, *, low: float, high: float = math.inf
    ) -> float:
        value = self.raw(key)
        limit = f"a finite number from {low} to {high}" if high < math.inf else f"finite, >= {low}"
        if value is None:
            if default is None:
                raise self.refuse(key, f"is missing: must be {limit}")
            return default
        # Integers are compared before conversion: float() of a huge one raises OverflowError.
        is_number = type(value) in (int, float)
        if not is_number or not low <= value <= min(high, 1e300):  # type: ignore[operator]
            raise self.refuse(key, f"is {show(value)}: must be {limit}")
        return float(value)  # type: ignore[arg-type]

    def flag(self, key: str, default: bool) -> bool:
        value = self.raw(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.refuse(key, f"is {show(value)}: must be true or false")
        return value

    def text(self, key: str) -> str | None:
        value = self.raw(key)
        if value is not None and not isinstance(value, str):
            raise self.refuse(key, f"is {show(value)}: must be a string")
        return value

    def table(self, key: str) -> Mapping[str, object] | None:
        value = self.raw(key)
        if value is None:
            return None
        if not isinstance(value, dict) or not all(isinstance(name, str) for name in value):
            raise self.refuse(key, f"is {show(value)}: must be an object")
        return value

    def refuse_leftovers(self) -> None:
        """Check that every key not read so far is known to change nothing."""
        for key, value in self.values.items():
            if key in self.used or key in IGNORED:
                continue
            # Null and empty values switch nothing on, whatever the key means.
            if value is None or (isinstance(value, (str, list, dict)) and not value):
                continue
            if key in NEUTRAL:
                # bool is an int in Python: the type is compared too, so that true is not 1.
                if any(type(value) is type(ok) and value == ok for ok in NEUTRAL[key]):
                    continue
                allowed = ", ".join(repr(ok) for ok in NEUTRAL[key]) or "absent"
                out = WAY_OUT.get(key, f"only {allowed} is supported")
                raise self.refuse(key, f"is {show(value)}: {out}")
            raise self.refuse(
                key,
                f"is {show(value)}: this key is not known here and could change what the model "
                "computes. Remove it from config.json if it does not",
            )
