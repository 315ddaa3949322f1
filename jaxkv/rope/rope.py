"""Rope: how a model rotates its keys, and how a key cached at one position is moved to another.

A key at position p has had each pair of its channels turned by `float32(p) * inv_freq`, an angle that the
model rounds to float32. So the correction is not one turn by `(new - old) * inv_freq`: far from position
zero that drifts away from the model by up to `2^-24 * (old + new) * inv_freq` radians. It is composed from
cos and sin at the model's own two angles, in float32:

    cos_d = cos(new) cos(old) + sin(new) sin(old)
    sin_d = sin(new) cos(old) - cos(new) sin(old)

and applied to the stored bytes with one rounding. (Relative error in bfloat16 2.3e-3, which is sqrt 2
times the floor of a single rounding; the usual form, bfloat16 tables with an undo and a redo, has 4.1e-3
and is not the identity where nothing moves.) Both implementations of a rotating op take the tables that
`Rope.delta_tables` computes, so that they see the same numbers.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.typing import ArrayLike, DTypeLike

from ..rotation import (
    DeltaTables,
    Pairing,
    checked_pairing,
    checked_window,
    deltas_from_angles,
    deltas_from_rows,
    float_format,
    rotate,
)
from .config import mrope_axes, read_config
from .positions import Positions, as_positions, check_values, on_host, within
from .tables import RopeTables, check_width, read_tables

ANGLE_POSITION_LIMIT = 2**24
"""First position that frequencies do not serve: float32 counts exactly up to here, so that beyond it
neighbouring positions share an angle in the model, too."""


@dataclasses.dataclass(frozen=True)
class Rope:
    """One rotary frequency set: a hashable value, equal to another if and only if it moves keys alike.

    Made by `from_config`, `from_inv_freq` or `from_tables`. Where in a row the rotated window starts is
    not part of it (that is the cache's layout, not the model's rotation).

    Attributes:
        pairing: `"half"` turns channels i and i + pair_distance together, `"interleaved"` 2i and 2i + 1.
        inv_freq: radians per position, float32 values; None if the tables are given.
        tables: the model's own cos and sin; None if the frequencies are given.
        pair_distance: channels between the two of a pair. None becomes rotary_dim / 2, or 1 if
            interleaved. More than rotary_dim / 2 leaves a stretch between the halves unrotated.
        attention_scaling: the factor m on the model's cos and sin (YaRN, longrope). Old and new keys
            both carry it once, so it moves nothing; keys of another m have another size.
        axes: for each frequency the position component that drives it (M-RoPE); None for plain positions.
        regime: which part of a length-dependent scaling this is, such as `"longrope short"`.
        position_limit: first position that is not served. None becomes the tables' length, or 2^24.
        description: one line for messages; not compared.
    """

    pairing: Pairing
    inv_freq: tuple[float, ...] | None = dataclasses.field(default=None, repr=False)
    tables: RopeTables | None = None
    pair_distance: int | None = None
    attention_scaling: float = 1.0
    axes: tuple[int, ...] | None = dataclasses.field(default=None, repr=False)
    regime: str | None = None
    position_limit: int | None = None
    description: str = dataclasses.field(default="", compare=False)

    def __post_init__(self) -> None:
        checked_pairing(self.pairing)
        if (self.inv_freq is None) == (self.tables is None):
            raise ValueError("give either inv_freq or tables")
        covered = ANGLE_POSITION_LIMIT
        if self.tables is None:
            values = np.asarray(self.inv_freq, np.float32)
            if values.ndim != 1 or not values.size or not np.isfinite(values).all():
                raise ValueError(f"inv_freq must be a row of finite numbers, got shape {values.shape}")
            object.__setattr__(self, "inv_freq", tuple(values.tolist()))
        else:
            covered = len(self.tables.cos)
        if self.position_limit is None or self.position_limit > covered:
            object.__setattr__(self, "position_limit", covered)
        nearest = 1 if self.pairing == "interleaved" else self.pairs
        distance = nearest if self.pair_distance is None else self.pair_distance
        if distance < nearest or (self.pairing == "interleaved" and distance != 1):
            raise ValueError(f"pair_distance={distance} does not fit {self.pairs} {self.pairing} pairs")
        object.__setattr__(self, "pair_distance", distance)
        if not (np.isfinite(self.attention_scaling) and self.attention_scaling > 0):
            raise ValueError(f"attention_scaling must be positive, got {self.attention_scaling}")
        if self.axes is not None and (len(self.axes) != self.pairs or not set(self.axes) <= {0, 1, 2}):
            raise ValueError(f"axes must name component 0, 1 or 2 for each of {self.pairs} frequencies")

    @classmethod
    def from_config(
        cls,
        config: Any,
        *,
        layer_type: str | None = None,
        sequence_length: int | None = None,
        pairing: str | None = None,
    ) -> "Rope":
        """The frequency set that a model's config describes.

        Reads Hugging Face's field names, the `rope_scaling` form and the newer `rope_parameters` form,
        flat or nested by layer type. Scalings: default, linear, llama3, YaRN, longrope, dynamic NTK,
        proportional; M-RoPE by `mrope_section`. The pairing comes from `rope_interleave` or
        `is_neox_style` in the config, else from the model type (`models.MODELS`).

        Args:
            config: a mapping, or an object with the fields as attributes. Of a multimodal config the
                `text_config` is read.
            layer_type: which layers, where the model's differ, such as `"sliding_attention"`.
            sequence_length: tokens of the sequence. Longrope and dynamic NTK need it, since it chooses
                their frequencies; a key moves only within one such choice.
            pairing: overrides what the config says, for a cache whose channel order is not the
                checkpoint's (transformers stores DeepSeek's rotary channels as halves).

        Returns:
            The frequency set.

        Raises:
            ValueError: naming the field, for whatever is unknown, missing or contradictory; for models
                whose keys are not rotated (ALiBi, learned positions).
        """
        fields = read_config(config, layer_type=layer_type, sequence_length=sequence_length, pairing=pairing)
        return cls(
            fields.pairing,
            tuple(fields.scaled.inv_freq.tolist()),
            pair_distance=fields.scaled.pair_distance,
            attention_scaling=fields.scaled.attention_scaling,
            axes=fields.axes,
            regime=fields.scaled.regime,
            position_limit=fields.scaled.position_limit,
            description=fields.description,
        )

    @classmethod
    def from_inv_freq(
        cls,
        inv_freq: ArrayLike | Sequence[float],
        *,
        pairing: str,
        rotary_dim: int | None = None,
        pair_distance: int | None = None,
        attention_scaling: float = 1.0,
        mrope_section: Sequence[int] | None = None,
        mrope_interleaved: bool = False,
        regime: str | None = None,
    ) -> "Rope":
        """A frequency set from the model's own inverse frequencies, scaling included.

        Args:
            inv_freq: [rotary_dim / 2], radians per position; rounded to float32. Zeros at the end are
                channels that do not turn, though they belong to the pairs' span (as transformers writes
                the `proportional` type).
            pairing: `"half"` or `"interleaved"`.
            rotary_dim: the width that the frequencies are meant for, to be checked.
            pair_distance: channels between the two of a half-split pair; rotary_dim / 2 if None.
            attention_scaling: the factor on the model's tables.
            mrope_section: frequencies of each position component, for M-RoPE.
            mrope_interleaved: whether these sections alternate channel by channel.
            regime: a name for the part of a length-dependent scaling that this is.

        Returns:
            The frequency set.

        Raises:
            ValueError: if the frequencies are not a row of finite numbers, or not rotary_dim / 2.
        """
        values = np.asarray(inv_freq, np.float32)
        if values.ndim != 1:
            raise ValueError(f"inv_freq must be a row of numbers, got shape {values.shape}")
        check_width(len(values), rotary_dim, "frequencies")
        axes = _axes(mrope_section, mrope_interleaved, len(values))
        turning = len(np.trim_zeros(values, "b"))
        if pair_distance is None and pairing == "half":
            pair_distance = len(values)
        return cls(
            checked_pairing(pairing),
            tuple(values[:turning].tolist()),
            pair_distance=pair_distance,
            attention_scaling=float(attention_scaling),
            axes=axes and axes[:turning],
            regime=regime,
            description=f"{turning} given frequencies",
        )

    @classmethod
    def from_tables(
        cls,
        cos: ArrayLike,
        sin: ArrayLike,
        *,
        pairing: str,
        rotary_dim: int | None = None,
        pair_distance: int | None = None,
        attention_scaling: float | None = None,
        mrope_section: Sequence[int] | None = None,
        mrope_interleaved: bool = False,
        regime: str | None = None,
    ) -> "Rope":
        """A frequency set from the model's own cos and sin, one row per position from 0 on.

        Prefer frequencies where there are any: tables become constants of a program with traced
        positions, and serve only the positions they cover.

        Args:
            cos: [positions, rotary_dim / 2], or [positions, rotary_dim] with each value twice (then
                `rotary_dim` has to say so). A factor on the tables is found and taken out.
            sin: the same.
            pairing: `"half"` or `"interleaved"`.
            rotary_dim: channels that turn; twice the tables' width if None.
            pair_distance: channels between the two of a half-split pair; rotary_dim / 2 if None.
            attention_scaling: the factor on the tables, to be checked; None reads it off them.
            mrope_section: frequencies of each position component, for M-RoPE.
            mrope_interleaved: whether these sections alternate channel by channel.
            regime: a name for the part of a length-dependent scaling that this is.

        Returns:
            The frequency set.

        Raises:
            ValueError: if the tables disagree in shape, do not have the width, or are not cos and sin
                times one factor.
        """
        tables, scaling = read_tables(cos, sin, rotary_dim=rotary_dim, attention_scaling=attention_scaling)
        positions, pairs = tables.cos.shape
        return cls(
            checked_pairing(pairing),
            tables=tables,
            pair_distance=pair_distance,
            attention_scaling=scaling,
            axes=_axes(mrope_section, mrope_interleaved, pairs),
            regime=regime,
            description=f"given tables of {positions} positions",
        )

    @property
    def pairs(self) -> int:
        """Pairs of channels that turn: the columns of the delta tables."""
        if self.tables is not None:
            return int(self.tables.cos.shape[1])
        return len(self.inv_freq or ())

    @property
    def rotary_dim(self) -> int:
        """Channels that turn."""
        return 2 * self.pairs

    @property
    def pair_stride(self) -> int:
        """Channels from one pair's first to the next pair's: pair i is at i * stride and + pair_distance."""
        return 2 if self.pairing == "interleaved" else 1

    @property
    def components(self) -> int | None:
        """Components of a position: 3 for M-RoPE, None for plain ones."""
        return None if self.axes is None else 3

    @property
    def width(self) -> int:
        """Channels of the rotated window, from the first that turns to the last."""
        return self.rotary_dim if self.pairing == "interleaved" else self.pairs + (self.pair_distance or 0)

    def position_ok(self, old: ArrayLike | Sequence[int], new: ArrayLike | Sequence[int]) -> Positions:
        """Which tokens have positions that can be served.

        Args and errors are those of `delta_tables`.

        Returns:
            bool [tokens]: neither position negative, nor at or past `position_limit`. A NumPy array if
            both are NumPy (or lists), else a `jax.Array`, which is not waited for.
        """
        return self._served(old, new)[2]

    def check_positions(
        self, old: ArrayLike | Sequence[int], new: ArrayLike | Sequence[int], tokens: int, *, where: str = ""
    ) -> None:
        """Checks positions, their values too where these are concrete (a device array is waited for).

        Args:
            old: as in `delta_tables`.
            new: as in `delta_tables`.
            tokens: how many there are to move.
            where: goes before the message, such as `"chunk 3: "`.

        Raises:
            TypeError: for positions that are not integers.
            ValueError: for positions that are missing, of another number or shape than the tokens, or
                (concrete ones) negative or at `position_limit` or past it; names value and limit.
        """
        for name, given in (("old", old), ("new", new)):
            positions = as_positions(name, given, components=self.components, where=where)
            if positions.shape[-1] != tokens:
                raise ValueError(f"{where}{positions.shape[-1]} {name} positions for {tokens} tokens")
            check_values(name, positions, self._limit, where)

    def delta_tables(self, old: ArrayLike | Sequence[int], new: ArrayLike | Sequence[int]) -> DeltaTables:
        """The correction that takes a key from its old position to its new one.

        Pure `jax.numpy`: positions may be traced. Nothing is raised for their values; a token whose
        position cannot be served does not move (`position_ok` tells which).

        Args:
            old: integers [tokens], or [3, tokens] for M-RoPE (time, height, width).
            new: the same.

        Returns:
            float32 [tokens, rotary_dim / 2] cosines and sines, and bool [tokens]: whether the token moves.
            Where it does not, the rows are exactly cos 1 and sin 0.

        Raises:
            TypeError: for positions that are not integers.
            ValueError: for positions that are missing or of another shape.
        """
        before, after, ok = self._served(old, new)
        if self.tables is None:
            inv_freq = np.asarray(self.inv_freq, np.float32)
            return deltas_from_angles(before, after, ok, inv_freq, axes=self.axes)
        rows = (*self.tables.rows(before, self.axes), *self.tables.rows(after, self.axes))
        return deltas_from_rows(*rows, before, after, ok, axes=self.axes)

    def shift(
        self,
        k: ArrayLike,
        old: ArrayLike | Sequence[int],
        new: ArrayLike | Sequence[int],
        *,
        offset: int = 0,
        dtype: DTypeLike | None = None,
    ) -> jax.Array:
        """Keys as the model would have made them at another position.

        One rounding to the keys' dtype, fp8 saturating. Bit-identical where old == new and in channels that
        the model does not rotate. Concrete positions are checked (a device array of them is waited for);
        under tracing a token whose position cannot be served stays as it is.

        Args:
            k: keys [tokens, heads, head_dim] in bfloat16, float16, float32, float8_e4m3fn or float8_e5m2.
            old: integers [tokens], or [3, tokens] for M-RoPE: the positions the keys were made for.
            new: the same: the positions they are wanted at.
            offset: where in the row the rotated window starts.
            dtype: the float format where `k` holds raw unsigned integers.

        Returns:
            Keys of the same shape and dtype.

        Raises:
            TypeError: for keys that cannot be rotated, or positions that are not integers.
            ValueError: for positions that are missing, not one per token, negative or past
                `position_limit`, and for a window that does not fit the row.
        """
        k = k if isinstance(k, jax.Array) else np.asarray(k)
        if k.ndim != 3:
            raise ValueError(f"k must be [tokens, heads, head_dim], got shape {k.shape}")
        float_format(k.dtype, dtype)
        checked_window(self.pairs, self.pairing, self.pair_distance or 0, offset, k.shape[2])
        self.check_positions(old, new, k.shape[0])
        return _rotated(
            k,
            *self.delta_tables(on_host(old), on_host(new)),
            pairing=self.pairing,
            pair_distance=self.pair_distance,
            offset=offset,
            dtype=None if dtype is None else np.dtype(dtype),
        )

    @property
    def _limit(self) -> int:
        assert self.position_limit is not None  # __post_init__ fills it in
        return self.position_limit

    def _served(self, old: Any, new: Any) -> tuple[Positions, Positions, Positions]:
        """Both as int32, 0 where they cannot be served, and which tokens can."""
        before = as_positions("old", old, components=self.components)
        after = as_positions("new", new, components=self.components)
        if before.shape != after.shape:
            raise ValueError(f"{before.shape[-1]} old positions but {after.shape[-1]} new ones")
        before, before_ok = within(before, self._limit)
        after, after_ok = within(after, self._limit)
        ok: Any = before_ok & after_ok
        return before, after, ok if self.axes is None else ok.all(axis=0)


def _axes(sections: Sequence[int] | None, interleaved: bool, count: int) -> tuple[int, ...] | None:
    return None if sections is None else mrope_axes(sections, interleaved=interleaved, count=count)


_rotated = jax.jit(rotate, static_argnames=("pairing", "pair_distance", "offset", "dtype"))
