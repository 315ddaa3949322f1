"""Which tokens a call is about: their ranges, slots and positions, checked and laid out in rows of chunks."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .chunk import known
from .ops import checks
from .spec import CacheSpec


class Ranges(NamedTuple):
    """Token ranges of chunks, starts and ends; NumPy where known, else traced."""

    starts: Any
    ends: Any

    @property
    def sizes(self) -> Any:
        """Tokens of each range."""
        return self.ends - self.starts


def slot_mapping(page_table: Any, num_tokens: int, *, page_size: int, start: int = 0) -> Any:
    """The slots of a sequence's tokens, from the pages it was given.

    Args:
        page_table: integers `[pages]`: the page of tokens 0 to page_size - 1, that of the next ones, and so on; a
            negative page gives slots of -1, which are skipped. NumPy or a list gives NumPy, a jax.Array a jax.Array,
            which is not read.
        num_tokens: tokens of the sequence.
        page_size: tokens a page.
        start: first token to give a slot.

    Returns:
        Integers `[num_tokens - start]`, of the table's type if it is int32 or int64, else int64 (int32 for a
        jax.Array).

    Raises:
        TypeError: the table does not hold integers.
        ValueError: it has another rank than one, or pages for fewer tokens; or a number is negative.
    """
    table = page_table if isinstance(page_table, jax.Array) else np.asarray(page_table)
    if table.size == 0 and not isinstance(page_table, jax.Array):
        table = table.astype(np.int64)
    if not jnp.issubdtype(table.dtype, jnp.integer):
        raise TypeError(f"page_table: expected integers, got dtype {table.dtype}")
    if table.ndim != 1:
        raise ValueError(f"page_table: expected one dimension, got shape {table.shape}")
    for name, value, least in (("num_tokens", num_tokens, 0), ("page_size", page_size, 1), ("start", start, 0)):
        if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < least:
            raise ValueError(f"{name}: expected an int of at least {least}, got {value!r}")
    if num_tokens > table.shape[0] * page_size:
        raise ValueError(f"page_table: {table.shape[0]} pages of {page_size} tokens for {num_tokens} tokens")
    xp: Any = jnp if isinstance(table, jax.Array) else np
    kind = table.dtype if table.dtype in (np.int32, np.int64) else (jnp.int32 if xp is jnp else np.int64)
    page, token = np.divmod(np.arange(start, max(num_tokens, start)), page_size)
    pages = table.astype(kind)[page] if page.size else xp.zeros(0, kind)
    slots = pages * xp.asarray(page_size, kind) + xp.asarray(token, kind)
    return xp.where(pages < 0, xp.asarray(-1, kind), slots)


class Selection(NamedTuple):
    """The tokens of a store, in rows of chunks.

    Attributes:
        slots: int32 `[chunks, rows]`, the slot of each row, -1 for none.
        valid: bool `[chunks, rows]`, which rows are real.
        positions: int32 `[chunks, rows]` (`[chunks, 3, rows]` for M-RoPE).
        num_tokens: tokens of each chunk, int32 `[chunks]`.
    """

    slots: Any
    valid: Any
    positions: Any
    num_tokens: np.ndarray

    @property
    def rows(self) -> int:
        """Rows of each chunk."""
        return int(self.slots.shape[1])


class Rows(NamedTuple):
    """Where the rows of a store come from: all that its copies wait for.

    Attributes:
        slots: int32 `[chunks, rows]`, the slot of each row, -1 for none.
        described: what else is to be said of them, which can be worked out when they are on their way.
    """

    slots: Any
    described: Callable[[], Selection]


def select_rows(
    spec: CacheSpec,
    slots: Any,
    *,
    rows: int,
    num_slots: int,
    starts: Sequence[int] | None,
    ends: Sequence[int] | None,
    positions: Any,
    skip_prefix: Any,
    out_of_range: str,
) -> Rows:
    """Lays the tokens of a store out in chunks of `rows` rows; arguments and errors are those of `store`."""
    checks.check_out_of_range(out_of_range)
    slot = checks.slots_int32(slots, read=out_of_range == "raise")
    prefix = check_skip_prefix(skip_prefix)
    known_slots = isinstance(slot, np.ndarray) and not checks.is_traced(prefix)
    if starts is None and ends is None and positions is None and known_slots:
        return _consecutive(spec, slot, rows, num_slots, int(prefix), out_of_range)
    ranges = _store_ranges(slot.shape[0], rows, starts, ends)
    position = _positions(spec, positions, slot.shape[0])
    token = ranges.starts[:, None] + np.arange(rows, dtype=np.int32)
    given = token < ranges.ends[:, None]
    token = np.where(given, token, np.int32(0))
    if token.size == 0 or slot.shape[0] == 0:
        nowhere = np.full(token.shape, -1, np.int32)
        none = np.zeros((len(token), *position.shape[:-1], rows), np.int32)
        return Rows(nowhere, lambda: Selection(nowhere, np.zeros_like(given), none, ranges.sizes))
    xp: Any = np if known_slots else jnp
    at = xp.asarray(slot)[token]
    taken = given & (at >= 0) & (token >= prefix)
    if xp is np and out_of_range == "raise":
        used = np.zeros(len(slot), bool)
        used[token[taken]] = True
        checks.check_slots_in_pool(np.where(used, slot, np.int32(-1)), num_slots)
    taken = taken & (at < num_slots)
    table = xp.where(taken, at, xp.asarray(-1, np.int32))

    def described() -> Selection:
        xpos: Any = jnp if isinstance(position, jax.Array) else np
        held = xpos.where(given, position[..., token], xpos.asarray(0, np.int32))
        return Selection(table, taken, xpos.moveaxis(held, -2, 0), ranges.sizes)

    return Rows(table, described)


def _consecutive(spec: CacheSpec, slot: np.ndarray, rows: int, num_slots: int, prefix: int, out_of_range: str) -> Rows:
    """Chunks that follow one another, of known slots at positions 0, 1, and so on: the usual case, in few passes."""
    count = len(slot)
    chunks = -(-count // rows)
    flat = slot  # a copy of the caller's
    if count < chunks * rows:
        flat = np.full(chunks * rows, -1, np.int32)
        flat[:count] = slot
    flat[:prefix] = -1
    if flat.max(initial=-1) >= num_slots:
        if out_of_range == "raise":
            checks.check_slots_in_pool(flat, num_slots)
        flat[flat >= num_slots] = -1
    table = flat.reshape(chunks, rows)

    def described() -> Selection:
        position = _positions(spec, None, count)
        held = np.zeros((*position.shape[:-1], chunks * rows), np.int32)
        held[..., :count] = position
        by_chunk = np.moveaxis(held.reshape(*position.shape[:-1], chunks, rows), -2, 0)
        return Selection(table, table >= 0, by_chunk, _store_ranges(count, rows, None, None).sizes)

    return Rows(table, described)


def check_chunk_tokens(rows: Any) -> int:
    """Rows of a chunk as an int; ValueError where they are no positive integer."""
    if isinstance(rows, bool) or not isinstance(rows, (int, np.integer)) or rows < 1:
        raise ValueError(f"chunk_tokens: expected an int of at least 1, got {rows!r}")
    return int(rows)


def check_skip_prefix(skip_prefix: Any) -> Any:
    """The prefix as an int (or a traced int32); ValueError where it is negative, TypeError where no integer."""
    if type(skip_prefix) is int and 0 <= skip_prefix <= checks.INT32_MAX:
        return np.int32(skip_prefix)
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


def given_positions(positions: Any, read: bool) -> Any:
    """Positions as a caller gives them, as an array; a `jax.Array` stays one unless it is known and may be read."""
    if isinstance(positions, jax.Array):
        if not checks.is_traced(positions) and positions.is_deleted():
            raise ValueError("positions: this array was deleted or donated to an earlier call")
        return known(positions, read)
    try:
        values = np.asarray(positions)
    except (ValueError, TypeError) as error:
        raise TypeError(f"positions: expected integers, got {type(positions).__name__}: {error}") from None
    # An empty list has no integers to tell its dtype by.
    return values.astype(np.int32) if values.size == 0 and isinstance(positions, (list, tuple)) else values


def check_positions(name: str, values: Any, spec: CacheSpec, count: int) -> Any:
    """Positions as int32; one that int32 does not hold becomes one that no rope serves.

    Raises:
        TypeError: they are no integers.
        ValueError: there is not one for each token, or not in the components that the spec's rope has.
    """
    if not jnp.issubdtype(values.dtype, jnp.integer):
        raise TypeError(f"{name}: expected integers, got dtype {values.dtype}")
    shape = (count,) if spec.position_components is None else (spec.position_components, count)
    if values.shape != shape:
        raise ValueError(f"{name}: got shape {values.shape}, expected {shape}")
    if isinstance(values, jax.Array):
        return checks.narrow_traced(values)  # by value: 2^32 + 5 must not become 5
    fits = (values >= 0) & (values <= checks.INT32_MAX)
    return np.where(fits, values, values.dtype.type(0)).astype(np.int32) - (~fits).astype(np.int32)


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


def _positions(spec: CacheSpec, positions: Any, num_tokens: int) -> Any:
    """The position of each token, int32 `[tokens]` (`[3, tokens]` for M-RoPE); by default its index."""
    if positions is None:
        index = np.arange(num_tokens, dtype=np.int32)
        return index if spec.position_components is None else np.stack([index] * spec.position_components)
    return check_positions("positions", given_positions(positions, read=False), spec, num_tokens)
