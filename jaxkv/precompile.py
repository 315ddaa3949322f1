"""Compiling ahead: every program that stores and loads of some size need, before the first request comes."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from . import paths
from .bulk import load, store
from .chunk import Chunk, as_format
from .spec import CacheSpec, PagedCache
from .tuning import DEFAULT, Tuning


def precompile(
    cache: PagedCache | CacheSpec,
    *,
    max_tokens: int,
    num_pages: int | None = None,
    sharding: Any = None,
    positions: bool | None = None,
    gaps: str = "keep",
    chunk_tokens: int | None = None,
    tuning: Tuning | None = None,
    **options: Any,
) -> PagedCache:
    """Compiles what `store` and `load` need, so that no call of up to so many tokens compiles anything.

    That is, no call with these options, slots in NumPy or a list, and the cache consumed. The programs of a layer-wise
    transfer are the caller's own, or compiled with the first layer.

    It makes such calls: chunks of tokens are stored and loaded into the slots they came from, which changes no byte.
    Programs are made for the pool's own arrays, so they have to be at hand: those of a cache, or with a spec a pool of
    zero bytes, which is to be called before the memory is needed for another.

    Args:
        cache: the cache, which is consumed (its arrays are deleted, their bytes are those of the result), or its spec.
        max_tokens: of the longest call.
        num_pages: pages of the pool, with a spec.
        sharding: of the pool's arrays, with a spec.
        positions: whether loads may turn keys; by default where the spec has a rope.
        gaps: "zero" where loads may zero gaps.
        chunk_tokens: as in `store`.
        tuning: sizes; see `Tuning`.
        **options: of `store` and `load`: `path`, `implementation`; and of `store` alone: `format`, `layers_per_array`.

    Returns:
        The cache, to be used in place of the one that was given; with a spec, a pool of zero bytes.

    Raises:
        TypeError: `cache` is neither, or an option is unknown.
        ValueError: `max_tokens` is no positive integer or more than the pool holds, `num_pages` is missing, or as
            `store` and `load`; a cache is whole.
    """
    if isinstance(cache, CacheSpec):
        if num_pages is None:
            raise ValueError("num_pages: missing; programs are made for arrays of that many pages")
        pool = cache.empty(num_pages, sharding=sharding)
    elif isinstance(cache, PagedCache):
        pool = cache
    else:
        raise TypeError(f"cache: expected a PagedCache or a CacheSpec, got {type(cache).__name__}")
    if isinstance(max_tokens, bool) or not isinstance(max_tokens, (int, np.integer)) or max_tokens < 1:
        raise ValueError(f"max_tokens: expected an int of at least 1, got {max_tokens!r}")
    if max_tokens > pool.num_slots:
        raise ValueError(f"max_tokens: {max_tokens} is more than the pool's {pool.num_slots} slots")
    tuning = tuning or DEFAULT
    rows = tuning.chunk_tokens if chunk_tokens is None else chunk_tokens
    of_store = {name: options.pop(name) for name in ("format", "layers_per_array") if name in options}
    turning = bool(pool.spec.ropes()) if positions is None else positions
    for count, path in _calls(pool, -(-int(max_tokens) // rows), rows, tuning, options):
        slots = np.arange(min(count * rows, int(max_tokens)), dtype=np.int32)
        way = {**options, "path": path, "tuning": tuning}
        chunks: tuple[Chunk, ...] = ()
        for _ in range(2):  # into new memory, and into that of older chunks
            chunks = store(pool, slots, chunk_tokens=rows, into=chunks, **of_store, **way)
        pool = load(pool, chunks, slots, **way)
        if turning:
            pool = load(pool, chunks, slots, positions=slots, **way)
    if gaps == "zero":
        pool = _zeroing(pool, int(max_tokens), options.get("implementation"))
    return jax.block_until_ready(pool)


def _calls(cache: PagedCache, most: int, rows: int, tuning: Tuning, options: dict[str, Any]) -> list[tuple[int, str]]:
    """Numbers of chunks and paths of calls that take every program: those of a longer call are made of them."""
    way: Callable[[int], paths.Way] = lambda count: paths.choose(  # noqa: E731
        options.get("path"),
        cache.pool.leaves,
        (),
        traced=False,
        nbytes=count * rows * cache.spec.bytes_per_token,
        implementation=options.get("implementation"),
        tuning=tuning,
    )
    ways = {way(count) for count in range(1, most + 1)}
    return [
        (size, each.path)
        for each in sorted(ways)
        for size in sorted({len(run) for count in range(1, most + 1) for run in paths.batches(count, each.batch)})
    ]


def _zeroing(cache: PagedCache, max_tokens: int, implementation: str | None) -> PagedCache:
    """Zeroes no slots, with tables of every size."""
    groups, pool = paths.groups_of(cache.spec, as_format(cache.spec, None)), cache.pool
    restore = paths.Restore(pool, donate=True, traced=False, implementation=implementation)
    for bits in range((max_tokens - 1).bit_length() + 1):
        restore.scatter(paths.Part(np.full(1 << bits, -1, np.int32), (), groups), ())
    return PagedCache.of(dataclasses.replace(pool, leaves=tuple(restore.leaves)), cache.spec)
