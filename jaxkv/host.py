"""Pinned host memory: arrays go there and come back whole, and are never indexed while there.

Indexing or slicing an array in host memory is not something XLA does reliably on a GPU (openxla/xla#34565,
openxla/xla#47362): whatever picks rows runs on the device, before an array leaves or after it arrived.
"""

import functools
from collections import deque
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from .ops import checks
from .ops.sharding import describe
from .ops.transfer import Transfer

PINNED = "pinned_host"

Arrays = tuple[jax.Array, ...]


def place(arrays: Sequence[jax.Array]) -> Arrays:
    """Copies device arrays to pinned host memory, each shard beside its own device; dispatched, not waited for.

    Inside `jit` it is part of the program.
    """
    if any(map(checks.is_traced, arrays)):
        return tuple(jax.device_put(array, jax.memory.Space.Host) for array in arrays)
    return tuple(jax.device_put(list(arrays), [_pinned(array.sharding) for array in arrays]))


@functools.lru_cache(maxsize=256)
def _pinned(sharding: Any) -> Any:
    return sharding.with_memory_kind(PINNED)


def fetch(arrays: Sequence[jax.Array], shardings: Sequence[Any] | None) -> Arrays:
    """Copies host arrays to the device; dispatched, not waited for.

    Args:
        arrays: in host memory (an array that is on the device already stays there).
        shardings: where each is to go, in device memory; None inside `jit`, where the compiler decides.
    """
    if shardings is None:
        return tuple(jax.device_put(array, jax.memory.Space.Device) for array in arrays)
    return tuple(jax.device_put(list(arrays), list(shardings)))


def send_beside(tables: Sequence[Any], sharding: Any) -> list[jax.Array]:
    """Sends small tables to the devices of an array with this sharding, whole to each, in one call."""
    if isinstance(sharding, NamedSharding):
        sharding = NamedSharding(sharding.mesh, PartitionSpec())
    return jax.device_put(list(tables), sharding)


Place = tuple[tuple[int, ...], Any]
"""Shape and sharding of an array that is to be."""


def places_of(transfer: Transfer, arrays: Sequence[jax.Array], rows: int) -> list[Place]:
    """Where the arrays of a chunk of some pool leaves are to be on the device: sharded as these are."""
    leaves = describe(transfer, rows, tuple(x.shape for x in arrays), 1, rows)
    sharding = arrays[0].sharding
    if not isinstance(sharding, NamedSharding):
        return [(leaf.shape, sharding) for leaf in leaves.chunks]
    axes = leaves.split(arrays).mesh_axes
    return [(leaf.shape, leaf.sharding(sharding.mesh, axes)) for leaf in leaves.chunks]


class Ring:
    """Buffers that are used again in turn, by donating the oldest: the caller's own, for one request at a time.

    Args:
        size: buffers in the ring.

    Raises:
        ValueError: `size` is no positive integer.
    """

    def __init__(self, size: int = 2) -> None:
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise ValueError(f"size: expected an int of at least 1, got {size!r}")
        self._size = size
        self._kept: deque[tuple[list[Place], Arrays]] = deque()

    def take(self, places: list[Place], dtype: Any) -> Arrays:
        """The oldest buffers, to be donated; new ones while the ring is not full or holds others."""
        if len(self._kept) >= self._size:
            kind, arrays = self._kept.popleft()
            if kind == places and all(array.dtype == dtype and not array.is_deleted() for array in arrays):
                return arrays
        return tuple(jnp.empty(shape, dtype, device=sharding) for shape, sharding in places)

    def give(self, arrays: Sequence[jax.Array]) -> None:
        """Puts buffers behind all others."""
        self._kept.append(([(array.shape, array.sharding) for array in arrays], tuple(arrays)))
