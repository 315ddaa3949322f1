"""store and load: chunks of all layers between the pages and pinned host memory.

Both walk the chunks one by one through a ring of device buffers: while one chunk is on the link, the next is
gathered (or the last is scattered). So the device memory a call takes is that of the ring, whatever the number of
tokens; and every chunk of a store has the same shape, so that a request of another length compiles nothing.
"""

import functools
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from . import host
from .chunk import Chunk, ChunkFormat, Fingerprint, as_format
from .layout import Layout
from .ops import checks, primitive
from .ops.gather import gather_leaves
from .ops.scatter import scatter_leaves
from .ops.sharding import describe
from .ops.transfer import Transfer
from .plans import Plan, Ranges, check_ranges, check_skip_prefix
from .plans import plan as make_plan
from .spec import CacheSpec, PagedCache, Pool
from .tuning import Tuning


class Group(NamedTuple):
    """Layers that share an array of a chunk: their transfer, and the pool leaves it touches."""

    transfer: Transfer
    leaves: tuple[int, ...]


@functools.lru_cache(maxsize=256)
def groups_of(spec: CacheSpec, format: ChunkFormat) -> tuple[Group, ...]:
    """The groups of a format, in the order of a chunk's arrays."""
    assert isinstance(format.layout, Layout)  # made so by ChunkFormat
    return tuple(Group(*spec.transfer(format.layout, layers).narrowed()) for layers in format.groups(spec.num_layers))


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
        positions: integers `[tokens]`, the position each key is rotated for; by default a token's index.
        chunk_tokens: rows of each chunk's arrays (256); a shorter range fills the rest with zero bytes.
        layers_per_array: layers that share one array; by default all do.
        format: of the chunks: a `ChunkFormat`, `Layout`, sentence or name. By default KV_2LTD (KV_MLA for one
            plane), or KV_T2D where `layers_per_array` is given.
        skip_prefix: tokens below this index are treated as having a negative slot.
        out_of_range: "raise", or "skip" to treat slots past the pool as negative ones; under a tracer, and with
            "skip", no device array is read.
        implementation: None for the best there is, "xla" or "ffi".
        tuning: sizes; see `Tuning`.

    Returns:
        The chunks, in order.

    Raises:
        TypeError: an argument is of the wrong type.
        ValueError: arguments do not fit one another, or a concrete slot is past the pool; nothing was launched.
        NotImplementedError: the pages are sharded over another axis than heads.
        RuntimeError: `implementation="ffi"` where no handlers were built.
    """
    spec, pool, tuning = _check_call(cache, implementation, tuning)
    checks.check_out_of_range(out_of_range)
    rows = tuning.chunk_tokens if chunk_tokens is None else chunk_tokens
    if isinstance(rows, bool) or not isinstance(rows, (int, np.integer)) or rows < 1:
        raise ValueError(f"chunk_tokens: expected an int of at least 1, got {chunk_tokens!r}")
    format = as_format(spec, format, layers_per_array)
    groups = groups_of(spec, format)
    rows = int(rows)
    slot = checks.slots_int32(slots, read=out_of_range == "raise")
    ranges = _store_ranges(slot.shape[0], rows, starts, ends)
    prefix = check_skip_prefix(skip_prefix)
    position = _positions(positions, slot.shape[0])
    table, valid, held = _rows_of(slot, ranges, rows, prefix, pool.num_slots, out_of_range)

    ring = deque(() if pool.traced else _empty_staging(groups, pool, rows, spec, tuning.staging))
    fingerprint = Fingerprint.of(spec, format)
    chunks = []
    for k, (start, end) in enumerate(zip(ranges.starts.tolist(), ranges.ends.tolist(), strict=True)):
        if pool.traced:
            data = _gather_groups(table[k], pool.leaves, groups, implementation)
        else:
            # The ring's oldest buffers take the next chunk, once its own copy to the host has left them.
            data = _gather_step(ring.popleft(), table[k], pool.leaves, groups=groups, implementation=implementation)
            ring.append(data)
        at = _padded(position[start:end], rows)
        chunks.append(Chunk(host.place(data), np.int32(held[k]), at, valid[k], fingerprint))
    return tuple(chunks)


def load(
    cache: PagedCache,
    chunks: Plan | Iterable[Chunk],
    slots: Any = None,
    *,
    donate: bool = True,
    implementation: str | None = None,
    tuning: Tuning | None = None,
    **options: Any,
) -> PagedCache:
    """Copies chunks into the pages.

    `load(cache, chunks, slots, **options)` is `load(cache, plan(cache, chunks, slots, **options))`. Device memory
    is bounded by waiting for a chunk's arrival before the one `tuning.staging` further on is sent; the scatters
    themselves are not waited for.

    Args:
        cache: the pages; consumed unless `donate=False`: its arrays are deleted, even where the backend made a
            copy, and the result is the new cache.
        chunks: the chunks, or a plan made by `plan`.
        slots: integers `[tokens]`, the slot of each token (not with a plan).
        donate: whether the cache is consumed; if not, the pages are copied once.
        implementation: None for the best there is, "xla" or "ffi".
        tuning: sizes; see `Tuning`.
        **options: of `plan`: `starts`, `ends`, `gaps`, `skip_prefix`, `out_of_range`, `unique_slots`.

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
            raise TypeError(f"load: a plan has its slots and options already, got {['slots', *options]}")
        plan = chunks
        _check_plan(plan, spec, pool)
    else:
        if slots is None:
            raise TypeError("slots: missing; give the slot of each token, or a plan")
        plan = make_plan(cache, chunks, slots, **options)
    if donate and not pool.traced:
        _check_distinct(pool)

    moving = [k for k in range(len(plan.chunks)) if _may_move(plan.slots_of(k))]
    zeroing = _may_move(plan.zero_slots)
    if not moving and not zeroing:
        return cache
    leaves = list(pool.leaves)
    shardings = {k: _chunk_shardings(plan.chunks[k], spec, pool) for k in moving}
    staged = deque(host.fetch(plan.chunks[k].data, shardings[k]) for k in moving[: tuning.staging])
    step = _scatter_groups if pool.traced else (_scatter_in_place if donate else _scatter_into_copy)
    try:
        for at, k in enumerate(moving):
            data = staged.popleft()
            groups = groups_of(spec, plan.chunks[k].format)
            leaves = step(leaves, plan.slots_of(k), data, groups=groups, implementation=implementation)
            step = step if pool.traced else _scatter_in_place
            if at + tuning.staging < len(moving):
                jax.block_until_ready(() if pool.traced else data)
                ahead = moving[at + tuning.staging]
                staged.append(host.fetch(plan.chunks[ahead].data, shardings[ahead]))
        if zeroing:
            group = groups_of(spec, as_format(spec, None))
            # Padded to a power of two, so that few programs serve all lengths.
            size = 1 << (plan.zero_slots.shape[0] - 1).bit_length()
            slots = _padded(plan.zero_slots, size, fill=-1)
            leaves = step(leaves, slots, (), groups=group, implementation=implementation)
    except Exception as error:
        error.cache = PagedCache(jax.tree.unflatten(pool.structure, leaves), spec)  # type: ignore[attr-defined]
        raise
    if donate and not pool.traced:
        for leaf in pool.leaves:
            leaf.delete()
    return PagedCache(jax.tree.unflatten(pool.structure, leaves), spec)


