"""store and load: chunks of all layers between the pages and pinned host memory.

Both walk the chunks one by one through a ring of device buffers: while one chunk is on the link, the next is
gathered (or the last is scattered). So the device memory a call takes is that of the ring, whatever the number of
tokens; and every chunk of a store has the same shape, so that a request of another length compiles nothing.
"""

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from . import host, paths
from .chunk import Chunk, ChunkFormat, Fingerprint, as_format, check_chunks, known
from .ops import checks, primitive
from .paths import Group, Part, Restore, Stretch, groups_of
from .plans import Plan
from .plans import plan as make_plan
from .selection import Selection, check_chunk_tokens, select_rows
from .spec import CacheSpec, PagedCache, Pool
from .tuning import Tuning, check_tuning


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
            that is not `valid`. Reading them waits for them where they are on a device.
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
    spec, pool, tuning = _check_call(cache, implementation, tuning)
    rows = check_chunk_tokens(tuning.chunk_tokens if chunk_tokens is None else chunk_tokens)
    format = as_format(spec, format, layers_per_array)
    groups = groups_of(spec, format)
    chosen = select_rows(
        spec,
        slots,
        rows=rows,
        num_slots=pool.num_slots,
        starts=starts,
        ends=ends,
        positions=positions,
        skip_prefix=skip_prefix,
        out_of_range=out_of_range,
    )
    count = len(chosen.slots)
    recycled = _recycled(into, spec, format, rows, count)
    traced = checks.is_tracing()
    hosts = [array for chunk in recycled for array in chunk.data]
    nbytes = count * rows * spec.bytes_per_token
    options: dict[str, Any] = {"traced": traced, "implementation": implementation, "tuning": tuning}
    way = paths.choose(path, pool.leaves, hosts, nbytes=nbytes, **options)
    if count == 0:
        return ()
    if traced:
        data = paths.save_traced(pool, chosen.slots, groups, implementation)
    elif way.path == "overlapped":
        for array in hosts:
            array.delete()  # consumed all the same: the runtime's pool of pinned memory takes them back
        data = paths.save_overlapped(pool, chosen.slots, groups, way, implementation)
    else:
        held = len(recycled)
        try:
            data = paths.save_pinned(pool, chosen.slots[:held], groups, way, [chunk.data for chunk in recycled])
        except (RuntimeError, ValueError) as error:
            if "external reference" not in str(error):
                raise
            raise ValueError(
                "into: a NumPy or DLPack view of one of these chunks is held (np.asarray(chunk.data[0]) makes one that "
                "lives as long as the array), so its memory cannot be written; Chunk.rows() copies and leaves none"
            ) from error
        data += paths.save_pinned(pool, chosen.slots[held:], groups, way)
        for array in hosts:
            array.delete()  # a CPU donates nothing that NumPy has a view of
    return chunks_of(data, chosen.described(), Fingerprint.of(spec, format))


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
    spec, pool, tuning = _check_call(cache, implementation, tuning)
    if isinstance(chunks, Plan):
        if slots is not None or options:
            given = ["slots"] * (slots is not None) + sorted(options)
            raise TypeError(f"load: a plan has its slots and options already, got {given}")
        plan = chunks
        _check_plan(plan, spec, pool)
    else:
        if slots is None:
            raise TypeError("slots: missing; give the slot of each token, or a plan")
        plan = make_plan(cache, chunks, slots, **options)
    # What is traced need not be the pages: a jitted function may close over them, and they outlive its tracing.
    traced = checks.is_tracing()
    if donate and not traced:
        check_distinct(pool)

    moving, zeroing = plan.moving(), _may_move(plan.zero_slots)
    if not moving and not zeroing:
        # Not the caller's own arrays: who keeps the cache may well donate the result.
        return cache if donate or traced else jax.tree.map(jnp.copy, cache)
    how: dict[str, Any] = {"traced": traced, "implementation": implementation, "tuning": tuning}
    hosts = [array for k in moving for array in plan.chunks[k].data]
    nbytes = spec.bytes_per_token * sum(plan.chunks[k].num_rows for k in moving)
    way = paths.choose(path, pool.leaves, hosts, nbytes=nbytes, **how)
    restore = Restore(pool, donate=donate, traced=traced, implementation=implementation)
    try:
        if way.path == "overlapped":
            parts = _parts(spec, plan, moving)
            shardings = [None if traced else _shardings(part, pool) for part in parts]
            restore.overlapped(parts, shardings, tuning.staging)
        else:
            for stretch in _stretches(spec, plan, moving):
                restore.from_pinned(stretch, way)
        if zeroing:
            # Padded to a power of two, so that few programs serve all lengths.
            size = 1 << (plan.zero_slots.shape[0] - 1).bit_length()
            restore.scatter(Part(_padded(plan.zero_slots, size), (), groups_of(spec, as_format(spec, None))), ())
    except Exception as error:
        if not traced:  # what is traced has written nothing, and must not outlive its tracing
            error.cache = PagedCache.of(dataclasses.replace(pool, leaves=tuple(restore.leaves)), spec)  # type: ignore[attr-defined]
        raise
    if donate and not traced:
        for leaf in pool.leaves:
            leaf.delete()
    return PagedCache.of(dataclasses.replace(pool, leaves=tuple(restore.leaves)), spec)


