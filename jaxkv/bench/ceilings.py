"""What the machine can do: copies on the device, and by the copy engine over the link."""

import ctypes
import statistics
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .timing import wall


def device_copy(nbytes: int) -> float:
    """Seconds of a device-to-device copy of `nbytes`, from a queue of them."""
    source = jnp.zeros(nbytes, jnp.uint8)
    copy = jax.jit(jnp.copy)
    count = 16
    seconds = []
    for repeat in range(6):
        start = time.perf_counter()
        jax.block_until_ready([copy(source) for _ in range(count)][-1])
        if repeat:
            seconds.append((time.perf_counter() - start) / count)
    return statistics.median(seconds)


def host_copy(nbytes: int) -> float:
    """Seconds of a memcpy of `nbytes` on the host."""
    source, target = np.ones(nbytes, np.uint8), np.zeros(nbytes, np.uint8)
    return wall(lambda: np.copyto(target, source)).total


class Driver:
    """NVIDIA's driver, called directly, in the context of the first device that JAX uses too.

    Raises:
        OSError: there is no such driver.
    """

    def __init__(self) -> None:
        self._cuda = ctypes.CDLL("libcuda.so.1")
        context, device = ctypes.c_void_p(), ctypes.c_int()
        self._call("cuInit", 0)
        self._call("cuDeviceGet", ctypes.byref(device), 0)
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self._call("cuCtxSetCurrent", context)

    def synchronize(self) -> None:
        """Waits until the device has nothing left to do, by the driver's word."""
        self._call("cuCtxSynchronize")

    def _call(self, name: str, *args: Any) -> None:
        status = getattr(self._cuda, name)(*args)
        if status:
            raise OSError(f"{name} failed with CUDA error {status}")


class CopyEngine(Driver):
    """The copy engine, driven directly: pinned memory, no framework.

    Args:
        nbytes: the largest copy.

    Raises:
        OSError: there is no NVIDIA driver.
    """

    def __init__(self, nbytes: int) -> None:
        super().__init__()
        self._host = [ctypes.c_void_p(), ctypes.c_void_p()]
        self._device = [ctypes.c_uint64(), ctypes.c_uint64()]
        self._streams = [ctypes.c_void_p(), ctypes.c_void_p()]
        for i in range(2):
            self._call("cuMemHostAlloc", ctypes.byref(self._host[i]), ctypes.c_size_t(nbytes), 0)
            self._call("cuMemAlloc_v2", ctypes.byref(self._device[i]), ctypes.c_size_t(nbytes))
            self._call("cuStreamCreate", ctypes.byref(self._streams[i]), 1)

    def seconds(self, nbytes: int, direction: str) -> float:
        """Median seconds of one copy: "d2h", "h2d", or "both" at once (of `nbytes` each way)."""
        size, times = ctypes.c_size_t(nbytes), []
        for repeat in range(9):
            start = time.perf_counter()
            if direction in ("d2h", "both"):
                self._call("cuMemcpyDtoHAsync_v2", self._host[0], self._device[0], size, self._streams[0])
            if direction in ("h2d", "both"):
                self._call("cuMemcpyHtoDAsync_v2", self._device[1], self._host[1], size, self._streams[1])
            for stream in self._streams:
                self._call("cuStreamSynchronize", stream)
            if repeat > 1:
                times.append(time.perf_counter() - start)
        return statistics.median(times)

    def close(self) -> None:
        """Frees what was allocated."""
        for i in range(2):
            self._call("cuMemFreeHost", self._host[i])
            self._call("cuMemFree_v2", self._device[i])
            self._call("cuStreamDestroy_v2", self._streams[i])
