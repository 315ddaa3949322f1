"""In words, why two ropes do not mix: the message behind a refused chunk."""

from typing import Any

from .rope import Rope


def explain_difference(a: Rope | None, b: Rope | None) -> str:
    """The first part in which two ropes differ, with both values; empty if they are equal.

    Args:
        a: a rope, or None for layers without one.
        b: the same.
    """
    if a == b:
        return ""
    if a is None or b is None:
        return f"rope is {a and a.description} in one and {b and b.description} in the other"
    parts = ("pairing", "rotary_dim", "pair_distance", "axes", "regime", "attention_scaling", "tables")
    for part in parts:
        if getattr(a, part) != getattr(b, part):
            return _difference(part, getattr(a, part), getattr(b, part), a, b)
    for i, (x, y) in enumerate(zip(a.inv_freq or (), b.inv_freq or (), strict=True)):
        if x != y:
            return _difference(f"inv_freq[{i}]", x, y, a, b)
    return _difference("position_limit", a.position_limit, b.position_limit, a, b)


def _difference(part: str, x: Any, y: Any, a: Rope, b: Rope) -> str:
    return f"{part} is {x} ({a.description}) in one and {y} ({b.description}) in the other"
