"""`jaxkv demo`: KV of a real text leaves its pages, comes back, and the model goes on.

Three parts: all layers at once into other pages, layer by layer beside the forward pass, and two passages used at
other positions than they were cached at. The first two are compared bit for bit with a run whose KV never moved.
"""

import importlib.metadata
import json
import sys
import time
from pathlib import Path
from typing import Any

import jax

from ..info import implementation_of
from ..ops import native
from .layer_by_layer import layer_by_layer
from .model import Model
from .reuse import reuse
from .round_trip import round_trip


def run(text_file: str | None, *, as_json: bool) -> int:
    """Runs the demo; returns 0 where all matched."""
    started = time.perf_counter()
    model = Model.reading(read_text(text_file))
    result: dict[str, Any] = {}
    for part in (round_trip, layer_by_layer, reuse):
        result.update(part(model))
    device = jax.devices()[0]
    platform = native.platform_of(device)
    result |= {"implementation": implementation_of(platform), "platform": platform, "device": device.device_kind}
    result |= {"jax": jax.__version__, "seconds": round(time.perf_counter() - started, 1)}
    _print_table(result)
    if as_json:
        print(json.dumps(result))
    return 0 if result["match"] and result["layerwise_match"] and result["reuse_match"] else 1


def read_text(path: str | None) -> str:
    """A file, or by default the README that is installed with the package."""
    if path is not None:
        return Path(path).read_text(encoding="utf-8")
    text = importlib.metadata.metadata("jaxkv").json.get("description")
    if not isinstance(text, str) or not text.strip():
        sys.exit("jaxkv demo: the installed package carries no README; name a text with --text FILE")
    return text


def _print_table(r: dict[str, Any]) -> None:
    def verdict(name: str) -> str:
        return "bit-equal to" if r[name] else "DIFFERENT from"

    size = r["bytes"] / 2**20
    rows = [
        ("prompt", f"{r['tokens']} tokens, {r['layers']} layers, {size:.2f} MiB of KV"),
        ("store", f"{r['chunks']} chunks, {r['store_ms']:.3f} ms, {r['store_gb_per_s']:.2f} GB/s"),
        ("load", f"into other pages, {r['load_ms']:.3f} ms, {r['load_gb_per_s']:.2f} GB/s"),
        ("decoding on", f"{verdict('match')} the run whose KV never left its pages"),
        ("layer by layer", f"{r['layerwise_tokens']} tokens in {r['layerwise_arrays']} arrays"),
        ("decoding on", f"{verdict('layerwise_match')} the run whose KV never left its pages"),
        ("re-used", f"{r['reuse_tokens']} tokens, in part at other positions; keys of the first layer are off by"),
        (
            "",
            f"{r['key_error_uncorrected']:.2g} as cached, {r['key_error_corrected']:.2g} corrected, "
            + ("which is rounding" if r["reuse_match"] else "MORE than rounding explains"),
        ),
        (
            "logits off by",
            f"{r['logit_error_uncorrected']:.3f} as cached, {r['logit_error_corrected']:.3f} corrected, "
            f"{r['logit_error_blended']:.3f} with {r['recomputed_tokens']} tokens recomputed",
        ),
        ("implementation", f"{r['implementation']} on {r['device']} ({r['platform']}), JAX {r['jax']}"),
        ("took", f"{r['seconds']} s"),
    ]
    for name, value in rows:
        print(f"{name:>15}  {value}")
