"""store and load: chunks of all layers between the pages and pinned host memory.

Both walk the chunks one by one through a ring of device buffers: while one chunk is on the link, the next is
gathered (or the last is scattered). So the device memory a call takes is that of the ring, whatever the number of
tokens; and every chunk of a store has the same shape, so that a request of another length compiles nothing.
"""

import inspect
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from . import paths, ways
from .calls import check_call, check_distinct, check_store_plan, chunks_of, naming_views, recycled_chunks
from .chunk import Chunk, Fingerprint, as_format
from .loading import prepared_load
from .ops import checks
from .paths import Restore, groups_of
from .planning import plan as make_plan
from .plans import Plan
from .selection import check_chunk_tokens
from .spec import PagedCache
from .store_plans import StorePlan, decided, prepared_store
from .tuning import Tuning


def store(
    cache: PagedCache,
    slots: Any,
    *,
    starts: Sequence[int] | None = None,
    ends: Sequence[int] | None = None,
    positions: Any = None,
    chunk_tokens: int | None = None,
    layers_per_array: int | None = None,
    format: Any = None,
    skip_prefix: Any = 0,
    out_of_range: str = "raise",
    into: Iterable[Chunk] = (),
    path: str | None = None,
    implementation: str | None = None,
    tuning: Tuning | None = None,
) -> tuple[Chunk, ...]:
    """Copies the KV of some tokens out of the pages, into chunks in pinned host memory.

    Dispatched, not waited for: `Chunk.is_ready` says whether a chunk has arrived, and what is done to the pages
    after the call does not change it. On the device it takes `tuning.staging` chunks of memory.

    Args:
        cache: the pages.
        slots: integers `[tokens]`, `page * page_size + token in page`. A negative slot gives a row of zero bytes
            that is not `valid`. Reading them waits for them where they are on a device. Or a `StorePlan`, which has
            the options as well, and with which the copies begin soonest.
        starts: the first token of each chunk. By default chunks of `chunk_tokens` tokens follow one another, the
            last one shorter.
        ends: one past the last token of each chunk, at most `chunk_tokens` further on; with `starts`.
        positions: integers `[tokens]` (`[3, tokens]` for M-RoPE), the position each key is rotated for; by default a
            token's index in `slots`, which is wrong for a part of a sequence that does not begin it.
        chunk_tokens: rows of each chunk's arrays (256); a shorter range fills the rest with zero bytes.
        layers_per_array: layers that share one array; by default all do.
        format: of the chunks: a `ChunkFormat`, `Layout`, sentence or name. By default KV_2LTD (KV_MLA for one
            plane), or KV_T2D where `layers_per_array` is given.
        skip_prefix: tokens below this index are treated as having a negative slot.
        out_of_range: "raise", or "skip" to treat slots past the pool as negative ones; under a tracer, and with
            "skip", no device array is read.
        into: chunks that are no longer needed: their pinned buffers take the new ones, and they are consumed. With
            enough of them no more host memory is taken than they hold.
        path: "overlapped", "engine" or "direct" (see `jaxkv.ways`); by default chosen from the call.
        implementation: None for the best there is, "xla" or "ffi".
        tuning: sizes; see `Tuning`.

    Returns:
        The chunks, in order.

    Raises:
        TypeError: an argument is of the wrong type.
        ValueError: arguments do not fit one another, or a concrete slot is past the pool; nothing was launched.
        NotImplementedError: the pages are sharded over another axis than heads.
        RuntimeError: `implementation="ffi"` where no handlers were built, or a `path` that is not possible.
    """
    spec, pool, tuning = check_call(cache, implementation, tuning)
    options = {"starts": starts, "ends": ends, "positions": positions}
    options |= {"skip_prefix": skip_prefix, "out_of_range": out_of_range}
    if isinstance(slots, Plan):
        raise TypeError("slots: expected slots or a StorePlan, got a Plan, which is for load")
    if isinstance(slots, StorePlan):
        going = slots
        check_store_plan("slots", going, spec, pool, {**options, "chunk_tokens": chunk_tokens})
    else:
        rows = check_chunk_tokens(tuning.chunk_tokens if chunk_tokens is None else chunk_tokens)
        going = decided(spec, slots, rows=rows, num_slots=pool.num_slots, **options)
    # What nobody asked for is worked out once, with the plan: the first copy waits for every line here.
    if format is not None or layers_per_array is not None:
        format = as_format(spec, format, layers_per_array)
    count, rows = going.rows.slots.shape
    nothing = isinstance(into, tuple) and not into
    recycled, where = ([], ()) if nothing else recycled_chunks(into, spec, format, rows, count)
    how: dict[str, Any] = {"path": path, "implementation": implementation, "tuning": tuning}
    traced = checks.is_tracing()
    if traced or count == 0:
        ways.choose(leaves=pool.leaves, hosts=where, traced=traced, nbytes=0, **how)
        format = as_format(spec, format)
        data = paths.save_traced(pool, going.rows.slots, groups_of(spec, format), implementation)
        return chunks_of(data, going.chosen_from(pool.num_slots), Fingerprint.of(spec, format))
    steps = prepared_store(going, pool, format, where, cut=len(recycled), **how)
    older = [chunk.data for chunk in recycled]
    if steps.way.path == "overlapped":
        _delete(older)  # consumed all the same: the runtime's pool of pinned memory takes them back
        data = paths.save_overlapped(pool, steps, implementation)
    else:
        data = naming_views(lambda: paths.save_pinned(pool, steps, older))
        _delete(older)  # a CPU donates nothing that NumPy has a view of
    return chunks_of(data, going.chosen_from(pool.num_slots), steps.fingerprint, steps.alike)


