"""Chain keys: the name of a block's KV below the device. Host only.

A block's key is the SHA-256 of the key before it and of its own tokens; the first one follows a
root made of the salt and, where blocks outlive the process, of what the KV was computed with. So a
key stands for all tokens up to the end of its block, and for nothing else; tiers keep the block's
tokens and its parent's key beside it and compare them as well.
"""

from __future__ import annotations

from hashlib import sha256

from pico_vllm.cache.radix_tree import TOKEN_BYTES, num_common_tokens

Key = bytes
MAX_KNOWN = 64
"""Prompts whose keys are kept."""


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


class KnownChains:
    """Makes the keys of prompts, and keeps those of the last MAX_KNOWN: one that begins like
    another, as the next turn of a conversation does, takes those of what they have in common."""

    def __init__(self, block_bytes: int) -> None:
        self._block_bytes = block_bytes
        self._known: list[tuple[Key, bytes, list[Key]]] = []
        """Root, tokens, and the keys of those; the last one last."""

    def keys(self, root: Key, tokens: bytes) -> list[Key]:
        """Of the whole blocks. Not to be changed."""
        size = self._block_bytes
        tokens = tokens[: len(tokens) // size * size]
        if not tokens:
            return []
        if self._known and self._known[-1][:2] == (root, tokens):  # asked again, as it enters
            return self._known[-1][2]
        keys = self._shared(root, tokens)
        if len(keys) * size < len(tokens):
            keys = keys + chain_keys(keys[-1] if keys else root, tokens[len(keys) * size :], size)
        self._known.append((root, tokens, keys))
        del self._known[:-MAX_KNOWN]
        return keys

    def _shared(self, root: Key, tokens: bytes) -> list[Key]:
        """What is known of the first blocks: all of the longest prompt that goes on with these
        tokens, which is forgotten, or what the last one has in common that begins like this."""
        first, whole, like = tokens[: self._block_bytes], -1, -1
        for index, (of_root, known, _) in enumerate(self._known):
            if of_root == root and known.startswith(first):
                like = index
                if tokens.startswith(known) and (
                    whole < 0 or len(known) > len(self._known[whole][1])
                ):
                    whole = index
        if whole >= 0:
            return self._known.pop(whole)[2]
        if like < 0:
            return []
        _, known, keys = self._known[like]
        return keys[: num_common_tokens(tokens, known) * TOKEN_BYTES // self._block_bytes]
