"""The command line as a user runs it, on the default model."""

from __future__ import annotations

import json
import os
import pty
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest

CLI = [sys.executable, "-m", "pico_vllm.cli.main"]
# One thread: these tests run beside others, and greedy answers must not depend on the machine.
GREEDY = ["--temperature", "0", "--threads", "1", "--max-model-len", "1024"]
QUESTION = "Tell me the capital of France."


def run(*arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*CLI, *arguments], input=stdin, capture_output=True, text=True, timeout=120
    )


def strict_json(text: str) -> Any:
    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    return json.loads(text, parse_constant=refuse)


def test_generate_answers_its_argument() -> None:
    """The answer alone is on stdout; the summary is on stderr, without colours in a pipe."""
    done = run("generate", *GREEDY, QUESTION)
    assert done.returncode == 0, done.stderr
    assert "Paris" in done.stdout and done.stdout.endswith("\n")
    assert done.stderr.startswith("[37 prompt tokens; ") and done.stderr.endswith("; stop]\n")
    assert "tokens/s" in done.stderr and "\x1b" not in done.stdout + done.stderr


def test_generate_reads_stdin_and_writes_json() -> None:
    """A raw prompt from a pipe gives one strict JSON object whose parts agree."""
    arguments = ["--raw", "--json", "--max-tokens", "4", "--logprobs", "1"]
    done = run("generate", *arguments, *GREEDY, stdin="The capital of France is\n")
    assert done.returncode == 0, done.stderr
    found = strict_json(done.stdout)
    (output,) = found["outputs"]
    assert found["prompt"] == "The capital of France is"
    assert output["text"].startswith(" Paris") and output["finish_reason"] == "length"
    assert len(output["token_ids"]) == 4 == found["usage"]["completion_tokens"]
    assert found["usage"]["prompt_tokens"] == len(found["prompt_token_ids"])
    chosen = [entries[0] for entries in output["logprobs"]]
    assert [entry["token_id"] for entry in chosen] == output["token_ids"]
    assert all(entry["rank"] == 1 and entry["logprob"] <= 0 for entry in chosen)
    assert all(value > 0 for value in found["timings"].values())


def test_info_agrees_with_what_loading_takes() -> None:
    """The bytes that info names for each format are those of the loaded weights."""
    from pico_vllm.config.engine import EngineConfig
    from pico_vllm.engine.llm import LLM

    done = run("info", "smollm2-135m", "--context", "1024", "--batch", "4", "--json")
    assert done.returncode == 0, done.stderr
    found = strict_json(done.stdout)
    assert found["num_parameters"] == 134_515_008
    assert {name: entry["num_tensors"] for name, entry in found["storage"].items()} == {
        "q4_1": 210,
        "q8_0": 1,
        "f32": 61,
    }
    for weight_format in ("keep", "bf16"):
        config = EngineConfig(model="smollm2-135m", dtype="bf16", device="cpu")
        with LLM(
            config.model, dtype=config.dtype, weight_format=weight_format, max_model_len=64,
            cpu_graph="off",
        ) as llm:  # fmt: skip
            # The model counts what a step reads for its products: all but the norms.
            norm_bytes = 2 * 61 * 576
            assert llm.weight_bytes + norm_bytes == found["weight_bytes"][weight_format]


def test_models_lists_the_default_model() -> None:
    """The default model is listed with the file that holds it."""
    done = run("models", "--json")
    assert done.returncode == 0, done.stderr
    models = {model["name"]: model for model in map(strict_json, done.stdout.splitlines())}
    assert models["smollm2-135m"]["path"].endswith(".gguf")
    assert models["smollm2-135m"]["size_bytes"] > 90_000_000
    assert models["qwen2.5-1.5b"]["kind"] == "config"


@pytest.mark.parametrize("command", [["generate", "hi", "--model"], ["chat", "--model"], ["pull"]])
def test_an_unknown_model_is_one_line_and_exit_1(command: list[str]) -> None:
    """The line names the model and what would work."""
    done = run(*command, "nonsense")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("error: there is no model 'nonsense'")
    assert done.stderr.count("\n") == 1


