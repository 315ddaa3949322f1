"""scatter: rows of chunks into chosen slots of the pages, in place where the pages are donated."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.custom_partitioning import custom_partitioning

from . import primitive, windows
from .sharding import Leaf, Leaves, describe
from .transfer import Transfer, Turn, attributes, turn_attribute


def scatter_leaves(
    slots: jax.Array,
    chunks: Sequence[jax.Array],
    pages: Sequence[jax.Array],
    *,
    transfer: Transfer,
    num_chunks: int,
    rows: int,
    implementation: str | None,
    turn: Turn | None = None,
    deltas: Sequence[jax.Array] = (),
) -> list[jax.Array]:
    """Scatters the rows of `num_chunks` chunks; distinct slots are the caller's to see to.

    Args:
        slots: int32 `[num_chunks * rows + zeroed]`: the slot of each row, then slots to fill with zero bytes. A
            slot that is not in the pool is skipped.
        chunks: the leaves of the first chunk, then those of the second, and so on.
        pages: the pool leaves that `transfer` covers.
        transfer: the two layouts.
        num_chunks: chunks given.
        rows: rows of each chunk.
        implementation: None, "xla" or "ffi".
        turn: how keys are turned on the way, or None.
        deltas: with `turn`, its delta tables: cos and sin, float32 `[tables, rows of all chunks, pairs]`, and
            whether a row turns at all, int32 `[tables, rows of all chunks]`.

    Returns:
        The pool leaves, written.
    """
    with jax.named_scope("jaxkv.scatter"):
        instead = "give it all rows and slots at once, in flat arrays"
        operands = primitive.guarded("scatter", instead, [slots, *deltas, *chunks, *pages])
        shapes = tuple(x.shape for x in operands)
        return list(_partitioned(shapes, transfer, num_chunks, rows, implementation, turn)(*operands))


def last_wins(slots: jax.Array, num_slots: int) -> jax.Array:
    """Keeps the last of equal slots and makes the others -1, for slots whose values are not known when tracing.

    Args:
        slots: int32 `[n]`.
        num_slots: slots in the pool; others are left alone.
    """
    order = jnp.arange(slots.shape[0], dtype=jnp.int32)
    inside = (slots >= 0) & (slots < num_slots)
    at = jnp.where(inside, slots, jnp.int32(num_slots))
    last = jnp.full((num_slots,), -1, jnp.int32).at[at].max(order, mode="drop")
    wins = last.at[at].get(mode="fill", fill_value=-1) == order
    return jnp.where(wins | ~inside, slots, jnp.int32(-1))


class Operands(NamedTuple):
    """What a scatter takes, apart."""

    slots: Any
    deltas: Sequence[Any]
    chunks: Sequence[Any]
    pool: Sequence[Any]


def split_operands(operands: Sequence[Any], transfer: Transfer, num_chunks: int, turn: Turn | None) -> Operands:
    """Takes the operands of a scatter apart (or their types, or shapes)."""
    chunks = 1 if turn is None else 4
    pool = chunks + num_chunks * len(transfer.chunk_kinds)
    return Operands(operands[0], operands[1:chunks], operands[chunks:pool], operands[pool:])


def _leaves(slots: Any, pages: Sequence[Any], transfer: Transfer, num_chunks: int, rows: int) -> Leaves:
    return describe(transfer, slots.shape[0], tuple(page.shape for page in pages), num_chunks, rows)


def _abstract(
    *operands: Any, transfer: Transfer, num_chunks: int, rows: int, implementation: str | None, turn: Turn | None
) -> list[Any]:
    del implementation
    slots, _, _, pages = split_operands(operands, transfer, num_chunks, turn)
    _leaves(slots, pages, transfer, num_chunks, rows)
    # The pool's own types: sharding, memory space and varying axes travel with them.
    return primitive.result_types(operands, pages)


@functools.lru_cache(maxsize=256)
def _partitioned(
    shapes: tuple[tuple[int, ...], ...],
    transfer: Transfer,
    num_chunks: int,
    rows: int,
    implementation: str | None,
    turn: Turn | None,
) -> Callable[..., Sequence[jax.Array]]:
    slots_shape, delta_shapes, _, pool_shapes = split_operands(shapes, transfer, num_chunks, turn)
    leaves = describe(transfer, slots_shape[0], tuple(pool_shapes), num_chunks, rows)
    inputs = (leaves.slots, *map(Leaf, delta_shapes), *leaves.chunks, *leaves.pool)

    def local(ways: int) -> Callable[..., Sequence[jax.Array]]:
        sizes = transfer.sizes._replace(heads=transfer.sizes.heads // ways)
        return functools.partial(
            _scatter_p.bind,
            transfer=dataclasses.replace(transfer, sizes=sizes),
            num_chunks=num_chunks,
            rows=rows,
            implementation=implementation,
            turn=turn,
        )

    def partition(mesh: Any, operands: Any, results: Any) -> Any:
        del results
        split = leaves.split(split_operands(operands, transfer, num_chunks, turn).pool)
        place = [leaf.sharding(mesh, split.mesh_axes) for leaf in inputs]
        results_at = len(place) - len(leaves.pool)
        return mesh, local(split.ways), place[results_at:], tuple(place)  # results: a list, as `bind`'s

    call = custom_partitioning(local(1))
    rule, sizes = leaves.rule(inputs, leaves.pool)
    call.def_partition(
        partition=partition,
        infer_sharding_from_operands=lambda *args: partition(*args)[2],
        sharding_rule=rule,
        **sizes,
    )
    return call


def _xla(*operands: jax.Array, transfer: Transfer, num_chunks: int, rows: int, turn: Turn | None) -> list[jax.Array]:
    slots, deltas, chunks, pages = split_operands(operands, transfer, num_chunks, turn)
    leaves = _leaves(slots, pages, transfer, num_chunks, rows)
    per_chunk = len(transfer.chunk_kinds)
    parts = []
    for c in range(num_chunks):
        part = [windows.as_bits(leaf) for leaf in chunks[c * per_chunk : (c + 1) * per_chunk]]
        parts.append(windows.unpack(transfer, part, rows))
    if turn is not None:
        parts = [windows.turn_keys(jnp.concatenate(parts, axis=2), turn, deltas, pages[0].dtype)]
    zeroed = slots.shape[0] - num_chunks * rows
    if zeroed:
        size = transfer.chunk_sizes
        bits = windows.bits_dtype(pages[0].dtype)
        parts.append(jnp.zeros((size.layers, size.planes, zeroed, size.heads, size.dim), bits))
    return windows.write(transfer, leaves.num_pages, pages, slots, jnp.concatenate(parts, axis=2))


def _ffi(ctx: Any, *operands: Any, transfer: Transfer, num_chunks: int, rows: int, turn: Turn | None) -> Any:
    slots, _, _, pages = split_operands(ctx.avals_in, transfer, num_chunks, turn)
    leaves = _leaves(slots, pages, transfer, num_chunks, rows)
    attrs = attributes(transfer, pages[0].dtype, leaves.num_pages, rows, num_chunks, turn)
    first = len(operands) - len(pages)
    aliases = {first + i: i for i in range(len(pages))}
    lowering = jax.ffi.ffi_lowering("jaxkv_scatter", operand_output_aliases=aliases)
    return lowering(ctx, *operands, **attrs, turn=turn_attribute(turn, pages[0].dtype))


_scatter_p = primitive.define(
    "scatter",
    abstract=_abstract,
    xla=_xla,
    ffi=_ffi,
)
