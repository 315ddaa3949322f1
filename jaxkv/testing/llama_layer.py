"""One decoder layer of the small Llama over paged KV, as pure functions for the caller's own `jit`.

KV can so be moved layer by layer beside the forward pass:

    page = jaxkv.write(page, staged)                  # before: what was loaded for the layer
    hidden, page = decoder_layer(weights, config, hidden, page, slots, positions, ...)
    sent.append(jaxkv.store_layer(page, ...))         # after: what the layer has computed

`pool` is the layout of the pages, `page` what one layer has of them: its array or its tuple of arrays,
and all of the pages where arrays hold every layer.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax.typing import DTypeLike

from jaxkv import ops
from jaxkv.layout import Layout, Sizes

_ROWS = Layout("layer token kv head dim")

Pages = Any
Params = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class LlamaConfig:
    """Sizes of the model. Hashable: a static argument of every compiled function.

    Attributes:
      vocab_size: 256 bytes and the begin-of-sequence token.
      hidden: Width of the residual stream.
      layers: Decoder layers.
      heads: Query heads.
      kv_heads: Key and value heads; divides `heads`.
      head_dim: Width of a head, all of it rotated.
      ffn: Width of the feed-forward layer.
      rope_theta: Base of the rotary frequencies.
      dtype: Of weights, activations and cache; norms, softmax and logits are float32.
    """

    vocab_size: int = 257
    hidden: int = 256
    layers: int = 4
    heads: int = 8
    kv_heads: int = 2
    head_dim: int = 32
    ffn: int = 512
    rope_theta: float = 10000.0
    dtype: DTypeLike = jnp.bfloat16

    def inv_freq(self) -> npt.NDArray[np.float32]:
        """Rotary frequencies `[head_dim / 2]`, radians per position."""
        exponent = np.arange(0, self.head_dim, 2, dtype=np.float64) / self.head_dim
        return (self.rope_theta**-exponent).astype(np.float32)

    def sizes(self, page_size: int, layers: int | None = None) -> Sizes:
        """What a layout of the model's cache has to know."""
        return Sizes(self.layers if layers is None else layers, self.kv_heads, self.head_dim, page_size)


# ---- One layer's part of the pages


def layer_pages(pages: Pages, pool: Layout, layer: int) -> Pages:
    """What one layer has of the pages: its array or arrays, or all of them where arrays hold every layer."""
    if pool.has_axis("layer"):
        return pages
    if pool.levels[0] == "layer":
        return pages[layer]
    return tuple(plane[layer] for plane in pages)


def with_layer_pages(pages: Pages, pool: Layout, layer: int, page: Pages) -> Pages:
    """The pages with one layer's part replaced; what `layer_pages` takes out, this puts back."""
    if pool.has_axis("layer"):
        return page
    if pool.levels[0] == "layer":
        return _replaced(pages, layer, page)
    planes = [_replaced(plane, layer, new) for plane, new in zip(pages, page, strict=True)]
    return type(pages)(planes)


def _replaced(entries: Any, index: int, entry: Any) -> Any:
    return type(entries)([*entries[:index], entry, *entries[index + 1 :]])


def _one_layer(page: Pages, pool: Layout, config: LlamaConfig, page_size: int, layer: int) -> tuple[Pages, Any]:
    """A layer's part as a pool of its own, and how to tell `ops` which layer of it is meant."""
    if pool.has_axis("layer"):
        return page, {"sizes": config.sizes(page_size), "layers": range(layer, layer + 1)}
    alone = (page,) if pool.levels[0] == "layer" else tuple((plane,) for plane in page)
    return alone, {"sizes": config.sizes(page_size, layers=1)}


# ---- The model


def _norm(x: jax.Array, weight: jax.Array) -> jax.Array:
    """Root mean square norm of `[n, hidden]`, in float32."""
    wide = x.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + 1e-5)
    return (wide * scale).astype(x.dtype) * weight[None, :]


def _rotated(x: jax.Array, positions: jax.Array, config: LlamaConfig) -> jax.Array:
    """Rotary embedding of `[n, heads, dim]`, half pairing, in float32."""
    angle = positions.astype(jnp.float32)[:, None] * config.inv_freq()[None, :]
    cos, sin = jnp.cos(angle)[:, None, :], jnp.sin(angle)[:, None, :]
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return turned.astype(x.dtype)