class Terminal:
    """A program on a terminal of its own, whose Ctrl-C is a real one."""

    # Runs in the child: the terminal must be its controlling one for Ctrl-C to become a signal.
    _BOOT = (
        "import fcntl, os, sys, termios\n"
        "fcntl.ioctl(0, termios.TIOCSCTTY, 0)\n"
        "os.execv(sys.argv[1], sys.argv[1:])\n"
    )

    def __init__(self, *command: str) -> None:
        self._master, slave = pty.openpty()
        self.process = subprocess.Popen(
            [sys.executable, "-c", self._BOOT, *command],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
            # A dumb terminal gets neither colours nor bars.
            env={**os.environ, "TERM": "dumb"},
        )
        os.close(slave)
        self._unread = b""

    def send(self, text: str) -> None:
        os.write(self._master, text.encode())

    def read_until(self, text: str, timeout_s: float = 60.0) -> str:
        """What appeared up to and with `text`."""
        end = time.monotonic() + timeout_s
        while text.encode() not in self._unread:
            ready, _, _ = select.select([self._master], [], [], max(0, end - time.monotonic()))
            assert ready, f"{text!r} did not come, but {self._unread!r}"
            try:
                self._unread += os.read(self._master, 4096)
            except OSError:  # how Linux says that the program closed its terminal
                raise AssertionError(
                    f"the program ended before {text!r}: {self._unread!r}"
                ) from None
        shown, mark, self._unread = self._unread.partition(text.encode())
        return (shown + mark).decode()

    def press_ctrl_c_until(self, text: str) -> None:
        """Python's input() misses a signal in the moment between prompt and wait: press again."""
        for _ in range(10):
            self.send("\x03")
            ready, _, _ = select.select([self._master], [], [], 2.0)
            if ready:
                break
        self.read_until(text)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._master)


@pytest.fixture
def terminal() -> Iterator[Terminal]:
    opened = Terminal(*CLI, "chat", *GREEDY)
    yield opened
    opened.close()


def test_chat_in_a_terminal(terminal: Terminal) -> None:
    """A conversation: answers with their speed, Ctrl-C for one of them, commands, Ctrl-D."""
    terminal.read_until(">>> ")
    terminal.send(f"{QUESTION}\n")
    assert "Paris" in terminal.read_until("tokens/s]")
    terminal.read_until(">>> ")

    terminal.send("Write a very long story about a dragon.\n")
    terminal.read_until("dragon.")  # the echo
    terminal.read_until(" the ")
    terminal.send("\x03")
    assert "tokens/s, stopped]" in terminal.read_until(">>> ")
    assert terminal.process.poll() is None

    terminal.press_ctrl_c_until("once more leaves")
    terminal.read_until(">>> ")
    terminal.send("half a line")
    terminal.read_until("half a line")
    terminal.press_ctrl_c_until("once more leaves")  # it cancelled the line: not the second one
    terminal.read_until(">>> ")
    terminal.send("/system Answer in one word.\n")
    assert "the system text is set" in terminal.read_until(">>> ")
    terminal.send("/reset\n")
    assert "the conversation is forgotten" in terminal.read_until(">>> ")
    terminal.send(f"{QUESTION}\n")
    assert "Paris" in terminal.read_until("tokens/s]")
    terminal.read_until(">>> ")

    terminal.send("\x04")
    assert terminal.process.wait(timeout=20) == 0


def test_ctrl_c_twice_at_the_prompt_leaves(terminal: Terminal) -> None:
    """The first says so, the second leaves."""
    terminal.read_until(">>> ")
    terminal.press_ctrl_c_until("once more leaves")
    terminal.read_until(">>> ")
    terminal.press_ctrl_c_until("\n")
    assert terminal.process.wait(timeout=20) == 0
