"""store and load: chunks of all layers between the pages and pinned host memory.

Both walk the chunks one by one through a ring of device buffers: while one chunk is on the link, the next is
gathered (or the last is scattered). So the device memory a call takes is that of the ring, whatever the number of
tokens; and every chunk of a store has the same shape, so that a request of another length compiles nothing.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from . import host, paths, store_plans
from .chunk import Chunk, ChunkFormat, Fingerprint, as_format
from .loading import prepared
from .ops import checks, primitive
from .paths import Part, Restore, groups_of
from .planning import plan as make_plan
from .plans import Plan
from .selection import Selection, check_chunk_tokens
from .spec import CacheSpec, PagedCache, Pool
from .store_plans import StorePlan
from .tuning import Tuning, check_tuning

T = TypeVar("T")


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
        path: "overlapped", "engine" or "direct" (see `jaxkv.paths`); by default chosen from the call.
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
    if isinstance(slots, StorePlan):
        decided = slots
        check_store_plan(decided, spec, pool, {**options, "chunk_tokens": chunk_tokens})
    else:
        rows = check_chunk_tokens(tuning.chunk_tokens if chunk_tokens is None else chunk_tokens)
        decided = store_plans.decided(spec, slots, rows=rows, num_slots=pool.num_slots, **options)
    format = as_format(spec, format, layers_per_array)
    count, rows = decided.rows.slots.shape
    recycled = recycled_chunks(into, spec, format, rows, count)
    hosts = [array for chunk in recycled for array in chunk.data]
    how: dict[str, Any] = {"path": path, "implementation": implementation, "tuning": tuning}
    traced = checks.is_tracing()
    where = paths.shardings_of(hosts)
    if traced or count == 0:
        paths.choose(path, pool.leaves, where, traced=traced, nbytes=0, implementation=implementation, tuning=tuning)
        data = paths.save_traced(pool, decided.rows.slots, groups_of(spec, format), implementation)
        return chunks_of(data, decided.chosen_from(pool.num_slots), Fingerprint.of(spec, format))
    held = len(recycled) if len(recycled) < count else 0
    saving = store_plans.prepared(decided, pool, format, where, held=held, **how)
    if saving.way.path == "overlapped":
        for array in hosts:
            array.delete()  # consumed all the same: the runtime's pool of pinned memory takes them back
        data = paths.save_overlapped(pool, saving, implementation)
    else:
        older = [chunk.data for chunk in recycled]
        data = naming_views(lambda: paths.save_pinned(pool, saving, older))
        for array in hosts:
            array.delete()  # a CPU donates nothing that NumPy has a view of
    return chunks_of(data, decided.chosen_from(pool.num_slots), Fingerprint.of(spec, format))


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
    takes `tuning.staging` chunks of memory, and one more on the overlapped path. Dispatched, not waited for, except on
    that path, which bounds its memory by waiting for a chunk's arrival before it sends the one `tuning.staging` further
    on.

    Args:
        cache: the pages; consumed unless `donate=False`: its arrays are deleted, even where the backend made a
            copy, and the result is the new cache.
        chunks: the chunks, or a plan made by `plan`.
        slots: integers `[tokens]`, the slot of each token (not with a plan).
        donate: whether the cache is consumed; if not, the pages are copied once.
        path: "overlapped", "engine" or "direct" (see `jaxkv.paths`); by default chosen from the call.
        implementation: None for the best there is, "xla" or "ffi".
        tuning: sizes; see `Tuning`.
        **options: of `plan`: `starts`, `ends`, `positions`, `gaps`, `skip_prefix`, `out_of_range`, `unique_slots`.

    Returns:
        The cache, written.

    Raises:
        TypeError, ValueError: as `plan`; nothing was launched and the cache is whole.
        RuntimeError: `implementation="ffi"` where no handlers were built.
        Exception: what fails after the first write carries the cache that is left, as `error.cache`.
    """
    spec, pool, tuning = check_call(cache, implementation, tuning)
    if isinstance(chunks, Plan):
        if slots is not None or options:
            given = ["slots"] * (slots is not None) + sorted(options)
            raise TypeError(f"load: a plan has its slots and options already, got {given}")
        plan = chunks
    else:
        if slots is None:
            raise TypeError("slots: missing; give the slot of each token, or a plan")
        # Without the cache, of which the plan would send its tables at once, as a load of default options needs them.
        plan = make_plan(spec, chunks, slots, **{**options, "num_pages": pool.num_pages})
    # What is traced need not be the pages: a jitted function may close over them, and they outlive its tracing.
    traced = checks.is_tracing()
    if donate and not traced:
        check_distinct(pool)
    how: dict[str, Any] = {"path": path, "implementation": implementation}
    way, steps, zeroing = prepared(plan, spec, pool, tuning=tuning, **how)
    if not steps and zeroing is None:
        # Not the caller's own arrays: who keeps the cache may well donate the result.
        return cache if donate or traced else jax.tree.map(jnp.copy, cache)
    restore = Restore(pool, donate=donate, traced=traced, implementation=implementation)
    try:
        if way.path == "overlapped":
            shardings = [None if traced else _shardings(part, pool) for part in steps]
            restore.overlapped(steps, shardings, tuning.staging)
        else:
            for stretch in steps:
                restore.from_pinned(stretch, way)
        if zeroing is not None:
            restore.scatter(zeroing, ())
    except Exception as error:
        if not traced:  # what is traced has written nothing, and must not outlive its tracing
            error.cache = PagedCache.of(pool.with_leaves(restore.leaves), spec)  # type: ignore[attr-defined]
        raise
    if donate and not traced:
        for leaf in pool.leaves:
            leaf.delete()
    return PagedCache.of(pool.with_leaves(restore.leaves), spec)


