"""exchange: one request's KV goes out while another's comes in."""

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from .bulk import load, store
from .calls import check_call, check_distinct, check_store_plan, chunks_of, naming_views, recycled_chunks
from .chunk import Chunk, ChunkFormat, as_format
from .host import Arrays
from .loading import PreparedLoad, prepared_load
from .ops import checks
from .ops.exchange import Side, exchange_leaves
from .paths import PreparedStore, Restore, Stretch, groups_of
from .plans import Plan
from .selection import Selection
from .spec import PagedCache, Pool
from .store_plans import StorePlan, prepared_store
from .tuning import Tuning
from .values import kept_for


def exchange(
    cache: PagedCache,
    going: StorePlan,
    coming: Plan,
    *,
    into: Iterable[Chunk] = (),
    format: Any = None,
    path: str | None = None,
    implementation: str | None = None,
    tuning: Tuning | None = None,
) -> tuple[tuple[Chunk, ...], PagedCache]:
    """Stores some tokens and loads others, both at once: the link carries as much each way as it does one way.

    The result is that of `chunks = store(cache, going)` and `cache = load(cache, coming)`, in this order. One operation
    does both, chunk by chunk, for as many chunks as there are of both, where it can: on the engine path, with slots
    that are known and in one of the plans alone, chunks that have all layers in one array, those that come alike in
    rows and format and none of them twice, and `into` empty or with a chunk for each that goes. Else, and for the
    chunks that are left, it is these two calls. (Its programs are compiled when they are first needed: `precompile` is
    for those of the two calls.) What it works out is kept with `coming`, and `going` with it.

    Args:
        cache: the pages; consumed: its arrays are deleted, the result is the new cache.
        going: what is stored, of `store_plan`.
        coming: what is loaded, of `plan`.
        into: as in `store`.
        format: as in `store`.
        path: as in `store` and `load`.
        implementation: as in `store`.
        tuning: sizes; see `Tuning`. On the device both directions together take `2 * tuning.staging` chunks of memory.

    Returns:
        The chunks that were stored, in order; and the cache, written.

    Raises:
        TypeError: an argument is of the wrong type.
        ValueError, NotImplementedError, RuntimeError: as `store` and `load`, or a chunk of `into` is one that comes;
            nothing was launched.
        Exception: what fails after that carries the cache that is left, as `error.cache`, and the chunks that were
            stored, as `error.chunks`.
    """
    spec, pool, tuning = check_call(cache, implementation, tuning)
    if not isinstance(going, StorePlan):
        raise TypeError(f"going: expected a StorePlan, got {type(going).__name__}; see store_plan")
    if not isinstance(coming, Plan):
        raise TypeError(f"coming: expected a Plan, got {type(coming).__name__}; see plan")
    check_store_plan("going", going, spec, pool, {})
    if format is not None:
        format = as_format(spec, format)
    count, rows = going.rows.slots.shape
    older, where = recycled_chunks(into, spec, format, rows, count)
    _check_apart(older, coming)
    if not checks.is_tracing():
        check_distinct(pool)
    how: dict[str, Any] = {"path": path, "implementation": implementation, "tuning": tuning}
    its = prepared_load(coming, spec, pool, **how)
    ours: PreparedStore | None = None
    if its.way.path == "engine" and len(older) in (0, count) and _are_apart(going, coming, pool):
        its = prepared_load(coming, spec, pool, cut=count, **how)

        def beside() -> tuple[PreparedLoad, PreparedStore | None]:
            return its, _beside(its, going, pool, format, where, len(older), how)

        # Kept with what it was made beside, whose id is therefore no other's.
        key = (going, id(its), format, where, len(older))
        _, ours = kept_for(coming, "_exchange", key, beside) if coming.as_made else beside()
    if ours is None:
        chunks = store(cache, going, into=older, format=format, **how)
        try:
            return chunks, load(cache, coming, **how)
        except Exception as error:
            error.chunks = chunks  # type: ignore[attr-defined]
            raise

    def stored() -> tuple[Chunk, ...]:
        chosen = Selection(*(field[: len(data)] for field in going.chosen_from(pool.num_slots)))
        return chunks_of(data, chosen, ours.fingerprint, ours.alike)

    restore = Restore(pool, donate=True, traced=False, implementation=implementation)
    data: list[Arrays] = []
    try:
        naming_views(lambda: _exchange(restore, ours, its.stretches, [chunk.data for chunk in older], data))
        if its.zeroing is not None:
            restore.scatter(its.zeroing, ())
    except Exception as error:
        error.cache = PagedCache.of(pool.with_leaves(restore.leaves), spec)  # type: ignore[attr-defined]
        error.chunks = stored()  # type: ignore[attr-defined]
        raise
    return stored(), PagedCache.of(pool.with_leaves(restore.leaves), spec)