def _gather_groups(
    slots: Any, leaves: Sequence[jax.Array], groups: tuple[Group, ...], implementation: str | None
) -> tuple[jax.Array, ...]:
    return tuple(
        part
        for transfer, numbers in groups
        for part in gather_leaves(
            jnp.asarray(slots),
            [leaves[i] for i in numbers],
            transfer=transfer,
            num_chunks=1,
            implementation=implementation,
        )
    )


@functools.partial(jax.jit, static_argnames=("groups", "implementation"), donate_argnames="staging", keep_unused=True)
def _gather_step(
    staging: tuple[jax.Array, ...],
    slots: Any,
    leaves: Sequence[jax.Array],
    *,
    groups: tuple[Group, ...],
    implementation: str | None,
) -> tuple[jax.Array, ...]:
    """Gathers one chunk into the buffers of an earlier one: they are donated, and of the results' shapes."""
    del staging
    return _gather_groups(slots, leaves, groups, implementation)


def _scatter_groups(
    leaves: Sequence[jax.Array],
    slots: Any,
    data: tuple[jax.Array, ...],
    *,
    groups: tuple[Group, ...],
    implementation: str | None,
) -> list[jax.Array]:
    """Scatters one chunk, or zero bytes where `data` is empty."""
    out, parts, slots = list(leaves), list(data), jnp.asarray(slots)
    for transfer, numbers in groups:
        held = len(transfer.chunk_kinds) if data else 0
        written = scatter_leaves(
            slots,
            parts[:held],
            [out[i] for i in numbers],
            transfer=transfer,
            num_chunks=1 if data else 0,
            rows=slots.shape[0] if data else 0,
            implementation=implementation,
        )
        parts = parts[held:]
        for i, leaf in zip(numbers, written, strict=True):
            out[i] = leaf
    return out


_STEP = ("groups", "implementation")
_scatter_in_place = jax.jit(_scatter_groups, static_argnames=_STEP, donate_argnames="leaves")
_scatter_into_copy = jax.jit(_scatter_groups, static_argnames=_STEP)


def _check_call(cache: PagedCache, implementation: str | None, tuning: Tuning | None) -> tuple[CacheSpec, Pool, Tuning]:
    if not isinstance(cache, PagedCache):
        raise TypeError(f"cache: expected a PagedCache, got {type(cache).__name__}")
    primitive.check_implementation(implementation)
    return cache.spec, cache.spec.check(cache.pages), tuning or Tuning()


