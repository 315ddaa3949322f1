"""The scaling formulas of rotary frequencies: default, linear, dynamic, YaRN, longrope, llama3, proportional.

They are those of huggingface/transformers (`modeling_rope_utils.py`, 5.24), evaluated the way torch
evaluates them there: exponents, products and quotients in float32, step by step. In float64 they would
be a few units in the last place away from the frequencies that the model itself uses, which far from
position zero is a visible angle.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from numbers import Integral, Real
from types import MappingProxyType
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

Frequencies: TypeAlias = NDArray[np.float32]


class Config:
    """Reads the fields of a mapping or an object alike; an absent field and a null one are the same.

    Args:
        source: a mapping, or an object with the fields as attributes.
    """

    def __init__(self, source: Any) -> None:
        self._source = source

    def get(self, name: str) -> Any:
        """The field as it is, None where it is absent."""
        if isinstance(self._source, Mapping):
            return self._source.get(name)
        return getattr(self._source, name, None)

    def number(self, name: str) -> float | None:
        """The field as a finite number, None where it is absent; anything else is a ValueError."""
        value = self.get(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, Real) or not math.isfinite(value):
            raise ValueError(f"{name} must be a number, got {value!r}")
        return int(value) if isinstance(value, Integral) else float(value)

    def integer(self, *names: str) -> int | None:
        """The value of whichever of the synonymous fields is there."""
        name, value = self.agreed(*names)
        if value is not None and value != int(value):
            raise ValueError(f"{name} must be a whole number, got {value!r}")
        return None if value is None else int(value)

    def agreed(self, *names: str) -> tuple[str, float | None]:
        """The first field that is there and its value; those after it must say the same."""
        found = [(name, value) for name in names if (value := self.number(name)) is not None]
        for name, value in found[1:]:
            if value != found[0][1]:
                raise ValueError(f"config contradicts itself: {found[0][0]}={found[0][1]} but {name}={value}")
        return found[0] if found else (names[0], None)


@dataclasses.dataclass(frozen=True)
class Case:
    """What a formula reads: one layer type's rope settings, and the config around them.

    Attributes:
        settings: the `rope_scaling` or `rope_parameters` dict, of one layer type.
        config: the config that holds it.
        theta: the base.
        width: channels that turn, even.
        head_dim: channels of the head.
        sequence_length: tokens of the sequence, where the caller named it.
    """

    settings: Config
    config: Config
    theta: float
    width: int
    head_dim: int
    sequence_length: int | None

    def optional(self, name: str) -> float | None:
        """A number above zero, None where it is absent."""
        value = self.settings.number(name)
        if value is not None and value <= 0:
            raise ValueError(f"{name} must be positive, got {value!r}")
        return value

    def positive(self, name: str) -> float:
        """A number above zero that has to be there."""
        value = self.optional(name)
        if value is None:
            raise ValueError(f"rope config lacks {name}, which its rope_type needs")
        return value

    def max_positions(self) -> int:
        """The context length that the config declares."""
        value = self.config.integer("max_position_embeddings", "n_positions")
        if value is None:
            raise ValueError("config lacks max_position_embeddings, which its rope_type needs")
        return value

    def original_positions(self) -> int:
        """The context length that the model was trained with."""
        # Phi-3 keeps the field beside the rope dict, others inside it.
        inside = self.settings.integer("original_max_position_embeddings")
        outside = self.config.integer("original_max_position_embeddings")
        if inside is not None and outside is not None and inside != outside:
            raise ValueError(
                f"config contradicts itself: original_max_position_embeddings={outside}, "
                f"but {inside} in the rope settings"
            )
        if inside is None:
            inside = outside
        return self.max_positions() if inside is None else inside

    def factor(self) -> float:
        """`factor`, or the ratio of the two context lengths that it stands for."""
        factor = self.optional("factor")
        return self.max_positions() / self.original_positions() if factor is None else factor

    def length(self, rope_type: str) -> int:
        """The sequence's length, for scalings that read it."""
        if self.sequence_length is None:
            raise ValueError(f"rope_type {rope_type!r} depends on the length of the sequence: give sequence_length")
        return self.sequence_length


@dataclasses.dataclass(frozen=True)
class Scaled:
    """A formula's result.

    Attributes:
        inv_freq: float32 [rotary_dim / 2], radians per position.
        attention_scaling: the factor that the model puts on its cos and sin tables.
        pair_distance: channels between the two of a half-split pair; None for rotary_dim / 2.
        regime: the part of a length-dependent scaling that holds here, such as `"longrope short"`.
        position_limit: positions from here on belong to another regime; None for no such limit.
    """

    inv_freq: Frequencies
    attention_scaling: float = 1.0
    pair_distance: int | None = None
    regime: str | None = None
    position_limit: int | None = None


def _powers(base: float, width: int, count: int | None = None) -> Frequencies:
    """float32 base^(2i / width), i < count (width / 2 by default).

    The exponent is rounded to float32 as in torch; the power itself is taken in float64 and rounded
    once, which is what a good float32 pow returns.
    """
    steps = np.arange(0, width if count is None else 2 * count, 2).astype(np.float32)
    exponents = (steps / np.float32(width)).astype(np.float64)
    return np.power(np.float64(np.float32(base)), exponents).astype(np.float32)


def _plain(base: float, width: int, count: int | None = None) -> Frequencies:
    return np.float32(1) / _powers(base, width, count)


def _default(case: Case) -> Scaled:
    factor = case.settings.number("factor")
    if factor not in (None, 1):
        raise ValueError(f"config contradicts itself: rope_type 'default' with factor={factor}")
    return Scaled(_plain(case.theta, case.width))


def _linear(case: Case) -> Scaled:
    return Scaled(_plain(case.theta, case.width) / np.float32(case.positive("factor")))


