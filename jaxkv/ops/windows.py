"""The XLA form of a transfer: (page, token) windows of the pool, as bit patterns.

Canonical rows are `[layer, kv, token, head, dim]`; `read` and `write` exchange them with the pool, `pack` and
`unpack` with the leaves of a chunk.
"""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from ..rotation import rotate
from .transfer import Transfer, Turn

CANONICAL = ("layer", "kv", "token", "head", "dim")


@dataclasses.dataclass(frozen=True)
class Windows:
    """One pool leaf in the terms of XLA's gather and scatter: a window is all that the leaf holds of a token.

    Attributes:
        axes: the single axes of the leaf, outermost first.
        atom_sizes: their sizes in the array, padding included.
        window: their sizes in one window, padding left out.
        first_layer: where the windows start along `layer`.
    """

    axes: tuple[str, ...]
    atom_sizes: tuple[int, ...]
    window: tuple[int, ...]
    first_layer: int

    @classmethod
    def of(cls, transfer: Transfer, num_pages: int, kind: int) -> "Windows":
        """The windows of a leaf that follows sentence `kind` of the pool."""
        atoms = transfer.pool.atoms(transfer.sizes, num_pages, kv=kind)
        first, last = transfer.layers
        sizes = {"layer": last - first, "page": 1, "token": 1, "kv": 2}
        sizes |= {"head": transfer.sizes.heads, "dim": transfer.sizes.dim}
        axes = tuple(axis for axis, _ in atoms)
        return cls(axes, tuple(size for _, size in atoms), tuple(sizes[axis] for axis in axes), first)

    @property
    def indexed(self) -> tuple[int, ...]:
        """Array axes that the index has a column for: page, token and, where the leaf has it, layer."""
        return tuple(self.axes.index(axis) for axis in ("page", "token", "layer") if axis in self.axes)

    @property
    def single(self) -> tuple[int, ...]:
        """Array axes of which a window has one element and that vanish from it: page and token."""
        return tuple(sorted(self.indexed[:2]))

    @property
    def inner(self) -> tuple[str, ...]:
        """The axes of a window."""
        return tuple(axis for axis in self.axes if axis not in ("page", "token"))

    def index(self, slots: jax.Array, page_size: int) -> jax.Array:
        """Starts of the windows of some slots, int32 `[n, 2 or 3]`.

        A slot outside the pool starts past the last page, where XLA drops it; a negative start would count from
        the end instead. The starts past the end differ, so that they too keep a promise of unique indices.
        """
        num_pages = self.atom_sizes[self.axes.index("page")]
        outside = (slots < 0) | (slots >= num_pages * page_size)
        beyond = jnp.int32(num_pages) + jnp.arange(slots.shape[0], dtype=jnp.int32)
        page = jnp.where(outside, beyond, slots // jnp.int32(page_size))
        columns = [page, jnp.where(outside, jnp.int32(0), slots % jnp.int32(page_size))]
        if "layer" in self.axes:
            columns.append(jnp.full_like(slots, self.first_layer))
        return jnp.stack(columns, axis=1)

    def to_canonical(self, windows: jax.Array) -> jax.Array:
        """`[n, *inner]` to canonical rows of the planes this leaf holds."""
        return _reorder(windows, ("token", *self.inner), CANONICAL)

    def from_canonical(self, rows: jax.Array) -> jax.Array:
        """Canonical rows of the planes this leaf holds to `[n, *inner]`."""
        return _reorder(rows, CANONICAL, ("token", *self.inner))


def read(transfer: Transfer, num_pages: int, pages: Sequence[jax.Array], slots: jax.Array) -> jax.Array:
    """Canonical rows of the slots, as bits; zero where a slot is not in the pool."""
    parts: dict[tuple[int, int], jax.Array] = {}
    for leaf, (page, kind) in enumerate(zip(pages, transfer.pool_kinds, strict=True)):
        windows = Windows.of(transfer, num_pages, kind)
        taken = jax.lax.gather(
            as_bits(page).reshape(windows.atom_sizes),
            windows.index(slots, transfer.sizes.page_size),
            jax.lax.GatherDimensionNumbers(
                offset_dims=tuple(range(1, 1 + len(windows.inner))),
                collapsed_slice_dims=windows.single,
                start_index_map=windows.indexed,
            ),
            windows.window,
            mode=jax.lax.GatherScatterMode.FILL_OR_DROP,
            fill_value=0,
        )
        parts[transfer.members("pool")[leaf][0]] = windows.to_canonical(taken)
    return _assemble(parts, transfer)


def write(
    transfer: Transfer, num_pages: int, pages: Sequence[jax.Array], slots: jax.Array, rows: jax.Array
) -> list[jax.Array]:
    """The pool with canonical rows (as bits) written to distinct slots; slots outside the pool are skipped."""
    out = []
    for leaf, (page, kind) in enumerate(zip(pages, transfer.pool_kinds, strict=True)):
        windows = Windows.of(transfer, num_pages, kind)
        written = jax.lax.scatter(
            as_bits(page).reshape(windows.atom_sizes),
            windows.index(slots, transfer.sizes.page_size),
            windows.from_canonical(_select(rows, transfer.members("pool")[leaf], transfer.layers[0])),
            jax.lax.ScatterDimensionNumbers(
                update_window_dims=tuple(range(1, 1 + len(windows.inner))),
                inserted_window_dims=windows.single,
                scatter_dims_to_operand_dims=windows.indexed,
            ),
            unique_indices=True,
            mode=jax.lax.GatherScatterMode.FILL_OR_DROP,
        )
        out.append(from_bits(written.reshape(page.shape), page.dtype))
    return out


def pack(transfer: Transfer, rows: jax.Array) -> list[jax.Array]:
    """Canonical rows of one chunk to its leaves."""
    sizes, pages = transfer.chunk_pages(rows.shape[2])
    out = []
    for leaf, (shape, kind) in enumerate(zip(transfer.chunk_shapes(rows.shape[2]), transfer.chunk_kinds, strict=True)):
        held = _select(rows, transfer.members("chunk")[leaf], 0)
        if held.size == 0:
            out.append(held.reshape(shape))  # no tokens, hence no page to split them by
            continue
        split = held.reshape((*held.shape[:2], pages, sizes.page_size, *held.shape[3:]))
        axes = tuple(axis for axis, _ in transfer.chunk.atoms(sizes, pages, kv=kind))
        out.append(_reorder(split, ("layer", "kv", "page", "token", "head", "dim"), axes).reshape(shape))
    return out


def unpack(transfer: Transfer, leaves: Sequence[jax.Array], num_rows: int) -> jax.Array:
    """The leaves of one chunk to canonical rows."""
    sizes, pages = transfer.chunk_pages(num_rows)
    parts: dict[tuple[int, int], jax.Array] = {}
    for leaf, (array, kind) in enumerate(zip(leaves, transfer.chunk_kinds, strict=True)):
        atoms = transfer.chunk.atoms(sizes, pages, kv=kind)
        split = array.reshape(tuple(size for _, size in atoms))
        rows = _reorder(split, tuple(axis for axis, _ in atoms), ("layer", "kv", "page", "token", "head", "dim"))
        rows = rows.reshape((*rows.shape[:2], num_rows, *rows.shape[4:]))
        layer, kv = transfer.members("chunk")[leaf][0]
        parts[layer + transfer.layers[0], kv] = rows
    return _assemble(parts, transfer)


def turn_keys(rows: jax.Array, turn: Turn, deltas: Sequence[jax.Array], dtype: DTypeLike) -> jax.Array:
    """Canonical rows (as bits) with their keys turned.

    Args:
        rows: `[layer, kv, token, head, dim]`.
        turn: which layers turn, and how.
        deltas: cos and sin `[tables, token, pairs]`, and whether a token turns `[tables, token]`.
        dtype: the float format of the keys.
    """
    cos, sin, moved = deltas
    layers = []
    for layer, table in enumerate(turn.tables):
        if table < 0:
            layers.append(rows[layer])
            continue
        keys = rotate(
            rows[layer, 0],
            cos[table],
            sin[table],
            moved[table] != 0,
            pairing=turn.pairing,
            pair_distance=turn.distance,
            offset=turn.offset,
            dtype=dtype,
        )
        layers.append(jnp.concatenate([keys[None], rows[layer, 1:]]))
    return jnp.stack(layers)


def bits_dtype(dtype: DTypeLike) -> jnp.dtype:
    """The integers that a payload moves as. Integers move as they are: XLA makes a copy for every new type."""
    dtype = jnp.dtype(dtype)
    return dtype if jnp.issubdtype(dtype, jnp.integer) else jnp.dtype(f"uint{8 * dtype.itemsize}")


def as_bits(x: jax.Array) -> jax.Array:
    """The payload as integers of its width: XLA's moves of floats may change the payload of a NaN."""
    bits = bits_dtype(x.dtype)
    return x if x.dtype == bits else jax.lax.bitcast_convert_type(x, bits)


def from_bits(x: jax.Array, dtype: DTypeLike) -> jax.Array:
    """The payload back in its dtype."""
    return x if x.dtype == dtype else jax.lax.bitcast_convert_type(x, dtype)


def _assemble(parts: dict[tuple[int, int], jax.Array], transfer: Transfer) -> jax.Array:
    """Canonical rows of all planes from the parts that single leaves hold, keyed by their first (layer, kv)."""
    by_layer: dict[int, list[jax.Array]] = {}
    for (layer, _), rows in sorted(parts.items()):
        by_layer.setdefault(max(layer, transfer.layers[0]), []).append(rows)
    return jnp.concatenate([jnp.concatenate(kv, axis=1) for kv in by_layer.values()], axis=0)


def _select(rows: jax.Array, members: Sequence[tuple[int, int]], first_layer: int) -> jax.Array:
    """The planes of canonical rows that a leaf with these members holds (and that `rows` has)."""
    layers = sorted({layer - first_layer for layer, _ in members if 0 <= layer - first_layer < rows.shape[0]})
    planes = sorted({kv for _, kv in members})
    return rows[layers[0] : layers[-1] + 1, planes[0] : planes[-1] + 1]


def _reorder(x: jax.Array, axes: tuple[str, ...], wanted: tuple[str, ...]) -> jax.Array:
    """Transposes `axes` to `wanted`; an axis that only one side names has length one and is dropped or made."""
    kept = [axis for axis in axes if axis in wanted]
    x = x.reshape(tuple(size for axis, size in zip(axes, x.shape, strict=True) if axis in wanted))
    x = x.transpose([kept.index(axis) for axis in wanted if axis in kept])
    sizes = iter(x.shape)
    return x.reshape(tuple(next(sizes) if axis in kept else 1 for axis in wanted))
