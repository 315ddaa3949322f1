"""plan: decides where the rows of chunks go, and checks it, before anything moves."""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from . import loading
from .chunk import Chunk, check_chunks, known
from .ops import checks
from .ops.scatter import last_wins
from .plans import Counts, Plan
from .selection import Ranges, check_positions, check_ranges, check_skip_prefix, given_positions
from .spec import CacheSpec, PagedCache
from .tuning import DEFAULT

GAPS = ("keep", "zero")

_TABLE_SLOTS = 1 << 26  # a table of all slots finds equal ones faster than sorting, while it is not huge


def plan(
    cache: PagedCache | CacheSpec,
    chunks: Iterable[Chunk],
    slots: Any,
    *,
    starts: Sequence[int] | None = None,
    ends: Sequence[int] | None = None,
    positions: Any = None,
    gaps: str = "keep",
    skip_prefix: Any = 0,
    out_of_range: str = "raise",
    unique_slots: bool = False,
    num_pages: int | None = None,
    data_later: bool = False,
) -> Plan:
    """Decides where the rows of chunks go.

    NumPy arrays, lists and device arrays that are not traced are read here (for a device array that waits for
    it); under a tracer, or with `out_of_range="skip"`, no device array is read and what cannot be served is not
    moved. With a cache the tables are sent to its devices as well, as a `load` of default options needs them.

    Args:
        cache: the cache, or its spec where the pool is not at hand.
        chunks: in any order; where two cover the same slot, the later one's row wins.
        slots: integers `[tokens]`, the slot of each token of the request; negative for tokens to leave out.
        starts: the first token that each chunk covers. By default the chunks follow one another from token 0.
        ends: one past the last token that each chunk covers; with `starts`.
        positions: integers `[tokens]` (`[3, tokens]` for M-RoPE), where each token is in this request: keys are
            turned there from the positions that the chunks carry. None leaves keys as they were stored.
        gaps: "keep", or "zero" to fill the slots of tokens between the first and the last chunk that no chunk
            covers with zero bytes (LMCache's behaviour).
        skip_prefix: tokens below this index are left alone.
        out_of_range: "raise", or "skip" to leave out tokens whose slot is past the pool.
        unique_slots: a promise that no two tokens share a slot, which saves looking for such.
        num_pages: pages of the pool, where `cache` is a spec; without it slots are checked when loading. (Layer by
            layer nothing sees the pool before the caller's own program: there a slot past it is left out.)
        data_later: chunks may be descriptions without data, which comes layer by layer (see `fetch_layers`).

    Returns:
        The plan.

    Raises:
        TypeError: slots or chunks are of the wrong type, or a chunk's dtype is not the cache's.
        ValueError: ranges, slots or chunks do not fit one another or the cache.
    """
    spec, num_slots = _pool_of(cache, num_pages)
    checks.check_out_of_range(out_of_range)
    checks.check_choice("gaps", gaps, GAPS)
    parts = check_chunks(spec, chunks, data_later=data_later)
    slot_of_token = checks.slots_int32(slots, read=out_of_range == "raise")
    prefix = check_skip_prefix(skip_prefix)
    made_of: Tables | None = None
    if starts is None and ends is None and positions is None and gaps == "keep":
        made_of = _consecutive(parts, slot_of_token, prefix, num_slots, unique_slots)
    if made_of is None:
        made_of = _anywhere(
            spec,
            parts,
            slot_of_token,
            prefix,
            num_slots,
            starts=starts,
            ends=ends,
            positions=positions,
            gaps=gaps,
            out_of_range=out_of_range,
            unique_slots=unique_slots,
        )
    for table in jax.tree.leaves(made_of[:-1]):
        if isinstance(table, np.ndarray):
            table.flags.writeable = False  # what was checked, and sent to a device, stays as it is
    made = Plan(tuple(parts), *made_of, spec, num_slots, out_of_range)
    # Not a field: a plan that is altered, or comes out of a program, is another one.
    object.__setattr__(made, "_as_made", all(type(chunk.data) is tuple and chunk.data for chunk in parts))
    if isinstance(cache, PagedCache) and made.as_made and not checks.is_tracing():
        loading.prepared_load(made, spec, cache.pool, path=None, implementation=None, tuning=DEFAULT)
    return made


class Tables(NamedTuple):
    """What a plan decides, in the order of its fields."""

    slots: Any
    zero_slots: Any
    zeroed: Any
    row_of_token: Any
    positions: tuple[Any, Any] | None
    counts: Counts


def _consecutive(
    parts: Sequence[Chunk], slot: Any, prefix: Any, num_slots: int | None, unique_slots: bool
) -> Tables | None:
    """The usual case, in few passes: full chunks that follow one another, of known slots that the pool has.

    Row r is token r. None where this is another case, or one that has an error.
    """
    if not isinstance(slot, np.ndarray) or checks.is_traced(prefix) or not parts:
        return None
    valid = [chunk.valid for chunk in parts]
    if not all(isinstance(x, np.ndarray) and x.dtype == bool for x in valid):
        return None
    if not all(isinstance(chunk.num_tokens, (int, np.integer)) for chunk in parts):
        return None
    count, rows = len(slot), sum(map(len, valid))
    held = [int(chunk.num_tokens) for chunk in parts]
    if held[:-1] != [len(x) for x in valid[:-1]] or sum(held) != count or not 0 <= held[-1] <= len(valid[-1]):
        return None
    final = np.full(rows, -1, np.int32)
    final[:count] = slot
    final[:prefix] = -1
    final[~np.concatenate(valid)] = -1
    if final.max(initial=-1) >= (checks.INT32_MAX if num_slots is None else num_slots):
        return None
    moves = final[:count] >= 0
    row_of_token = np.where(moves, np.arange(count, dtype=np.int32), np.int32(-1))
    moved = moves.sum(dtype=np.int32)
    counts = Counts(moved, np.int32(count) - moved, np.int32(0), np.int32(0))
    slots = final if unique_slots else _last_wins(final, np, num_slots)
    return Tables(slots, np.zeros(0, np.int32), np.zeros(count, bool), row_of_token, None, counts)


