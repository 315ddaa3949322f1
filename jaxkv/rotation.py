"""Turning pairs of key channels by given angles: plain `jax.numpy` on bit patterns, exact where nothing turns.

This is the arithmetic only; which angles, `rope.Rope` knows. Rows are handled as unsigned integers and
only the channels that turn pass through a float type, because XLA may change NaN payloads in anything it
takes for a float.
"""

import functools
from typing import Any, Literal, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike
from numpy.typing import NDArray

Array = TypeVar("Array", jax.Array, NDArray[Any])

Pairing: TypeAlias = Literal["half", "interleaved"]
"""`half` turns channels i and i + d together (d: the pair distance), `interleaved` 2i and 2i + 1."""

PAIRINGS: tuple[Pairing, ...] = ("half", "interleaved")

DeltaTables: TypeAlias = tuple[jax.Array, jax.Array, jax.Array]
"""cos and sin of the correction, float32 [tokens, pairs], and bool [tokens]: whether the token moves."""

ROTATABLE = (jnp.bfloat16, jnp.float16, jnp.float32, jnp.float8_e4m3fn, jnp.float8_e5m2)
"""Key dtypes that can be rotated."""


def float_format(dtype: DTypeLike, declared: DTypeLike | None) -> np.dtype:
    """The float format in which a payload is rotated.

    Args:
        dtype: of the array that holds the payload.
        declared: the format of the values where the array holds raw unsigned integers; None where the
            array's own dtype says it.

    Returns:
        One of `ROTATABLE`.

    Raises:
        TypeError: naming the dtype, for integers without a declared format, for another format than
            `ROTATABLE`, and for a declared format that is not the array's.
    """
    dtype = np.dtype(dtype)
    accepted = ", ".join(np.dtype(known).name for known in ROTATABLE)
    if declared is None:
        if np.issubdtype(dtype, np.integer):
            raise TypeError(f"cannot rotate {dtype.name} keys without a declared float format; formats are {accepted}")
        declared = dtype
    declared = np.dtype(declared)
    if declared not in [np.dtype(known) for known in ROTATABLE]:
        raise TypeError(f"cannot rotate {declared.name} keys; formats are {accepted}")
    if dtype != declared and not (np.issubdtype(dtype, np.unsignedinteger) and dtype.itemsize == declared.itemsize):
        raise TypeError(f"dtype {declared.name} was declared for keys that are {dtype.name}")
    return declared


def checked_pairing(pairing: str) -> Pairing:
    """The pairing, if it is one.

    Raises:
        ValueError: otherwise, naming those that are.
    """
    for known in PAIRINGS:
        if pairing == known:
            return known
    raise ValueError(f"pairing must be 'half' or 'interleaved', got {pairing!r}")


def checked_window(pairs: int, pairing: Pairing, pair_distance: int, offset: int, row: int) -> int:
    """Channels from the first that turns to the last, both included, if they lie inside a row.

    Args:
        pairs: how many turn.
        pairing: which channels turn together.
        pair_distance: channels between the two of a pair.
        offset: where in the row the first pair starts.
        row: channels of a row.

    Raises:
        ValueError: naming width, offset and row width, if they do not.
    """
    width = 2 * pairs if pairing == "interleaved" else pairs + pair_distance
    if offset < 0 or offset + width > row:
        raise ValueError(f"the rotated window does not fit: width {width} at offset {offset} in rows of {row}")
    return width


def rotate(
    k: ArrayLike,
    cos_d: jax.Array,
    sin_d: jax.Array,
    moved: jax.Array,
    *,
    pairing: Pairing,
    pair_distance: int,
    offset: int = 0,
    dtype: DTypeLike | None = None,
) -> jax.Array:
    """Turns each pair of channels by its angle.

    Pair i is channels `offset + i` (half) or `offset + 2 * i` (interleaved) and the one `pair_distance`
    further. In float32 with one rounding to the keys' format; fp8 saturates, so that finite stays finite. Tokens
    that do not move keep their bits, and so do the channels of no pair, whatever they hold.

    Args:
        k: keys [tokens, ..., row], of a dtype in `ROTATABLE`, or its bits as unsigned integers.
        cos_d: float32 [tokens, pairs], cosines of the correction.
        sin_d: the same, sines.
        moved: bool [tokens].
        pairing: which channels turn together.
        pair_distance: channels between the two of a pair: `pairs` or more for half, 1 for interleaved.
        offset: where in the row the first pair starts.
        dtype: the float format where `k` holds raw bits.

    Returns:
        Keys of the same shape and dtype.

    Raises:
        TypeError: for a payload that cannot be rotated (see `float_format`).
        ValueError: if the window does not fit the row.
    """
    k = jnp.asarray(k)
    form, pairs, row = float_format(k.dtype, dtype), cos_d.shape[1], k.shape[-1]
    width = checked_window(pairs, pairing, pair_distance, offset, row)
    bits = jax.lax.bitcast_convert_type(k, f"uint{8 * form.itemsize}")
    window = bits[..., offset : offset + width]
    middle = (1,) * (k.ndim - 2)
    cos_d, sin_d = (table.reshape(table.shape[0], *middle, pairs) for table in (cos_d, sin_d))
    moved = moved.reshape(moved.shape[0], *middle, 1)

    def turned(first: jax.Array, second: jax.Array) -> tuple[jax.Array, jax.Array]:
        x = jax.lax.bitcast_convert_type(first, form).astype(jnp.float32)
        y = jax.lax.bitcast_convert_type(second, form).astype(jnp.float32)
        rotated = x * cos_d - y * sin_d, y * cos_d + x * sin_d
        # The select is on bits: times one plus times zero is not the identity for NaN, Inf and -0.
        return (
            jnp.where(moved, _narrowed(rotated[0], form), first),
            jnp.where(moved, _narrowed(rotated[1], form), second),
        )

    if pairing == "half":
        first, second = turned(window[..., :pairs], window[..., pair_distance:])
        between = window[..., pairs:pair_distance]
        window = jnp.concatenate((first, between, second), axis=-1)
    else:
        couples = window.reshape(*window.shape[:-1], pairs, 2)
        couples = jnp.stack(turned(couples[..., 0], couples[..., 1]), axis=-1)
        window = couples.reshape(window.shape)
    bits = jnp.concatenate((bits[..., :offset], window, bits[..., offset + width :]), axis=-1)
    return jax.lax.bitcast_convert_type(bits, k.dtype)