def _attention(q: jax.Array, k: jax.Array, v: jax.Array, positions: jax.Array, slots: jax.Array) -> jax.Array:
    """Causal grouped-query attention.

    Args:
      q: `[n, heads, dim]`.
      k: `[s, kv_heads, dim]`, the keys of positions 0 to s - 1.
      v: `[s, kv_heads, dim]`.
      positions: int32 `[n]` of the queries.
      slots: int32 `[s]`, negative where there is no key.

    Returns:
      `[n, heads, dim]`.
    """
    n, heads, dim = q.shape
    s, kv_heads, _ = k.shape
    grouped = q.reshape(n, kv_heads, heads // kv_heads, dim)
    scores = jnp.einsum("nhgd,shd->hgns", grouped, k, preferred_element_type=jnp.float32)
    key_positions = jnp.arange(s, dtype=jnp.int32)
    seen = (key_positions[None, :] <= positions[:, None]) & (slots >= 0)[None, :]
    # Not minus infinity: a padding query sees no key at all, and must not become a NaN.
    scores = jnp.where(seen[None, None], scores * dim**-0.5, jnp.finfo(jnp.float32).min)
    weights = jax.nn.softmax(scores, axis=-1)
    mixed = jnp.einsum("hgns,shd->nhgd", weights, v.astype(jnp.float32))
    return mixed.reshape(n, heads, dim).astype(q.dtype)


def embed(params: Params, tokens: jax.Array) -> jax.Array:
    """The residual stream `[n, hidden]` that the first layer takes, from tokens int32 `[n]`."""
    return jnp.take(params["embed"], tokens, axis=0, mode="clip")


def decoder_layer(
    weights: Params,
    config: LlamaConfig,
    hidden: jax.Array,
    page: Pages,
    slots: jax.Array,
    positions: jax.Array,
    *,
    pool: Layout,
    page_size: int,
    layer: int = 0,
    before_attention: Callable[[Pages], Pages] | None = None,
    implementation: str | None = None,
) -> tuple[jax.Array, Pages]:
    """One layer: writes the KV of some tokens to their pages and attends to all that the pages hold.

    Args:
      weights: An entry of `params["layers"]`.
      config: Sizes of the model.
      hidden: `[n, hidden]`, the tokens to compute.
      page: The layer's part of the pages (see `layer_pages`).
      slots: int32 `[s]`, slots of the sequence by position. What is negative, or past the last of
        `positions`, is not read.
      positions: int32 `[n]`, positions of the tokens, in any order; negative for padding.
      pool: Layout of the pages.
      page_size: Tokens a page.
      layer: Number of the layer; used only where arrays hold every layer.
      before_attention: Called with the page when the tokens' KV are in it and no key has been read: what it
        returns is what attention reads and the layer hands back.
      implementation: Of `gather` and `scatter`.

    Returns:
      The residual stream `[n, hidden]` for the next layer, and the page.
    """
    x = _norm(hidden, weights["attention_norm"])
    q, k, v = (jnp.einsum("nc,chd->nhd", x, weights[name]) for name in ("wq", "wk", "wv"))
    q, k = _rotated(q, positions, config), _rotated(k, positions, config)

    own = jnp.where(positions >= 0, jnp.take(slots, positions, mode="clip"), -1)
    alone, which = _one_layer(page, pool, config, page_size, layer)
    move = {"pool": pool, "chunk": _ROWS, "implementation": implementation, **which}
    alone = ops.scatter(alone, jnp.stack([k, v], axis=1)[None], own, **move)
    page = layer_pages(alone, pool, 0)
    if before_attention is not None:
        page = before_attention(page)
        alone, _ = _one_layer(page, pool, config, page_size, layer)

    # Rows that nobody wrote may hold anything, and zero times NaN is NaN: they are not even read.
    written = jnp.arange(slots.shape[0], dtype=jnp.int32) <= jnp.max(positions)
    kept = jnp.where(written, slots, -1)
    (rows,) = ops.gather(alone, kept, **move)
    mixed = _attention(q, rows[:, 0], rows[:, 1], positions, kept)
    hidden = hidden + jnp.einsum("nhd,hdc->nc", mixed, weights["wo"])

    x = _norm(hidden, weights["ffn_norm"])
    gated = jax.nn.silu(x @ weights["gate"]) * (x @ weights["up"])
    return hidden + gated @ weights["down"], page


def logits(params: Params, hidden: jax.Array, index: jax.Array | int) -> jax.Array:
    """Float32 logits `[vocab]` of one row of the last layer's `[n, hidden]`."""
    last = jax.lax.dynamic_slice_in_dim(hidden, index, 1)
    out = jnp.matmul(_norm(last, params["norm"]), params["head"], preferred_element_type=jnp.float32)
    return out[0]
