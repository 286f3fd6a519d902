"""Messages to prompt text, by the model's own Jinja template, which is not trusted.

    messages -> checked -> JSON down a pipe -> worker: sandboxed jinja -> text, or ChatTemplateError

A template comes with the weights, so anyone may have written it. It runs in a process of its own
that holds no secret, has limits on time, output and memory, and is simply killed when it passes one
(`chat_template_worker.py`).
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from pico_vllm.errors import ChatTemplateError, InvalidRequestError

MAX_MESSAGES = 2048
TIME_LIMIT_S = 2.0
OUTPUT_LIMIT_BYTES = 64 * 2**20
MEMORY_LIMIT_BYTES = 512 * 2**20
"""Address space of the worker: the longest output eight times, as joining makes copies."""
START_LIMIT_S = 30.0
GRACE_S = 1.0
"""The worker ends itself at its time limit; the parent ends it this much later if it could not."""
LINE_LIMIT_BYTES = 65536

_SENTENCES = {
    "syntax": "The chat template of this model is not valid Jinja",
    "unsafe": "The chat template of this model tried something that a template may not do",
    "undefined": "The chat template of this model needs a value that these messages do not have",
    "output": "The chat template wrote more than {output_limit} MiB; send less text",
    "memory": "The chat template needed more than {memory_limit} MiB of memory; send less text",
    "range": "The chat template counts further than the sandbox allows",
    "recursion": "The chat template calls itself too deeply",
    "failed": "The chat template of this model could not render these messages",
    "time": "The chat template did not finish within {time_limit:g} s; send less text",
    "died": "The chat template ended the process that renders it",
}

_WORKER_SCRIPT = Path(__file__).with_name("chat_template_worker.py")
# What Python itself needs to start and to tell the local time. Nothing else of the environment: it
# may hold keys.
_PASSED_ON = ("PATH", "LD_LIBRARY_PATH", "PYTHONPATH", "PYTHONHOME", "TZ", "LANG", "LC_ALL")


def check_messages(messages: object) -> list[dict[str, Any]]:
    """Copy `messages`: text parts of a content joined, keys whose value is None left out.

    Raises:
        InvalidRequestError: not a list of 1..2048 objects with a string `role` and, where there is
            one, a `content` that is a string or a list of text parts.
    """
    if not isinstance(messages, list) or not messages:
        raise _bad_messages("messages must be a list with at least one message")
    if len(messages) > MAX_MESSAGES:
        raise _bad_messages(f"{len(messages)} messages are more than {MAX_MESSAGES}; send fewer")
    return [_check_message(index, message) for index, message in enumerate(messages)]


def _check_message(index: int, message: object) -> dict[str, Any]:
    if not isinstance(message, dict) or not all(isinstance(key, str) for key in message):
        raise _bad_messages(f"messages[{index}] must be an object")
    if not isinstance(message.get("role"), str):
        raise _bad_messages(f"messages[{index}].role must be a string")
    # Templates test `message.content is defined` or print the word None; a missing key serves both.
    checked = {key: value for key, value in message.items() if value is not None}
    if "content" in checked:
        checked["content"] = _content_text(index, checked["content"])
    return checked


def _content_text(index: int, content: object) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise _bad_messages(f"messages[{index}].content must be a string or a list of text parts")
    parts: list[str] = []
    for number, part in enumerate(content):
        text = part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None
        if not isinstance(text, str):
            raise _bad_messages(
                f'messages[{index}].content[{number}] must be {{"type": "text", "text": "..."}}; '
                "other kinds of part are not supported"
            )
        parts.append(text)
    return "".join(parts)


def _bad_messages(sentence: str) -> InvalidRequestError:
    return InvalidRequestError(sentence, param="messages")


class ChatTemplate:
    """One template and the worker that renders it.

    The worker is started by the first render, kept for the next, and replaced when it died.
    Threads may share one; they take turns. After a fork the child starts a worker of its own.
    """

    def __init__(
        self,
        source: str,
        special_tokens: Mapping[str, str] | None = None,
        *,
        time_limit_s: float = TIME_LIMIT_S,
        output_limit_bytes: int = OUTPUT_LIMIT_BYTES,
        memory_limit_bytes: int = MEMORY_LIMIT_BYTES,
    ) -> None:
        """`special_tokens` are variables of the template: `bos_token` and so on, by their text."""
        self.source = source
        self.special_tokens = dict(special_tokens or {})
        self._limits: dict[str, float] = {
            "time_limit_s": time_limit_s,
            "output_limit_bytes": output_limit_bytes,
            "memory_limit_bytes": memory_limit_bytes,
        }
        self._lock = threading.Lock()
        self._worker: _Worker | None = None

    def render(
        self,
        messages: object,
        /,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> str:
        """Write the prompt for these messages.

        Raises:
            InvalidRequestError: messages of the wrong shape, or a variable that JSON cannot carry.
            ChatTemplateError: the template refused the messages (its own sentence), is broken,
                tried to leave the sandbox, or passed its time, output or memory limit.
        """
        request = _to_json(
            {
                **self.special_tokens,
                "documents": None,
                **variables,
                "messages": check_messages(messages),
                "tools": tools,
                "add_generation_prompt": add_generation_prompt,
            }
        )
        with self._lock:
            worker = self._worker
            if worker is None or not worker.is_usable():
                self.close()
                worker = self._worker = _Worker({"source": self.source, **self._limits})
            try:
                text, refusal = worker.ask(request, self._limits)
            except _WorkerGoneError as gone:
                self.close()
                text, refusal = b"", {"error": gone.kind, "message": ""}
        if refusal is not None:
            raise self._explain(refusal)
        return text.decode()

    def close(self) -> None:
        """End the worker; a later render starts another."""
        if self._worker is not None:
            self._worker.stop()
            self._worker = None

    def _explain(self, refusal: Mapping[str, Any]) -> ChatTemplateError:
        kind, message = refusal["error"], " ".join(refusal["message"].split())
        if kind == "refused":
            return ChatTemplateError(message, param="messages")
        sentence = _SENTENCES[kind].format(
            time_limit=self._limits["time_limit_s"],
            output_limit=int(self._limits["output_limit_bytes"]) // 2**20,
            memory_limit=int(self._limits["memory_limit_bytes"]) // 2**20,
        )
        return ChatTemplateError(
            f"{sentence}: {message}" if message else sentence, param="messages"
        )


def _to_json(variables: Mapping[str, Any]) -> bytes:
    try:
        return json.dumps(variables, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise _bad_messages(
            "the text holds a lone surrogate, half of a UTF-16 pair, which is not a character"
        ) from None
    except RecursionError:
        raise _bad_messages("the messages, tools or variables are nested too deeply") from None
    except (TypeError, ValueError):
        raise _bad_messages("the messages, tools and variables may hold only JSON values") from None


class _WorkerGoneError(Exception):
    def __init__(self, kind: str) -> None:
        super().__init__(kind)
        self.kind = kind


class _Worker:
    """The process and its two pipes."""

    def __init__(self, setup: Mapping[str, Any]) -> None:
        self._pid_of_owner = os.getpid()
        self._is_overdue = False
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(_WORKER_SCRIPT)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={name: os.environ[name] for name in _PASSED_ON if name in os.environ},
        )
        self._finalizer = weakref.finalize(self, _end_process, self._process)
        try:
            with self._deadline(START_LIMIT_S):
                # ASCII escapes, so that a lone surrogate in a template is an error of rendering,
                # not of sending
                self._send(json.dumps(setup).encode() + b"\n")
                self._read_line()
        except _WorkerGoneError:
            self.stop()
            raise ChatTemplateError(
                "The process that renders chat templates did not start; is jinja2 installed?",
                param="messages",
            ) from None

    def is_usable(self) -> bool:
        return self._pid_of_owner == os.getpid() and self._process.poll() is None

    def ask(
        self, request: bytes, limits: Mapping[str, float]
    ) -> tuple[bytes, Mapping[str, Any] | None]:
        """Return the text and None, or nothing and the worker's reason."""
        with self._deadline(limits["time_limit_s"] + GRACE_S):
            self._send(b'{"bytes": %d}\n' % len(request) + request)
            answer = self._read_line()
            if "error" in answer:
                return b"", answer
            num_bytes = answer["bytes"]
            assert 0 <= num_bytes <= limits["output_limit_bytes"], num_bytes
            text = _pipe(self._process.stdout).read(num_bytes)
            if len(text) < num_bytes:
                raise self._gone()
            return text, None

    def stop(self) -> None:
        if self._pid_of_owner == os.getpid():
            self._finalizer()
        else:
            self._finalizer.detach()

    @contextmanager
    def _deadline(self, seconds: float) -> Iterator[None]:
        """Kill the process after so long: that ends any wait on its pipes."""
        timer = threading.Timer(seconds, self._kill)
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def _kill(self) -> None:
        self._is_overdue = True
        self._process.kill()

    def _send(self, data: bytes) -> None:
        try:
            _pipe(self._process.stdin).write(data)
            _pipe(self._process.stdin).flush()
        except BrokenPipeError:
            raise self._gone() from None

    def _read_line(self) -> dict[str, Any]:
        line = _pipe(self._process.stdout).readline(LINE_LIMIT_BYTES)
        if not line.endswith(b"\n"):
            raise self._gone()
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _gone(self) -> _WorkerGoneError:
        """Why the process closed its pipes: a signal at the time limit, or something else."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(GRACE_S)
        is_late = self._is_overdue or self._process.returncode == -signal.SIGALRM
        return _WorkerGoneError("time" if is_late else "died")


def _pipe(stream: IO[bytes] | None) -> IO[bytes]:
    assert stream is not None, "the worker is started with pipes"
    return stream


def _end_process(process: subprocess.Popen[bytes]) -> None:
    """Close the pipes, which tells the worker to end; kill it if it does not."""
    for stream in (process.stdin, process.stdout):
        with suppress(OSError):
            _pipe(stream).close()
    try:
        process.wait(0.2)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
