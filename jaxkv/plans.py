"""Plans: which row of which chunk goes to which slot, worked out and checked before anything moves."""

import dataclasses
import itertools
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .chunk import Chunk
from .ops import checks
from .ops.scatter import last_wins
from .spec import CacheSpec, PagedCache

GAPS = ("keep", "zero")

_TABLE_SLOTS = 1 << 26  # a table of all slots finds equal ones faster than sorting, while it is not huge


class Counts(NamedTuple):
    """What became of the tokens of a call; the four add up to the tokens given.

    Attributes:
        moved: tokens whose rows move (of equal slots, all count).
        skipped: negative slots, the skipped prefix, and rows that are not real.
        out_of_range: slots past the pool.
        bad_position: positions that cannot be served.
    """

    moved: Any
    skipped: Any
    out_of_range: Any
    bad_position: Any = 0


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Plan:
    """A load, decided: a value that can be loaded as often as you like.

    Attributes:
        chunks: what is loaded.
        slots: int32 `[rows of all chunks]`, the slot of each row; -1 where a row stays behind.
        zero_slots: int32 `[n]`, slots to fill with zero bytes (`gaps="zero"`), -1 for none.
        zeroed: bool `[tokens]`, the gap tokens: covered by no chunk, between the first and the last.
        counts: what becomes of the tokens.
        spec: the cache it was made for.
        num_slots: slots of the pool it was checked against, or None where that is left to `load`.
        out_of_range: what was asked for slots past the pool, "raise" or "skip".
    """

    chunks: tuple[Chunk, ...]
    slots: Any
    zero_slots: Any
    zeroed: Any
    counts: Counts
    spec: CacheSpec = dataclasses.field(metadata={"static": True})
    num_slots: int | None = dataclasses.field(metadata={"static": True})
    out_of_range: str = dataclasses.field(metadata={"static": True})

    def slots_by_chunk(self) -> list[Any]:
        """The slots of each chunk's rows, int32 `[rows]`."""
        ends = list(itertools.accumulate(chunk.num_rows for chunk in self.chunks))
        return [self.slots[first:last] for first, last in itertools.pairwise([0, *ends])]


class Ranges(NamedTuple):
    """Token ranges of chunks, starts and ends; NumPy where known, else traced."""

    starts: Any
    ends: Any

    @property
    def sizes(self) -> Any:
        """Tokens of each range."""
        return self.ends - self.starts


