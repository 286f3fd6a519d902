"""Attention of one new token per request over its paged KV.

R requests, H query heads, G KV heads, D head dim, B blocks in pool, S block_size,
M block-table width, E entries (requests, or pieces of long ones), N tokens of a padded entry

torch's attention wants the tokens of a head in a row, so KV is gathered out of the pool, but never
more than one tile of TILE_BYTES (kernels/cpu/tiles.py) at a time.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from pico_vllm.kernels.cpu.kv_rows import KVRows, whole_blocks
from pico_vllm.kernels.cpu.tiles import PIECES_PER_TILE, attend_with_lse

SPLIT_TOKENS = 600
"""Most padding of a group: 0.1 us a token, and a call more costs 60 us."""
BLOCKWISE_TOKENS = 2048
"""Padded tokens of a tile from which whole blocks are gathered. Below that they save less than it
costs to hide what a last block holds past its request's end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeTile:
    """Entries gathered and attended in one call."""

    num_entries: int
    block_size: int | None
    """Where rows are whole blocks."""
    rows: Tensor
    """[2 * e * G * N] int64, or whole blocks [2 * e * G * N / S], see KVRows."""
    requests: Tensor | None = None
    """[e] int64, rows of q; None where the entries are the batch in its order."""
    mask: Tensor | None = None
    """[e * G, 1, 1, N] in q's dtype, added to the scores; None without padding."""
    num_tokens: Tensor | None = None
    """With whole blocks: scalar N, attention reads no further."""
    unused: Tensor | None = None
    """With whole blocks and a mask: what the copy's rows [2 * e * G * N, D] hold past the ends of
    requests. It is cleared, since no mask hides NaN."""

    def tensors(self) -> dict[str, Tensor]:
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        return {name: value for name, value in values.items() if isinstance(value, Tensor)}


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeTiles:
    """What the attention of a decode batch reads, the same in every layer of one pool."""

    tiles: list[DecodeTile]
    num_kv_heads: int
    num_pieces: int = 1
    """P, of the longest request."""
    order: Tensor | None = None
    """[R * P] int64, each request's entries among those of all tiles; None where they are the
    batch in its order."""
    hides: Tensor | None = None
    """[R, P, 1] fp32, -inf where a request has fewer pieces than P; None if P is 1."""
    empty: Tensor | None = None
    """int64, requests without tokens."""

    @property
    def shape(self) -> tuple[object, ...]:
        """Equal for batches that differ in the numbers within their tensors only."""
        tiles = [(t.num_entries, t.block_size, *t.tensors()) for t in self.tiles]
        return (self.num_pieces, *self._own(), *tiles)

    def tensors(self) -> list[Tensor]:
        in_tiles = [tensor for tile in self.tiles for tensor in tile.tensors().values()]
        return [*self._own().values(), *in_tiles]

    def with_tensors(self, tensors: list[Tensor]) -> DecodeTiles:
        """Others in place of `tensors()`."""
        values = iter(tensors)
        own = {name: next(values) for name in self._own()}
        tiles = [replace(t, **{name: next(values) for name in t.tensors()}) for t in self.tiles]
        return replace(self, tiles=tiles, **own)

    def _own(self) -> dict[str, Tensor]:
        values = {"order": self.order, "hides": self.hides, "empty": self.empty}
        return {name: value for name, value in values.items() if value is not None}


@dataclass(slots=True)
class DecodeGroup:
    """Entries of similar length, attended in as few calls as fit into tiles."""

    requests: NDArray[np.int64]
    """[e], ascending if none is long."""
    blocks: NDArray[np.int64]
    """[e, n] block ids; past an entry's end anything."""
    lengths: NDArray[np.int64]
    """[e] tokens."""