def _check_plan(plan: Plan, spec: CacheSpec, pool: Pool) -> None:
    """A plan may have been made for another pool, or for none: its slots are checked against this one."""
    for chunk in plan.chunks:
        different = chunk.fingerprint.difference(spec)
        if different:
            raise ValueError(f"plan: made for another cache: {different}")
    if plan.out_of_range == "raise" and isinstance(plan.slots, np.ndarray):
        for slots in (plan.slots, plan.zero_slots):
            checks.check_slots_in_pool(slots, pool.num_slots)


def _check_distinct(pool: Pool) -> None:
    seen: dict[int, int] = {}
    for i, leaf in enumerate(pool.leaves):
        first = seen.setdefault(id(leaf), i)
        if first != i:
            raise ValueError(f"pages: arrays {first} and {i} are one array, which cannot be donated twice")


def _may_move(slots: Any) -> bool:
    """Whether a row may move; slots whose values are not known may."""
    return bool((slots >= 0).any()) if isinstance(slots, np.ndarray) else slots.shape[0] > 0


def _store_ranges(num_tokens: int, rows: int, starts: Sequence[int] | None, ends: Sequence[int] | None) -> Ranges:
    if starts is None and ends is None:
        first = np.arange(0, num_tokens, rows, dtype=np.int32)
        return Ranges(first, np.minimum(first + np.int32(rows), np.int32(num_tokens)))
    if starts is None or ends is None:
        raise ValueError(f"starts and ends: give both or neither, got {starts!r} and {ends!r}")
    ranges = check_ranges(starts, ends, num_tokens)
    for k in np.flatnonzero(ranges.sizes > rows):
        raise ValueError(
            f"starts and ends: chunk {k} has range [{ranges.starts[k]}, {ranges.ends[k]}), more than the {rows} tokens "
            f"of a chunk (chunk_tokens)"
        )
    return ranges


def _rows_of(
    slots: Any, ranges: Ranges, rows: int, prefix: Any, num_slots: int, out_of_range: str
) -> tuple[Any, Any, np.ndarray]:
    """The slot of each row, int32 `[chunks, rows]` with -1 for none; which rows are real; tokens of each chunk."""
    token = ranges.starts[:, None] + np.arange(rows, dtype=np.int32)
    given = token < ranges.ends[:, None]
    token = np.where(given, token, np.int32(0))
    traced = isinstance(slots, jax.Array) or checks.is_traced(prefix)
    xp: Any = jnp if traced else np
    if token.size == 0:
        return token, given, ranges.sizes
    slot = xp.asarray(slots)[token] if slots.shape[0] else xp.full(token.shape, -1, np.int32)
    taken = given & (slot >= 0) & (token >= prefix)
    if not traced and out_of_range == "raise":
        used = np.zeros(len(slots), bool)
        used[token[taken]] = True
        checks.check_slots_in_pool(np.where(used, slots, np.int32(-1)), num_slots)
    taken &= slot < num_slots
    return xp.where(taken, slot, xp.asarray(-1, np.int32)), taken, ranges.sizes


def _positions(positions: Any, num_tokens: int) -> Any:
    """The position of each token, int32 `[tokens]`."""
    if positions is None:
        return np.arange(num_tokens, dtype=np.int32)
    values = positions if isinstance(positions, jax.Array) else np.asarray(positions)
    if not jnp.issubdtype(values.dtype, jnp.integer):
        raise TypeError(f"positions: expected integers, got dtype {values.dtype}")
    if values.shape != (num_tokens,):
        raise ValueError(f"positions: got shape {values.shape} for {num_tokens} tokens")
    return values.astype(np.int32)


def _padded(values: Any, size: int, fill: int = 0) -> Any:
    xp = np if isinstance(values, np.ndarray) else jnp
    return xp.pad(values, (0, size - values.shape[0]), constant_values=fill)


def _chunk_leaves(groups: tuple[Group, ...], pool: Pool, rows: int) -> list[Any]:
    """Where each array of a chunk of this pool is to be on the device: its shape and sharding."""
    out = []
    for transfer, numbers in groups:
        arrays = [pool.leaves[i] for i in numbers]
        leaves = describe(transfer, rows, tuple(x.shape for x in arrays), 1, rows)
        sharding = arrays[0].sharding
        axes = leaves.split(arrays).mesh_axes
        mesh = sharding.mesh if isinstance(sharding, NamedSharding) else None
        out += [(leaf.shape, sharding if mesh is None else leaf.sharding(mesh, axes)) for leaf in leaves.chunks]
    return out


def _chunk_shardings(chunk: Chunk, spec: CacheSpec, pool: Pool) -> list[Any]:
    if pool.traced:
        return [None] * len(chunk.data)
    return [sharding for _, sharding in _chunk_leaves(groups_of(spec, chunk.format), pool, chunk.num_rows)]


def _empty_staging(
    groups: tuple[Group, ...], pool: Pool, rows: int, spec: CacheSpec, count: int
) -> list[tuple[jax.Array, ...]]:
    """The ring of a store, filled by nothing yet."""
    places = _chunk_leaves(groups, pool, rows)
    return [tuple(jnp.empty(shape, spec.dtype, device=sharding) for shape, sharding in places) for _ in range(count)]
