"""Tokenizers that several files of this folder use."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import pytest

from pico_vllm.tokenizer.tokenizer import Tokenizer

sys.path.insert(0, str(Path(__file__).parents[2]))  # tests/, for smollm2.py

from smollm2 import smollm2_path
from tokenizer_files import byte_level, sentencepiece_metadata, write_directory


@pytest.fixture(scope="session")
def smollm2_metadata() -> dict[str, Any]:
    reader = gguf.GGUFReader(smollm2_path())
    return {
        name: field.contents()
        for name, field in reader.fields.items()
        if name.startswith("tokenizer.")
    }


@pytest.fixture(scope="session")
def smollm2(smollm2_metadata: dict[str, Any]) -> Iterator[Tokenizer]:
    tokenizer = Tokenizer.from_gguf_metadata(smollm2_metadata)
    yield tokenizer
    tokenizer.close()


@pytest.fixture(scope="session")
def bytes_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """Byte-level: ids of single bytes and of pieces of the corpus."""
    folder = tmp_path_factory.mktemp("byte_level")
    return Tokenizer.from_directory(write_directory(folder, byte_level()))


@pytest.fixture(scope="session")
def pieces_tokenizer() -> Tokenizer:
    """SentencePiece kind: `<0xNN>` byte tokens, a space before every text."""
    return Tokenizer.from_gguf_metadata(sentencepiece_metadata())
