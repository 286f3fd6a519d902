from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple


class Result(NamedTuple):
    code: int
    out: str
    err: str


RunCli = Callable[..., Result]
"""The fixture `run_cli`: (*arguments, stdin=b"", llm=None) -> Result."""
