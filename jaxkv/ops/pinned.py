"""place and fetch: gather into, and scatter from, arrays in pinned host memory, as one operation each.

`send_ahead` has some of what a fetch takes arrive before it.

They are the fast paths of a transfer, not another meaning of it: `gather` followed by a copy to the host, and a
copy to the device followed by `scatter`, give the same bytes. Both exist as FFI handlers alone. On a GPU the copy
engine does the moving, through a few staging buffers on the device, or the kernel reaches into pinned memory
itself; on a CPU the rows are copied once, straight to where they go.

A program's operands and results in pinned memory are taken as they are: `place` writes into donated arrays.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import mlir
from jax.sharding import NamedSharding

from . import native
from .gather import gather_leaves
from .scatter import split_operands
from .sharding import describe, places_of
from .transfer import Transfer, Turn, attributes, turn_attribute


def place_leaves(
    slots: Any,
    host: Sequence[jax.Array] | None,
    pages: Sequence[jax.Array],
    *,
    transfer: Transfer,
    num_chunks: int,
    staging: int,
) -> list[jax.Array]:
    """Gathers the rows of some slots into pinned arrays: given ones, which are consumed, or new ones.

    Args:
        slots: int32 `[num_chunks * rows]`; a slot that is not in the pool gives a row of zero bytes.
        host: in pinned memory, the leaves of the first chunk, then those of the second, and so on; None for new ones.
        pages: the pool leaves that `transfer` covers, on one device.
        transfer: the two layouts.
        num_chunks: chunks to fill.
        staging: device buffers of one chunk that the copy engine goes through; 0 for a kernel that writes into
            pinned memory itself.

    Returns:
        The host arrays, written in place.
    """
    where = None if host is None else host[0].sharding
    program = place_program(slots, where, pages, transfer=transfer, num_chunks=num_chunks, staging=staging)
    return list(program(host, slots, tuple(pages)))  # a list would be another program


def place_program(
    slots: Any, sharding: Any, pages: Sequence[jax.Array], *, transfer: Transfer, num_chunks: int, staging: int
) -> Any:
    """The program of a `place_leaves`, to be called with its `host`, `slots` and `pages` (a tuple).

    Args:
        slots: as in `place_leaves`.
        sharding: of `host`; None for new arrays.
        pages: as in `place_leaves`.
        transfer: the two layouts.
        num_chunks: chunks to fill.
        staging: as in `place_leaves`.
    """
    if sharding is None:
        return _new_program(new_shardings(slots, pages, transfer, num_chunks), transfer, num_chunks, staging)
    return _place_program(sharding, transfer, num_chunks, staging)


def fetch_leaves(
    slots: Any,
    host: Sequence[jax.Array],
    pages: Sequence[jax.Array],
    *,
    transfer: Transfer,
    num_chunks: int,
    rows: int,
    staging: int,
    donate: bool,
    arrived: int = 0,
    turn: Turn | None = None,
    deltas: Sequence[jax.Array] = (),
) -> list[jax.Array]:
    """Scatters the rows of pinned arrays; distinct slots are the caller's to see to.

    Args:
        slots: int32 `[num_chunks * rows]`, the slot of each row; one that is not in the pool is skipped.
        host: the leaves of the first chunk, then those of the second, and so on; in pinned memory but for those that
            have `arrived`.
        pages: the pool leaves that `transfer` covers, on one device.
        transfer: the two layouts.
        num_chunks: chunks given.
        rows: rows of each chunk.
        staging: as for `place_leaves`.
        donate: whether the pages are consumed and written in place, or copied first.
        arrived: the first chunks, as many as this, are on the device, of `send_ahead`; the copy engine goes through
            their memory, and what is in them afterwards is of no use.
        turn: how keys are turned on the way, or None.
        deltas: with `turn`, its delta tables, as `scatter_leaves` takes them.

    Returns:
        The pool leaves, written.
    """
    program = _fetch_program(pages[0].sharding, donate, transfer, num_chunks, rows, staging, arrived, turn)
    return list(program(pages, slots, tuple(deltas), host))


@jax.jit
def send_ahead(host: Sequence[jax.Array]) -> list[jax.Array]:
    """Copies pinned arrays to the device, in a program of few arrays, which is soon queued; `fetch_leaves` goes on."""
    with jax.named_scope("jaxkv.send_ahead"):
        return [jax.device_put(array, jax.memory.Space.Device) for array in host]


# A program for each set of static values, rather than one with static arguments: those are hashed and compared anew by
# every call, which the first copy waits for.
@functools.lru_cache(maxsize=1024)
def _place_program(sharding: Any, transfer: Transfer, num_chunks: int, staging: int) -> Any:
    def run(host: Any, slots: Any, pages: Any) -> Any:
        with jax.named_scope("jaxkv.place"):
            return _place_p.bind(slots, *host, *pages, transfer=transfer, num_chunks=num_chunks, staging=staging)

    # The memory kind of a result is not inferred from its type: it is named here.
    return jax.jit(run, donate_argnums=0, out_shardings=sharding)


def new_shardings(slots: Any, pages: Sequence[jax.Array], transfer: Transfer, num_chunks: int) -> Any:
    """Where the arrays of new chunks are to be: on the pages' device, on a mesh of one device sharded as these are."""
    sharding = pages[0].sharding
    if not isinstance(sharding, NamedSharding):
        return sharding
    return tuple(where for _, where in places_of(transfer, pages, slots.shape[0] // num_chunks)) * num_chunks


def new_arrays(shapes: Sequence[tuple[int, ...]], dtype: Any) -> list[jax.Array]:
    """Pinned arrays that nothing has written, inside a program for CUDA: from the runtime's pool, at no cost."""
    return [jax.device_put(jax.lax.empty(shape, dtype), jax.memory.Space.Host) for shape in shapes]


@functools.lru_cache(maxsize=1024)
def _new_program(shardings: Any, transfer: Transfer, num_chunks: int, staging: int) -> Any:
    def run(_: None, slots: Any, pages: Any) -> Any:  # as the other program is called
        with jax.named_scope("jaxkv.place"):
            if on_cpu:
                # Its memory is all of one kind: a gather's results are in pinned memory where the program says so.
                return gather_leaves(slots, pages, transfer=transfer, num_chunks=num_chunks, implementation="ffi")
            host = new_arrays(transfer.chunk_shapes(slots.shape[0] // num_chunks) * num_chunks, pages[0].dtype)
            return _place_p.bind(slots, *host, *pages, transfer=transfer, num_chunks=num_chunks, staging=staging)

    first = shardings[0] if isinstance(shardings, tuple) else shardings
    on_cpu = next(iter(first.device_set)).platform == "cpu"
    pinned = jax.tree.map(lambda sharding: sharding.with_memory_kind("pinned_host"), shardings)
    return jax.jit(run, out_shardings=list(pinned) if isinstance(pinned, tuple) else pinned)


@functools.lru_cache(maxsize=1024)
def _fetch_program(
    sharding: Any,
    donate: bool,
    transfer: Transfer,
    num_chunks: int,
    rows: int,
    staging: int,
    arrived: int,
    turn: Turn | None,
) -> Any:
    params: dict[str, Any] = {"transfer": transfer, "num_chunks": num_chunks, "rows": rows, "turn": turn}
    params |= {"staging": staging, "arrived": arrived}

    def run(pages: Any, slots: Any, deltas: Any, host: Any) -> Any:
        with jax.named_scope("jaxkv.fetch"):
            return _fetch_p.bind(slots, *deltas, *host, *pages, **params)

    return jax.jit(run, donate_argnums=0 if donate else (), out_shardings=sharding)


def _lower_place(ctx: Any, *operands: Any, transfer: Transfer, num_chunks: int, staging: int) -> Any:
    slots, _, host, pages = split_operands(ctx.avals_in, transfer, num_chunks, None)
    rows = slots.shape[0] // num_chunks
    leaves = describe(transfer, slots.shape[0], tuple(page.shape for page in pages), num_chunks, rows)
    attrs = attributes(transfer, pages[0].dtype, leaves.num_pages, rows, num_chunks)
    lowering = jax.ffi.ffi_lowering("jaxkv_place", operand_output_aliases={1 + i: i for i in range(len(host))})
    return lowering(ctx, *operands, **attrs, staging=staging)


def _lower_fetch(
    ctx: Any,
    *operands: Any,
    transfer: Transfer,
    num_chunks: int,
    rows: int,
    staging: int,
    arrived: int,
    turn: Turn | None,
) -> Any:
    slots, _, _, pages = split_operands(ctx.avals_in, transfer, num_chunks, turn)
    leaves = describe(transfer, slots.shape[0], tuple(page.shape for page in pages), num_chunks, rows)
    attrs = attributes(transfer, pages[0].dtype, leaves.num_pages, rows, num_chunks, turn)
    first = len(operands) - len(pages)
    lowering = jax.ffi.ffi_lowering("jaxkv_fetch", operand_output_aliases={first + i: i for i in range(len(pages))})
    counts = {"staging": np.int64(staging), "arrived": np.int64(arrived)}
    return lowering(ctx, *operands, **attrs, **counts, turn=turn_attribute(turn, pages[0].dtype))


_place_p, _fetch_p = Primitive("jaxkv_place"), Primitive("jaxkv_fetch")
_place_p.multiple_results = _fetch_p.multiple_results = True
_place_p.def_abstract_eval(
    lambda *operands, transfer, num_chunks, **_: list(split_operands(operands, transfer, num_chunks, None).chunks)
)
_fetch_p.def_abstract_eval(
    lambda *operands, transfer, num_chunks, turn, **_: list(split_operands(operands, transfer, num_chunks, turn).pool)
)
for _platform in ("cpu", "cuda"):
    if native.available(_platform):
        mlir.register_lowering(_place_p, _lower_place, platform=_platform)
        mlir.register_lowering(_fetch_p, _lower_fetch, platform=_platform)
