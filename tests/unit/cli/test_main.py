from __future__ import annotations

import os
import subprocess
import sys

import pytest
from cli_result import RunCli

from pico_vllm import __version__


def test_help_and_wrong_arguments_do_without_torch() -> None:
    """Help, the version and refused options come before torch and numpy are imported."""
    script = (
        "import sys\n"
        "from pico_vllm.cli.main import run\n"
        "codes = [run(args.split()) for args in (\n"
        "    '--help', 'generate --help', 'chat --help', 'info --help', '--version',\n"
        "    'generate --kv lru hi', 'generate --top-p 7 hi', 'generate --nonsense')]\n"
        "assert codes == [0, 0, 0, 0, 0, 1, 1, 2], codes\n"
        "assert not {'torch', 'numpy', 'huggingface_hub'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, timeout=30)


def test_version(run_cli: RunCli) -> None:
    """--version prints name and version."""
    assert run_cli("--version") == (0, f"pico-vllm {__version__}\n", "")


def test_no_arguments_show_the_help(run_cli: RunCli) -> None:
    """Without arguments the commands are listed."""
    code, out, _ = run_cli()
    assert code == 0
    assert all(name in out for name in ("generate", "chat", "info", "pull", "models", "bench"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["generate", "--zz"], "No such option: --zz; see pico-vllm generate --help"),
        (["nonsense"], "No such command 'nonsense'; see pico-vllm --help"),
        (["info"], "Missing argument"),
        (["generate", "--top-k", "some", "hi"], "Invalid value for '--top-k'"),
    ],
)
def test_wrong_usage_is_one_line_and_exit_2(
    run_cli: RunCli, arguments: list[str], message: str
) -> None:
    """What cannot be parsed is said in one line that names the help."""
    code, out, err = run_cli(*arguments)
    assert (code, out) == (2, "")
    assert err.startswith("error: ") and message in err and err.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--temperature", "3"], "temperature must be a number in [0, 2], not 3.0"),
        (["--temperature", "nan"], "temperature must be a number in [0, 2], not nan"),
        (["--kv", "lru"], "kv must be one of paged, contiguous, none, not 'lru'"),
        (
            ["--max-tokens", "0"],
            "max_tokens must be a whole number from 1 to 2147483647, not 0; leave --max-tokens out "
            "for 512, or for what the window leaves",
        ),
        (["--device", "tpu"], "device 'tpu' is not known"),
        (["--max-num-seqs", "0"], "max_num_seqs must be a whole number from 1"),
        (["--stop", ""], "each stop string has 1 to 256 characters"),
        (["--sample-seed", str(2**63)], "seed must be a whole number"),
    ],
)
def test_refused_settings_are_one_line_and_exit_1(
    run_cli: RunCli, arguments: list[str], message: str
) -> None:
    """The classes behind the options check them; nothing is loaded before."""
    code, out, err = run_cli("generate", *arguments, "hi")
    assert (code, out) == (1, "")
    assert err.startswith(f"error: {message}") and err.count("\n") == 1


def test_an_error_cannot_drive_the_terminal(run_cli: RunCli) -> None:
    """Control characters and newlines in an error become text of one line."""
    code, _, err = run_cli("generate", "--kv", "\x1b[2J\nlru", "hi")
    assert code == 1
    assert "\x1b" not in err and err.count("\n") == 1


@pytest.mark.parametrize("place", ["before", "after"])
def test_debug_shows_the_traceback(run_cli: RunCli, place: str) -> None:
    """--debug counts before and after the command."""
    arguments = ["generate", "--kv", "lru", "hi"]
    code, _, err = run_cli(
        *(["--debug", *arguments] if place == "before" else [*arguments, "--debug"])
    )
    assert code == 1
    assert err.startswith("Traceback") and "ConfigError" in err
    assert err.splitlines()[-1].startswith("error: kv must be")


def test_debug_after_two_dashes_is_part_of_the_prompt(run_cli: RunCli) -> None:
    """What follows -- is no option."""
    _, _, err = run_cli("generate", "--kv", "lru", "--", "--debug")
    assert "Traceback" not in err


def test_unexpected_errors_are_one_line_too(
    run_cli: RunCli, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bug of ours shows its kind and how to see more."""
    from pico_vllm.cli import main

    monkeypatch.setattr(main, "app", lambda *args, **kwargs: 1 / 0)
    code, _, err = run_cli("models")
    assert code == 1
    assert err == (
        "error: ZeroDivisionError: division by zero; run again with --debug to see where\n"
    )


def test_interrupt_exits_with_130(run_cli: RunCli, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C ends a command as the shell expects it."""

    class Interrupting:
        def __enter__(self) -> None:
            raise KeyboardInterrupt

        def __exit__(self, *exc_info: object) -> None:
            pass

    code, out, err = run_cli("generate", "hi", llm=Interrupting())
    assert (code, out, err) == (130, "", "")


def test_a_reader_that_leaves_is_no_error() -> None:
    """A closed pipe ends the program quietly."""
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "pico_vllm.cli.main", "--version"]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, timeout=30)
    os.close(writer)
    assert (done.returncode, done.stderr) == (1, b"")


@pytest.mark.parametrize("buffering", ["", "1"])
@pytest.mark.parametrize(
    ("arguments", "code", "out", "err"),
    [
        ("--version >&-", 0, "", ""),
        ("--version 2>&-", 0, "pico-vllm ", ""),
        ("nonsense 2>&-", 2, "", ""),
        ("nonsense 2>/dev/full", 2, "", ""),
        ("generate --raw a $'b\\xff'", 1, "", "error: the prompt is not UTF-8 text at byte 3\n"),
        ("generate --model nonsense <&-", 1, "", "error: the prompt is empty; give it as an arg"),
        (
            "--version >/dev/full",
            1,
            "",
            "error: stdout cannot be written to: No space left on device; send it elsewhere\n",
        ),
    ],
)
def test_streams_that_are_closed_or_full(
    arguments: str, code: int, out: str, err: str, buffering: str
) -> None:
    """What comes by the others is as ever."""
    script = f"{sys.executable} -m pico_vllm.cli.main {arguments}"
    environment = os.environ | {"PYTHONUNBUFFERED": buffering}
    done = subprocess.run(
        ["bash", "-c", script], capture_output=True, text=True, timeout=30, env=environment
    )
    assert done.returncode == code
    for found, wanted in ((done.stdout, out), (done.stderr, err)):
        assert found.startswith(wanted) and bool(found) == bool(wanted)
        assert found.count("\n") <= 1