@dataclass(slots=True)
class DecodePlan:
    """Which KV a decode batch reads."""

    block_size: int
    tile_tokens: int
    num_pieces: NDArray[np.int64]
    """[R] entries of each request."""
    groups: list[DecodeGroup] = field(default_factory=list)
    kv_rows: KVRows | None = None
    """Of the pool that the plan was bound to."""
    tiles: DecodeTiles | None = None

    @property
    def is_one_group(self) -> bool:
        """Whether every request has tokens and all entries are of similar length."""
        return len(self.groups) == 1 and bool(self.num_pieces.all())

    def bind(self, kv_rows: KVRows, dtype: torch.dtype) -> DecodeTiles:
        """Find the rows of this pool and make masks of its dtype, once for all its layers."""
        self.kv_rows = kv_rows
        is_batch = len(self.groups) == 1 and bool((self.num_pieces == 1).all())
        tiles = []
        for group in self.groups:
            parts = _parts(group, self.block_size, self.tile_tokens)
            is_whole = is_batch and len(parts) == 1
            tiles += [_tile(part, kv_rows, dtype, is_whole=is_whole) for part in parts]
        bound = DecodeTiles(tiles=tiles, num_kv_heads=kv_rows.num_heads)
        self.tiles = bound if is_batch or not tiles else self._merging(bound, kv_rows.device)
        return self.tiles

    def _merging(self, tiles: DecodeTiles, device: torch.device) -> DecodeTiles:
        owners = np.concatenate([group.requests for group in self.groups])
        by_request = np.argsort(owners, kind="stable")
        num_pieces = self.num_pieces
        pieces = np.arange(num_pieces.max())
        is_piece = pieces < num_pieces[:, None]
        starts = np.cumsum(num_pieces) - num_pieces
        order = by_request[np.where(is_piece, starts[:, None] + pieces, 0)]
        hides = empty = None
        if len(pieces) > 1:
            is_hidden = ~is_piece & (num_pieces > 0)[:, None]
            hides = np.where(is_hidden, np.float32(-np.inf), np.float32(0))[:, :, None]
        if not num_pieces.all():
            empty = np.flatnonzero(num_pieces == 0)

        def to_device(values: NDArray[np.generic] | None) -> Tensor | None:
            return None if values is None else torch.from_numpy(values).to(device)

        return replace(
            tiles,
            num_pieces=len(pieces),
            order=to_device(order.ravel()),
            hides=to_device(hides),
            empty=to_device(empty),
        )


