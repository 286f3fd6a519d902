"""The other end of `chat_template.ChatTemplate`: renders untrusted templates and may be killed.

Run as a script, never imported by the engine: stdlib and jinja2 only, so that it starts in a tenth
of a second.

A message each way is one JSON line and, where that line says `bytes`, so many bytes after it. First
`{source, time_limit_s, output_limit_bytes, memory_limit_bytes}` comes in and `{ready}` goes out.
Then each `{bytes}` with JSON variables is answered by `{bytes}` with the text, or by
`{error, message}`. End of input ends the process.
"""

from __future__ import annotations

import json
import resource
import signal
import sys
from contextlib import suppress
from datetime import datetime
from typing import Any, BinaryIO

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.runtime
import jinja2.sandbox
import jinja2.utils

MESSAGE_LIMIT_CHARS = 1000


class RefusedByTemplateError(jinja2.TemplateError):
    """The template called raise_exception: its own sentence goes to the user."""


class OutputTooLongError(Exception):
    pass


class Sandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
    def unsafe_undefined(self, obj: Any, attribute: str) -> jinja2.Undefined:
        """Refuse at once: jinja's own would print a forbidden attribute as an empty string."""
        raise jinja2.exceptions.SecurityError(attribute)


class Generation(jinja2.ext.Extension):
    """`{% generation %}` marks the assistant's words for training; here it opens a scope."""

    tags = {"generation"}  # noqa: RUF012  jinja's own spelling of the field

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body).set_lineno(line)


class PlainNamespace(jinja2.utils.Namespace):
    """jinja's namespace without names that could reach Python's insides."""

    def __setitem__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            raise jinja2.exceptions.SecurityError(name)
        super().__setitem__(name, value)


def raise_exception(message: object) -> None:
    raise RefusedByTemplateError(str(message))


def strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def make_dict(*pairs: Any, **values: Any) -> dict[Any, Any]:
    """`dict(...)` as a plain function, without the class's attributes."""
    return dict(*pairs, **values)


def tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Unlike jinja's own filter, escapes nothing for HTML: models were trained on plain JSON."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def make_environment() -> Sandbox:
    """The dialect that chat templates are written in; `range` is capped by jinja's sandbox."""
    environment = Sandbox(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[Generation, jinja2.ext.loopcontrols],
    )
    environment.filters["tojson"] = tojson
    environment.globals.update(
        raise_exception=raise_exception,
        strftime_now=strftime_now,
        dict=make_dict,
        namespace=PlainNamespace,
    )
    return environment


def render(template: jinja2.Template, variables: dict[str, Any], limit_bytes: int) -> bytes:
    pieces: list[str] = []
    num_chars = 0
    for piece in template.generate(variables):
        num_chars += len(piece)
        if num_chars > limit_bytes:
            raise OutputTooLongError
        pieces.append(piece)
    text = "".join(pieces).encode()
    if len(text) > limit_bytes:
        raise OutputTooLongError
    return text


def describe(error: Exception) -> dict[str, str]:
    """Which sentence `chat_template.py` should use, and the template's own words if they help."""
    match error:
        case RefusedByTemplateError():
            return {"error": "refused", "message": str(error)}
        case jinja2.TemplateSyntaxError():
            return {"error": "syntax", "message": f"line {error.lineno}: {error.message}"}
        case jinja2.exceptions.SecurityError():
            return {"error": "unsafe", "message": ""}
        case jinja2.UndefinedError():
            return {"error": "undefined", "message": str(error)}
        case OutputTooLongError():
            return {"error": "output", "message": ""}
        case MemoryError():
            return {"error": "memory", "message": ""}
        case OverflowError():
            return {"error": "range", "message": ""}
        case RecursionError():
            return {"error": "recursion", "message": ""}
        case _:
            return {"error": "failed", "message": ""}


def limit_process(memory_limit_bytes: int) -> None:
    """Only what rendering needs: no file is written, no process started, no core left behind.

    Second lines behind the sandbox, so a platform without one of them goes on without it.
    """
    for name, limit in (
        ("RLIMIT_AS", memory_limit_bytes),
        ("RLIMIT_FSIZE", 0),
        ("RLIMIT_NPROC", 0),
        ("RLIMIT_CORE", 0),
    ):
        with suppress(AttributeError, ValueError, OSError):
            resource.setrlimit(getattr(resource, name), (limit, limit))


def serve(requests: BinaryIO, replies: BinaryIO) -> None:
    setup = json.loads(requests.readline())
    environment = make_environment()
    template: jinja2.Template | None = None
    limit_process(setup["memory_limit_bytes"])
    send(replies, {"ready": True})

    while line := requests.readline():
        # The default action of SIGALRM ends the process wherever it is, also inside one long C
        # call, and also when the parent is gone.
        signal.setitimer(signal.ITIMER_REAL, setup["time_limit_s"])
        variables = json.loads(requests.read(json.loads(line)["bytes"]))
        try:
            # Here and not at start: compiling folds constants, so it can be as hostile as
            # rendering.
            template = template or environment.from_string(setup["source"])
            text = render(template, variables, setup["output_limit_bytes"])
        except Exception as error:
            answer = describe(error)
            send(replies, answer | {"message": answer["message"][:MESSAGE_LIMIT_CHARS]})
            if isinstance(error, MemoryError):
                return  # what is left of the heap is not worth trusting
        else:
            send(replies, {"bytes": len(text)}, text)
        signal.setitimer(signal.ITIMER_REAL, 0)


def send(replies: BinaryIO, line: dict[str, Any], body: bytes = b"") -> None:
    replies.write(json.dumps(line).encode() + b"\n" + body)
    replies.flush()


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    with suppress(BrokenPipeError):
        serve(sys.stdin.buffer, sys.stdout.buffer)


if __name__ == "__main__":
    main()
