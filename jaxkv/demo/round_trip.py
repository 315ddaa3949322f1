"""All layers at once: KV leaves its pages, comes back into other pages, and the model goes on."""

import statistics
import time
from collections.abc import Callable
from typing import Any

import jax

from ..bulk import load, store
from ..spec import PagedCache
from .model import STEPS, Model, page_sets

_REPEATS = 5


def round_trip(model: Model) -> dict[str, Any]:
    """Prefill, store, poison the pages, load into other pages, decode on; compared with never having moved."""
    count = len(model.tokens)
    num_pages, slots = page_sets(count + STEPS, 2)
    home, elsewhere = slots

    logits, pages = model.prefill(model.empty(num_pages).pages, home)
    expected_tokens, expected_logits = model.go_on(logits, pages, home)

    cache = PagedCache(pages, model.spec)
    chunks, store_seconds = _timed(lambda: store(cache, home[:count]))
    poisoned = [model.empty(num_pages) for _ in range(_REPEATS)]
    jax.block_until_ready(poisoned)
    returned, load_seconds = _timed(lambda: load(poisoned.pop(), chunks, elsewhere[:count]))
    tokens, scores = model.go_on(logits, returned.pages, elsewhere)

    moved = count * model.spec.bytes_per_token
    return {
        "match": bool((tokens == expected_tokens).all() and scores.tobytes() == expected_logits.tobytes()),
        "tokens": count,
        "layers": model.spec.num_layers,
        "bytes": moved,
        "chunks": len(chunks),
        "store_ms": round(store_seconds * 1e3, 3),
        "load_ms": round(load_seconds * 1e3, 3),
        "store_gb_per_s": round(moved / store_seconds / 1e9, 3),
        "load_gb_per_s": round(moved / load_seconds / 1e9, 3),
    }


def _timed(call: Callable[[], Any]) -> tuple[Any, float]:
    """The last result and the median time of a call, to completion; the first one, which compiles, left out."""
    times, result = [], None
    for _ in range(_REPEATS):
        start = time.perf_counter()
        result = jax.block_until_ready(call())
        times.append(time.perf_counter() - start)
    return result, statistics.median(times[1:])
