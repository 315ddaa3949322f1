"""Pinned host memory: arrays go there and come back whole, and are never indexed while there.

Indexing or slicing an array in host memory is not something XLA does reliably on a GPU (openxla/xla#34565,
openxla/xla#47362): whatever picks rows runs on the device, before an array leaves or after it arrived.
"""

import functools
import logging
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from .ops import checks
from .ops.sharding import Place

PINNED = "pinned_host"

_LOG = logging.getLogger("jaxkv.host")
_SECONDS_PER_GIB = (0.3, 1.5)
"""How long pinning took on the machines where it was measured."""

Arrays = tuple[jax.Array, ...]


def place(arrays: Sequence[jax.Array]) -> Arrays:
    """Copies device arrays to pinned host memory, each shard beside its own device; dispatched, not waited for.

    Inside `jit` it is part of the program.
    """
    if any(map(checks.is_traced, arrays)):
        return tuple(jax.device_put(array, jax.memory.Space.Host) for array in arrays)
    return _put(arrays, [_pinned(array.sharding) for array in arrays])


def _put(arrays: Sequence[jax.Array], shardings: Sequence[Any]) -> Arrays:
    if len(arrays) == 1:  # a list of one takes longer to queue
        return (jax.device_put(arrays[0], shardings[0]),)
    return tuple(jax.device_put(list(arrays), list(shardings)))


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
    return _put([_for(array, where) for array, where in zip(arrays, shardings, strict=True)], shardings)


def _for(array: jax.Array, where: Any) -> jax.Array:
    """What is to be copied: of an array that several devices have whole, one copy, if it goes to others.

    JAX does not copy such an array from host memory to one device.
    """
    if len(array.devices()) == 1 or not array.is_fully_replicated or array.sharding.device_set == where.device_set:
        return array
    return array.addressable_data(0)


def send_beside(tables: Sequence[Any], sharding: Any) -> list[jax.Array]:
    """Sends small tables to the devices of an array with this sharding, whole to each, in one call."""
    if isinstance(sharding, NamedSharding):
        sharding = NamedSharding(sharding.mesh, PartitionSpec())
    return jax.device_put(list(tables), sharding)


def reserve(nbytes: int, *, device: jax.Device | None = None) -> float:
    """Has the runtime pin host memory now, so that no transfer waits for it later.

    The runtime pins memory when it needs more, twice as much each time, and a transfer that asks for it waits: for a
    large pool seconds. What is reserved stays with the runtime, and chunks are made of it, while no more than `nbytes`
    of them are alive. To be called once, before the first transfer. Where host memory is not pinned (on a CPU) there
    is nothing to do.

    Args:
        nbytes: of the chunks that are to be held at one time.
        device: whose runtime; by default that of `jax.devices()[0]`.

    Returns:
        Seconds it took, 0 where there was nothing to do. They are logged (logger "jaxkv.host"), and what to expect is
        logged before.

    Raises:
        TypeError: `device` is no device.
        ValueError: `nbytes` is no positive integer.
        MemoryError: the runtime cannot have that much: its limit on pinned memory is lower, or the machine has less.
    """
    if isinstance(nbytes, bool) or not isinstance(nbytes, (int, np.integer)) or nbytes < 1:
        raise ValueError(f"nbytes: expected an int of at least 1, got {nbytes!r}")
    device = jax.devices()[0] if device is None else device
    if not isinstance(device, jax.Device):
        raise TypeError(f"device: expected a jax.Device, got {device!r}")
    if device.platform == "cpu":
        _LOG.info("host memory is not pinned on %s: nothing to reserve", device)
        return 0.0
    gib = nbytes / 2**30
    low, high = (gib * seconds for seconds in _SECONDS_PER_GIB)
    _LOG.info("pinning %.1f GiB of host memory for %s, which takes about %.0f to %.0f s", gib, device, low, high)
    pinned = jax.sharding.SingleDeviceSharding(device, memory_kind=PINNED)
    start = time.perf_counter()
    try:
        # Memory that nothing writes: it is pinned and given back, and the runtime's pool keeps it.
        block = jax.jit(lambda: jax.lax.empty((int(nbytes),), jnp.uint8), out_shardings=pinned)()
        block.block_until_ready().delete()
    except jax.errors.JaxRuntimeError as error:
        raise MemoryError(
            f"reserve: the runtime cannot pin {gib:.1f} GiB of host memory. Its own limit is 64 GiB unless "
            f"XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB says otherwise, which it reads once, before the first use of JAX's "
            f"devices (`jaxkv info` shows it); what the machine has free is another ({error})"
        ) from error
    taken = time.perf_counter() - start
    _LOG.info("pinned %.1f GiB in %.1f s", gib, taken)
    return taken


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
