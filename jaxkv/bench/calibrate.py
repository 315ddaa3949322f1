"""`jaxkv bench --calibrate`: the sizes of `Tuning`, measured on this machine."""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax

from ..bulk import load, store
from ..ops import native
from ..planning import plan as make_plan
from ..tuning import Tuning
from .overlap import LayerByLayer
from .shapes import Shape
from .timing import wall


def calibrate(shape: Shape, *, sizes: Sequence[int] = (32, 64, 128, 256, 512), tokens: int = 2048) -> Tuning:
    """Measures what the constants of `Tuning` are about.

    Args:
        shape: the cache it is to be for.
        sizes: tokens of the single chunks with which the direct and the engine path are compared.
        tokens: of a layer-wise transfer, and of a bulk one of many chunks.

    Returns:
        A tuning to pass to the calls. What is not measured keeps its default: `chunk_tokens`, `staging` and
        `first_bytes`, and on a CPU what is about paths.
    """
    tuning = Tuning()
    if native.platform_of(jax.devices()[0]) == "cuda" and native.available("cuda"):
        tuning = dataclasses.replace(tuning, direct_bytes=_direct_bytes(shape, sizes))
        batches = {count: _bulk(shape, tokens, chunks_per_call=count) for count in (8, 16, 32, 64)}
        tuning = dataclasses.replace(tuning, chunks_per_call=min(batches, key=batches.__getitem__))
    return dataclasses.replace(tuning, array_bytes=_array_bytes(shape, tokens))


def _direct_bytes(shape: Shape, sizes: Iterable[int]) -> int:
    """The largest single chunk that a kernel moves as fast as the engine."""
    best = 1
    for tokens in sizes:
        seconds = {path: _bulk(shape, tokens, chunk_tokens=tokens, path=path) for path in ("direct", "engine")}
        if seconds["direct"] > seconds["engine"]:
            break
        best = tokens * shape.spec.bytes_per_token
    return best


def _bulk(shape: Shape, tokens: int, *, path: str | None = None, chunk_tokens: int = 256, **sizes: int) -> float:
    """Seconds of a store into new memory and a load."""
    tuning, slots = Tuning(**sizes), shape.slots(tokens, seed=0)
    cache = shape.spec.empty(shape.num_pages)
    run: Callable[[], Any] = lambda: store(  # noqa: E731
        cache, slots, chunk_tokens=chunk_tokens, path=path, tuning=tuning
    )
    chunks = jax.block_until_ready(run())
    plan = make_plan(cache, chunks, slots)

    def reload() -> Any:
        nonlocal cache
        cache = load(cache, plan, path=path, tuning=tuning)
        return cache

    return wall(run).total + wall(reload).total


def _array_bytes(shape: Shape, tokens: int) -> int:
    """Of the layers that may share an array, the number with which a store and a load take least: its bytes."""
    seconds = {}
    groups = [group for group in (1, 2, 4, 8, 16, 32) if group <= shape.spec.num_layers]
    for group in groups:
        # As many rows a chunk as there are tokens: an array is as large as its layers make it.
        run = LayerByLayer(shape, tokens, group=group, chunk_tokens=tokens)
        plan = run.plan()
        seconds[group] = wall(run.store).total + wall(lambda: run.load(plan=plan)).total  # noqa: B023
    best = min(seconds, key=seconds.__getitem__)
    return max(tokens * shape.spec.bytes_per_token * best // shape.spec.num_layers, 1)
