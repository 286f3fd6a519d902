"""Templates render as in transformers, and hostile ones end in an error and nothing worse."""

from __future__ import annotations

import ast
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import transformers
from tokenizer_files import TEMPLATES, byte_level

from pico_vllm.errors import ChatTemplateError, InvalidRequestError
from pico_vllm.tokenizer import chat_template
from pico_vllm.tokenizer.chat_template import ChatTemplate, check_messages

HI = [{"role": "user", "content": "hi"}]
TALK = [
    {"role": "user", "content": "  What is 2 + 2?\n"},
    {"role": "assistant", "content": "4 <b>&</b> \"quotes\" 'n' 日本 🙂"},
    {"role": "user", "content": "thanks"},
]
SYSTEM = {"role": "system", "content": " Be brief. "}
TOOL = {
    "type": "function",
    "function": {"name": "get", "description": "é < & '", "parameters": {"type": "object"}},
}
TOOL_TALK = [
    SYSTEM,
    HI[0],
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"type": "function", "function": {"name": "get", "arguments": {"q": "é", "n": 1.5}}}
        ],
    },
    {"role": "tool", "content": "result"},
]
SPECIALS = {"bos_token": "<s>", "eos_token": "</s>"}


@pytest.fixture
def make() -> Iterator[Any]:
    made: list[ChatTemplate] = []

    def make_one(source: str, **options: Any) -> ChatTemplate:
        made.append(ChatTemplate(source, SPECIALS, **options))
        return made[-1]

    yield make_one
    for template in made:
        template.close()


@pytest.fixture(scope="module")
def theirs() -> Any:
    return transformers.PreTrainedTokenizerFast(tokenizer_object=byte_level(), **SPECIALS)


def rendered_by_transformers(theirs: Any, source: str, messages: Any, **options: Any) -> str:
    text = theirs.apply_chat_template(messages, chat_template=source, tokenize=False, **options)
    assert isinstance(text, str)
    return text


@pytest.mark.parametrize("name", ["smollm2", *TEMPLATES])
@pytest.mark.parametrize("prompted", [True, False])
def test_same_text_as_transformers(
    name: str,
    prompted: bool,
    make: Any,
    theirs: Any,
    smollm2_metadata: dict[str, Any],
) -> None:
    """Every template writes what transformers makes it write."""
    source = TEMPLATES.get(name) or smollm2_metadata["tokenizer.chat_template"]
    template = make(source)
    conversations: list[list[dict[str, Any]]] = [HI, TALK]
    if name != "mistral":
        conversations.append([SYSTEM, *TALK])
    for messages in conversations:
        assert template.render(messages, prompted) == rendered_by_transformers(
            theirs, source, messages, add_generation_prompt=prompted
        )


def test_tools_and_variables_as_in_transformers(make: Any, theirs: Any) -> None:
    """Tools, tool calls and extra variables reach the template as transformers hands them over."""
    source = TEMPLATES["qwen"]
    expected = rendered_by_transformers(
        theirs,
        source,
        TOOL_TALK,
        tools=[TOOL],
        add_generation_prompt=True,
        enable_thinking=False,
    )
    template = make(source)
    assert template.render(TOOL_TALK, True, [TOOL], enable_thinking=False) == expected
    assert "<think>" in expected and '"q": "é"' in expected


