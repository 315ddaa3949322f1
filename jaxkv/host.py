"""Pinned host memory: arrays go there and come back whole, and are never indexed while there.

Indexing or slicing an array in host memory is not something XLA does reliably on a GPU (openxla/xla#34565,
openxla/xla#47362): whatever picks rows runs on the device, before an array leaves or after it arrived.
"""

from collections.abc import Sequence
from typing import Any

import jax

from .ops import checks

PINNED = "pinned_host"


def place(arrays: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
    """Copies device arrays to pinned host memory, each shard beside its own device; dispatched, not waited for.

    Inside `jit` it is part of the program.
    """
    if any(map(checks.is_traced, arrays)):
        return tuple(jax.device_put(array, jax.memory.Space.Host) for array in arrays)
    return tuple(jax.device_put(list(arrays), [array.sharding.with_memory_kind(PINNED) for array in arrays]))


def fetch(arrays: Sequence[jax.Array], shardings: Sequence[Any]) -> tuple[jax.Array, ...]:
    """Copies host arrays to the device; dispatched, not waited for.

    Args:
        arrays: in host memory (an array that is on the device already stays there).
        shardings: where each is to go, in device memory; not used inside `jit`, where the compiler decides.
    """
    if any(map(checks.is_traced, arrays)):
        return tuple(jax.device_put(array, jax.memory.Space.Device) for array in arrays)
    return tuple(jax.device_put(list(arrays), list(shardings)))