def plan(
    cache: PagedCache | CacheSpec,
    chunks: Iterable[Chunk],
    slots: Any,
    *,
    starts: Sequence[int] | None = None,
    ends: Sequence[int] | None = None,
    gaps: str = "keep",
    skip_prefix: Any = 0,
    out_of_range: str = "raise",
    unique_slots: bool = False,
    num_pages: int | None = None,
) -> Plan:
    """Decides where the rows of chunks go.

    NumPy arrays, lists and device arrays that are not traced are read here (for a device array that waits for
    it); under a tracer, or with `out_of_range="skip"`, no device array is read and what cannot be served is not
    moved.

    Args:
        cache: the cache, or its spec where the pool is not at hand.
        chunks: in any order; where two cover the same slot, the later one's row wins.
        slots: integers `[tokens]`, the slot of each token of the request; negative for tokens to leave out.
        starts: the first token that each chunk covers. By default the chunks follow one another from token 0.
        ends: one past the last token that each chunk covers; with `starts`.
        gaps: "keep", or "zero" to fill the slots of tokens between the first and the last chunk that no chunk
            covers with zero bytes (LMCache's behaviour).
        skip_prefix: tokens below this index are left alone.
        out_of_range: "raise", or "skip" to leave out tokens whose slot is past the pool.
        unique_slots: a promise that no two tokens share a slot, which saves looking for such.
        num_pages: pages of the pool, where `cache` is a spec; without it slots are checked when loading.

    Returns:
        The plan.

    Raises:
        TypeError: slots or chunks are of the wrong type, or a chunk's dtype is not the cache's.
        ValueError: ranges, slots or chunks do not fit one another or the cache.
    """
    spec, num_slots = _pool_of(cache, num_pages)
    checks.check_out_of_range(out_of_range)
    if gaps not in GAPS:
        raise ValueError(f"gaps: {gaps!r} is unknown, expected one of {GAPS}")
    parts = check_chunks(spec, chunks)
    read = out_of_range == "raise"
    slot_of_token = checks.slots_int32(slots, read=read)
    num_tokens = slot_of_token.shape[0]
    # Chunks that come out of a jitted store have these on the device, where they are as concrete as any other.
    held, real = ([known(x, read) for x in xs] for xs in ([c.num_tokens for c in parts], [c.valid for c in parts]))
    ranges = _load_ranges(parts, held, num_tokens, starts, ends)
    prefix = check_skip_prefix(skip_prefix)

    xp: Any = np
    values = (slot_of_token, ranges.starts, prefix, *held, *real)
    if any(isinstance(value, jax.Array) for value in values):
        xp = jnp

    # Row r of chunk k holds token starts[k] + r, if it holds one at all.
    rows = np.asarray([chunk.num_rows for chunk in parts], np.int32)
    chunk_of_row = np.repeat(np.arange(len(parts)), rows)
    row = (np.arange(rows.sum()) - np.repeat(np.cumsum(rows) - rows, rows)).astype(np.int32)
    token = xp.asarray(ranges.starts)[chunk_of_row] + row
    given = row < xp.asarray(ranges.sizes)[chunk_of_row]
    given &= token < num_tokens
    token = xp.where(given, token, xp.asarray(0, token.dtype))
    slot = xp.asarray(slot_of_token)[token] if num_tokens else xp.full(row.shape, -1, np.int32)
    real_row = xp.concatenate([xp.asarray(x) for x in real]) if parts else np.zeros(0, bool)
    taken = given & real_row & (token >= prefix) & (slot >= 0)

    limit = checks.INT32_MAX if num_slots is None else num_slots
    outside = taken & (slot >= limit)
    if xp is np and out_of_range == "raise":
        _raise_for(outside, token, slot, num_slots)
    moves = taken & ~outside
    final = xp.where(moves, slot, xp.asarray(-1, np.int32))
    num_given, num_taken, num_outside = (x.sum(dtype=np.int32) for x in (given, taken, outside))

    zeroed, zero_slots, gap_counts = _gaps(
        gaps, ranges, num_tokens, slot_of_token, prefix, num_slots, final, xp, out_of_range
    )
    if not unique_slots:
        zero_slots = _last_wins(zero_slots, xp, num_slots)  # the ops want distinct slots, also for zeros
        final = _last_wins(final, xp, num_slots)
    counts = Counts(
        num_taken - num_outside + gap_counts.moved,
        num_given - num_taken + gap_counts.skipped,
        num_outside + gap_counts.out_of_range,
        np.int32(0),
    )
    return Plan(tuple(parts), final, zero_slots, zeroed, counts, spec, num_slots, out_of_range)


def check_chunks(spec: CacheSpec, chunks: Iterable[Chunk]) -> list[Chunk]:
    """Checks that chunks can be loaded into a cache.

    Raises:
        TypeError: an entry is no chunk, or its dtype is not the cache's.
        ValueError: an entry is missing, of other KV than the cache's, or its arrays have other shapes or were
            deleted.
    """
    if isinstance(chunks, Chunk):
        raise TypeError("chunks: expected a sequence of chunks, got one Chunk; put it in a tuple")
    parts = list(chunks)
    fitting: dict[tuple[int, int], tuple[tuple[int, ...], ...]] = {}  # the chunks of one store differ in data alone
    for i, chunk in enumerate(parts):
        if chunk is None:
            raise ValueError(f"chunks: entry {i} is missing (None)")
        if not isinstance(chunk, Chunk):
            raise TypeError(f"chunks: entry {i} is no Chunk but {type(chunk).__name__}")
        kind = (id(chunk.fingerprint), chunk.num_rows)
        if kind not in fitting:
            dtype = chunk.fingerprint.dtype
            if dtype != str(np.dtype(spec.dtype)):
                raise TypeError(f"chunks: chunk {i} has dtype {dtype}, layer 0 of the cache has {np.dtype(spec.dtype)}")
            different = chunk.fingerprint.difference(spec)
            if different:
                raise ValueError(f"chunks: chunk {i} was stored from another cache: {different}")
            fitting[kind] = chunk.format.shapes(spec, chunk.num_rows)
        shapes = fitting[kind]
        if tuple(array.shape for array in chunk.data) != shapes:
            raise ValueError(
                f"chunks: chunk {i} has arrays of shapes {[array.shape for array in chunk.data]}, expected "
                f"{list(shapes)} for {chunk.num_rows} rows in format {str(chunk.format.layout)!r}"
            )
        for array in chunk.data:
            if array.dtype != spec.dtype:
                raise TypeError(f"chunks: chunk {i} holds {array.dtype}, the cache {np.dtype(spec.dtype)}")
            if checks.is_traced(array):
                continue
            if array.is_deleted():
                raise ValueError(f"chunks: an array of chunk {i} was deleted or donated to an earlier call")
            if array.sharding.memory_kind == "unpinned_host":
                raise ValueError(
                    f"chunks: chunk {i} is in memory kind 'unpinned_host', expected 'pinned_host' (or 'device')"
                )
    return parts


