"""Memory of an engine that is gone, for the next one in the same process."""

from __future__ import annotations

import gc

import torch


def free_memory() -> None:
    """Collect what nobody refers to any more, also of what was exempted from collection when a
    model was loaded (cli/terminal.py), and give the device's share back."""
    gc.unfreeze()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
