"""Read the tokenizer files of a model directory: data only, never code."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import tokenizers

from pico_vllm.errors import ModelLoadError
from pico_vllm.tokenizer.tokenizer_parts import TokenizerParts, call_backend


def read_directory(directory: Path) -> TokenizerParts:
    """tokenizer.json, tokenizer_config.json and chat_template.jinja; the last two may be missing.

    Raises:
        ModelLoadError: a file missing or damaged, custom code asked for, or a named token that
            does not exist.
    """
    tokenizer_path = directory / "tokenizer.json"
    if not tokenizer_path.is_file():
        raise ModelLoadError(
            f"{directory} has no tokenizer.json: copy the one of the model's repository there, "
            "or use a GGUF file, which carries its tokenizer",
            param="tokenizer",
        )
    config = _read_config(directory / "tokenizer_config.json")
    backend = call_backend(
        str(tokenizer_path), lambda: tokenizers.Tokenizer.from_file(str(tokenizer_path))
    )
    # Left in some files by their training scripts; a prompt is neither cut nor padded here.
    backend.no_truncation()
    backend.no_padding()

    special_tokens = {
        name: text
        for name, value in config.items()
        if name.endswith("_token") and (text := _token_text(value)) is not None
    }
    known = {name: text for name, text in special_tokens.items() if _has(backend, text)}
    call_backend(str(tokenizer_path), lambda: _mark_special(backend, set(known.values())))
    bos_id, eos_id = (
        _named_id(directory, backend, special_tokens, name) for name in ("bos_token", "eos_token")
    )
    return TokenizerParts(
        backend=backend,
        bos_token_id=bos_id,
        eos_token_ids=() if eos_id is None else (eos_id,),
        chat_template=_read_template(directory, config),
        special_tokens=special_tokens,
    )


def _read_config(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        config = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        reason = "nested too deep" if isinstance(error, RecursionError) else str(error)
        raise ModelLoadError(f"{path} is not valid JSON: {reason}", param="tokenizer") from None
    if not isinstance(config, dict):
        raise ModelLoadError(f"{path} must hold a JSON object", param="tokenizer")
    if config.get("auto_map"):
        raise ModelLoadError(
            f"{path} names Python classes in auto_map: custom code not supported; "
            "remove auto_map if tokenizer.json alone describes the tokenizer",
            param="tokenizer",
            code="custom_code_not_supported",
        )
    return config


def _token_text(value: object) -> str | None:
    """A token is written as its text, or as an object with its text and how it matches."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) and value else None


def _has(backend: tokenizers.Tokenizer, text: str) -> bool:
    return _is_unicode(text) and backend.token_to_id(text) is not None


def _is_unicode(text: str) -> bool:
    """JSON may spell half a surrogate pair, which no tokenizer file can mean."""
    return not any("\ud800" <= char <= "\udfff" for char in text)


def _mark_special(backend: tokenizers.Tokenizer, texts: set[str]) -> None:
    """What tokenizer_config.json names is special even where tokenizer.json does not say so."""
    marked = {token.content for token in backend.get_added_tokens_decoder().values()}
    backend.add_special_tokens(
        [
            tokenizers.AddedToken(text, special=True, normalized=False)
            for text in sorted(texts - marked)
        ]
    )


def _named_id(
    directory: Path, backend: tokenizers.Tokenizer, special_tokens: dict[str, str], name: str
) -> int | None:
    if name not in special_tokens:
        return None
    text = special_tokens[name]
    if not _has(backend, text):
        raise ModelLoadError(
            f"{directory}: tokenizer_config.json gives {name} as {text!r}, "
            "which tokenizer.json does not have; the two files must come from the same model",
            param="tokenizer",
        )
    return backend.token_to_id(text)


def _read_template(directory: Path, config: dict[str, Any]) -> str | None:
    path = directory / "chat_template.jinja"
    if path.is_file():
        try:
            return path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            raise ModelLoadError(f"{path} is not UTF-8 text", param="tokenizer") from None
    template = config.get("chat_template")
    if isinstance(template, list):
        named = {
            entry["name"]: entry.get("template")
            for entry in template
            if isinstance(entry, dict) and isinstance(entry.get("name"), str)
        }
        template = named.get("default")
    if template is not None and not isinstance(template, str):
        raise ModelLoadError(
            f"{directory}: chat_template in tokenizer_config.json must be a string, "
            "or a list of objects with name and template",
            param="tokenizer",
        )
    return template
