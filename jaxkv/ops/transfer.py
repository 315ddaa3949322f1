"""A transfer: the strided copy, indirect on the token, that leads from one layout to another.

Everything the kernels need is worked out here, on the host, from the two sentences: the handlers in `ffi/`
hold no policy, and the XLA forms in `gather.py` and `scatter.py` follow the same description.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import numpy as np
from jax.typing import DTypeLike

from ..layout import Layout, Plane, Sizes
from ..rotation import Pairing
from ..values import hashed_once


class Side(NamedTuple):
    """Byte strides of one side of a move."""

    page: int
    token: int
    head: int
    dim: int


class Move(NamedTuple):
    """Planes that share their strides: one kernel launch.

    A token of a plane is `heads * dims` runs of `run` contiguous bytes, the first of them at the given starts.
    Where `table` is not negative, `dims` counts pairs, `run` is one element, and pairs are turned by that table.
    """

    first_plane: int
    num_planes: int
    pool: Side
    chunk: Side
    pool_start: int
    chunk_start: int
    heads: int
    dims: int
    run: int
    table: int


FORMATS = {"bfloat16": 0, "float16": 1, "float32": 2, "float8_e4m3fn": 3, "float8_e5m2": 4}
"""Formats of keys that can be turned, as the handlers number them."""


class Turn(NamedTuple):
    """How a scatter turns keys on their way.

    Attributes:
        pairing: "half" or "interleaved"; pair i starts at element `i` or `2 * i` of the window.
        pairs: pairs that turn.
        distance: elements from a pair's first to its second.
        offset: where in a head's row the window starts.
        tables: for each layer that moves, the delta table it takes, or -1 where it does not turn.
    """

    pairing: Pairing
    pairs: int
    distance: int
    offset: int
    tables: tuple[int, ...]

    @property
    def num_tables(self) -> int:
        """Delta tables of a call."""
        return max(self.tables) + 1

    def rest(self, dim: int) -> list[tuple[int, int]]:
        """The stretches of a head's row that do not turn, as (start, length)."""
        if self.pairing == "interleaved":
            turning = [(self.offset, 2 * self.pairs)]
        else:
            turning = [(self.offset, self.pairs), (self.offset + self.distance, self.pairs)]
        edges = [0, *(edge for start, length in turning for edge in (start, start + length)), dim]
        return [(start, end - start) for start, end in zip(edges[::2], edges[1::2], strict=True) if end > start]


@hashed_once
@dataclasses.dataclass(frozen=True)
class Transfer:
    """Between which layouts KV moves.

    Attributes:
        pool: layout of the paged arrays.
        chunk: layout of the rows, with or without a page axis of its own (of the pool's page size).
        sizes: the model's sizes; `sizes.layers` is what the pool holds.
        layers: first and one-past-last layer to move; the chunk holds these alone.
    """

    pool: Layout
    chunk: Layout
    sizes: Sizes
    layers: tuple[int, int]

    def __post_init__(self) -> None:
        if not self.pool.has_axis("page"):
            raise ValueError(f"layout: axis 'page' is missing in {str(self.pool)!r}, which is to hold pages")
        if self.chunk.pad:
            raise ValueError(f"format: rows of a chunk are not padded, got {str(self.chunk)!r}")
        first, last = self.layers
        if not 0 <= first < last <= self.sizes.layers:
            raise ValueError(f"layers: [{first}, {last}) is no range of the pool's {self.sizes.layers} layers")

    @property
    def chunk_sizes(self) -> Sizes:
        """The chunk's sizes: the pool's, with the layers that move."""
        return self.sizes._replace(layers=self.layers[1] - self.layers[0])

    @property
    def pool_kinds(self) -> tuple[int, ...]:
        """Which sentence each pool leaf follows."""
        return leaf_kinds(self.pool, self.sizes)

    @property
    def chunk_kinds(self) -> tuple[int, ...]:
        """Which sentence each leaf of a chunk follows."""
        return leaf_kinds(self.chunk, self.chunk_sizes)

    def members(self, side: str) -> tuple[tuple[tuple[int, int], ...], ...]:
        """The (layer, kv) planes that each leaf of the pool or of a chunk holds, each side counting from 0."""
        layout, sizes = (self.pool, self.sizes) if side == "pool" else (self.chunk, self.chunk_sizes)
        return _members(layout, sizes)

    def narrowed(self) -> "tuple[Transfer, tuple[int, ...]]":
        """The same transfer over the pool leaves it touches alone, and the numbers of these leaves."""
        members = self.members("pool")
        if "layer" not in self.pool.levels:
            return self, tuple(range(len(members)))
        leaves = tuple(i for i, held in enumerate(members) if self.layers[0] <= held[0][0] < self.layers[1])
        sizes = self.chunk_sizes
        return dataclasses.replace(self, sizes=sizes, layers=(0, sizes.layers)), leaves

    def chunk_pages(self, rows: int) -> tuple[Sizes, int]:
        """Sizes and number of pages of a chunk of `rows` tokens; without a page axis it is one page.

        Raises:
            ValueError: the chunk layout has pages and `rows` is no whole number of them.
        """
        if not self.chunk.has_axis("page"):
            return self.chunk_sizes._replace(page_size=max(rows, 1)), 1 if rows else 0
        if rows % self.sizes.page_size:
            raise ValueError(
                f"rows: {rows} tokens are no multiple of the page size {self.sizes.page_size}, as chunk layout "
                f"{str(self.chunk)!r} needs"
            )
        return self.chunk_sizes, rows // self.sizes.page_size

    def chunk_shapes(self, rows: int) -> tuple[tuple[int, ...], ...]:
        """Shapes of one chunk's arrays of `rows` tokens."""
        sizes, pages = self.chunk_pages(rows)
        return tuple(self.chunk.shape(sizes, pages, kv=kind) for kind in self.chunk_kinds)

    def planes(self, num_pages: int, rows: int) -> tuple[tuple[Plane, Plane], ...]:
        """Pool plane and chunk plane of each (layer, kv), layers outermost."""
        chunk_sizes, chunk_pages = self.chunk_pages(rows)

        def chunk_plane(layer: int, kv: int) -> Plane:
            plane = self.chunk.plane(chunk_sizes, chunk_pages, layer - self.layers[0], kv)
            if self.chunk.has_axis("page"):
                return plane
            # Both sides are then addressed alike, by page and token in the page.
            page = plane.strides.token * self.sizes.page_size
            return plane._replace(strides=plane.strides._replace(page=page))

        return tuple(
            (self.pool.plane(self.sizes, num_pages, layer, kv), chunk_plane(layer, kv))
            for layer in range(*self.layers)
            for kv in range(self.sizes.planes)
        )