def _anywhere(
    spec: CacheSpec,
    parts: Sequence[Chunk],
    slot_of_token: Any,
    prefix: Any,
    num_slots: int | None,
    *,
    starts: Sequence[int] | None,
    ends: Sequence[int] | None,
    positions: Any,
    gaps: str,
    out_of_range: str,
    unique_slots: bool,
) -> Tables:
    """Every case; arguments and errors are those of `plan`."""
    num_tokens, read = slot_of_token.shape[0], out_of_range == "raise"
    # Chunks that come out of a jitted store have these on the device, where they are as concrete as any other.
    held, real = ([known(x, read) for x in xs] for xs in ([c.num_tokens for c in parts], [c.valid for c in parts]))
    ranges = _load_ranges(parts, held, num_tokens, starts, ends)
    wanted = _wanted_positions(spec, positions, num_tokens, read)
    stored = [] if wanted is None else [_stored_positions(spec, k, chunk, read) for k, chunk in enumerate(parts)]

    xp: Any = np
    values = (slot_of_token, ranges.starts, prefix, *held, *real, wanted, *stored)
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
    moved_to, bad_position = None, xp.zeros(row.shape, bool)
    if wanted is not None:
        old = xp.concatenate([xp.asarray(x) for x in stored], axis=-1) if parts else wanted[..., :0]
        new = xp.asarray(wanted)[..., token] if num_tokens else old
        bad_position = moves & ~_can_turn(spec, old, new, xp)
        if xp is np and out_of_range == "raise":
            _raise_for_position(spec, bad_position, token, [np.asarray(c.positions) for c in parts], positions)
        moves = moves & ~bad_position
        moved_to = (old, new)
    final = xp.where(moves, slot, xp.asarray(-1, np.int32))
    num_given, num_taken, num_outside, num_bad = (x.sum(dtype=np.int32) for x in (given, taken, outside, bad_position))
    row_of_token = _row_of_token(token, moves, num_tokens, xp)

    zeroed, zero_slots, gap_counts = _gaps(
        gaps, ranges, num_tokens, slot_of_token, prefix, num_slots, final, xp, out_of_range
    )
    if not unique_slots:
        zero_slots = _last_wins(zero_slots, xp, num_slots)  # the ops want distinct slots, also for zeros
        final = _last_wins(final, xp, num_slots)
    counts = Counts(
        num_taken - num_outside - num_bad + gap_counts.moved,
        num_given - num_taken + gap_counts.skipped,
        num_outside + gap_counts.out_of_range,
        num_bad,
    )
    return Tables(final, zero_slots, zeroed, row_of_token, moved_to, counts)


def _wanted_positions(spec: CacheSpec, positions: Any, num_tokens: int, read: bool) -> Any:
    """The position of each token in this request, int32, or None where nothing turns."""
    if positions is None:
        return None
    if spec.rope is None:
        raise ValueError("positions: given, but the cache's spec has no rope to turn keys by; see CacheSpec(rope=...)")
    spec.turn()  # raises where such keys cannot be turned
    return check_positions("positions", given_positions(positions, read), spec, num_tokens)


def _stored_positions(spec: CacheSpec, k: int, chunk: Chunk, read: bool) -> Any:
    if chunk.positions is None:
        raise ValueError(f"chunks: chunk {k} carries 0 old positions for its {chunk.num_rows} rows")
    positions = known(chunk.positions, read)
    if positions.shape[-1] != chunk.num_rows:
        raise ValueError(f"chunks: chunk {k} carries {positions.shape[-1]} old positions for its {chunk.num_rows} rows")
    return check_positions(f"chunks: the old positions of chunk {k}", positions, spec, chunk.num_rows)


def _can_turn(spec: CacheSpec, old: Any, new: Any, xp: Any) -> Any:
    """Which rows every rope of the cache can move."""
    ok = xp.ones(old.shape[-1:], bool)
    for rope in spec.ropes():
        ok = ok & rope.position_ok(old, new)
    return ok


def _raise_for_position(spec: CacheSpec, bad: np.ndarray, token: np.ndarray, stored: Any, wanted: Any) -> None:
    """Names the first token with a bad position, and the values as they were given: int32 may have cut them."""
    rows = np.flatnonzero(bad)
    if rows.size:
        row = rows[token[rows].argmin()]
        old, new = np.concatenate(stored, axis=-1)[..., row], np.asarray(wanted)[..., token[row]]
        limit = min(rope.position_limit or 0 for rope in spec.ropes())
        raise ValueError(
            f"positions: token {token[row]} is to move from position {old} to {new}, but positions "
            f"from 0 to {limit - 1} can be served; out_of_range='skip' leaves such tokens out"
        )


def _row_of_token(token: Any, moves: Any, num_tokens: int, xp: Any) -> Any:
    """The last row that brings each token, -1 for none."""
    row = np.arange(token.shape[0], dtype=np.int32)
    if xp is np:
        out = np.full(num_tokens, -1, np.int32)
        out[token[moves]] = row[moves]
        return out
    at = jnp.where(moves, token, jnp.asarray(num_tokens, token.dtype))
    return jnp.full((num_tokens,), -1, jnp.int32).at[at].max(row, mode="drop")


def _pool_of(cache: PagedCache | CacheSpec, num_pages: int | None) -> tuple[CacheSpec, int | None]:
    if isinstance(cache, PagedCache):
        return cache.spec, cache.num_slots
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
