"""The second half of the oracle: what a load plan says, and what a rotation of keys must give.

Kept apart from the addresses in `oracle`, through which both are used. The plan is a loop over
tokens in plain Python; the rotation is the textbook formula in float64.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


def plan_rows(
    num_tokens_per_chunk: Sequence[int],
    slots: Sequence[Any],
    starts: Sequence[int] | None = None,
    ends: Sequence[int] | None = None,
    skip_prefix: int = 0,
    num_slots: int | None = None,
    valid: Sequence[Sequence[bool] | None] | None = None,
) -> tuple[list[list[int]], dict[str, int]]:
    """Where each row of each chunk goes in a load.

    Args:
      num_tokens_per_chunk: Rows of each chunk, in list order.
      slots: Slot of each token of the sequence.
      starts: First token of each chunk; one after the other from token 0 unless given.
      ends: One past the last token of each chunk.
      skip_prefix: Tokens below this index are treated as slot -1.
      num_slots: Slots of the pool; no limit unless given.
      valid: For each chunk which of its rows hold KV, or None for all.

    Returns:
      The slot of each row of each chunk, -1 where it is not written (a row that a later one
      overwrites included); and the counts `moved`, `skipped` and `out_of_range`, in which an
      overwritten row is moved.

    Raises:
      ValueError: Numbers of chunks differ, or a range does not fit its chunk or the slots.
    """
    chunks = len(num_tokens_per_chunk)
    if starts is None:
        starts = [sum(num_tokens_per_chunk[:i]) for i in range(chunks)]
    if ends is None:
        ends = [start + n for start, n in zip(starts, num_tokens_per_chunk, strict=True)]
    if valid is None:
        valid = [None] * chunks
    table: list[list[int]] = []
    counts = {"moved": 0, "skipped": 0, "out_of_range": 0}
    last: dict[int, tuple[int, int]] = {}
    for chunk, (n, start, end, real) in enumerate(zip(num_tokens_per_chunk, starts, ends, valid, strict=True)):
        if end - start != n or start < 0 or end > len(slots):
            raise ValueError(f"chunk {chunk}: {n} rows, tokens [{start}, {end}) of {len(slots)}")
        table.append([-1] * n)
        for row in range(n):
            token = start + row
            slot = int(slots[token])
            if slot < 0 or token < skip_prefix or (real is not None and not real[row]):
                counts["skipped"] += 1
            elif num_slots is not None and slot >= num_slots:
                counts["out_of_range"] += 1
            else:
                counts["moved"] += 1
                if slot in last:
                    loser_chunk, loser_row = last[slot]
                    table[loser_chunk][loser_row] = -1
                last[slot] = (chunk, row)
                table[chunk][row] = slot
    return table, counts


def gap_tokens(starts: Sequence[int], ends: Sequence[int], skip_prefix: int = 0) -> list[int]:
    """Tokens from the first start to the last end that no chunk covers; empty chunks count not."""
    covered = {token for start, end in zip(starts, ends, strict=True) for token in range(start, end)}
    if not covered:
        return []
    return [t for t in range(min(covered), max(covered)) if t not in covered and t >= skip_prefix]


def zero_slots(starts: Sequence[int], ends: Sequence[int], slots: Sequence[Any], skip_prefix: int = 0) -> list[int]:
    """The slots of the gap tokens: a load that zeroes gaps clears them before it writes."""
    return [int(slots[token]) for token in gap_tokens(starts, ends, skip_prefix)]


def _round_once(values: npt.NDArray[np.float64], dtype: np.dtype[Any]) -> Array:
    """Float64 to `dtype`, rounded once to nearest even, the finite kept finite in 8 bits."""
    if dtype in (np.float16, np.float32, np.float64):
        return values.astype(dtype)
    # Conversions to bfloat16 and to 8 bits pass through float32, which would round twice. A float32
    # rounded to odd (towards zero, last bit set if anything was lost) keeps what the second
    # rounding needs to know.
    near = values.astype(np.float32)
    inexact = np.isfinite(near) & (near.astype(np.float64) != values)
    too_big = inexact & (np.abs(near.astype(np.float64)) > np.abs(values))
    odd = ((near.view(np.uint32) - too_big.astype(np.uint32)) | inexact.astype(np.uint32)).view(np.float32)
    if dtype.itemsize == 1:
        every = np.arange(256, dtype=np.uint8).view(dtype).astype(np.float32)
        largest = every[np.isfinite(every)].max()
        odd = np.where(np.isfinite(odd), np.clip(odd, -largest, largest), odd)
    rounded: Array = odd.astype(dtype)
    return rounded


def rotate(
    rows: Array,
    inv_freq: npt.ArrayLike,
    old: npt.ArrayLike,
    new: npt.ArrayLike,
    pairing: str = "half",
    rotary_dim: int | None = None,
    offset: int = 0,
) -> Array:
    """Keys moved from old positions to new ones: rotated in float64, then rounded once.

    Args:
      rows: `[..., n, head, dim]`, keys of a float dtype, already rotated to `old`.
      inv_freq: `[rotary_dim / 2]` frequencies in radians per position.
      old: `[n]` integers, positions that the keys have.
      new: `[n]` integers, positions that they get.
      pairing: `"half"` (component i with i + rotary_dim / 2) or `"interleaved"` (2i with 2i + 1).
      rotary_dim: Width of the rotated window; the whole row unless given.
      offset: First dim of the window.

    Returns:
      As `rows`. Tokens whose position stays, and dims outside the window, keep their bits.
    """
    frequencies = np.asarray(inv_freq, np.float64)
    shift = np.asarray(new, np.int64) - np.asarray(old, np.int64)
    width = rows.shape[-1] if rotary_dim is None else rotary_dim
    if frequencies.shape != (width // 2,) or width % 2 or offset + width > rows.shape[-1]:
        raise ValueError(f"{frequencies.shape} frequencies, window {offset}+{width} of {rows.shape[-1]}")
    if pairing == "half":
        first = offset + np.arange(width // 2)
        second = first + width // 2
    elif pairing == "interleaved":
        first = offset + 2 * np.arange(width // 2)
        second = first + 1
    else:
        raise ValueError(f"pairing {pairing!r}")

    angle = (shift[:, None] * frequencies)[:, None, :]
    cos, sin = np.cos(angle), np.sin(angle)
    x, y = rows[..., first].astype(np.float64), rows[..., second].astype(np.float64)
    moved = np.array(rows, order="C", copy=True)
    with np.errstate(invalid="ignore", over="ignore"):
        moved[..., first] = _round_once(x * cos - y * sin, rows.dtype)
        moved[..., second] = _round_once(x * sin + y * cos, rows.dtype)
    stays = shift == 0
    moved[..., stays, :, :] = rows[..., stays, :, :]
    return moved
