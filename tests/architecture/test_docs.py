"""Documents name only what exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import pico_vllm

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted(
    [
        ROOT / "README.md",
        ROOT / "CONTRIBUTING.md",
        ROOT / "benchmarks/README.md",
        *ROOT.glob("docs/*.md"),
    ]
)
FOLDERS = "pico_vllm|tests|docs|scripts|benchmarks"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_path_in_a_document_exists(document: Path) -> None:
    """A path in backticks or a link leads to a file or folder of the project."""
    text = document.read_text()
    paths = re.findall(rf"`((?:{FOLDERS})/[\w./-]*)`", text)
    targets = re.findall(r"\]\((?!http|#)([^)#]+)[^)]*\)", text)
    links = [document.parent / target for target in targets]
    for path in [*(ROOT / each for each in paths), *links]:
        assert path.exists(), f"{document.name} names {path}, which does not exist"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_make_target_in_a_document_exists(document: Path) -> None:
    """`make X` names a target of the Makefile."""
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for target in re.findall(r"`make ([\w-]+)`", document.read_text()):
        assert target in targets, f"{document.name}: make {target}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_command_in_a_document_exists(document: Path) -> None:
    """`pico-vllm X` names a command of the command line, and its options are real ones."""
    from typer.main import get_command

    from pico_vllm.cli.main import app

    root = get_command(app)
    lines = re.findall(r"pico-vllm ([a-z][^`\n]*)", document.read_text())
    for line in lines:
        command, words = root, line.split()
        while words and hasattr(command, "commands"):
            assert words[0] in command.commands, f"{document.name}: pico-vllm {line}"
            command = command.commands[words.pop(0)]
        options = {name for each in command.params for name in each.opts + each.secondary_opts}
        for option in re.findall(r"(?<=\s)(--[\w-]+)", " " + " ".join(words)):
            assert option in options, f"{document.name}: pico-vllm {line}"


def test_the_public_names_are_these() -> None:
    """The public API is a short list, and each name of it loads."""
    assert pico_vllm.__all__ == ["LLM", "PicoError", "RequestOutput", "SamplingParams"]
    for name in pico_vllm.__all__:
        assert getattr(pico_vllm, name).__name__ == name