_NOT_OF_LOAD = ("cache", "chunks", "slots", "num_pages", "data_later")
_OPTIONS = tuple(name for name in inspect.signature(make_plan).parameters if name not in _NOT_OF_LOAD)


def _delete(chunks: Sequence[Sequence[jax.Array]]) -> None:
    for arrays in chunks:
        for array in arrays:
            array.delete()


def load(
    cache: PagedCache,
    chunks: Plan | Iterable[Chunk],
    slots: Any = None,
    *,
    donate: bool = True,
    path: str | None = None,
    implementation: str | None = None,
    tuning: Tuning | None = None,
    **options: Any,
) -> PagedCache:
    """Copies chunks into the pages.

    `load(cache, chunks, slots, **options)` is `load(cache, plan(cache, chunks, slots, **options))`. On the device it
    takes `tuning.staging` chunks of memory, one more on the overlapped path, and at most as many again on the engine
    path where it takes several operations. Dispatched, not waited for, except on
    that path, which bounds its memory by waiting for a chunk's arrival before it sends the one `tuning.staging` further
    on.

    Args:
        cache: the pages; consumed unless `donate=False`: its arrays are deleted, even where the backend made a
            copy, and the result is the new cache.
        chunks: the chunks, or a plan made by `plan`.
        slots: integers `[tokens]`, the slot of each token (not with a plan).
        donate: whether the cache is consumed; if not, the pages are copied once.
        path: "overlapped", "engine" or "direct" (see `jaxkv.ways`); by default chosen from the call.
        implementation: None for the best there is, "xla" or "ffi".
        tuning: sizes; see `Tuning`.
        **options: of `plan`: `starts`, `ends`, `positions`, `gaps`, `skip_prefix`, `out_of_range`, `unique_slots`.

    Returns:
        The cache, written.

    Raises:
        TypeError, ValueError: as `plan`, or `path` is unknown; nothing was launched and the cache is whole.
        NotImplementedError: the pages are sharded over another axis than heads.
        RuntimeError: `implementation="ffi"` where no handlers were built, or a `path` that is not possible.
        Exception: what fails after the first write carries the cache that is left, as `error.cache`.
    """
    spec, pool, tuning = check_call(cache, implementation, tuning)
    if isinstance(chunks, StorePlan):
        raise TypeError("chunks: expected chunks or a Plan, got a StorePlan, which is for store")
    if isinstance(chunks, Plan):
        if slots is not None or options:
            given = ["slots"] * (slots is not None) + sorted(options)
            raise TypeError(f"load: a plan has its slots and options already, got {given}")
        plan = chunks
    else:
        if slots is None or isinstance(slots, StorePlan):
            found = "missing" if slots is None else "a StorePlan, which is for store"
            raise TypeError(f"slots: {found}; give the slot of each token, or a plan in place of the chunks")
        unknown = [name for name in options if name not in _OPTIONS]
        if unknown:
            raise TypeError(f"load: unexpected options {unknown}, expected some of {_OPTIONS}")
        # Without the cache, of which the plan would send its tables at once, as a load of default options needs them.
        plan = make_plan(spec, chunks, slots, **{**options, "num_pages": pool.num_pages})
    # What is traced need not be the pages: a jitted function may close over them, and they outlive its tracing.
    traced = checks.is_tracing()
    if donate and not traced:
        check_distinct(pool)
    how: dict[str, Any] = {"path": path, "implementation": implementation, "tuning": tuning}
    steps = prepared_load(plan, spec, pool, **how)
    if not (steps.parts or steps.stretches or steps.zeroing):
        # Not the caller's own arrays: who keeps the cache may well donate the result.
        return cache if donate or traced else jax.tree.map(jnp.copy, cache)
    restore = Restore(pool, donate=donate, traced=traced, implementation=implementation)
    try:
        if steps.parts:
            shardings = [None if traced else paths.shardings_on_device(part, pool) for part in steps.parts]
            restore.overlapped(steps.parts, shardings, tuning.staging)
        for stretch in steps.stretches:
            restore.from_pinned(stretch, steps.way)
        if steps.zeroing is not None:
            restore.scatter(steps.zeroing, ())
    except Exception as error:
        if not traced:  # what is traced has written nothing, and must not outlive its tracing
            error.cache = PagedCache.of(pool.with_leaves(restore.leaves), spec)  # type: ignore[attr-defined]
        raise
    if donate and not traced:
        for leaf in pool.leaves:
            leaf.delete()
    return PagedCache.of(pool.with_leaves(restore.leaves), spec)
