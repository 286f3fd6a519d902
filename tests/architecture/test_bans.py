"""What the source must never contain: ways to run code from a file that a user gave us."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import pico_vllm.errors

SOURCE = Path(pico_vllm.errors.__file__).parent

# Modules that run code while they read data.
BANNED_MODULES = {"pickle", "cPickle", "cloudpickle", "dill", "joblib", "marshal", "shelve", "yaml"}
# Plain calls, and calls of an attribute by the name of its owner.
BANNED_CALLS = {"eval", "exec", "compile", "__import__"}
BANNED_ATTRIBUTES = {
    ("torch", "load"),
    ("torch.jit", "load"),
    ("torch.serialization", "load"),
    ("torch.hub", "load"),
    ("yaml", "load"),
    ("os", "system"),
    ("os", "popen"),
}
# Keyword arguments that switch such a thing on.
BANNED_KEYWORDS = {"shell", "allow_pickle", "trust_remote_code"}


def dotted(node: ast.expr) -> str:
    """`torch.jit` for the expression torch.jit; empty for anything but names and dots."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (owner := dotted(node.value)):
        return f"{owner}.{node.attr}"
    return ""


def violations(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and name of each banned thing."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] in BANNED_MODULES:
                    yield node.lineno, f"import {alias.name}"
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            if module.split(".")[0] in BANNED_MODULES:
                yield node.lineno, f"from {module} import"
            for alias in node.names:
                if (module, alias.name) in BANNED_ATTRIBUTES:
                    yield node.lineno, f"from {module} import {alias.name}"
        elif isinstance(node, ast.Attribute):
            if (dotted(node.value), node.attr) in BANNED_ATTRIBUTES:
                yield node.lineno, f"{dotted(node.value)}.{node.attr}"
        elif isinstance(node, ast.Call):
            if isinstance(node.func, ast.Name) and node.func.id in BANNED_CALLS:
                yield node.lineno, f"{node.func.id}()"
            for keyword in node.keywords:
                is_off = isinstance(keyword.value, ast.Constant) and not keyword.value.value
                if keyword.arg in BANNED_KEYWORDS and not is_off:
                    yield node.lineno, f"{keyword.arg}="
        elif isinstance(node, ast.ExceptHandler) and node.type is None:
            yield node.lineno, "bare except"


def test_source_has_no_banned_call() -> None:
    """No file of the package can run code that a checkpoint, a request or a peer brings."""
    files = sorted(SOURCE.rglob("*.py"))
    assert len(files) > 10
    found = [
        f"{path.relative_to(SOURCE)}:{line}: {name}"
        for path in files
        for line, name in violations(ast.parse(path.read_text("utf-8"), str(path)))
    ]
    assert found == []


@pytest.mark.parametrize(
    "code",
    [
        "import pickle",
        "import yaml as y",
        "from pickle import loads",
        "from torch import load",
        "torch.load('x')",
        "reader = torch.load",
        "torch.jit.load('x')",
        "eval('1')",
        "exec('1')",
        "subprocess.run('ls', shell=True)",
        "subprocess.run('ls', shell=flag)",
        "numpy.load('x', allow_pickle=True)",
        "AutoModel.from_pretrained('x', trust_remote_code=True)",
        "os.system('ls')",
        "try:\n    pass\nexcept:\n    pass",
    ],
)
def test_each_ban_is_seen(code: str) -> None:
    """The check itself finds every form."""
    assert len(list(violations(ast.parse(code)))) == 1


@pytest.mark.parametrize(
    "code",
    [
        "model.eval()",
        "re.compile('x')",
        "json.load(file)",
        "numpy.load('x', allow_pickle=False)",
        "subprocess.run(['ls'], shell=False)",
        "connection.execute('x')",
    ],
)
def test_harmless_lookalikes_pass(code: str) -> None:
    """Methods and switches that are off are no violations."""
    assert list(violations(ast.parse(code))) == []
