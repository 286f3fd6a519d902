"""The import table of docs/architecture.md, held against the source."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "pico_vllm"
HOST_ONLY = [
    "pico_vllm.config.engine",
    "pico_vllm.config.model",
    "pico_vllm.config.hardware",
    "pico_vllm.scheduler.scheduler",
    "pico_vllm.cache.block_manager",
    "pico_vllm.cache.prefix_cache",
    "pico_vllm.bench.prompt_trace",
    "pico_vllm.bench.replay",
    "pico_vllm.tokenizer.tokenizer",
    "pico_vllm.tokenizer.detokenizer",
    "pico_vllm.request",
    "pico_vllm.step",
    "pico_vllm.outputs",
    "pico_vllm.sampling_params",
    "pico_vllm.errors",
]
TORCH_ROOT_NOUNS = {"forward_batch"}
KNOWS_TORCH = {"kernels", "cache", "layers", "models", "sampler", "engine", "bench"}


def _table() -> dict[str, tuple[set[str], set[str]]]:
    """room -> (rooms, third-party packages) of the table `Who may import whom`."""
    text = (ROOT / "docs/architecture.md").read_text()
    section = text.split("## Who may import whom")[1].split("\n## ")[0]
    rows = [line.split("|")[1:-1] for line in section.splitlines() if line.startswith("|")]

    def names(cell: str) -> set[str]:
        return {name.strip() for name in cell.split(",") if name.strip()}

    return {row[0].strip(): (names(row[1]), names(row[2])) for row in rows[2:]}


def _imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found.add(node.module or "")
    return found


def _rooms() -> list[str]:
    return sorted(path.name for path in PACKAGE.iterdir() if (path / "__init__.py").exists())


def test_the_table_names_every_room_and_no_other() -> None:
    """Each folder of the package has a row, and each row a folder."""
    assert sorted(_table()) == _rooms()


@pytest.mark.parametrize("room", _rooms())
def test_a_room_imports_only_what_its_row_allows(room: str) -> None:
    """No import leaves the room's row: neither to other rooms nor to third parties."""
    rooms, third_party = _table()[room]
    for path in (PACKAGE / room).rglob("*.py"):
        for module in _imports(path):
            where = f"{path.relative_to(ROOT)} imports {module}"
            parts = module.split(".")
            if parts[0] == "pico_vllm":
                noun = parts[1] if len(parts) > 1 else ""
                if noun in _rooms():
                    assert noun == room or noun in rooms, where
                else:
                    assert room != "kernels" or not noun, where
                    assert noun not in TORCH_ROOT_NOUNS or room in KNOWS_TORCH, where
            elif parts[0] not in sys.stdlib_module_names:
                assert parts[0] in third_party, where


def test_root_nouns_know_no_room() -> None:
    """The files that all rooms share import each other at most, so that no circle can arise."""
    for path in PACKAGE.glob("*.py"):
        if path.name == "__init__.py":
            continue
        for module in _imports(path):
            parts = module.split(".")
            assert parts[0] != "pico_vllm" or parts[1] not in _rooms(), f"{path.name}: {module}"


def test_the_scheduler_sees_no_tensor_of_the_cache() -> None:
    """It takes blocks and prefixes from the cache room; and blocks and tree do not know each
    other."""
    for path in (PACKAGE / "scheduler").glob("*.py"):
        cache = {module for module in _imports(path) if module.startswith("pico_vllm.cache")}
        names = ("block_manager", "prefix_cache", "radix_tree", "tiers.lower")
        assert cache <= {f"pico_vllm.cache.{name}" for name in names}, path.name
    for name, others in (("block_manager", set()), ("radix_tree", {"pico_vllm.cache.eviction"})):
        found = _imports(PACKAGE / f"cache/{name}.py")
        assert {module for module in found if module.startswith("pico_vllm.cache")} == others


def test_host_only_modules_import_without_torch() -> None:
    """Scheduler, configuration and tokenizer load on a machine that has no torch."""
    program = (
        "import sys; sys.modules['torch'] = None\n"
        + "\n".join(f"import {module}" for module in HOST_ONLY)
        + "\nimport pico_vllm; pico_vllm.SamplingParams"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_room_init_files_are_empty() -> None:
    """Importing one file of a room loads no other."""
    for path in PACKAGE.rglob("__init__.py"):
        if path.parent != PACKAGE:
            assert path.read_text() == "", path
