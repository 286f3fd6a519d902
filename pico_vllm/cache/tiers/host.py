"""HostTier: which blocks lie in which slots of host memory. Host only; it moves no byte.

Owner of: the slots, and the order in which blocks go. Invariant (`check_invariants`): each slot is
free or of exactly one block, in the index or dropped from it. A block is found once it is ready:
its copy is known to be done. While somebody copies to or from its slot it is pinned, and the slot
is given to nobody else; a block that is dropped meanwhile is found no more, and its slot is free
when the last pin goes.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from pico_vllm.cache.tiers.chain import Key


@dataclass(slots=True, eq=False)
class HostBlock:
    key: Key
    parent: Key
    tokens: bytes
    slot: int
    is_ready: bool = False
    is_dropped: bool = False
    num_pins: int = 0
    is_from_disk: bool = False
    """Nobody has used it since it was read."""


class HostTier:
    def __init__(
        self, num_blocks: int, on_evict: Callable[[HostBlock], None] = lambda block: None
    ) -> None:
        """on_evict: told of a block that goes for another."""
        self.num_blocks = num_blocks
        self._on_evict = on_evict
        self._free = list(range(num_blocks - 1, -1, -1))
        self._blocks: OrderedDict[Key, HostBlock] = OrderedDict()
        """The one whose last use is longest ago first."""
        self._dropped: dict[int, HostBlock] = {}
        """Out of the index, and pinned, by slot."""

    def __len__(self) -> int:
        return len(self._blocks)

    def get(self, key: Key) -> HostBlock | None:
        return self._blocks.get(key)

    def find(self, key: Key, tokens: bytes) -> HostBlock | None:
        """A block that may be copied from."""
        block = self._blocks.get(key)
        return block if block is not None and block.is_ready and block.tokens == tokens else None

    def num_found(self, keys: Sequence[Key], tokens: bytes) -> int:
        """Of how many of the first keys `find` has a block. tokens: of all their blocks."""
        found = []
        for block in map(self._blocks.get, keys):
            if block is None or not block.is_ready:
                break
            found.append(block.tokens)
        if tokens.startswith(b"".join(found)):  # in one go, as keys hardly ever lie
            return len(found)
        size = len(found[0])
        of_blocks = (tokens[at : at + size] for at in range(0, len(tokens), size))
        return next(index for index, each in enumerate(of_blocks) if each != found[index])

    def has_all(self, keys: Iterable[Key]) -> bool:
        return all(map(self._blocks.__contains__, keys))

    def take(self, key: Key, parent: Key, tokens: bytes) -> HostBlock | None:
        """A slot for a block that is not here, pinned for who fills it: a free one, or that of the
        block whose last use is longest ago. None where all are pinned."""
        assert key not in self._blocks
        if not self._free:
            for oldest in self._blocks.values():
                if not oldest.num_pins:
                    break
            else:
                return None
            self._on_evict(oldest)
            self.drop(oldest)
        block = HostBlock(key, parent, tokens, self._free[-1], num_pins=1)
        self._blocks[key] = block
        self._free.pop()
        return block

    def use(self, keys: Iterable[Key]) -> None:
        """Let blocks that are here be the last to go."""
        move_to_end = self._blocks.move_to_end
        for key in keys:
            move_to_end(key)

    def pin(self, block: HostBlock) -> None:
        block.num_pins += 1

    def pin_ready(self, keys: Iterable[Key]) -> list[HostBlock]:
        """Pin and use blocks that may be copied from, all of which are here."""
        index, blocks = self._blocks, []
        for key in keys:
            block = index[key]
            assert block.is_ready
            block.num_pins += 1
            index.move_to_end(key)
            blocks.append(block)
        return blocks

    def unpin(self, block: HostBlock) -> None:
        assert block.num_pins > 0, "unpinned more often than pinned"
        block.num_pins -= 1
        if block.is_dropped and not block.num_pins:
            del self._dropped[block.slot]
            self._free.append(block.slot)

    def unpin_all(self, blocks: Iterable[HostBlock]) -> None:
        for block in blocks:
            # As most are; the rest is in one place.
            if block.num_pins > 0 and not block.is_dropped:
                block.num_pins -= 1
            else:
                self.unpin(block)

    def drop(self, block: HostBlock) -> None:
        """Let nobody find it again."""
        if block.is_dropped:
            return
        del self._blocks[block.key]
        block.is_dropped = True
        if block.num_pins:
            self._dropped[block.slot] = block
        else:
            self._free.append(block.slot)

    def clear(self) -> None:
        for block in list(self._blocks.values()):
            self.drop(block)

    def check_invariants(self) -> None:
        slots = [block.slot for block in (*self._blocks.values(), *self._dropped.values())]
        assert sorted([*slots, *self._free]) == list(range(self.num_blocks)), "a slot lost or twice"
        for key, block in self._blocks.items():
            assert block.key == key and not block.is_dropped
            assert block.is_ready or block.num_pins, "nobody fills it"
        assert all(block.is_dropped and block.num_pins for block in self._dropped.values())
