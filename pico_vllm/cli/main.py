"""pico-vllm: the command line. What an error looks like is decided here, for all commands.

Commands import what they need when they run: asking for help must not wait for torch.
"""

from __future__ import annotations

import errno
import logging
import os
import sys
import traceback
from typing import Annotated

import typer

from pico_vllm import __version__
from pico_vllm.cli import bench
from pico_vllm.cli.cache import cache
from pico_vllm.cli.chat import chat
from pico_vllm.cli.generate import generate
from pico_vllm.cli.info import info
from pico_vllm.cli.models import models, pull
from pico_vllm.cli.profile import profile
from pico_vllm.cli.terminal import drop, one_line, print_error
from pico_vllm.errors import PicoError

app = typer.Typer(
    name="pico-vllm",
    help="Run language models on this machine.",
    add_completion=False,
    pretty_exceptions_enable=False,
)
for command in (generate, chat, info, pull, models, cache, profile):
    app.command()(command)
app.add_typer(bench.app, name="bench")

# typer exports no name for the base of its usage errors, and its home differs between versions.
_UsageError: type[Exception] = typer.BadParameter.__mro__[1]

_CANNOT_WRITE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def _print_version(is_asked: bool) -> None:
    if is_asked:
        print(f"pico-vllm {__version__}")
        raise typer.Exit


@app.callback()
def _global_options(
    is_debug: Annotated[
        bool,
        typer.Option(
            "--debug", help="Log more, and show where an error comes from; also after the command."
        ),
    ] = False,
    is_version: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the version.", is_eager=True, callback=_print_version
        ),
    ] = False,
) -> None:
    # Nothing to do: --debug is read in `run`, for it counts even where parsing fails.
    pass


def main(args: list[str] | None = None) -> None:
    """Run one command and exit: 0 done, 1 an error, 2 wrong usage, 130 interrupted."""
    sys.exit(run(sys.argv[1:] if args is None else args))


def run(args: list[str]) -> int:
    is_debug, args = _take_debug(args)
    _open_what_is_closed()
    _set_up_output(is_debug)
    try:
        code = app(args or ["--help"], prog_name="pico-vllm", standalone_mode=False)
        sys.stdout.flush()
        return code or 0
    except (KeyboardInterrupt, typer.Abort):
        return 130
    except BrokenPipeError:
        # Whoever read our output left.
        drop(sys.stdout)
        return 1
    except Exception as error:
        if is_debug:
            traceback.print_exc()
        return _report(error)
    finally:
        try:
            sys.stderr.flush()
        except OSError:  # what it would have said is no part of the answer
            drop(sys.stderr)


def _report(error: Exception) -> int:
    if isinstance(error, PicoError):
        print_error(error.message)
        return 1
    if isinstance(error, OSError) and error.errno in _CANNOT_WRITE and error.filename is None:
        # Whoever writes to a file says which.
        drop(sys.stdout)
        print_error(f"stdout cannot be written to: {error.strerror}; send it elsewhere")
        return 1
    if isinstance(error, _UsageError):
        context = getattr(error, "ctx", None)
        path = "pico-vllm" if context is None else context.command_path
        message = error.format_message().rstrip(".")  # type: ignore[attr-defined]
        if message:  # without arguments typer has shown the help, which says more
            print_error(f"{message}; see {path} --help")
        return 2
    print_error(f"{type(error).__name__}: {error}; run again with --debug to see where")
    return 1


def _take_debug(args: list[str]) -> tuple[bool, list[str]]:
    """--debug may stand anywhere before a `--`."""
    end = args.index("--") if "--" in args else len(args)
    options = [arg for arg in args[:end] if arg != "--debug"]
    return len(options) < end, options + args[end:]


def _open_what_is_closed() -> None:
    """Whoever starts a command may have closed its streams, as some daemons do: nothing comes in
    there, and what goes out is lost."""
    if sys.stdin is None:
        sys.stdin = open(os.devnull, encoding="utf-8")  # noqa: SIM115, to the end of the process
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115


def _set_up_output(is_debug: bool) -> None:
    # A terminal that cannot show a character gets its code instead of an error.
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    if not sys.stderr.isatty():
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    if not is_debug:
        # The error that ends a download says what its retries said.
        os.environ.setdefault("HF_HUB_VERBOSITY", "error")
    handler = logging.StreamHandler()
    if is_debug:
        handler.setFormatter(logging.Formatter("%(levelname)s %(message)s"))
    else:
        handler.setFormatter(_OneLine())
        # Whoever asked is told of the failure too: one line is enough.
        handler.addFilter(lambda record: not record.exc_info)
    logging.basicConfig(level=logging.INFO if is_debug else logging.WARNING, handlers=[handler])


class _OneLine(logging.Formatter):
    """Level and message, as an error looks."""

    def format(self, record: logging.LogRecord) -> str:
        return f"{record.levelname.lower()}: {one_line(record.getMessage())}"


if __name__ == "__main__":
    main()