def _check_apart(older: Sequence[Chunk], coming: Plan) -> None:
    """Raises ValueError where a chunk that is to be written into is one that comes."""
    if not older:
        return
    come = {id(array) for chunk in coming.chunks for array in chunk.data}
    for k, chunk in enumerate(older):
        if any(id(array) in come for array in chunk.data):
            raise ValueError(
                f"into: chunk {k} is one of those that come; its memory cannot be written before it is read"
            )


def _are_apart(going: StorePlan, coming: Plan, pool: Pool) -> bool:
    """Whether no slot is of both: a chunk that comes may be written before one that goes was read."""

    def compare() -> bool:
        out, into = going.rows.slots, coming.slots
        if not isinstance(out, np.ndarray) or not isinstance(into, np.ndarray) or not out.size:
            return False
        taken = np.zeros(pool.num_slots, bool)
        taken[out[(out >= 0) & (out < pool.num_slots)]] = True
        return not taken[into[(into >= 0) & (into < pool.num_slots)]].any()

    return kept_for(coming, "_apart", (going, pool.num_slots), compare) if coming.as_made else compare()


def _beside(
    its: PreparedLoad,
    going: StorePlan,
    pool: Pool,
    format: ChunkFormat | None,
    hosts: tuple[Any, ...],
    recycled: int,
    how: dict[str, Any],
) -> PreparedStore | None:
    """What a store does beside a load, cut as that is; None where one operation cannot do both."""
    if not its.stretches or len(groups_of(going.spec, as_format(going.spec, format))) > 1:
        return None
    first = its.stretches[0]
    alike = all(stretch.groups is first.groups and stretch.rows == first.rows for stretch in its.stretches)
    if not alike or len(first.groups) > 1:
        return None
    come = [id(array) for stretch in its.stretches for array in stretch.hosts[0]]
    if len(set(come)) < len(come):  # the handler refuses arrays that are one: XLA must not have made such
        return None
    count = len(going.rows.slots)
    ends = itertools.accumulate((stretch.num_chunks for stretch in its.stretches), initial=0)
    runs = [range(start, stop) for start, stop in itertools.pairwise(ends) if stop <= count]
    both = runs[-1].stop if runs else 0
    runs += its.way.runs(count - both, start=both)
    ours = prepared_store(going, pool, format, hosts, cut=recycled, runs=tuple(runs), **how)
    return ours if ours.way.path == "engine" else None


def _exchange(
    restore: Restore,
    ours: PreparedStore,
    stretches: Sequence[Stretch],
    older: Sequence[Arrays],
    data: list[Arrays],
) -> None:
    """Moves everything; the arrays of each chunk that goes are added to `data`."""
    staging, group = ours.way.staging, ours.groups[0]
    transfer = group.transfer
    each = len(transfer.chunk_kinds)
    for run, slots, programs, coming in itertools.zip_longest(ours.runs, ours.tables, ours.programs, stretches):
        if run is None:  # more chunks come than go
            restore.from_pinned(coming, ours.way)
            continue
        recycled = [array for k in run for array in older[k]] if older else None
        leaves = group.of(tuple(restore.leaves))
        if coming is None:  # more go than come
            went = programs[0](recycled, slots, leaves)
        else:
            (its,) = coming.groups
            went, restore.leaves = exchange_leaves(
                (slots, coming.slots),
                recycled,
                coming.hosts[0],
                leaves,
                going=Side(transfer, len(run), slots.shape[0] // len(run)),
                coming=Side(its.transfer, coming.num_chunks, coming.rows),
                staging=staging,
                turn=its.turn,
                deltas=coming.deltas(),
            )
        data += [tuple(went[at : at + each]) for at in range(0, len(went), each)]
