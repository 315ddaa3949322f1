"""The ops: KV between paged arrays and rows of any other layout.

`gather` and `scatter` are for use inside the caller's own `jit` (or outside of it): they donate nothing by
themselves, and `scatter` writes in place wherever the caller donates the pages.
"""

from typing import Any

import jax

from ..layout import Layout, Sizes
from ..layouts import named
from . import checks, primitive
from .gather import gather_leaves
from .scatter import last_wins, scatter_leaves
from .sharding import describe_pool
from .transfer import Transfer

__all__ = ["gather", "scatter"]

_STATIC = ("transfer", "num_chunks", "implementation")
_gather_jit = jax.jit(gather_leaves, static_argnames=_STATIC)
_scatter_jit = jax.jit(scatter_leaves, static_argnames=(*_STATIC, "rows"))
_last_wins_jit = jax.jit(last_wins, static_argnums=1)


def gather(
    pages: Any,
    slots: Any,
    *,
    pool: Layout | str | tuple[str, str],
    chunk: Layout | str | tuple[str, str],
    sizes: Sizes,
    layers: range | None = None,
    out_of_range: str = "raise",
    implementation: str | None = None,
) -> Any:
    """Copies the rows of some slots out of the pages, in another layout.

    Args:
        pages: the pool: the pytree of arrays that `pool` describes, `sizes.layers` layers.
        slots: integers `[n]`, `page * page_size + token`. A negative slot gives a row of zero bytes.
        pool: layout of the pages: a `Layout`, a sentence (or one each for K and V), or a name of `jaxkv.layouts`.
        chunk: layout of the rows, for example `"kv layer token (head dim)"`.
        sizes: the model's sizes.
        layers: the layers to move, by default all.
        out_of_range: "raise", or "skip" to treat slots past the pool as negative ones; under a tracer, and with
            "skip", no device array is read on the host.
        implementation: None for the best there is, or "xla" or "ffi".

    Returns:
        The rows: one array, or the tuples of arrays that `chunk` describes, of the pages' dtype.

    Raises:
        TypeError: a page is no array, slots are no integers, or the dtype has no whole bytes.
        ValueError: an array does not fit its layout, `layers` is no range of the pool's, or a concrete slot is
            past the pool.
        RuntimeError: `implementation="ffi"` where no handlers were built.
    """
    transfer, leaves, _, numbers = _prepare(pages, pool, chunk, sizes, layers, implementation)
    slots = _slots(slots, transfer, leaves, out_of_range)
    rows = _gather_jit(
        slots, [leaves[i] for i in numbers], transfer=transfer, num_chunks=1, implementation=implementation
    )
    return checks.nested(rows, transfer.chunk, transfer.chunk_sizes)


def scatter(
    pages: Any,
    rows: Any,
    slots: Any,
    *,
    pool: Layout | str | tuple[str, str],
    chunk: Layout | str | tuple[str, str],
    sizes: Sizes,
    layers: range | None = None,
    unique_slots: bool = False,
    out_of_range: str = "raise",
    implementation: str | None = None,
) -> Any:
    """Copies rows into some slots of the pages.

    Args:
        pages: the pool: the pytree of arrays that `pool` describes, `sizes.layers` layers.
        rows: one array, or the tuples of arrays that `chunk` describes, of the pages' dtype.
        slots: integers `[n]`, one for each row. A negative slot is skipped; of equal slots the last wins.
        pool: layout of the pages: a `Layout`, a sentence (or one each for K and V), or a name of `jaxkv.layouts`.
        chunk: layout of the rows.
        sizes: the model's sizes.
        layers: the layers to move, by default all.
        unique_slots: a promise that slots differ, which saves looking for equal ones. If it is broken, the
            bytes of the doubled slots are unspecified.
        out_of_range: "raise", or "skip" to treat slots past the pool as negative ones.
        implementation: None for the best there is, or "xla" or "ffi".

    Returns:
        The pages, written, in the structure they came in. Nothing is donated, so outside of `jit` this copies
        the pages; inside a `jit` that donates them it writes in place.

    Raises:
        TypeError: a page or row is no array, slots are no integers, or dtypes differ.
        ValueError: an array does not fit its layout, rows and slots differ in number, or a concrete slot is
            past the pool.
        RuntimeError: `implementation="ffi"` where no handlers were built.
    """
    transfer, leaves, structure, numbers = _prepare(pages, pool, chunk, sizes, layers, implementation)
    slots = _slots(slots, transfer, leaves, out_of_range)
    count = slots.shape[0]
    parts, _ = checks.arrays_of(rows, transfer.chunk, transfer.chunk_sizes.layers, "rows")
    checks.check_same_dtype(parts, leaves[0].dtype, "rows")
    for part, shape in zip(parts, transfer.chunk_shapes(count), strict=True):
        if part.shape != shape:
            raise ValueError(
                f"rows: got shape {part.shape}, expected {shape} for {count} slots in layout {str(transfer.chunk)!r}"
            )
    if count == 0:
        return pages
    pool_leaves = [leaves[i] for i in numbers]
    if not unique_slots:
        slots = _last_wins_jit(slots, _num_slots(transfer, pool_leaves))
    written = _scatter_jit(
        slots, parts, pool_leaves, transfer=transfer, num_chunks=1, rows=count, implementation=implementation
    )
    for i, leaf in zip(numbers, written, strict=True):
        leaves[i] = leaf
    return jax.tree.unflatten(structure, leaves)


def _prepare(
    pages: Any,
    pool: Layout | str | tuple[str, str],
    chunk: Layout | str | tuple[str, str],
    sizes: Sizes,
    layers: range | None,
    implementation: str | None,
) -> tuple[Transfer, list[jax.Array], Any, tuple[int, ...]]:
    """The transfer over the leaves it touches, all leaves, their structure, and the numbers of those touched."""
    primitive.check_implementation(implementation)
    layers = range(sizes.layers) if layers is None else layers
    if not isinstance(layers, range) or layers.step != 1:
        raise ValueError(f"layers: expected a range of neighbouring layers, got {layers!r}")
    pool, chunk = named(pool), named(chunk)
    whole = Transfer(pool, chunk, sizes, (layers.start, layers.stop))
    leaves, structure = checks.arrays_of(pages, pool, sizes.layers, "pages")
    checks.check_dtype(leaves[0].dtype, "pages")
    checks.check_same_dtype(leaves, leaves[0].dtype, "pages")
    num_pages, _ = describe_pool(pool, sizes, tuple(leaf.shape for leaf in leaves))
    if num_pages * sizes.page_size > checks.INT32_MAX:
        raise ValueError(f"pages: {num_pages} pages of {sizes.page_size} tokens are more slots than int32 can number")
    transfer, numbers = whole.narrowed()
    return transfer, leaves, structure, numbers


def _num_slots(transfer: Transfer, leaves: list[jax.Array]) -> int:
    kind = transfer.pool_kinds[0]
    return transfer.pool.num_pages(leaves[0].shape, transfer.sizes, kv=kind) * transfer.sizes.page_size


def _slots(slots: Any, transfer: Transfer, leaves: list[jax.Array], out_of_range: str) -> Any:
    checks.check_out_of_range(out_of_range)
    narrow = checks.slots_int32(slots, read=out_of_range == "raise")
    if not isinstance(narrow, jax.Array) and out_of_range == "raise":
        checks.check_slots_in_pool(narrow, _num_slots(transfer, leaves), given=slots)
    return narrow
