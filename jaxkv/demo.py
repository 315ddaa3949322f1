"""`jaxkv demo`: KV of a real text leaves its pages, comes back into other pages, and the model goes on.

The run that is compared with never moved a byte, so the comparison is bit for bit.
"""

import dataclasses
import importlib.metadata
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from . import layouts
from .bulk import load, store
from .info import implementation_of
from .ops import native
from .spec import CacheSpec, PagedCache
from .testing import llama

MIN_TOKENS = 500
MAX_TOKENS = 900
STEPS = 24
PAGE_SIZE = 16
POISON = 0xDE


@dataclasses.dataclass(frozen=True)
class Model:
    """A small Llama with its cache: what the parts of the demo share."""

    config: llama.LlamaConfig
    params: Any
    spec: CacheSpec
    tokens: np.ndarray

    def prefill(self, pages: Any, slots: np.ndarray) -> tuple[jax.Array, Any]:
        """Logits of the last token, and the pages with the prompt's KV."""
        return llama.prefill(
            self.params, self.config, self.tokens, pages, slots, pool=self.spec.pool_layout, page_size=PAGE_SIZE
        )

    def go_on(self, logits: jax.Array, pages: Any, slots: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The next tokens, greedily, and their logits."""
        tokens, scores, _ = llama.generate(
            self.params,
            self.config,
            logits,
            pages,
            slots,
            start=len(self.tokens),
            steps=STEPS,
            pool=self.spec.pool_layout,
            page_size=PAGE_SIZE,
        )
        return np.asarray(tokens), np.asarray(scores)


def run(text_file: str | None, *, as_json: bool) -> int:
    """Runs the demo; returns 0 where all matched."""
    started = time.perf_counter()
    model = _model(_read_text(text_file))
    result = round_trip(model)
    result["seconds"] = round(time.perf_counter() - started, 1)
    _print_table(result)
    if as_json:
        print(json.dumps(result))
    return 0 if result["match"] else 1


def round_trip(model: Model) -> dict[str, Any]:
    """Prefill, store, poison the pages, load into other pages, decode on; compared with never having moved."""
    spec, count = model.spec, len(model.tokens)
    used = -(-(count + STEPS) // PAGE_SIZE)
    rng = np.random.default_rng(0)
    order = rng.permutation(2 * used + 3)
    home, elsewhere = (_slots_of(order[first : first + used]) for first in (0, used))

    logits, pages = model.prefill(spec.empty(len(order)).pages, home)
    expected_tokens, expected_logits = model.go_on(logits, pages, home)

    cache = PagedCache(pages, spec)
    chunks, store_seconds = _timed(lambda: store(cache, home[:count]))
    poisoned = [PagedCache(jax.tree.map(_poison, pages), spec) for _ in range(_REPEATS)]
    jax.block_until_ready(poisoned)
    returned, load_seconds = _timed(lambda: load(poisoned.pop(), chunks, elsewhere[:count]))
    tokens, scores = model.go_on(logits, returned.pages, elsewhere)

    moved = count * spec.bytes_per_token
    device = jax.devices()[0]
    return {
        "match": bool((tokens == expected_tokens).all() and scores.tobytes() == expected_logits.tobytes()),
        "tokens": count,
        "layers": spec.num_layers,
        "bytes": moved,
        "chunks": len(chunks),
        "store_ms": round(store_seconds * 1e3, 3),
        "load_ms": round(load_seconds * 1e3, 3),
        "store_gb_per_s": round(moved / store_seconds / 1e9, 3),
        "load_gb_per_s": round(moved / load_seconds / 1e9, 3),
        "implementation": implementation_of(native.platform_of(device)),
        "platform": native.platform_of(device),
        "device": device.device_kind,
        "jax": jax.__version__,
    }


_REPEATS = 5


def _timed(call: Callable[[], Any]) -> tuple[Any, float]:
    """The last result and the median time of a call, to completion; the first one, which compiles, left out."""
    times, result = [], None
    for _ in range(_REPEATS):
        start = time.perf_counter()
        result = jax.block_until_ready(call())
        times.append(time.perf_counter() - start)
    return result, statistics.median(times[1:])


def _model(text: str) -> Model:
    config = llama.LlamaConfig()
    tokens = np.asarray(llama.encode(text))
    tokens = np.resize(tokens, max(len(tokens), MIN_TOKENS))[:MAX_TOKENS]  # a short text is read again from its start
    spec = CacheSpec(
        layout=layouts.FLASH_ATTENTION,
        num_layers=config.layers,
        num_kv_heads=config.kv_heads,
        head_dim=config.head_dim,
        page_size=PAGE_SIZE,
        dtype=config.dtype,
        model="demo",
    )
    return Model(config, llama.init(config), spec, tokens)


def _read_text(path: str | None) -> str:
    if path is not None:
        return Path(path).read_text(encoding="utf-8")
    text = importlib.metadata.metadata("jaxkv").json.get("description")
    if not isinstance(text, str) or not text.strip():
        sys.exit("jaxkv demo: the installed package carries no README; name a text with --text FILE")
    return text


def _slots_of(pages: np.ndarray) -> np.ndarray:
    return (pages[:, None] * PAGE_SIZE + np.arange(PAGE_SIZE)).reshape(-1)


def _poison(page: jax.Array) -> jax.Array:
    bits = jnp.full(page.shape, int.from_bytes(bytes([POISON]) * page.dtype.itemsize), f"uint{8 * page.dtype.itemsize}")
    return jax.lax.bitcast_convert_type(bits, page.dtype)


def _print_table(result: dict[str, Any]) -> None:
    size = result["bytes"] / 2**20
    rows = [
        ("prompt", f"{result['tokens']} tokens, {result['layers']} layers, {size:.2f} MiB of KV"),
        ("store", f"{result['chunks']} chunks, {result['store_ms']:.3f} ms, {result['store_gb_per_s']:.2f} GB/s"),
        ("load", f"into other pages, {result['load_ms']:.3f} ms, {result['load_gb_per_s']:.2f} GB/s"),
        (
            "implementation",
            f"{result['implementation']} on {result['device']} ({result['platform']}), JAX {result['jax']}",
        ),
        ("decoding on", f"{'bit-equal to' if result['match'] else 'DIFFERENT from'} the run that never left its pages"),
        ("took", f"{result['seconds']} s"),
    ]
    for name, value in rows:
        print(f"{name:>15}  {value}")