def test_role_rules_give_the_templates_own_sentence(make: Any) -> None:
    """What the template says about roles is the message of the error."""
    template = make(TEMPLATES["mistral"])
    for messages, sentence in (
        ([HI[0], HI[0]], "Conversation roles must alternate user/assistant/user/assistant/..."),
        ([HI[0], TALK[1], HI[0], {"role": "wizard", "content": "x"}], "Only user and assistant"),
    ):
        with pytest.raises(ChatTemplateError) as caught:
            template.render(messages)
        assert caught.value.message.startswith(sentence)
        assert (caught.value.code, caught.value.param) == ("chat_template_error", "messages")
    assert template.render(HI) == "<s>[INST] hi [/INST]"


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("{{ lipsum.__globals__['os'].popen('touch CANARY').read() }}", "may not do"),
        ("{{ lipsum.__globals__ }}", "may not do"),
        ("{{ ''.__class__.__mro__ }}", "may not do"),
        ("{{ ''.__class__ }}", "may not do"),
        ("{{ 'a' | attr('__class__') }}", "may not do"),
        ("{{ '{0.__class__}'.format('a') }}", "may not do"),
        ("{{ messages.append(1) }}", "may not do"),
        ("{% set n = namespace() %}{% set n.__init__ = 1 %}", "may not do"),
        ("{{ raise_exception.__globals__ }}", "may not do"),
        ("{{ dict.__subclasses__() }}", "may not do|does not have|do not have"),
        ("{{ raise_exception('no\n\r way') }}", r"\Ano way\Z"),
        ("{% if %}", "not valid Jinja: line 1"),
        ("{{ 'x' ", "not valid Jinja: line 1"),
        ("{% include '/etc/passwd' %}", "could not render"),
        ("{{ nothing.at.all }}", "needs a value .* 'nothing' is undefined"),
        ("{{ 1 / 0 }}", "could not render"),
        ("{{ '\\ud800' }}", "could not render"),
        ("{% for i in range(10**9) %}x{% endfor %}", "counts further"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "calls itself too deeply"),
        ("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "calls itself too deeply"),
        ("{{ 'x' * 10**9 }}", "512 MiB of memory"),
        ("{{ '%1000000000d' % 1 }}", "512 MiB of memory"),
        ("{{ 'a' | center(10**9) }}", "512 MiB of memory"),
        ("{% set x = 'a' * 10**7 %}{{ x ~ x ~ x ~ x ~ x ~ x ~ x }}", "wrote more than 64 MiB"),
        ("{% set x = '🙂' * 10**7 %}{{ x }}{{ x }}", "wrote more than 64 MiB"),
    ],
)
def test_hostile_templates_are_refused(
    make: Any, source: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Escapes, errors and huge texts in a template end in ChatTemplateError and make no file."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ChatTemplateError, match=words) as caught:
        make(source).render(HI)
    assert "Error" not in caught.value.message and "Traceback" not in caught.value.message
    assert list(tmp_path.iterdir()) == []


LOOP = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"


@pytest.mark.parametrize(
    "source",
    [
        LOOP,
        "{% for i in range(99999) %}{% for j in range(99999) %}x{% endfor %}{% endfor %}",
        "{{ 7 ** (10 ** 9) }}",
        "{{ lipsum(n=99999) }}",
    ],
)
def test_endless_templates_are_stopped(make: Any, source: str) -> None:
    """Endless work ends at the time limit, in Python, in one long C call, while compiling."""
    started = time.monotonic()
    with pytest.raises(ChatTemplateError, match=r"did not finish within 0\.4 s"):
        make(source, time_limit_s=0.4).render(HI)
    assert time.monotonic() - started < 2.5


def test_the_default_time_limit_holds(make: Any) -> None:
    """With the limits that users get, an endless template ends within about two seconds."""
    template = make(LOOP)
    started = time.monotonic()
    with pytest.raises(ChatTemplateError, match="did not finish within 2 s"):
        template.render(HI)
    assert 1.9 < time.monotonic() - started < 4


def test_a_template_works_again_after_its_worker_died(make: Any) -> None:
    """A killed worker, or one killed at its limit, is replaced by the next render."""
    template = make(
        "{% if messages[0].content == 'loop' %}" + LOOP + "{% endif %}fine", time_limit_s=0.4
    )
    assert template.render(HI) == "fine"
    with pytest.raises(ChatTemplateError):
        template.render([{"role": "user", "content": "loop"}])
    assert template.render(HI) == "fine"
    worker = template._worker._process
    os.kill(worker.pid, signal.SIGKILL)
    worker.wait()
    assert template.render(HI) == "fine"


def test_a_stopped_worker_is_given_up(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that cannot even run its own clock is killed by the parent's."""
    monkeypatch.setattr(chat_template, "GRACE_S", 0.2)
    template = make("fine", time_limit_s=0.3)
    template.render(HI)
    os.kill(template._worker._process.pid, signal.SIGSTOP)
    with pytest.raises(ChatTemplateError, match="did not finish"):
        template.render(HI)
    assert template.render(HI) == "fine"


def test_the_worker_ends_with_its_template() -> None:
    """close, and forgetting the template, end the process."""
    for end in (lambda template: template.close(), lambda template: None):
        template = ChatTemplate("x")
        template.render(HI)
        process = template._worker._process  # type: ignore[union-attr]
        end(template)
        del template
        assert process.wait(5) == 0


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_the_worker_has_no_secrets_of_the_parent(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The environment of the parent, keys included, is not handed to the worker."""
    monkeypatch.setenv("SOME_API_KEY", "secret")
    template = make("x")
    template.render(HI)
    environment = Path(f"/proc/{template._worker._process.pid}/environ").read_bytes()
    assert b"SOME_API_KEY" not in environment


def test_the_worker_imports_only_the_standard_library_and_jinja2() -> None:
    """No torch and nothing of the engine: the worker starts fast and holds little."""
    tree = ast.parse(chat_template._WORKER_SCRIPT.read_text())
    names = {
        name.split(".")[0]
        for node in ast.walk(tree)
        for name in (
            [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else [node.module or ""]
            if isinstance(node, ast.ImportFrom)
            else []
        )
    }
    assert names - set(sys.stdlib_module_names) == {"jinja2"}


def test_threads_get_their_own_texts(make: Any) -> None:
    """Renders from many threads are not mixed up."""
    template = make("{{ messages[0].content }}")
    barrier = threading.Barrier(4)

    def render_some(first: int) -> bool:
        barrier.wait()
        return all(
            template.render([{"role": "user", "content": str(n)}]) == str(n)
            for n in range(first, first + 50)
        )

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(render_some, [0, 1000, 2000, 3000]))


def test_large_messages_pass_through(make: Any) -> None:
    """Eight mebibytes of text, control characters and all, come back unchanged."""
    text = ('\x00\n"\\日🙂' * 8 * 2**20)[: 4 * 2**20]
    assert make("{{ messages[0].content }}").render([{"role": "user", "content": text}]) == text


def test_text_parts_are_joined_and_none_is_left_out() -> None:
    """A list of text parts is one text; a content of None is as if it were not there."""
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert check_messages([{"role": "user", "content": parts}]) == [
        {"role": "user", "content": "ab"}
    ]
    assert check_messages([{"role": "assistant", "content": None}]) == [{"role": "assistant"}]


def deep(levels: int) -> Any:
    value: Any = 0
    for _ in range(levels):
        value = [value]
    return value


@pytest.mark.parametrize(
    "messages",
    [
        None,
        "hi",
        {},
        [],
        HI * 2049,
        [None],
        ["hi"],
        [{}],
        [{"content": "x"}],
        [{"role": 1, "content": "x"}],
        [{"role": "user", "content": 5}],
        [{"role": "user", "content": {"text": "x"}}],
        [{"role": "user", "content": ["x"]}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}],
        [{"role": "user", "content": [{"type": "text", "text": None}]}],
        [{"role": "user", "content": "x", 5: 6}],
        [{"role": "user", "content": "x", "extra": deep(100_000)}],
        [{"role": "user", "content": "x", "extra": b"bytes"}],
        [{"role": "user", "content": "\ud800"}],
    ],
    ids=lambda messages: repr(messages)[:40] if not isinstance(messages, list) else None,
)
def test_messages_of_the_wrong_shape_are_refused(make: Any, messages: Any) -> None:
    """Anything that is not a list of 1..2048 messages is an error of the request."""
    with pytest.raises(InvalidRequestError) as caught:
        make("x").render(messages)
    assert (caught.value.code, caught.value.param) == ("invalid_value", "messages")