def _narrowed(values: jax.Array, form: np.dtype) -> jax.Array:
    """float32 values, rounded once to a format and seen as its bits."""
    if form.itemsize == 1:
        # Casts to fp8 give NaN (e4m3fn) or Inf (e5m2) past the largest value, which a turned pair of
        # two large ones reaches. What was not finite before stays what it is.
        top = float(jnp.finfo(form).max)
        values = jnp.where(jnp.isfinite(values), jnp.clip(values, -top, top), values)
    return jax.lax.bitcast_convert_type(values.astype(form), f"uint{8 * form.itemsize}")


@functools.partial(jax.jit, static_argnames="axes")
def deltas_from_angles(
    old: jax.Array, new: jax.Array, ok: jax.Array, inv_freq: NDArray[np.float32], *, axes: tuple[int, ...] | None
) -> DeltaTables:
    """Delta tables from positions and frequencies.

    Args:
        old: int32 [tokens], or [3, tokens] where `axes` is given.
        new: the same.
        ok: bool [tokens]; a token that is not ok does not move.
        inv_freq: float32 [pairs], radians per position.
        axes: for each frequency the position component that drives it.

    Returns:
        The delta tables, rows that do not move being cos 1 and sin 0.
    """

    def tables(positions: jax.Array) -> tuple[jax.Array, jax.Array]:
        # Rounded to float32 before cos and sin, as the models have it.
        angles = per_frequency(positions, axes).astype(jnp.float32) * inv_freq[None, :]
        return jnp.cos(angles), jnp.sin(angles)

    return _composed(*tables(old), *tables(new), old, new, ok, axes)


@functools.partial(jax.jit, static_argnames="axes")
def deltas_from_rows(
    cos_old: jax.Array,
    sin_old: jax.Array,
    cos_new: jax.Array,
    sin_new: jax.Array,
    old: jax.Array,
    new: jax.Array,
    ok: jax.Array,
    *,
    axes: tuple[int, ...] | None,
) -> DeltaTables:
    """Delta tables from the rows of a model's own tables; any factor on these is divided out.

    Args:
        cos_old: float32 [tokens, pairs], the model's cosines at the old positions.
        sin_old: its sines there.
        cos_new: its cosines at the new positions.
        sin_new: its sines there.
        old: int32 [tokens], or [3, tokens] where `axes` is given.
        new: the same.
        ok: bool [tokens]; a token that is not ok does not move.
        axes: for each frequency the position component that drives it.

    Returns:
        The delta tables, rows that do not move being cos 1 and sin 0.
    """
    # Undoing the old rotation divides by what it multiplied the pair's length with. Taken entry by entry
    # that is m^2 and, for tables in bfloat16, their rounding as well.
    scale = cos_old * cos_old + sin_old * sin_old
    return _composed(cos_old / scale, sin_old / scale, cos_new, sin_new, old, new, ok, axes)


def per_frequency(positions: Array, axes: tuple[int, ...] | None) -> Array:
    """The position that drives each frequency, [tokens, 1] or [tokens, pairs] for M-RoPE."""
    return positions[:, None] if axes is None else positions[np.asarray(axes)].T


def _composed(
    cos_old: jax.Array,
    sin_old: jax.Array,
    cos_new: jax.Array,
    sin_new: jax.Array,
    old: jax.Array,
    new: jax.Array,
    ok: jax.Array,
    axes: tuple[int, ...] | None,
) -> DeltaTables:
    differ = old != new
    moved = ok & (differ if axes is None else differ.any(axis=0))
    # Of a moving M-RoPE token some frequencies may stay; composing would turn these by a rounding error.
    turns = per_frequency(differ, axes) & ok[:, None]
    return (
        jnp.where(turns, cos_new * cos_old + sin_new * sin_old, 1.0),
        jnp.where(turns, sin_new * cos_old - cos_new * sin_old, 0.0),
        moved,
    )