def chunks_of(data: Sequence[tuple[jax.Array, ...]], chosen: Selection, fingerprint: Fingerprint) -> tuple[Chunk, ...]:
    """Chunks from their arrays and what was selected."""
    rest = zip(chosen.num_tokens, chosen.positions, chosen.valid, strict=True)
    return tuple(
        Chunk(arrays, held, positions, valid, fingerprint)
        for arrays, (held, positions, valid) in zip(data, rest, strict=True)
    )


def _check_call(cache: PagedCache, implementation: str | None, tuning: Tuning | None) -> tuple[CacheSpec, Pool, Tuning]:
    if not isinstance(cache, PagedCache):
        raise TypeError(f"cache: expected a PagedCache, got {type(cache).__name__}")
    primitive.check_implementation(implementation)
    return cache.spec, cache.pool, check_tuning(tuning)


def _check_plan(plan: Plan, spec: CacheSpec, pool: Pool) -> None:
    """A plan may have been made for another pool, or for none: its slots are checked against this one."""
    if plan.spec is spec:
        plan.check()
    else:
        check_chunks(spec, plan.chunks)
    if plan.spec.page_size != spec.page_size:
        raise ValueError(
            f"plan: made for pages of {plan.spec.page_size} tokens, the cache has pages of {spec.page_size}: a slot is "
            f"another token there"
        )
    if plan.out_of_range != "raise" or checks.is_traced(plan.slots) or plan.slots_fit(pool.num_slots):
        return
    if not any((known(slots, read=True) >= pool.num_slots).any() for slots in (plan.slots, plan.zero_slots)):
        return
    parts = {f"row {{}} of chunk {k}": slots for k, slots in enumerate(plan.slots_by_chunk())}
    for name, slots in {**parts, "gap slot {}": plan.zero_slots}.items():
        slots = known(slots, read=True)
        for row in np.flatnonzero(slots >= pool.num_slots):
            raise ValueError(
                f"plan: {name.format(row)} has slot {slots[row]}, but the pool has {pool.num_slots} slots; plan with "
                f"out_of_range='skip' to leave such tokens out"
            )


def check_distinct(pool: Pool) -> None:
    """Raises ValueError where two of a pool's arrays are one, which cannot be donated twice."""
    if len(set(map(id, pool.leaves))) == len(pool.leaves):
        return
    seen: dict[int, int] = {}
    for i, leaf in enumerate(pool.leaves):
        first = seen.setdefault(id(leaf), i)
        if first != i:
            raise ValueError(f"pages: arrays {first} and {i} are one array, which cannot be donated twice")


def _groups(spec: CacheSpec, plan: Plan, chunk: Chunk) -> tuple[Group, ...]:
    """Between a chunk and the cache's pages, which need not be of the layout that the plan was made for."""
    return groups_of(spec, chunk.format, plan.positions is not None)


def _parts(spec: CacheSpec, plan: Plan, moving: Sequence[int]) -> list[Part]:
    """The chunks that move, one by one."""
    slots, positions = plan.slots_by_chunk(), plan.positions_by_chunk()
    chunks = plan.chunks
    return [Part(slots[k], chunks[k].data, _groups(spec, plan, chunks[k]), positions[k]) for k in moving]


def _stretches(spec: CacheSpec, plan: Plan, moving: Sequence[int]) -> Iterator[Stretch]:
    """The chunks that move, those that follow one another and are of one shape together."""
    spans, chunks = plan.spans(), plan.chunks
    kinds = itertools.groupby(moving, key=lambda k: (id(chunks[k].fingerprint), chunks[k].num_rows))
    for (_, rows), members in kinds:
        numbers = list(members)

        def of(table: Any, numbers: Sequence[int] = numbers) -> Any:
            if numbers[-1] - numbers[0] + 1 == len(numbers):
                return table[..., spans[numbers[0]][0] : spans[numbers[-1]][1]]
            xp = np if isinstance(table, np.ndarray) else jnp
            return xp.concatenate([table[..., slice(*spans[k])] for k in numbers], axis=-1)

        positions = None if plan.positions is None else tuple(map(of, plan.positions))
        data = [chunks[k].data for k in numbers]
        yield Stretch(of(plan.slots), data, rows, _groups(spec, plan, chunks[numbers[0]]), positions)


def _may_move(slots: Any) -> bool:
    """Whether a row may move; slots whose values are not known may."""
    return bool((slots >= 0).any()) if isinstance(slots, np.ndarray) else slots.shape[0] > 0


def _recycled(into: Iterable[Chunk], spec: CacheSpec, format: ChunkFormat, rows: int, count: int) -> list[Chunk]:
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


def _padded(slots: Any, size: int) -> Any:
    xp = np if isinstance(slots, np.ndarray) else jnp
    return xp.pad(slots, (0, size - slots.shape[0]), constant_values=-1)
