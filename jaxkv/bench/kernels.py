"""gather and scatter in device time, beside plain XLA."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..chunk import as_format
from ..ops.gather import gather_leaves
from ..ops.scatter import scatter_leaves
from ..paths import groups_of
from .shapes import Shape
from .timing import device_time

ROTATED = 4
"""Slot sets that a loop goes round, so that no step finds its rows in a cache."""


def rows_bytes(shape: Shape, tokens: int) -> int:
    """Bytes of some tokens' rows."""
    return tokens * shape.spec.bytes_per_token


def measure(shape: Shape, tokens: int, *, implementation: str | None = None, steps: int = 20) -> dict[str, float]:
    """Seconds of one gather and one scatter of all layers."""
    spec = shape.spec
    (group,) = groups_of(spec, as_format(spec, None))
    table = jnp.asarray(np.stack([shape.slots(tokens, seed) for seed in range(ROTATED)]))
    (chunk_shape,) = group.transfer.chunk_shapes(tokens)
    options: dict[str, Any] = {"transfer": group.transfer, "num_chunks": 1, "implementation": implementation}

    leaves = _leaves(shape)

    def gather(carry: Any, i: jax.Array) -> Any:
        pages, _ = carry
        return pages, gather_leaves(table[i % ROTATED], pages, **options)[0]

    def scatter(carry: Any, i: jax.Array) -> Any:
        pages, rows = carry
        return scatter_leaves(table[i % ROTATED], [rows], pages, rows=tokens, **options), rows

    rows = jnp.zeros(chunk_shape, spec.dtype)
    seconds = {"gather": device_time(gather, (leaves, rows), steps=steps)}
    rows = jnp.zeros(chunk_shape, spec.dtype)
    seconds["scatter"] = device_time(scatter, (_leaves(shape), rows), steps=steps)
    return seconds


def measure_plain(shape: Shape, tokens: int, *, steps: int = 8) -> dict[str, float]:
    """The same as a JAX stack would write it: take and stack, and `.at[].set`; for layouts "kv page token head dim"."""
    spec = shape.spec
    table = jnp.asarray(np.stack([shape.slots(tokens, seed) for seed in range(ROTATED)]))

    def flat(page: jax.Array) -> jax.Array:
        return page.reshape(2, shape.num_slots, -1)

    def gather(carry: Any, i: jax.Array) -> Any:
        pages, _ = carry
        return pages, jnp.stack([jnp.take(flat(page), table[i % ROTATED], axis=1) for page in pages], axis=1)

    def scatter(carry: Any, i: jax.Array) -> Any:
        pages, rows = carry
        slots = table[i % ROTATED]
        new = [
            flat(page).at[:, slots].set(rows[:, layer], unique_indices=True).reshape(page.shape)
            for layer, page in enumerate(pages)
        ]
        return new, rows

    def rows() -> jax.Array:
        return jnp.zeros((2, spec.num_layers, tokens, spec.num_kv_heads * spec.head_dim), spec.dtype)

    return {
        "gather": device_time(gather, (_leaves(shape), rows()), steps=steps),
        "scatter": device_time(scatter, (_leaves(shape), rows()), steps=steps),
    }


def _leaves(shape: Shape) -> Sequence[jax.Array]:
    fill: Callable[[tuple[int, ...]], jax.Array] = lambda s: jnp.full(s, 1, shape.spec.dtype)  # noqa: E731
    return [fill(leaf) for leaf in shape.spec.shapes(shape.num_pages)]