def plan_decode(
    block_table: NDArray[np.int32],
    seq_lens: NDArray[np.int32],
    block_size: int,
    *,
    tile_tokens: int,
) -> DecodePlan:
    """Once per step on the host. block_table [R, M], seq_lens [R]; tile_tokens: see tiles.py."""
    requests, first_blocks, lengths, num_pieces = _entries(seq_lens, block_size, tile_tokens)
    plan = DecodePlan(block_size, tile_tokens, num_pieces)
    longest = int(lengths.max(initial=0))
    is_batch = len(lengths) == len(seq_lens) and bool((num_pieces == 1).all())
    if is_batch and longest and len(lengths) * longest - int(lengths.sum()) <= SPLIT_TOKENS:
        # The usual step: all requests whole and of similar length.
        blocks = block_table[:, : -(-longest // block_size)].astype(np.int64)
        plan.groups.append(DecodeGroup(requests, blocks, lengths))
        return plan
    by_length = np.argsort(-lengths, kind="stable")
    while len(by_length):
        descending = lengths[by_length]
        padding = np.cumsum(descending[0] - descending)
        size = int(np.searchsorted(padding, SPLIT_TOKENS, side="right"))
        members = np.sort(by_length[:size])
        columns = first_blocks[members, None] + np.arange(-(-int(descending[0]) // block_size))
        np.minimum(columns, block_table.shape[1] - 1, out=columns)
        blocks = block_table[requests[members, None], columns].astype(np.int64)
        plan.groups.append(DecodeGroup(requests[members], blocks, lengths[members]))
        by_length = by_length[size:]
    return plan


def _entries(
    seq_lens: NDArray[np.int32], block_size: int, tile_tokens: int
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Requests longer than half a tile are cut into pieces of about equal length.

    Returns request, first block and tokens of each entry, and the number of each request's entries.
    """
    lengths = seq_lens.astype(np.int64)
    whole_tokens = tile_tokens // 2
    if lengths.max(initial=0) <= whole_tokens:
        requests = np.flatnonzero(lengths)
        is_used = (lengths > 0).astype(np.int64)
        return requests, np.zeros_like(requests), lengths[requests], is_used
    num_blocks = -(-lengths // block_size)
    most_blocks = max(1, tile_tokens // (PIECES_PER_TILE * block_size))
    num_pieces = np.where(lengths > whole_tokens, -(-num_blocks // most_blocks), 1)
    piece_blocks = np.maximum(-(-num_blocks // num_pieces), 1)
    num_pieces = -(-num_blocks // piece_blocks)
    requests = np.repeat(np.arange(len(lengths)), num_pieces)
    pieces = np.arange(len(requests)) - np.repeat(np.cumsum(num_pieces) - num_pieces, num_pieces)
    # First pieces first: the shorter last ones share tiles, and only those need masks.
    by_piece = np.lexsort((requests, pieces))
    requests, pieces = requests[by_piece], pieces[by_piece]
    first_blocks = pieces * piece_blocks[requests]
    left = lengths[requests] - first_blocks * block_size
    return requests, first_blocks, np.minimum(left, piece_blocks[requests] * block_size), num_pieces


def _parts(group: DecodeGroup, block_size: int, tile_tokens: int) -> list[DecodeGroup]:
    """As few tiles as hold the group, of about equal size."""
    num_entries, num_blocks = group.blocks.shape
    num_parts = -(-num_entries // max(1, tile_tokens // (num_blocks * block_size)))
    if num_parts == 1:
        return [group]
    size = -(-num_entries // num_parts)
    return [
        DecodeGroup(group.requests[part], group.blocks[part], group.lengths[part])
        for part in (slice(start, start + size) for start in range(0, num_entries, size))
    ]


def _tile(group: DecodeGroup, kv_rows: KVRows, dtype: torch.dtype, *, is_whole: bool) -> DecodeTile:
    block_size, num_heads = kv_rows.block_size, kv_rows.num_heads
    lengths, longest = group.lengths, int(group.lengths.max())
    blocks = group.blocks[:, : -(-longest // block_size)]
    num_entries, num_blocks = blocks.shape
    is_padded = int(lengths.min()) < longest
    is_blockwise = num_entries * num_blocks * block_size >= BLOCKWISE_TOKENS
    num_tokens = unused = mask = None
    if is_blockwise:
        # A first block with others after it is full: it stands for blocks past the shorter ends.
        is_used = np.arange(num_blocks) * block_size < lengths[:, None]
        blocks = np.where(is_used, blocks, blocks[lengths.argmax(), 0])
        rows = kv_rows.to_device(kv_rows.of_blocks(blocks).transpose(0, 1, 3, 2))
        num_tokens = torch.tensor(longest)
        if is_padded:
            unused = kv_rows.to_device(_unused(lengths, num_blocks, kv_rows))
    else:
        slots = (blocks[:, :, None] * block_size + np.arange(block_size)).reshape(num_entries, -1)
        slots = slots[:, :longest]
        if is_padded:
            is_real = np.arange(longest) < lengths[:, None]
            slots = np.where(is_real, slots, slots[:, :1])
        rows = kv_rows.to_device(kv_rows.of_slots(slots).transpose(0, 1, 3, 2))
    if is_padded:
        is_real = np.arange(longest) < lengths[:, None]
        hides = np.where(is_real, np.float32(0), np.float32(-np.inf))
        hides = hides.repeat(num_heads, axis=0)[:, None, None]
        mask = torch.from_numpy(hides).to(kv_rows.device, dtype)
    return DecodeTile(
        num_entries=num_entries,
        block_size=block_size if is_blockwise else None,
        rows=rows,
        requests=None if is_whole else kv_rows.to_device(group.requests),
        mask=mask,
        num_tokens=num_tokens,
        unused=unused,
    )


def _unused(lengths: NDArray[np.int64], num_blocks: int, kv_rows: KVRows) -> NDArray[np.int64]:
    """Rows of [2, e, G, N] that lie in an entry's last block and past its end."""
    offsets = np.arange(kv_rows.block_size)
    entries, past = np.nonzero(offsets < -lengths[:, None] % kv_rows.block_size)
    num_pairs, head_rows = len(lengths) * kv_rows.num_heads, num_blocks * kv_rows.block_size
    rows = entries * kv_rows.num_heads * head_rows + lengths[entries] + past
    heads = np.arange(2)[:, None] * num_pairs + np.arange(kv_rows.num_heads)
    return heads.reshape(-1, 1) * head_rows + rows


def paged_decode(
    q_RHD: Tensor, k_BGSD: Tensor, v_BGSD: Tensor, plan: DecodePlan, *, scale: float
) -> Tensor:
    """Attend one new token per request over its paged KV.

    Shapes:
        q_RHD          bf16, fp16 or fp32; strides free
        k/v_BGSD       K and V of one layer of the pool, dtype of q
        plan           plan_decode of the block table and lengths; lengths count the new token
        returns        [R, H, D], dtype of q; softmax and sums in fp32

    Raises:
        ValueError: H is not a multiple of G, or k_BGSD and v_BGSD are not a layer of a pool.

    Not checked: block ids in range. A row with seq_len 0 gives zeros; what slots past a request's
    end hold does not count. Same answer as paged_decode_reference.
    """
    kv_rows = plan.kv_rows or KVRows.of(k_BGSD, v_BGSD)
    if q_RHD.shape[1] % kv_rows.num_heads:
        raise ValueError(
            f"{q_RHD.shape[1]} query heads are not a multiple of {kv_rows.num_heads} KV heads"
        )
    tiles = plan.tiles or plan.bind(kv_rows, k_BGSD.dtype)
    return attend_tiles(q_RHD, kv_rows.matrix(k_BGSD), tiles, scale=scale)


def attend_tiles(q_RHD: Tensor, matrix: Tensor, tiles: DecodeTiles, *, scale: float) -> Tensor:
    """paged_decode for a layer's KVRows.matrix: tensors only, so that a graph can be made of it."""
    if not tiles.tiles:
        return torch.zeros(q_RHD.shape, dtype=q_RHD.dtype, device=q_RHD.device)
    # int: in a graph these are constants, not operations of every layer.
    num_heads, head_dim = (int(size) for size in q_RHD.shape[1:])
    if tiles.order is None and len(tiles.tiles) == 1:
        return _attend_tile(q_RHD, matrix, tiles.tiles[0], tiles, scale)[0]
    outs, lses = [], []
    for tile in tiles.tiles:
        out_eHD, lse_eH = _attend_tile(q_RHD, matrix, tile, tiles, scale)
        outs.append(out_eHD)
        lses.append(lse_eH)
    out_EHD = torch.cat(outs)
    if tiles.order is None:
        return out_EHD
    out_RHD = out_EHD.index_select(0, tiles.order)
    if tiles.hides is not None:
        lse_EH = torch.cat(lses).index_select(0, tiles.order)
        lse_RPH = lse_EH.view(-1, tiles.num_pieces, num_heads)
        shares_RPH1 = torch.softmax(lse_RPH + tiles.hides, 1)[..., None]
        out_RPHD = out_RHD.view(-1, tiles.num_pieces, num_heads, head_dim)
        out_RHD = (out_RPHD * shares_RPH1).sum(1).to(q_RHD.dtype)
    if tiles.empty is not None:
        out_RHD.index_fill_(0, tiles.empty, 0)
    return out_RHD


def _attend_tile(
    q_RHD: Tensor, matrix: Tensor, tile: DecodeTile, tiles: DecodeTiles, scale: float
) -> tuple[Tensor, Tensor | None]:
    """One attention for e * G (entry, KV head) pairs; their query heads are attention's queries.

    Returns out [e, H, D] and, where pieces are to be merged, lse [e, H].
    """
    num_heads, head_dim = (int(size) for size in q_RHD.shape[1:])
    num_pairs = tile.num_entries * tiles.num_kv_heads
    q_eHD = q_RHD if tile.requests is None else q_RHD.index_select(0, tile.requests)
    q_P1hD = q_eHD.reshape(num_pairs, 1, num_heads // tiles.num_kv_heads, head_dim)
    if tile.block_size is not None:
        matrix = whole_blocks(matrix, tile.block_size)
    gathered = matrix.index_select(0, tile.rows)
    if tile.unused is not None:
        gathered.view(-1, head_dim).index_fill_(0, tile.unused, 0)
    kv = gathered.view(2, num_pairs, 1, -1, head_dim)
    if tile.num_tokens is not None:
        kv = kv[:, :, :, : tile.num_tokens]
    k_P1ND, v_P1ND = kv.unbind()
    if tiles.hides is not None:
        out_P1hD, lse_P1h = attend_with_lse(q_P1hD, k_P1ND, v_P1ND, tile.mask, scale=scale)
        lse_eH = lse_P1h.reshape(tile.num_entries, num_heads)
        return out_P1hD.view(tile.num_entries, num_heads, head_dim), lse_eH
    out_P1hD = functional.scaled_dot_product_attention(
        q_P1hD, k_P1ND, v_P1ND, attn_mask=tile.mask, scale=scale
    )
    return out_P1hD.view(tile.num_entries, num_heads, head_dim), None