def chunks_of(data: Sequence[tuple[jax.Array, ...]], chosen: Selection, fingerprint: Fingerprint) -> tuple[Chunk, ...]:
    """Chunks from their arrays and what was selected."""
    rest = zip(chosen.num_tokens, chosen.positions, chosen.valid, strict=True)
    return tuple(
        Chunk(arrays, held, positions, valid, fingerprint)
        for arrays, (held, positions, valid) in zip(data, rest, strict=True)
    )


def check_call(cache: PagedCache, implementation: str | None, tuning: Tuning | None) -> tuple[CacheSpec, Pool, Tuning]:
    """What a call is about: the spec, the arrays and the sizes, checked."""
    if not isinstance(cache, PagedCache):
        raise TypeError(f"cache: expected a PagedCache, got {type(cache).__name__}")
    primitive.check_implementation(implementation)
    return cache.spec, cache.pool, check_tuning(tuning)


def check_store_plan(plan: StorePlan, spec: CacheSpec, pool: Pool, options: dict[str, Any]) -> None:
    """Raises TypeError or ValueError where a plan comes with an option, or does not fit the cache."""
    defaults = {"skip_prefix": 0, "out_of_range": "raise"}
    given = [name for name, value in options.items() if value is not None and not _is(value, defaults.get(name))]
    if given:
        raise TypeError(f"slots: a StorePlan has its options already, got {given}")
    if plan.spec != spec:
        raise ValueError("slots: a StorePlan that was made for another spec than the cache's")
    plan.check(pool.num_slots)


def _is(value: Any, default: Any) -> bool:
    return type(value) is type(default) and bool(value == default)


def check_distinct(pool: Pool) -> None:
    """Raises ValueError where two of a pool's arrays are one, which cannot be donated twice."""
    if pool.are_distinct:
        return
    seen: dict[int, int] = {}
    for i, leaf in enumerate(pool.leaves):
        first = seen.setdefault(id(leaf), i)
        if first != i:
            raise ValueError(f"pages: arrays {first} and {i} are one array, which cannot be donated twice")


def naming_views(call: Callable[[], T]) -> T:
    """What a call gives that writes into older chunks; ValueError where a view of one keeps it from that."""
    try:
        return call()
    except (RuntimeError, ValueError) as error:
        if "external reference" not in str(error):
            raise
        raise ValueError(
            "into: a NumPy or DLPack view of one of these chunks is held (np.asarray(chunk.data[0]) makes one that "
            "lives as long as the array), so its memory cannot be written; Chunk.rows() copies and leaves none"
        ) from error


def recycled_chunks(into: Iterable[Chunk], spec: CacheSpec, format: ChunkFormat, rows: int, count: int) -> list[Chunk]:
    """The chunks whose buffers a store takes, checked: as many as it needs, or as there are."""
    if isinstance(into, Chunk) or not isinstance(into, Iterable):
        raise TypeError(f"into: expected a sequence of chunks, got {type(into).__name__}")
    chunks = list(into)[:count]
    shapes, traced = list(format.shapes(spec, rows)), checks.is_tracing()
    dtypes = [spec.dtype] * len(shapes)
    seen: set[int] = set()
    for k, chunk in enumerate(chunks):
        if not isinstance(chunk, Chunk):
            raise TypeError(f"into: entry {k} is no Chunk but {type(chunk).__name__}")
        if traced and any(map(checks.is_traced, chunk.data)):
            raise TypeError("into: chunks are recycled outside of jit alone")
        if [array.shape for array in chunk.data] != shapes or [array.dtype for array in chunk.data] != dtypes:
            raise ValueError(
                f"into: chunk {k} has arrays of {[(a.shape, str(a.dtype)) for a in chunk.data]}, this store needs "
                f"{[(s, str(np.dtype(spec.dtype))) for s in shapes]}"
            )
        for array in chunk.data:
            if array.is_deleted() or id(array) in seen:
                raise ValueError(f"into: chunk {k} was deleted, or is given twice")
            seen.add(id(array))
            if array.sharding.memory_kind != host.PINNED:
                raise ValueError(
                    f"into: chunk {k} is in memory kind {array.sharding.memory_kind!r}, expected {host.PINNED!r}"
                )
    return chunks


def _shardings(part: Part, pool: Pool) -> list[Any]:
    return [sharding for _, sharding in paths.chunk_places(part.groups, pool, part.slots.shape[0])]
