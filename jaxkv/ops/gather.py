"""gather: rows of chosen slots, out of the pages, into chunks of another layout."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.experimental.custom_partitioning import custom_partitioning

from . import primitive, windows
from .sharding import Leaves, describe
from .transfer import Transfer, attributes


def gather_leaves(
    slots: jax.Array, pages: Sequence[jax.Array], *, transfer: Transfer, num_chunks: int, implementation: str | None
) -> list[jax.Array]:
    """Gathers into `num_chunks` chunks of `len(slots) / num_chunks` rows each.

    Args:
        slots: int32 `[num_chunks * rows]`; a slot that is not in the pool gives a row of zero bytes.
        pages: the pool leaves that `transfer` covers.
        transfer: the two layouts.
        num_chunks: chunks to fill.
        implementation: None, "xla" or "ffi".

    Returns:
        The leaves of the first chunk, then those of the second, and so on.
    """
    with jax.named_scope("jaxkv.gather"):
        operands = primitive.guarded("gather", "give it all slots at once, in one flat array", [slots, *pages])
        shapes = tuple(x.shape for x in operands)
        return list(_partitioned(shapes, transfer, num_chunks, implementation)(*operands))


def _leaves(slots: Any, pages: Sequence[Any], transfer: Transfer, num_chunks: int) -> Leaves:
    length = slots.shape[0]
    return describe(transfer, length, tuple(page.shape for page in pages), num_chunks, length // num_chunks)


def _abstract(slots: Any, *pages: Any, transfer: Transfer, num_chunks: int, implementation: str | None) -> list[Any]:
    del implementation
    leaves = _leaves(slots, pages, transfer, num_chunks)
    split, mesh = leaves.split(pages), pages[0].sharding.mesh
    results = [
        pages[0].update(shape=leaf.shape, sharding=leaf.sharding(mesh, split.mesh_axes)) for leaf in leaves.chunks
    ]
    return primitive.result_types([slots, *pages], results)


@functools.lru_cache(maxsize=256)
def _partitioned(
    shapes: tuple[tuple[int, ...], ...], transfer: Transfer, num_chunks: int, implementation: str | None
) -> Callable[..., Sequence[jax.Array]]:
    slots_shape, *pool_shapes = shapes
    leaves = describe(transfer, slots_shape[0], tuple(pool_shapes), num_chunks, slots_shape[0] // num_chunks)

    def local(ways: int) -> Callable[..., Sequence[jax.Array]]:
        sizes = transfer.sizes._replace(heads=transfer.sizes.heads // ways)
        return functools.partial(
            _gather_p.bind,
            transfer=dataclasses.replace(transfer, sizes=sizes),
            num_chunks=num_chunks,
            implementation=implementation,
        )

    def partition(mesh: Any, operands: Any, results: Any) -> Any:
        del results
        split = leaves.split(operands[1:])
        place = [leaf.sharding(mesh, split.mesh_axes) for leaf in (leaves.slots, *leaves.pool, *leaves.chunks)]
        return (
            mesh,
            local(split.ways),
            place[len(shapes) :],
            tuple(place[: len(shapes)]),
        )  # results: a list, as `bind`'s

    call = custom_partitioning(local(1))
    rule, sizes = leaves.rule((leaves.slots, *leaves.pool), leaves.chunks)
    call.def_partition(
        partition=partition,
        infer_sharding_from_operands=lambda *args: partition(*args)[2],
        sharding_rule=rule,
        **sizes,
    )
    return call


def _xla(slots: jax.Array, *pages: jax.Array, transfer: Transfer, num_chunks: int) -> list[jax.Array]:
    leaves = _leaves(slots, pages, transfer, num_chunks)
    rows = windows.read(transfer, leaves.num_pages, pages, slots)
    return [
        windows.from_bits(leaf, pages[0].dtype)
        for c in range(num_chunks)
        for leaf in windows.pack(transfer, rows[:, :, c * leaves.rows : (c + 1) * leaves.rows])
    ]


def _ffi(ctx: Any, *operands: Any, transfer: Transfer, num_chunks: int) -> Any:
    slots, *pages = ctx.avals_in
    leaves = _leaves(slots, pages, transfer, num_chunks)
    attrs = attributes(transfer, pages[0].dtype, leaves.num_pages, leaves.rows, num_chunks)
    return jax.ffi.ffi_lowering("jaxkv_gather")(ctx, *operands, **attrs)


_gather_p = primitive.define(
    "gather",
    abstract=_abstract,
    xla=_xla,
    ffi=_ffi,
)
