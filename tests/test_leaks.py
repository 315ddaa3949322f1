"""I5, I6: many stores and loads leave host and device memory where they were."""

import gc
from pathlib import Path

import helpers
import jax
import numpy as np
import pytest
from helpers import Model

import jaxkv
from jaxkv import host

CYCLES = 10_000
PAGE = 4096


def resident() -> int:
    """Bytes of host memory that the process holds."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE


def cycle(cache, slots, chunks, k):
    """One step of a serving stack: a store into new or older memory, a load, now and then layer by layer."""
    chunks = jaxkv.store(cache, slots, chunk_tokens=8, into=chunks if k % 2 else ())
    if k % 10 == 0:
        for staged in jaxkv.fetch_layers(jaxkv.plan(cache, chunks, slots)):
            if k % 20 == 0:
                break  # abandoned
            jaxkv.write(cache.pages[0], staged)
    return jaxkv.load(cache, chunks, slots), chunks


def run(cycles: int, warm: int) -> tuple[int, int]:
    """What host memory (bytes) and live arrays grow by over many cycles after some to warm up."""
    model = Model("A2")
    arrays, cache = model.random(0)
    slots, chunks = np.arange(20, dtype=np.int32), ()
    for k in range(warm + cycles):
        if k == warm:
            jax.block_until_ready(cache)
            gc.collect()
            before = resident(), len(jax.live_arrays())
        cache, chunks = cycle(cache, slots, chunks, k)
    jax.block_until_ready(cache)
    gc.collect()
    helpers.assert_same(cache.pages, arrays)
    return resident() - before[0], len(jax.live_arrays()) - before[1]


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads Linux's /proc")
def test_memory_is_flat():
    """10,000 cycles: no array stays, and 100 bytes a cycle would be seen."""
    grown, arrays = run(CYCLES, warm=2000)
    assert arrays == 0
    assert grown < 100 * CYCLES, f"{grown} bytes in {CYCLES} cycles"


@pytest.mark.gpu
def test_memory_is_flat_on_the_device():
    """The same with device memory, after host memory was reserved."""
    assert host.reserve(64 << 20) > 0
    run(100, warm=0)
    device = jax.devices()[0]
    before = device.memory_stats()["bytes_in_use"]
    grown, arrays = run(CYCLES, warm=2000)
    assert device.memory_stats()["bytes_in_use"] == before
    assert arrays == 0
    assert grown < 200 * CYCLES, f"{grown} bytes in {CYCLES} cycles"


@pytest.mark.gpu
def test_reserve_says_what_the_runtime_cannot_have():
    """I3, I17: the message names the setting and when it is read; what comes next is clean."""
    with pytest.raises(MemoryError, match="XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"):
        host.reserve(1 << 50)
    assert host.reserve(1 << 20) > 0