def _dynamic(case: Case) -> Scaled:
    length, trained = case.length("dynamic"), case.max_positions()
    base = np.float32(case.theta)
    if length > trained:
        if case.width == 2:
            raise ValueError("rope_type 'dynamic' needs a rotary width above 2")
        factor = np.float32(case.positive("factor"))
        # In float32, as transformers has it where the length is a tensor.
        growth = factor * np.float32(length) / np.float32(trained) - (factor - np.float32(1))
        power = np.power(np.float64(growth), np.float64(np.float32(case.width / (case.width - 2))))
        base = base * np.float32(power)
    return Scaled(
        _plain(float(base), case.width),
        regime=f"dynamic base {float(base)!r}",
        position_limit=max(length, trained),
    )


def _llama3(case: Case) -> Scaled:
    inv_freq = _plain(case.theta, case.width)
    factor = np.float32(case.positive("factor"))
    low, high = case.positive("low_freq_factor"), case.positive("high_freq_factor")
    if low >= high:
        raise ValueError(f"low_freq_factor={low} must be below high_freq_factor={high}")
    context = case.original_positions()
    wavelength = np.float32(2 * math.pi) / inv_freq
    smooth = (np.float32(context) / wavelength - np.float32(low)) / np.float32(high - low)
    between = (np.float32(1) - smooth) * inv_freq / factor + smooth * inv_freq
    stretched = np.where(wavelength > np.float32(context / low), inv_freq / factor, between)
    return Scaled(np.where(wavelength < np.float32(context / high), inv_freq, stretched))


def _yarn(case: Case) -> Scaled:
    width, context, factor = case.width, case.original_positions(), case.factor()
    # Absent and zero mean the same here, as in transformers.
    fast = case.settings.number("beta_fast") or 32
    slow = case.settings.number("beta_slow") or 1
    if fast < slow:
        raise ValueError(f"beta_fast={fast} must not be below beta_slow={slow}")

    def channel(turns: float) -> float:
        return width * math.log(context / (turns * 2 * math.pi)) / (2 * math.log(case.theta))

    first, last = channel(fast), channel(slow)
    if case.settings.get("truncate") is not False:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, width - 1)
    if first == last:
        last += 0.001  # a ramp of no width would divide by zero
    ramp = (np.arange(width // 2, dtype=np.float32) - np.float32(first)) / np.float32(last - first)
    kept = np.float32(1) - np.clip(ramp, np.float32(0), np.float32(1))
    powers = _powers(case.theta, width)
    stretched = np.float32(1) / (np.float32(factor) * powers)
    inv_freq = stretched * (np.float32(1) - kept) + (np.float32(1) / powers) * kept

    def mscale(weight: float = 1.0) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    scaling = case.optional("attention_factor")
    if scaling is None:
        scale, scale_all = case.settings.number("mscale"), case.settings.number("mscale_all_dim")
        scaling = mscale(scale) / mscale(scale_all) if scale and scale_all else mscale()
    return Scaled(inv_freq, float(scaling))


def _longrope(case: Case) -> Scaled:
    length, context = case.length("longrope"), case.original_positions()
    name = "long" if length > context else "short"
    factors = case.settings.get(f"{name}_factor")
    if not isinstance(factors, Sequence) or len(factors) != case.width // 2:
        got = f"{len(factors)} numbers" if isinstance(factors, Sequence) else repr(factors)
        raise ValueError(f"{name}_factor must hold {case.width // 2} numbers, got {got}")
    for factor in factors:
        if not isinstance(factor, Real) or not 0 < float(factor) < math.inf:
            raise ValueError(f"{name}_factor must hold positive numbers, got {factor!r}")
    stretched = np.asarray(factors, np.float32) * _powers(case.theta, case.width)
    scaling = case.optional("attention_factor")
    if scaling is None:
        ratio = case.factor()
        scaling = math.sqrt(1 + math.log(ratio) / math.log(context)) if ratio > 1 else 1.0
    return Scaled(
        np.float32(1) / stretched,
        float(scaling),
        regime=f"longrope {name}",
        # A sequence that reaches this far has left the short regime.
        position_limit=context if name == "short" else None,
    )


def _proportional(case: Case) -> Scaled:
    # The head is paired across its whole width and its exponents span that width; only the first
    # frequencies turn. (transformers writes the others as zeros.)
    inv_freq = _plain(case.theta, case.head_dim, case.width // 2)
    return Scaled(inv_freq / np.float32(case.optional("factor") or 1), pair_distance=case.head_dim // 2)


SCALINGS: Mapping[str, Callable[[Case], Scaled]] = MappingProxyType(
    {
        "default": _default,
        "dynamic": _dynamic,
        "linear": _linear,
        "llama3": _llama3,
        "longrope": _longrope,
        "proportional": _proportional,
        "yarn": _yarn,
    }
)
"""Rope types that can be served, by the name that configs use."""

SYNONYMS: Mapping[str, str] = MappingProxyType({"su": "longrope", "mrope": "default"})
"""Rope types under another name. (`mrope` says how positions are read, not how frequencies scale.)"""

KNOWN_FIELDS = frozenset(
    "factor original_max_position_embeddings attention_factor beta_fast beta_slow mscale mscale_all_dim "
    "truncate short_factor long_factor low_freq_factor high_freq_factor "
    # These change no frequency: names repeated from the config, M-RoPE's sections, YaRN's training
    # flag, and a factor that Ministral puts on its queries.
    "rope_theta rope_type type partial_rotary_factor mrope_section mrope_interleaved "
    "max_position_embeddings finetuned llama_4_scaling_beta".split()
)
"""Fields that a rope dict may hold; another one could change the frequencies in a way unknown here."""
