"""Chain keys: the name of a block's KV below the device. Host only.

A block's key is the SHA-256 of the key before it and of its own tokens; the first one follows a
root made of the salt and, where blocks outlive the process, of what the KV was computed with. So a
key stands for all tokens up to the end of its block, and for nothing else; tiers keep the block's
tokens and its parent's key beside it and compare them as well.
"""

from __future__ import annotations

from hashlib import sha256

Key = bytes


def root_key(identity: bytes, salt: str) -> Key:
    """identity: of the model and of how its KV is computed; of one length everywhere."""
    return sha256(b"pico-vllm kv" + identity + salt.encode()).digest()


def chain_keys(parent: Key, tokens: bytes, block_bytes: int) -> list[Key]:
    """Of the whole blocks of some tokens, which follow the parent's."""
    keys = []
    for at in range(0, len(tokens) - block_bytes + 1, block_bytes):
        parent = sha256(parent + tokens[at : at + block_bytes]).digest()
        keys.append(parent)
    return keys
