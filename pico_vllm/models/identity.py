"""What tells one model's weights from another's, without reading all of them."""

from __future__ import annotations

import os
from hashlib import sha256
from pathlib import Path

from pico_vllm.models.hub import ModelFiles

NUM_SAMPLES = 64
SAMPLE_BYTES = 4096


def weights_identity(files: ModelFiles, *, dummy_seed: int | None = None) -> bytes:
    """A digest of the weight files: of each its name, size, time of the last change, and samples
    from all over it. dummy_seed: of random weights, in place of those in files.

    Two fine-tunings of a model differ nearly everywhere, and in the time of the change. Files that
    were copied elsewhere are taken for others, which costs a cache and no answer.
    """
    digest = sha256()
    if dummy_seed is not None:
        digest.update(f"dummy {dummy_seed}".encode())
        return digest.digest()
    paths = [files.path] if files.kind == "gguf" else sorted(files.path.glob("*.safetensors"))
    for path in paths:
        _add_file(digest.update, path)
    return digest.digest()


def _add_file(update: object, path: Path) -> None:
    assert callable(update)
    with path.open("rb") as file:
        status = os.fstat(file.fileno())
        update(f"{path.name} {status.st_size} {status.st_mtime_ns} ".encode())
        for index in range(NUM_SAMPLES):
            file.seek(status.st_size * index // NUM_SAMPLES)
            update(file.read(SAMPLE_BYTES))