@functools.lru_cache(maxsize=512)
def _members(layout: Layout, sizes: Sizes) -> tuple[tuple[tuple[int, int], ...], ...]:
    held: list[list[tuple[int, int]]] = [[] for _ in range(layout.num_leaves(sizes.layers))]
    for layer in range(sizes.layers):
        for kv in range(sizes.planes):
            held[layout.plane(sizes, 1, layer, kv).leaf].append((layer, kv))
    return tuple(map(tuple, held))


def leaf_kinds(layout: Layout, sizes: Sizes) -> tuple[int, ...]:
    """For each leaf of a layout, which sentence it follows: 0, or 1 for V where K and V have one each."""
    two_sentences = len(layout.arrays) == 2
    return tuple(held[0][1] if two_sentences else 0 for held in _members(layout, sizes))


@functools.lru_cache(maxsize=512)
def attributes(
    transfer: Transfer, dtype: DTypeLike, num_pages: int, rows: int, num_chunks: int, turn: Turn | None = None
) -> dict[str, np.ndarray | np.int64]:
    """What the FFI handlers are told, in bytes.

    Args:
        transfer: the layouts.
        dtype: of pool and chunk.
        num_pages: pages of the pool.
        rows: tokens of each chunk.
        num_chunks: chunks in the call.
        turn: how keys are turned on the way, for a scatter.

    Returns:
        Attributes of the custom call: `planes` (pool leaf, byte offset, chunk leaf, byte offset, for each
        plane), `moves` (see `Move`), `page_size`, `num_slots`, `rows`, `num_chunks`, and for a scatter `turn`.
    """
    alike: dict[tuple[Any, ...], list[tuple[Plane, Plane]]] = {}
    for i, (pool, chunk) in enumerate(transfer.planes(num_pages, rows)):
        layer, kv = divmod(i, transfer.sizes.planes)
        table = turn.tables[layer] if turn is not None and kv == 0 else -1
        alike.setdefault((pool.strides[2:], chunk.strides[2:], table), []).append((pool, chunk))
    size = np.dtype(dtype).itemsize
    planes: list[tuple[int, int, int, int]] = []
    moves: list[Move] = []
    for (pool_strides, chunk_strides, table), members in alike.items():
        in_pool, in_chunk = (Side(*(step * size for step in strides)) for strides in (pool_strides, chunk_strides))
        span = (len(planes), len(members))
        planes += [(pool.leaf, pool.offset * size, chunk.leaf, chunk.offset * size) for pool, chunk in members]
        stretches = [(0, transfer.sizes.dim)]
        if turn is not None and table >= 0:
            stretches = turn.rest(transfer.sizes.dim)
            starts = (turn.offset * in_pool.dim, turn.offset * in_chunk.dim)
            moves.append(Move(*span, in_pool, in_chunk, *starts, transfer.sizes.heads, turn.pairs, size, table))
        for start, dims in stretches:
            moves.append(_plain_move(span, in_pool, in_chunk, start, dims, transfer.sizes.heads, size))
    flat = [[m.first_plane, m.num_planes, *m.pool, *m.chunk, *m[4:]] for m in moves]
    return {
        "planes": np.asarray(planes, np.int64).reshape(-1),
        "moves": np.asarray(flat, np.int64).reshape(-1),
        "page_size": np.int64(transfer.sizes.page_size),
        "num_slots": np.int64(num_pages * transfer.sizes.page_size),
        "rows": np.int64(rows),
        "num_chunks": np.int64(num_chunks),
    }


def turn_attribute(turn: Turn | None, dtype: DTypeLike) -> np.ndarray:
    """The attribute `turn` of a scatter: pairs, stride, distance, format and number of tables (0: nothing turns)."""
    if turn is None:
        return np.zeros(5, np.int64)
    stride = 2 if turn.pairing == "interleaved" else 1
    return np.asarray([turn.pairs, stride, turn.distance, FORMATS[np.dtype(dtype).name], turn.num_tables], np.int64)


def _plain_move(span: tuple[int, int], pool: Side, chunk: Side, start: int, dims: int, heads: int, size: int) -> Move:
    """The move of a stretch of each head's row, axes that are contiguous on both sides made one run."""
    starts, run = (start * pool.dim, start * chunk.dim), size
    if dims == 1 or pool.dim == chunk.dim == size:
        run, dims = run * dims, 1
        if heads == 1 or pool.head == chunk.head == run:
            run, heads = run * heads, 1
    pool, chunk = (
        side._replace(head=side.head if heads > 1 else 0, dim=side.dim if dims > 1 else 0) for side in (pool, chunk)
    )
    return Move(*span, pool, chunk, *starts, heads, dims, run, -1)
