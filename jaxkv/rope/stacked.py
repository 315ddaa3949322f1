"""Delta tables of several ropes at once, in the form that a turning scatter takes."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from .rope import Rope


def stacked_deltas(ropes: Sequence[Rope], old: Any, new: Any) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The delta tables of each rope.

    Args:
        ropes: with the same number of pairs.
        old: integers `[tokens]`, or `[3, tokens]` for M-RoPE: the positions that keys were made for.
        new: the same: the positions they are wanted at.

    Returns:
        cos and sin, float32 `[ropes, tokens, pairs]`, and int32 `[ropes, tokens]`: whether a token turns.
    """
    cos, sin, moved = zip(*(rope.delta_tables(old, new) for rope in ropes), strict=True)
    return jnp.stack(cos), jnp.stack(sin), jnp.stack(moved).astype(jnp.int32)
