"""store and load in wall time, to completion."""

from typing import Any

import jax

from ..bulk import load, store
from ..plans import plan as make_plan
from ..spec import PagedCache
from .shapes import Shape
from .timing import Timing, wall


def bulk(shape: Shape, tokens: int) -> dict[str, Timing]:
    """Stores and loads of all layers, each waited for: with fresh pinned memory, and with that of older chunks."""
    cache = shape.spec.empty(shape.num_pages)
    slots = shape.slots(tokens, seed=0)
    chunks = jax.block_until_ready(store(cache, slots))
    timings = {"store": wall(lambda: store(cache, slots))}

    def store_again() -> Any:
        nonlocal chunks
        chunks = store(cache, slots, into=chunks)
        return chunks

    def reload() -> PagedCache:
        nonlocal cache
        cache = load(cache, plan)
        return cache

    timings["store into older chunks"] = wall(store_again)
    plan = make_plan(cache, chunks, slots)
    timings["load"] = wall(reload)
    return timings


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
