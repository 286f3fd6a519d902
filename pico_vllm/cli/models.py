"""pico-vllm models and pull: what lies on this machine, and how more gets here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from pico_vllm.cli.terminal import console, note, printable

_KINDS = {
    "alias": "model in a Python package",
    "config": "sizes only, for --load-format dummy",
    "hub": "Hub cache",
}


def models(
    is_json: Annotated[bool, typer.Option("--json", help="Print JSON, one object a line.")] = False,
) -> None:
    """List the models that this machine has, and the names that are built in."""
    from rich.table import Table

    from pico_vllm.models.hub import ALIASES, list_models

    found = list_models()
    if is_json:
        for model in found:
            path = None if model.path is None else str(model.path)
            fields = {"name": model.name, "kind": model.kind, "size_bytes": model.size_bytes}
            print(json.dumps({**fields, "path": path}))
        return
    table = Table(box=None, pad_edge=False)
    for title in ("model", "size", "kind", "where"):
        table.add_column(title, justify="right" if title == "size" else "left", overflow="fold")
    for model in found:
        is_here = model.path is not None
        where = str(model.path) if is_here else f"not here yet: {ALIASES[model.name].install}"
        size = mebibytes(model.size_bytes) if model.size_bytes else "-"
        table.add_row(printable(model.name), size, _KINDS[model.kind], printable(where))
    console().print(table)


def pull(
    model: Annotated[
        str, typer.Argument(help="Hub id as org/name or org/name:file.gguf, or an alias.")
    ],
) -> None:
    """Bring a model onto this machine, so that later runs need no network."""
    from pico_vllm.models import hub

    files = hub.pull(model, progress=note)
    if files.kind == "config":
        note(f"{model} is a description without weights; --load-format dummy runs it")
    print(printable(f"{files.path}  {mebibytes(_size_bytes(files.path))}"))


def mebibytes(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:,.1f} MiB"


def _size_bytes(path: Path) -> int:
    files = path.rglob("*") if path.is_dir() else [path]
    return sum(file.stat().st_size for file in files if file.is_file())
