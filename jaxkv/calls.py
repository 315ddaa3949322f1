"""What store, load and exchange have in common: their checks, and chunks of what was stored."""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import jax
import numpy as np

from . import host
from .chunk import Chunk, ChunkFormat, Fingerprint, as_format
from .ops import checks, primitive
from .selection import Selection
from .spec import CacheSpec, PagedCache, Pool
from .store_plans import StorePlan
from .tuning import Tuning, check_tuning

T = TypeVar("T")


def chunks_of(
    data: Sequence[tuple[jax.Array, ...]], chosen: Selection, fingerprint: Fingerprint, alike: object = None
) -> tuple[Chunk, ...]:
    """Chunks from their arrays and what was selected.

    Args:
        data: the arrays of each chunk.
        chosen: what is in them.
        fingerprint: of all.
        alike: a mark for arrays that differ in their bytes alone, here and from call to call: of those that have the
            same one, `recycled_chunks` need look at one.
    """
    rest = zip(chosen.num_tokens, chosen.positions, chosen.valid, strict=True)
    chunks = tuple(
        Chunk(arrays, held, positions, valid, fingerprint)
        for arrays, (held, positions, valid) in zip(data, rest, strict=True)
    )
    if alike is not None:
        for chunk in chunks:
            object.__setattr__(chunk, "_alike", alike)  # not a field: what is made of the chunk does not have it
    return chunks


def check_call(cache: PagedCache, implementation: str | None, tuning: Tuning | None) -> tuple[CacheSpec, Pool, Tuning]:
    """What a call is about: the spec, the arrays and the sizes, checked."""
    if not isinstance(cache, PagedCache):
        raise TypeError(f"cache: expected a PagedCache, got {type(cache).__name__}")
    primitive.check_implementation(implementation)
    return cache.spec, cache.pool, check_tuning(tuning)


def check_store_plan(name: str, plan: StorePlan, spec: CacheSpec, pool: Pool, options: dict[str, Any]) -> None:
    """Checks the plan of a store.

    Args:
        name: what to call it in errors.
        plan: to be checked.
        spec: of the cache.
        pool: its arrays.
        options: what else was given, by name; None, or what a store takes by default, where it was not.

    Raises:
        TypeError: an option was given.
        ValueError: the plan is of another spec, or a slot is past the pool.
    """
    given = [option for option, value in options.items() if value is not None and not _is_default(option, value)]
    if given:
        raise TypeError(f"{name}: a StorePlan has its options already, got {given}")
    if plan.spec != spec:
        mine, its = ({f.name: getattr(of, f.name) for f in dataclasses.fields(of)} for of in (plan.spec, spec))
        field = next(field for field, value in mine.items() if value != its[field])
        values = (str(of[field]) if field == "layout" else repr(of[field]) for of in (mine, its))
        raise ValueError(
            f"{name}: a StorePlan that was made for another spec: its {field} is {next(values)}, the cache's "
            f"{next(values)}"
        )
    plan.check(pool.num_slots, name)


_DEFAULTS = {"skip_prefix": 0, "out_of_range": "raise"}


def _is_default(option: str, value: Any) -> bool:
    default = _DEFAULTS.get(option)
    if value is default or default is None:
        return value is default
    return not checks.is_traced(value) and np.ndim(value) == 0 and bool(value == default)


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


def recycled_chunks(
    into: Iterable[Chunk], spec: CacheSpec, format: ChunkFormat | None, rows: int, count: int
) -> tuple[list[Chunk], tuple[Any, ...]]:
    """The chunks whose buffers a store takes, checked.

    Args:
        into: chunks that are no longer needed.
        spec: of the cache.
        format: of the chunks that are stored; None for the cache's own.
        rows: of each.
        count: how many are stored.

    Returns:
        As many as are needed, or as there are; and the different shardings of their arrays.

    Raises:
        TypeError: an entry is no chunk, or is traced.
        ValueError: an array is of another shape, dtype or kind of memory, deleted, or given twice.
    """
    if isinstance(into, Chunk) or not isinstance(into, Iterable):
        raise TypeError(f"into: expected a sequence of chunks, got {type(into).__name__}")
    chunks = list(into)[:count]
    if not chunks:
        return chunks, ()
    shapes, traced = list(as_format(spec, format).shapes(spec, rows)), checks.is_tracing()
    kinds: set[int] = set()
    where: dict[Any, None] = {}
    for k, chunk in enumerate(chunks):
        if not isinstance(chunk, Chunk):
            raise TypeError(f"into: entry {k} is no Chunk but {type(chunk).__name__}")
        if chunk.alike is chunk and not _has_arrays(chunk):
            raise TypeError(f"into: chunk {k} has no tuple of jax.Arrays but {type(chunk.data).__name__}")
        kind = id(chunk.alike)
        if kind not in kinds:  # of chunks that are alike one is checked
            where |= dict.fromkeys(_check_recycled(k, chunk, spec, shapes, traced))
            kinds.add(kind)
    arrays = [array for chunk in chunks for array in chunk.data]
    if any([array.is_deleted() for array in arrays]) or len(set(map(id, arrays))) < len(arrays):
        seen: set[int] = set()
        for k, chunk in enumerate(chunks):
            for array in chunk.data:
                if array.is_deleted() or id(array) in seen:
                    raise ValueError(f"into: chunk {k} was deleted, or is given twice")
                seen.add(id(array))
    return chunks, tuple(where)


def _has_arrays(chunk: Chunk) -> bool:
    return isinstance(chunk.data, (tuple, list)) and all(isinstance(array, jax.Array) for array in chunk.data)


def _check_recycled(
    k: int, chunk: Chunk, spec: CacheSpec, shapes: Sequence[tuple[int, ...]], traced: bool
) -> list[Any]:
    """The shardings of a chunk's arrays; TypeError or ValueError where they are not what is to be written."""
    if traced and any(map(checks.is_traced, chunk.data)):
        raise TypeError("into: chunks are recycled outside of jit alone")
    if [array.shape for array in chunk.data] != shapes or any(array.dtype != spec.dtype for array in chunk.data):
        raise ValueError(
            f"into: chunk {k} has arrays of {[(a.shape, str(a.dtype)) for a in chunk.data]}, this store needs "
            f"{[(s, str(np.dtype(spec.dtype))) for s in shapes]}"
        )
    found = [array.sharding for array in chunk.data]
    for sharding in found:
        if sharding.memory_kind != host.PINNED:
            raise ValueError(f"into: chunk {k} is in memory kind {sharding.memory_kind!r}, expected {host.PINNED!r}")
    return found
