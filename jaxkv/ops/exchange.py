"""exchange: a place and a fetch at once, one operation that keeps the copy engines of both directions busy.

It is for CUDA alone. The same bytes as a place and then a fetch, where no slot is both of those that go and of those
that come; to see to that is the caller's.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import mlir

from . import native
from .pinned import new_arrays, new_shardings
from .sharding import describe
from .transfer import Transfer, Turn, attributes, turn_attribute


class Side(NamedTuple):
    """The chunks of one direction.

    Attributes:
        transfer: the two layouts.
        num_chunks: chunks that move.
        rows: of each chunk.
    """

    transfer: Transfer
    num_chunks: int
    rows: int

    @property
    def num_leaves(self) -> int:
        """Arrays of the chunks."""
        return self.num_chunks * len(self.transfer.chunk_kinds)


class Exchanged(NamedTuple):
    """What an exchange gives: the arrays that went, and the pool leaves."""

    host: list[jax.Array]
    pages: list[jax.Array]


def exchange_leaves(
    slots: tuple[Any, Any],
    recycled: Sequence[jax.Array] | None,
    hosts: Sequence[jax.Array],
    pages: Sequence[jax.Array],
    *,
    going: Side,
    coming: Side,
    staging: int,
    turn: Turn | None = None,
    deltas: Sequence[jax.Array] = (),
) -> Exchanged:
    """Gathers some slots into pinned arrays while others are scattered from such.

    Args:
        slots: of the rows that go and of those that come, int32 `[num_chunks * rows]`; distinct, on the pages' device.
        recycled: pinned arrays for what goes, which are consumed, or None for new ones.
        hosts: the pinned arrays that come.
        pages: the pool leaves, which both transfers cover, on one device; consumed.
        going: the chunks that go.
        coming: the chunks that come.
        staging: device buffers of one chunk for each direction.
        turn: how the keys that come are turned, or None.
        deltas: with `turn`, its delta tables.

    Returns:
        The arrays that went, written, and the pool leaves.
    """
    if recycled is None:
        shardings = new_shardings(slots[0], pages, going.transfer, going.num_chunks)
    else:
        shardings = (recycled[0].sharding,) * going.num_leaves
    program = _program(pages[0].sharding, shardings, going, coming, staging, turn, recycled is None)
    found = program(pages, () if recycled is None else recycled, *slots, tuple(deltas), hosts)
    return Exchanged(list(found[: going.num_leaves]), list(found[going.num_leaves :]))


@functools.lru_cache(maxsize=1024)
def _program(
    sharding: Any, shardings: Any, going: Side, coming: Side, staging: int, turn: Turn | None, makes_new: bool
) -> Any:
    def run(pages: Any, recycled: Any, going_slots: Any, coming_slots: Any, deltas: Any, hosts: Any) -> Any:
        with jax.named_scope("jaxkv.exchange"):
            if makes_new:
                recycled = new_arrays(going.transfer.chunk_shapes(going.rows) * going.num_chunks, pages[0].dtype)
            operands = (going_slots, coming_slots, *deltas, *hosts, *recycled, *pages)
            pages = _exchange_p.bind(*operands, going=going, coming=coming, staging=staging, turn=turn)
            # An array of pages, so that it comes after the exchange, which filled the others.
            return [*_settle_p.bind(pages[0], *recycled), *pages]

    # Of what goes, and of the pages.
    each = shardings if isinstance(shardings, tuple) else (shardings,) * going.num_leaves
    results = [where.with_memory_kind("pinned_host") for where in each]
    results += [sharding] * len(going.transfer.pool_kinds)
    return jax.jit(run, donate_argnums=(0, 1), out_shardings=results)


def _lower_exchange(ctx: Any, *operands: Any, going: Side, coming: Side, staging: int, turn: Turn | None) -> Any:
    pages = ctx.avals_out
    shapes = tuple(page.shape for page in pages)
    told: list[dict[str, Any]] = []
    for side, turns in ((going, None), (coming, turn)):
        count, rows = side.num_chunks, side.rows
        leaves = describe(side.transfer, count * rows, shapes, count, rows)
        told.append(attributes(side.transfer, pages[0].dtype, leaves.num_pages, rows, count, turns))
    first = len(operands) - len(pages)
    lowering = jax.ffi.ffi_lowering("jaxkv_exchange", operand_output_aliases={first + i: i for i in range(len(pages))})
    return lowering(
        ctx,
        *operands,
        **told[0],
        coming_planes=told[1]["planes"],
        coming_moves=told[1]["moves"],
        coming_rows=told[1]["rows"],
        coming_chunks=told[1]["num_chunks"],
        turn=turn_attribute(turn, pages[0].dtype),
        going_leaves=np.int64(going.num_leaves),
        staging=np.int64(staging),
    )


def _lower_settle(ctx: Any, *operands: Any) -> Any:
    lowering = jax.ffi.ffi_lowering(
        "jaxkv_settle", operand_output_aliases={1 + i: i for i in range(len(ctx.avals_out))}
    )
    return lowering(ctx, *operands)


_exchange_p, _settle_p = Primitive("jaxkv_exchange"), Primitive("jaxkv_settle")
_exchange_p.multiple_results = _settle_p.multiple_results = True
_exchange_p.def_abstract_eval(lambda *operands, going, **_: list(operands[-len(going.transfer.pool_kinds) :]))
_settle_p.def_abstract_eval(lambda page, *host: list(host))
if native.available("cuda"):
    mlir.register_lowering(_exchange_p, _lower_exchange, platform="cuda")
    mlir.register_lowering(_settle_p, _lower_settle, platform="cuda")
