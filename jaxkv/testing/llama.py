"""A small Llama in plain JAX whose KV lives in pages of any layout.

RMSNorm, grouped-query attention, rotary positions (half pairing), SwiGLU; bytes as tokens; weights from
a seed. It exists to show that moved KV is as good as KV that stayed: keys are cached after their
rotation, as serving engines keep them, and attention reads nothing but pages, so that a wrong byte in a
page changes the logits.

`prefill`, `decode_step` and `generate` take host values and pad them to a bucket. What they are made of
(`embed`, `decoder_layer`, `logits`) is for callers that go layer by layer.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from jaxkv.layout import Layout
from jaxkv.testing.llama_layer import (
    LlamaConfig,
    Pages,
    Params,
    decoder_layer,
    embed,
    layer_pages,
    logits,
    with_layer_pages,
)

__all__ = [
    "BOS",
    "BUCKET",
    "LlamaConfig",
    "decode",
    "decode_step",
    "decoder_layer",
    "embed",
    "encode",
    "generate",
    "init",
    "layer_pages",
    "logits",
    "prefill",
    "with_layer_pages",
]

BOS = 256
"""The token before the first byte."""

BUCKET = 256
"""Tokens and slots are padded to multiples of this, so that few lengths are compiled."""


def init(config: LlamaConfig, seed: int = 0) -> Params:
    """Weights, the same on every run with the same seed.

    Returns:
      A dict with `embed` `[vocab, hidden]`, `norm` `[hidden]`, `head` `[hidden, vocab]` and `layers`, a tuple
      with a dict for each layer: `wq` `[hidden, heads, dim]`, `wk` and `wv` `[hidden, kv_heads, dim]`, `wo`
      `[heads, dim, hidden]`, `gate` and `up` `[hidden, ffn]`, `down` `[ffn, hidden]`, `attention_norm` and
      `ffn_norm` `[hidden]`.
    """
    c = config
    # (shape, scale). A random model's scores are all alike, so that every token would get the same
    # attention: sharper queries make it choose, as a trained model does.
    layer = {
        "wq": ((c.hidden, c.heads, c.head_dim), 3 * c.hidden**-0.5),
        "wk": ((c.hidden, c.kv_heads, c.head_dim), c.hidden**-0.5),
        "wv": ((c.hidden, c.kv_heads, c.head_dim), c.hidden**-0.5),
        "wo": ((c.heads, c.head_dim, c.hidden), (c.heads * c.head_dim) ** -0.5),
        "gate": ((c.hidden, c.ffn), c.hidden**-0.5),
        "up": ((c.hidden, c.ffn), c.hidden**-0.5),
        "down": ((c.ffn, c.hidden), c.ffn**-0.5),
    }
    ends = {"embed": ((c.vocab_size, c.hidden), 1.0), "head": ((c.hidden, c.vocab_size), c.hidden**-0.5)}
    # One draw for all weights: a draw for each would compile as often as there are shapes.
    total = sum(math.prod(shape) for shape, _ in ends.values())
    total += c.layers * sum(math.prod(shape) for shape, _ in layer.values())
    draw = np.asarray(jax.random.normal(jax.random.key(seed), (total,), jnp.float32))
    taken = 0

    def take(shape: tuple[int, ...], scale: float) -> jax.Array:
        nonlocal taken
        part = draw[taken : taken + math.prod(shape)].reshape(shape)
        taken += part.size
        return jnp.asarray(part * np.float32(scale), c.dtype)

    one = jnp.ones(c.hidden, c.dtype)
    return {
        **{name: take(*what) for name, what in ends.items()},
        "norm": one,
        "layers": tuple(
            {name: take(*what) for name, what in layer.items()} | {"attention_norm": one, "ffn_norm": one}
            for _ in range(c.layers)
        ),
    }


def encode(text: str) -> npt.NDArray[np.int32]:
    """Tokens `[n]` of a text: the begin-of-sequence token, then its UTF-8 bytes."""
    return np.array([BOS, *text.encode()], np.int32)


def decode(tokens: Sequence[int] | npt.NDArray[np.int32]) -> str:
    """The text of some tokens, with a mark where the bytes are no UTF-8."""
    return bytes(int(t) for t in tokens if t < BOS).decode(errors="replace")


@functools.partial(jax.jit, static_argnames=("config", "pool", "page_size", "implementation"))
def _forward(
    params: Params,
    tokens: jax.Array,
    positions: jax.Array,
    last: jax.Array,
    pages: Pages,
    slots: jax.Array,
    *,
    config: LlamaConfig,
    pool: Layout,
    page_size: int,
    implementation: str | None,
) -> tuple[jax.Array, Pages]:
    hidden = embed(params, tokens)
    for i, weights in enumerate(params["layers"]):
        hidden, page = decoder_layer(
            weights,
            config,
            hidden,
            layer_pages(pages, pool, i),
            slots,
            positions,
            pool=pool,
            page_size=page_size,
            layer=i,
            implementation=implementation,
        )
        pages = with_layer_pages(pages, pool, i, page)
    return logits(params, hidden, last), pages


def _padded(values: Sequence[int] | npt.NDArray[Any], fill: int, bucket: int) -> npt.NDArray[np.int32]:
    given = np.asarray(values, np.int32)
    return np.pad(given, (0, -len(given) % bucket), constant_values=fill)


def prefill(
    params: Params,
    config: LlamaConfig,
    tokens: Sequence[int] | npt.NDArray[np.int32],
    pages: Pages,
    slots: Sequence[int] | npt.NDArray[Any],
    *,
    pool: Layout,
    page_size: int,
    start: int = 0,
    implementation: str | None = None,
) -> tuple[jax.Array, Pages]:
    """Computes tokens `start` to `start + n - 1` of a sequence.

    Args:
      params: Weights.
      config: Sizes of the model.
      tokens: `[n]` tokens from position `start` on.
      pages: The cache. With `start` above 0 it holds the KV of the positions before.
      slots: Slots of the sequence by position, at least `start + n`.
      pool: Layout of the pages.
      page_size: Tokens a page.
      start: Position of the first of `tokens`.
      implementation: Of `gather` and `scatter`.

    Returns:
      Float32 logits `[vocab]` after the last token, and the pages with the tokens' KV.

    Raises:
      ValueError: There are no tokens, or fewer slots than tokens.
    """
    n = len(tokens)
    if not 0 < n <= len(slots) - start:
        raise ValueError(f"slots: {len(slots)} for {n} tokens from position {start} on")
    # A single token keeps its shape: decoding must not compute a bucket of padding for it.
    bucket = BUCKET if n > 1 else 1
    positions = _padded(np.arange(start, start + n), -1, bucket)
    return _forward(
        params,
        _padded(tokens, 0, bucket),
        positions,
        np.int32(n - 1),
        pages,
        _padded(slots, -1, BUCKET),
        config=config,
        pool=pool,
        page_size=page_size,
        implementation=implementation,
    )


def decode_step(
    params: Params,
    config: LlamaConfig,
    token: int,
    position: int,
    pages: Pages,
    slots: Sequence[int] | npt.NDArray[Any],
    *,
    pool: Layout,
    page_size: int,
    implementation: str | None = None,
) -> tuple[jax.Array, Pages]:
    """Computes one token at `position`; otherwise as `prefill`."""
    return prefill(
        params,
        config,
        [token],
        pages,
        slots,
        pool=pool,
        page_size=page_size,
        start=position,
        implementation=implementation,
    )


def generate(
    params: Params,
    config: LlamaConfig,
    last_logits: jax.Array,
    pages: Pages,
    slots: Sequence[int] | npt.NDArray[Any],
    *,
    start: int,
    steps: int,
    pool: Layout,
    page_size: int,
    implementation: str | None = None,
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float32], Pages]:
    """Decodes on, always taking the likeliest token.

    Args:
      params: Weights.
      config: Sizes of the model.
      last_logits: `[vocab]`, what `prefill` said after position `start - 1`.
      pages: The cache, holding the KV of positions 0 to `start - 1`.
      slots: Slots of the sequence by position, at least `start + steps`.
      start: Position of the first token to decode.
      steps: Tokens to decode.
      pool: Layout of the pages.
      page_size: Tokens a page.
      implementation: Of `gather` and `scatter`.

    Returns:
      The tokens int32 `[steps]`, the logits float32 `[steps, vocab]` after each, and the pages.
    """
    tokens, after = [], []
    for position in range(start, start + steps):
        token = int(jnp.argmax(last_logits))
        last_logits, pages = decode_step(
            params,
            config,
            token,
            position,
            pages,
            slots,
            pool=pool,
            page_size=page_size,
            implementation=implementation,
        )
        tokens.append(token)
        after.append(np.asarray(last_logits))
    return np.array(tokens, np.int32), np.array(after, np.float32), pages
