"""Compiling ahead: every program that stores and loads of some size need, before the first request comes."""

from typing import Any

import jax
import numpy as np

from . import host, paths, ways
from .bulk import load, store
from .chunk import Chunk, as_format
from .ops import checks
from .planning import GAPS
from .selection import check_chunk_tokens
from .spec import CacheSpec, PagedCache
from .tuning import Tuning, check_tuning


def precompile(
    cache: PagedCache | CacheSpec,
    *,
    max_tokens: int,
    num_pages: int | None = None,
    sharding: Any = None,
    turning: bool | None = None,
    gaps: str = "keep",
    chunk_tokens: int | None = None,
    tuning: Tuning | None = None,
    **options: Any,
) -> PagedCache:
    """Compiles what `store` and `load` need, so that no call of up to so many tokens compiles anything.

    That is, no call with these options, slots in NumPy or a list, chunks that follow one another, and the cache
    consumed. The programs of a layer-wise transfer are the caller's own, or compiled with the first layer.

    It makes such calls: chunks of tokens are stored and loaded into the slots they came from, which changes no byte.
    Programs are made for the pool's own arrays, so they have to be at hand: those of a cache, or with a spec a pool of
    zero bytes, which is to be called before the memory is needed for another.

    Args:
        cache: the cache, which is consumed (its arrays are deleted, their bytes are those of the result), or its spec.
        max_tokens: of the longest call.
        num_pages: pages of the pool, with a spec.
        sharding: of the pool's arrays, with a spec.
        turning: whether loads may turn keys (`positions=`); by default where the spec's keys can be turned.
        gaps: "zero" where loads may zero gaps.
        chunk_tokens: as in `store`.
        tuning: sizes; see `Tuning`.
        **options: of `store` and `load`: `path`, `implementation`; and of `store` alone: `format`, `layers_per_array`.

    Returns:
        The cache, to be used in place of the one that was given; with a spec, a pool of zero bytes.

    Raises:
        TypeError: `cache` is neither, inside jit, or an option is unknown or of the wrong type.
        ValueError: `max_tokens` is no positive integer or more than the pool holds, `num_pages` is missing or given
            with a cache, keys that are to be turned cannot be, or as `store` and `load`. What fails after the first
            load carries the cache that is left, as `error.cache`.
    """
    if not isinstance(cache, (CacheSpec, PagedCache)):
        raise TypeError(f"cache: expected a PagedCache or a CacheSpec, got {type(cache).__name__}")
    if checks.is_tracing():
        raise TypeError("precompile: called inside jit, where nothing is compiled yet; call it before")
    spec = cache if isinstance(cache, CacheSpec) else cache.spec
    tuning = check_tuning(tuning)
    rows = check_chunk_tokens(tuning.chunk_tokens if chunk_tokens is None else chunk_tokens)
    checks.check_choice("gaps", gaps, GAPS)
    if turning is not None and not isinstance(turning, bool):
        raise TypeError(f"turning: expected a bool or None, got {turning!r}")
    if isinstance(max_tokens, bool) or not isinstance(max_tokens, (int, np.integer)) or max_tokens < 1:
        raise ValueError(f"max_tokens: expected an int of at least 1, got {max_tokens!r}")
    tokens = int(max_tokens)
    turns = _turns(spec, turning)
    if isinstance(cache, PagedCache):
        if num_pages is not None or sharding is not None:
            raise ValueError("num_pages and sharding: a cache has its own; they are for a spec")
        pool = cache
    elif num_pages is None:
        raise ValueError("num_pages: missing; programs are made for arrays of that many pages")
    else:
        pool = cache.empty(num_pages, sharding=sharding)
    if tokens > pool.num_slots:
        raise ValueError(f"max_tokens: {tokens} is more than the pool's {pool.num_slots} slots")

    of_store = {name: options.pop(name) for name in ("format", "layers_per_array") if name in options}
    try:
        for count, path in _calls(pool, -(-tokens // rows), rows, tuning, options):
            slots = np.arange(min(count * rows, tokens), dtype=np.int32)
            way = {**options, "path": path, "tuning": tuning}
            positions = _positions(spec, len(slots)) if turns else None
            chunks: tuple[Chunk, ...] = ()
            for _ in range(2):  # into new memory, and into that of older chunks
                chunks = store(pool, slots, positions=positions, chunk_tokens=rows, into=chunks, **of_store, **way)
            pool = load(pool, chunks, slots, **way)
            if turns:
                pool = load(pool, chunks, slots, positions=positions, **way)
        if gaps == "zero":
            pool = _zeroing(pool, tokens, options.get("implementation"))
    except Exception as error:
        if not hasattr(error, "cache"):
            error.cache = pool  # type: ignore[attr-defined]
        raise
    return jax.block_until_ready(pool)


def _turns(spec: CacheSpec, turning: bool | None) -> bool:
    """Whether to compile loads that turn keys."""
    if turning is False or (turning is None and not spec.ropes()):
        return False
    try:
        if spec.turn() is None:
            raise ValueError("turning: True, but the cache's spec has no rope to turn keys by; see CacheSpec(rope=...)")
    except (TypeError, NotImplementedError):
        if turning:
            raise
        return False
    return True


def _positions(spec: CacheSpec, count: int) -> np.ndarray:
    """Positions that every rope serves."""
    limit = min(rope.position_limit or checks.INT32_MAX for rope in spec.ropes())
    index = np.arange(count, dtype=np.int32) % limit
    return index if spec.position_components is None else np.stack([index] * spec.position_components)


def _calls(cache: PagedCache, most: int, rows: int, tuning: Tuning, options: dict[str, Any]) -> list[tuple[int, str]]:
    """Numbers of chunks and paths of calls that take every program: those of a longer call are made of them."""
    covered: set[tuple[Any, ...]] = set()
    calls = []
    for count in range(1, most + 1):
        way = ways.choose(
            options.get("path"),
            cache.pool.leaves,
            (),
            traced=False,
            nbytes=count * rows * cache.spec.bytes_per_token,
            chunks=count,
            implementation=options.get("implementation"),
            tuning=tuning,
        )
        programs: set[tuple[Any, ...]] = {("store", way.path, len(run)) for run in way.runs(count)}
        for at, run in enumerate(way.loads(count)):
            programs.add(("load", way.path, len(run), 0 if at else way.ahead(len(run))))
        if not programs <= covered:
            covered |= programs
            calls.append((count, way.path))
    return calls


def _zeroing(cache: PagedCache, max_tokens: int, implementation: str | None) -> PagedCache:
    """Zeroes no slots, with tables of every size."""
    groups, pool = paths.groups_of(cache.spec, as_format(cache.spec, None)), cache.pool
    restore = paths.Restore(pool, donate=True, traced=False, implementation=implementation)
    for bits in range((max_tokens - 1).bit_length() + 1):
        (slots,) = host.send_beside([np.full(1 << bits, -1, np.int32)], pool.leaves[0].sharding)
        restore.scatter(paths.Part(slots, (), groups), ())
    return PagedCache.of(pool.with_leaves(restore.leaves), cache.spec)
