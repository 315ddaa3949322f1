"""exchange: one request's KV goes out while another's comes in."""

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import numpy as np

from . import paths, store_plans
from .bulk import check_call, check_distinct, check_store_plan, chunks_of, load, naming_views, recycled_chunks, store
from .chunk import Chunk, Fingerprint, as_format
from .host import Arrays
from .loading import Prepared, prepared
from .ops.exchange import Side, exchange_leaves
from .ops.pinned import place_leaves
from .paths import Group, Restore, Saving, Stretch, groups_of
from .plans import Plan
from .spec import PagedCache
from .store_plans import StorePlan
from .tuning import Tuning


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

    The result is that of `chunks = store(cache, going)` and `cache = load(cache, coming)`, in this order. On the engine
    path one operation does both, chunk by chunk: as many chunks as there are of both, where no slot is in both plans
    and the chunks have all layers in one array. Else, and for the chunks that are left, it is these two calls. (Its
    programs are compiled when they are first needed: `precompile` is for those of the two calls.)

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
        ValueError, NotImplementedError, RuntimeError: as `store` and `load`; nothing was launched.
        Exception: what fails after the first write carries the cache that is left, as `error.cache`.
    """
    spec, pool, tuning = check_call(cache, implementation, tuning)
    if not isinstance(going, StorePlan):
        raise TypeError(f"going: expected a StorePlan, got {type(going).__name__}; see store_plan")
    if not isinstance(coming, Plan):
        raise TypeError(f"coming: expected a Plan, got {type(coming).__name__}; see plan")
    check_store_plan(going, spec, pool, {})
    format = as_format(spec, format)
    count, rows = going.rows.slots.shape
    older = recycled_chunks(into, spec, format, rows, count)
    check_distinct(pool)
    how: dict[str, Any] = {"path": path, "implementation": implementation, "tuning": tuning}
    steps = prepared(coming, spec, pool, cut=count, **how)
    saving = None
    if len(older) in (0, count) and _are_pairs(steps, groups_of(spec, format)) and _are_apart(going, coming):
        both = min(count, sum(stretch.num_chunks for stretch in steps.steps))
        hosts = paths.shardings_of([array for chunk in older for array in chunk.data])
        saving = store_plans.prepared(going, pool, format, hosts, held=both if both < count else 0, **how)
    if saving is None or saving.way.path != "engine":
        chunks = store(cache, going, into=older, format=format, **how)
        return chunks, load(cache, coming, **how)
    restore = Restore(pool, donate=True, traced=False, implementation=implementation)
    try:
        data = naming_views(lambda: _exchanged(restore, saving, steps.steps, [chunk.data for chunk in older]))
        if steps.zeroing is not None:
            restore.scatter(steps.zeroing, ())
    except Exception as error:
        error.cache = PagedCache.of(pool.with_leaves(restore.leaves), spec)  # type: ignore[attr-defined]
        raise
    chunks = chunks_of(data, going.chosen_from(pool.num_slots), Fingerprint.of(spec, format))
    return chunks, PagedCache.of(pool.with_leaves(restore.leaves), spec)


def _are_pairs(steps: Prepared, groups: tuple[Group, ...]) -> bool:
    """Whether one operation can take chunks that come together with chunks that go."""
    if steps.way.path != "engine" or not steps.steps or len(groups) > 1:
        return False
    first = steps.steps[0]
    alike = all(stretch.groups is first.groups and stretch.rows == first.rows for stretch in steps.steps)
    return alike and len(first.groups) == 1


def _are_apart(going: StorePlan, coming: Plan) -> bool:
    """Whether no slot is of both: a chunk that comes may be written before one that goes was read."""
    out, into = going.rows.slots, coming.slots
    if not isinstance(out, np.ndarray) or not isinstance(into, np.ndarray) or not out.size:
        return False
    taken = np.zeros(max(out.max(), into.max(initial=-1)) + 2, bool)
    taken[out] = True
    taken[-1] = False  # where slots of -1 landed
    return not taken[into].any()


def _exchanged(restore: Restore, saving: Saving, stretches: Sequence[Stretch], older: Sequence[Arrays]) -> list[Arrays]:
    """Moves everything, and gives the arrays of each chunk that went."""
    way, group = saving.way, saving.groups[0]
    transfer = group.transfer
    data: list[jax.Array] = []
    for run, slots, coming in itertools.zip_longest(saving.runs, saving.tables, stretches):
        if run is None:  # more chunks come than go
            restore.from_pinned(coming, way)
            continue
        recycled = [array for k in run for array in older[k]] if older else None
        leaves = [restore.leaves[i] for i in group.leaves]
        if coming is None:  # more go than come
            sizes: dict[str, Any] = {"num_chunks": len(run), "staging": way.staging}
            data += place_leaves(slots, recycled, leaves, transfer=transfer, **sizes)
            continue
        (its,) = coming.groups
        found = exchange_leaves(
            (slots, coming.slots),
            recycled,
            coming.hosts[0],
            leaves,
            going=Side(transfer, len(run), slots.shape[0] // len(run)),
            coming=Side(its.transfer, coming.num_chunks, coming.rows),
            staging=way.staging,
            turn=its.turn,
            deltas=coming.deltas(),
        )
        data += found.host
        restore.leaves = found.pages
    held = len(transfer.chunk_kinds)
    return [tuple(data[at : at + held]) for at in range(0, len(data), held)]
