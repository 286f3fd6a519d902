from __future__ import annotations

import signal

from cli_result import RunCli
from fake_llm import FakeLLM


def test_the_conversation_is_kept(run_cli: RunCli) -> None:
    """Each message is sent with all before it, and the speed shown after each answer."""
    llm = FakeLLM("A", "!")
    code, out, err = run_cli("chat", stdin=b"one\n\ntwo\n", llm=llm)
    assert (code, out) == (0, "A!\nA!\n")
    assert llm.prompts == [
        [("user", "one")],
        [("user", "one"), ("assistant", "A!"), ("user", "two")],
    ]
    assert err.count("tokens/s]") == 2


def test_commands(run_cli: RunCli) -> None:
    """/system sets, replaces and drops the system text, /reset forgets the rest, /exit leaves."""
    llm = FakeLLM("A")
    lines = "/system Be brief.\none\n/reset\ntwo\n/system\n/nonsense\n/help\nthree\n/exit\nfour\n"
    code, _, err = run_cli("chat", "--system", "Be kind.", stdin=lines.encode(), llm=llm)
    assert code == 0
    assert llm.prompts == [
        [("system", "Be brief."), ("user", "one")],
        [("system", "Be brief."), ("user", "two")],
        [("user", "two"), ("assistant", "A"), ("user", "three")],
    ]
    assert "there is no command /nonsense; /help lists them" in err
    assert "/system TEXT" in err


def test_ctrl_c_stops_the_answer_and_keeps_what_came(run_cli: RunCli) -> None:
    """The part of the answer stays in the conversation, the request is given up."""
    llm = FakeLLM("A", "B", "C", "D")
    llm.before_token = lambda index: signal.raise_signal(signal.SIGINT) if index == 1 else None
    code, out, err = run_cli("chat", stdin=b"one\n/exit\n", llm=llm)
    assert (code, out) == (0, "AB\n")
    assert ", stopped]" in err and llm.num_open_streams == 0
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_ctrl_c_again_interrupts_a_step_that_does_not_end(run_cli: RunCli) -> None:
    """The second Ctrl-C within one step leaves the program."""
    llm = FakeLLM("A", "B")

    def press_twice(index: int) -> None:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    llm.before_token = press_twice
    assert run_cli("chat", stdin=b"one\n", llm=llm).code == 130
    assert llm.num_open_streams == 0


def test_a_conversation_that_fills_the_window_stays_whole(run_cli: RunCli) -> None:
    """The message that does not fit is refused with the way out; a shorter one still works."""
    llm = FakeLLM("AAAA", window=20)
    lines = b"one\n" + b"x" * 30 + b"\ntwo\n"
    code, _, err = run_cli("chat", stdin=lines, llm=llm)
    assert code == 0
    errors = [line for line in err.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1 and "/reset starts a new one" in errors[0]
    assert llm.prompts[-1] == [("user", "one"), ("assistant", "AAAA"), ("user", "two")]
    assert [params.max_tokens for params in llm.params] == [17, 10]


def test_a_failed_answer_leaves_the_conversation_as_it_was(run_cli: RunCli) -> None:
    """After an error of the engine the next message is asked without the lost one."""
    llm = FakeLLM("A")
    llm.finish_reason = "error"
    code, _, err = run_cli("chat", stdin=b"one\ntwo\n", llm=llm)
    assert code == 0 and err.count("error: the engine failed at this answer: the reason;") == 2
    assert llm.prompts == [[("user", "one")], [("user", "two")]]


def test_what_a_chat_cannot_use_is_refused(run_cli: RunCli) -> None:
    """No template and several answers are errors, and name what works instead."""
    without = run_cli("chat", llm=FakeLLM("A", has_template=False))
    assert without.code == 1 and "generate --raw" in without.err
    several = run_cli("chat", "--n", "2", llm=FakeLLM("A"))
    assert several.code == 1 and "leave --n out" in several.err