def known(values: Any, read: bool) -> Any:
    """Values as NumPy where they are known and may be read (which waits for a device array), else as they are."""
    if isinstance(values, jax.Array) and (checks.is_traced(values) or not read):
        return values
    return np.asarray(values)


def check_skip_prefix(skip_prefix: Any) -> Any:
    """The prefix as an int (or a traced int32); ValueError where it is negative, TypeError where no integer."""
    traced = checks.is_traced(skip_prefix)
    value = skip_prefix if traced else np.asarray(skip_prefix)
    if value.ndim or not np.issubdtype(value.dtype, np.integer):
        raise TypeError(f"skip_prefix: expected an integer, got {skip_prefix!r}")
    if traced:
        return value.astype(jnp.int32)
    if value < 0:
        raise ValueError(f"skip_prefix: expected an integer of at least 0, got {skip_prefix!r}")
    return np.int32(min(int(value), checks.INT32_MAX))


def check_ranges(starts: Sequence[int], ends: Sequence[int], num_tokens: int) -> Ranges:
    """Token ranges from what a caller gives.

    Raises:
        TypeError: they are no integers.
        ValueError: they differ in number, or one is reversed, negative or past the slots.
    """
    first, last = (_integers(name, values) for name, values in (("starts", starts), ("ends", ends)))
    if len(first) != len(last):
        raise ValueError(f"starts and ends: {len(first)} starts and {len(last)} ends")
    for k, (start, end) in enumerate(zip(first.tolist(), last.tolist(), strict=True)):
        if start < 0 or end < start or end > num_tokens:
            raise ValueError(
                f"starts and ends: chunk {k} has range [{start}, {end}), slots are for {num_tokens} tokens"
            )
    return Ranges(first.astype(np.int32), last.astype(np.int32))


def _integers(name: str, values: Any) -> np.ndarray:
    array = np.asarray(values)
    if array.size == 0:
        array = array.astype(np.int64)
    if array.ndim != 1 or not np.issubdtype(array.dtype, np.integer):
        raise TypeError(f"{name}: expected integers in one dimension, got {values!r}")
    return array.astype(np.int64)


def _pool_of(cache: PagedCache | CacheSpec, num_pages: int | None) -> tuple[CacheSpec, int | None]:
    if isinstance(cache, PagedCache):
        return cache.spec, cache.spec.check(cache.pages).num_slots
    if not isinstance(cache, CacheSpec):
        raise TypeError(f"cache: expected a PagedCache or a CacheSpec, got {type(cache).__name__}")
    return cache, None if num_pages is None else num_pages * cache.page_size


