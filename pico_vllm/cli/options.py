"""Options of the command line, made from the fields of EngineConfig and SamplingParams.

A field with a docstring is an option of every command that takes its class; the docstring is the
help. What is named here differs from its field on purpose, and only in the ways shown.
"""

from __future__ import annotations

import ast
import functools
import inspect
import itertools
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import MISSING, fields, is_dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import typer

from pico_vllm.config.engine import EngineConfig
from pico_vllm.errors import ConfigError, PicoError
from pico_vllm.sampling_params import SamplingParams

DEFAULT_MODEL = "smollm2-135m"
DEFAULT_MAX_TOKENS = 512

_PANELS = {EngineConfig: "Engine", SamplingParams: "Sampling"}
# Who types a prompt wants a varied answer of readable length; a library caller says what it wants.
_DEFAULTS: dict[str, Any] = {
    "model": DEFAULT_MODEL,
    "max_tokens": None,
    "temperature": 0.7,
    "top_p": 0.95,
}
_FLAGS = {
    (EngineConfig, "num_threads"): "--threads",
    (EngineConfig, "enable_prefix_caching"): "--prefix-cache",
    (SamplingParams, "seed"): "--sample-seed",
}
_OVERRIDES: dict[str, dict[str, Any]] = {
    "max_tokens": {
        "help": "Most tokens to generate.",
        "show_default": f"{DEFAULT_MAX_TOKENS}, or what the window leaves",
    },
}
# Where an error's way out is a value of Python's.
_REWORDED = {
    "enable_prefix_caching": "--prefix-cache",
    "or None to fill the window": f"leave --max-tokens out for {DEFAULT_MAX_TOKENS}, or for what "
    "the window leaves",
}
_NO_OPTION = {
    "logit_bias",  # a mapping
    "prompt_logprobs",  # shown by no command
    "priority",  # a command has one request
    "cache_salt",
    "detokenize",  # every command shows text,
    "skip_special_tokens",  # and text for people
}


def takes_config(command: Callable[..., None]) -> Callable[..., None]:
    """Let a command take an EngineConfig or SamplingParams: one option for each of its fields.

    They are made, and so checked, before the command runs.
    """
    parameters: list[inspect.Parameter] = []
    owners: dict[str, type] = {}
    for parameter in inspect.signature(command, eval_str=True).parameters.values():
        owner = parameter.annotation
        if isinstance(owner, type) and is_dataclass(owner):
            owners[parameter.name] = owner
            parameters += _field_parameters(parameter.name, owner)
        else:
            parameters.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY))

    @functools.wraps(command)
    def run(**values: Any) -> None:
        for name, owner in owners.items():
            prefix = f"{name}_"
            given = {key: values.pop(key) for key in list(values) if key.startswith(prefix)}
            settings = {key.removeprefix(prefix): value for key, value in given.items()}
            try:
                values[name] = owner(**settings)
            except PicoError as error:
                message = _for_command_line(error.message)
                raise type(error)(message, param=error.param, code=error.code) from error
        command(**values)

    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


def _for_command_line(message: str) -> str:
    for words, reworded in _REWORDED.items():
        message = message.replace(words, reworded)
    return message


def field_option(owner: type, name: str, *flags: str) -> Any:
    """The option of one field, for a command that takes single fields."""
    flag = _FLAGS.get((owner, name), f"--{name.replace('_', '-')}")
    settings: dict[str, Any] = {
        # What nobody types is left out on the command line.
        "help": field_docs(owner).get(name, "").replace("None ", "unset "),
        "rich_help_panel": _PANELS[owner],
    }
    return typer.Option(*(flags or (flag,)), **(settings | _OVERRIDES.get(name, {})))


@functools.cache
def field_docs(owner: type) -> dict[str, str]:
    """The docstring under each field. Python does not keep them, so the source is read."""
    body = ast.parse(inspect.getsource(owner)).body[0].body  # type: ignore[attr-defined]
    return {
        field.target.id: " ".join(doc.value.value.split())
        for field, doc in itertools.pairwise(body)
        if isinstance(field, ast.AnnAssign)
        and isinstance(field.target, ast.Name)
        and isinstance(doc, ast.Expr)
        and isinstance(doc.value, ast.Constant)
        and isinstance(doc.value.value, str)
    }


def _field_parameters(prefix: str, owner: type) -> Iterator[inspect.Parameter]:
    hints = get_type_hints(owner)
    for field in fields(owner):
        if field.init and field.name not in _NO_OPTION:
            yield inspect.Parameter(
                f"{prefix}_{field.name}",
                inspect.Parameter.KEYWORD_ONLY,
                default=_default(owner, field.name),
                annotation=Annotated[
                    _option_type(hints[field.name]), field_option(owner, field.name)
                ],
            )


def _default(owner: type, name: str) -> Any:
    if name in _DEFAULTS:
        return _DEFAULTS[name]
    default = next(field.default for field in fields(owner) if field.name == name)
    assert default is not MISSING, f"{owner.__name__}.{name} needs a default for its option"
    return default


def _option_type(hint: Any) -> Any:
    """The type that typer parses: choices stay text, as the config refuses wrong ones itself."""
    if get_origin(hint) is Literal:
        return str
    if get_origin(hint) not in (types.UnionType, Union):
        return hint
    members = [member for member in get_args(hint) if member is not types.NoneType]
    for member in members:
        if get_origin(member) is Sequence:
            return list[get_args(member)[0]] | None  # type: ignore[misc]
    return members[0] | None


def integers(option: str, text: str) -> list[int]:
    """Whole numbers from 1 up with commas between. Raises ConfigError for anything else."""
    numbers = [each.strip() for each in text.split(",")]
    if not all(each.isdecimal() and 0 < int(each) < 1 << 31 for each in numbers):
        raise ConfigError(
            f"--{option} {text!r} must be whole numbers from 1 to {(1 << 31) - 1}, with commas "
            "between",
            param=option,
        )
    return [int(each) for each in numbers]


def names(option: str, text: str | None, known: Sequence[str]) -> list[str]:
    """Some of the names that there are, with commas between; all without a text. Raises ConfigError
    for others."""
    found = list(known) if text is None else [each.strip() for each in text.split(",")]
    unknown = [each for each in found if each not in known]
    if unknown:
        raise ConfigError(
            f"--{option} names {', '.join(unknown)}; there are {', '.join(known)}", param=option
        )
    return found
