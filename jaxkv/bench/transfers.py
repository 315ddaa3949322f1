"""store and load in wall time, to completion."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from ..bulk import load, store
from ..ops import native
from ..planning import plan as make_plan
from ..spec import PagedCache
from ..store_plans import store_plan
from . import ceilings
from .shapes import Shape
from .timing import Timing, wall

timed = partial(wall, repeats=15)  # what takes 20 ms at most is compared within a per cent


def bulk(shape: Shape, tokens: int) -> dict[str, Timing]:
    """Stores and loads of all layers, each waited for.

    What moves is decided beforehand, as an engine decides it while the step before computes; a call that decides it
    itself has a row of its own. On CUDA others tell when the device was done, before JAX's word of it arrives.
    """
    cache = shape.spec.empty(shape.num_pages)
    slots = shape.slots(tokens, seed=0)
    storing = store_plan(cache, slots, layers=None)
    chunks = jax.block_until_ready(store(cache, storing))
    timings = {
        "store": timed(lambda: store(cache, storing)),
        "store, no plan": timed(lambda: store(cache, slots)),
    }

    def store_again() -> Any:
        nonlocal chunks
        chunks = store(cache, storing, into=chunks)
        return chunks

    def reload(*what: Any) -> PagedCache:
        nonlocal cache
        cache = load(cache, *what)
        return cache

    timings["store into older chunks"] = timed(store_again)
    plan = make_plan(cache, chunks, slots)
    timings["load"] = timed(lambda: reload(plan))
    timings["load, no plan"] = timed(lambda: reload(chunks, slots))
    if native.platform_of(jax.devices()[0]) == "cuda":
        done = partial(timed, until=ceilings.Driver().synchronize)
        timings["store, until the device is done"] = done(lambda: store(cache, storing))
        timings["load, until the device is done"] = done(lambda: reload(plan))
    return timings


def bulk_one_array(nbytes: int) -> dict[str, Timing]:
    """As many bytes in one array, which is there already, by `device_put`: what JAX takes for a copy."""
    device = jnp.zeros(nbytes, jnp.uint8).block_until_ready()
    pinned = device.sharding.with_memory_kind("pinned_host")
    host = jax.device_put(device, pinned).block_until_ready()
    return {
        "store, one array by device_put": timed(lambda: jax.device_put(device, pinned)),
        "load, one array by device_put": timed(lambda: jax.device_put(host, device.sharding)),
    }


def bulk_plain(shape: Shape, tokens: int) -> dict[str, Timing]:
    """Page by page, as JAX stacks do it: index the page, `device_put` it; `device_put` it back, `.at[].set`."""
    pages = list(shape.spec.empty(shape.num_pages).pages)
    numbers = (shape.slots(tokens, seed=0)[:: shape.spec.page_size] // shape.spec.page_size).tolist()
    take = jax.jit(lambda arrays, n: [array[:, n] for array in arrays])
    put = jax.jit(
        lambda arrays, new, n: [a.at[:, n].set(b) for a, b in zip(arrays, new, strict=True)], donate_argnums=0
    )
    on_device = pages[0].sharding
    on_host = on_device.with_memory_kind("pinned_host")

    def save() -> Any:
        return [jax.device_put(take(pages, n), on_host) for n in numbers]

    saved = jax.block_until_ready(save())

    def restore() -> Any:
        nonlocal pages
        for n, page in zip(numbers, saved, strict=True):
            pages = put(pages, jax.device_put(page, on_device), n)
        return pages

    return {"store": wall(save, repeats=3, warm=1), "load": wall(restore, repeats=3, warm=1)}