def _load_ranges(
    chunks: Sequence[Chunk],
    tokens: Sequence[Any],
    num_tokens: int,
    starts: Sequence[int] | None,
    ends: Sequence[int] | None,
) -> Ranges:
    traced = any(isinstance(count, jax.Array) for count in tokens)
    if traced:
        held: Any = jnp.stack([jnp.asarray(count, jnp.int32) for count in tokens])
    else:
        held = np.asarray([int(count) for count in tokens], np.int32)
        for k, chunk in enumerate(chunks):
            if not 0 <= held[k] <= chunk.num_rows:
                raise ValueError(
                    f"chunks: chunk {k} is to hold {held[k]} tokens, its arrays have {chunk.num_rows} rows"
                )
    if starts is None and ends is None:
        last = (jnp if traced else np).cumsum(held, dtype=np.int32)
        if not traced and held.sum() != num_tokens:
            raise ValueError(
                f"slots: {num_tokens} slots for the {held.sum()} tokens of {len(chunks)} chunks; pass starts and ends "
                f"where the chunks do not cover all of them"
            )
        return Ranges(last - held, last)
    if starts is None or ends is None:
        raise ValueError(f"starts and ends: give both or neither, got {starts!r} and {ends!r}")
    if not len(starts) == len(ends) == len(chunks):
        raise ValueError(f"starts, ends and chunks: {len(starts)} starts, {len(ends)} ends and {len(chunks)} chunks")
    ranges = check_ranges(starts, ends, num_tokens)
    if not traced:
        for k in np.flatnonzero(ranges.sizes != held).tolist():
            raise ValueError(
                f"chunks: chunk {k} has {held[k]} rows, its range [{ranges.starts[k]}, {ranges.ends[k]}) has "
                f"{ranges.sizes[k]} tokens"
            )
    return ranges


def _raise_for(outside: np.ndarray, token: np.ndarray, slot: np.ndarray, num_slots: int | None) -> None:
    bad = np.flatnonzero(outside)
    if bad.size:
        index = token[bad].min()
        value = slot[bad[token[bad] == index][0]]
        pool = f"the pool has {num_slots}" if num_slots is not None else "no pool has that many"
        raise ValueError(
            f"slots: index {index} has slot {value}, but {pool} slots; out_of_range='skip' leaves such tokens out"
        )


def _last_wins(slots: Any, xp: Any, num_slots: int | None) -> Any:
    """Of equal slots keeps the last; the others become -1."""
    if xp is jnp:
        if num_slots is None:
            raise ValueError(
                "plan: traced slots need the cache, or num_pages, to find equal ones; or unique_slots=True"
            )
        return last_wins(slots, num_slots)
    if slots.size == 0:
        return slots
    order = np.arange(slots.size, dtype=np.int32)
    if slots.max() < _TABLE_SLOTS:
        winner = np.empty(slots.max() + 2, np.int32)
        winner[slots] = order  # of equal indices, NumPy assigns the last; -1 lands in the spare last entry
        return np.where(winner[slots] == order, slots, np.int32(-1))
    _, from_end = np.unique(slots[::-1], return_index=True)
    wins = np.zeros(slots.size, bool)
    wins[slots.size - 1 - from_end] = True
    return np.where(wins, slots, np.int32(-1))


def _gaps(
    gaps: str,
    ranges: Ranges,
    num_tokens: int,
    slots: Any,
    prefix: Any,
    num_slots: int | None,
    written: Any,
    xp: Any,
    out_of_range: str,
) -> tuple[Any, Any, Counts]:
    """The gap tokens, the slots to zero for them, and their counts; a slot that a chunk writes is not zeroed."""
    none = np.zeros(num_tokens, bool), np.zeros(0, np.int32), Counts(np.int32(0), np.int32(0), np.int32(0))
    if gaps == "keep" or num_tokens == 0:
        return none
    if isinstance(ranges.starts, jax.Array):
        raise ValueError("gaps: under a tracer, starts and ends must be given to zero the gaps between chunks")
    used = ranges.sizes > 0
    if not used.any():
        return none
    index = np.arange(num_tokens)
    covered = np.zeros(num_tokens, bool)
    for start, end in zip(ranges.starts[used], ranges.ends[used], strict=True):
        covered[start:end] = True
    gap = ~covered & (index >= ranges.starts[used].min()) & (index < ranges.ends[used].max())
    token = np.flatnonzero(gap).astype(np.int32)
    limit = checks.INT32_MAX if num_slots is None else num_slots
    slot = xp.asarray(slots)[token]
    taken = (slot >= 0) & (token >= prefix)
    outside = taken & (slot >= limit)
    if xp is np and out_of_range == "raise":
        _raise_for(outside, token, slot, num_slots)
    zeros = xp.where(taken & ~outside, slot, xp.asarray(-1, np.int32))
    zeros = xp.where(xp.isin(zeros, written), xp.asarray(-1, np.int32), zeros)
    moved, outside_count = ((taken & ~outside).sum(dtype=np.int32), outside.sum(dtype=np.int32))
    return gap, zeros, Counts(moved, np.int32(token.size) - moved - outside_count, outside_count)
