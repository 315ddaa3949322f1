"""What the parts of the demo share: a small Llama, its cache, and a text."""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .. import layouts
from ..layerwise import Staged, write
from ..layout import Layout
from ..rope import Rope
from ..spec import CacheSpec, PagedCache
from ..testing import llama

MIN_TOKENS = 500
MAX_TOKENS = 900
STEPS = 24
PAGE_SIZE = 16
BUCKET = 1024
"""Slots of every request, and tokens of a long one, are padded to this, so that one program serves them all."""
POISON = 0xDE


@dataclasses.dataclass(frozen=True)
class Model:
    """A small Llama and its cache.

    Attributes:
        config: sizes of the model.
        params: weights.
        spec: of its cache.
        tokens: of the text, int32 `[tokens]`.
    """

    config: llama.LlamaConfig
    params: Any
    spec: CacheSpec
    tokens: np.ndarray

    @classmethod
    def reading(cls, text: str) -> "Model":
        """The model, and as many tokens of a text as the demo takes."""
        config = llama.LlamaConfig()
        tokens = np.asarray(llama.encode(text))
        # A short text is read again from its start.
        tokens = np.resize(tokens, max(len(tokens), MIN_TOKENS))[:MAX_TOKENS]
        spec = CacheSpec(
            layout=layouts.FLASH_ATTENTION,
            num_layers=config.layers,
            num_kv_heads=config.kv_heads,
            head_dim=config.head_dim,
            page_size=PAGE_SIZE,
            dtype=config.dtype,
            rope=Rope.from_inv_freq(config.inv_freq(), pairing="half"),
            model="demo",
        )
        # Weights and pages stay where they are put. Where only some arguments do, JAX compiles a program once more.
        return cls(config, jax.device_put(llama.init(config), jax.devices()[0]), spec, tokens)

    def prefill(self, pages: Any, slots: np.ndarray) -> tuple[jax.Array, Any]:
        """Logits after the last token of the text, and the pages with its KV."""
        return llama.prefill(
            self.params, self.config, self.tokens, pages, slots, pool=self.spec.pool_layout, page_size=PAGE_SIZE
        )

    def go_on(self, logits: jax.Array, pages: Any, slots: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The tokens after the text, greedily, and their logits."""
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

    def embed(self, tokens: np.ndarray) -> jax.Array:
        """What the first layer takes, `[tokens, hidden]`."""
        return _embed(self.params, tokens)

    def layer(
        self,
        layer: int,
        hidden: jax.Array,
        page: Any,
        slots: np.ndarray,
        positions: np.ndarray,
        staged: Staged | None = None,
    ) -> tuple[jax.Array, Any]:
        """One decoder layer, in one program for all layers; consumes the page.

        Args:
            layer: number of the layer.
            hidden: `[tokens, hidden]`.
            page: the layer's pages.
            slots: `[BUCKET]`, the slot of each position of the request, -1 past its end.
            positions: `[tokens]`, of the tokens to compute; -1 for padding.
            staged: KV to write into the page before the tokens' own.

        Returns:
            The same of the next layer, and the page.
        """
        return _layer(
            self.params["layers"][layer],
            hidden,
            page,
            slots,
            positions,
            staged,
            config=self.config,
            pool=self.spec.pool_layout,
        )

    def forward(self, tokens: np.ndarray, positions: np.ndarray, pages: Any, slots: np.ndarray) -> tuple[Any, Any]:
        """All layers one by one: what the last one gives, `[tokens, hidden]`, and the pages."""
        hidden, pages = self.embed(tokens), list(pages)
        for i in range(self.config.layers):
            hidden, pages[i] = self.layer(i, hidden, pages[i], slots, positions)
        return hidden, tuple(pages)

    def logits(self, hidden: jax.Array, rows: np.ndarray) -> jax.Array:
        """Float32 logits `[rows, vocab]` after some rows of what the last layer gives."""
        return _logits(self.params, hidden, rows)

    def empty(self, num_pages: int) -> PagedCache:
        """A cache of poison: a row that nobody wrote shows."""
        return jax.tree.map(poisoned, self.spec.empty(num_pages, sharding=jax.devices()[0]))


def padded(values: np.ndarray, fill: int) -> np.ndarray:
    """int32 `[BUCKET]`."""
    return np.pad(values.astype(np.int32), (0, BUCKET - len(values)), constant_values=fill)


def page_sets(tokens: int, sets: int) -> tuple[int, Iterator[np.ndarray]]:
    """The pages of a pool, and for each of a few requests of some tokens the slots of pages drawn from it."""
    used = -(-tokens // PAGE_SIZE)
    order = np.random.default_rng(0).permutation(sets * used + 3)
    return len(order), (_slots_of(order[i * used : (i + 1) * used])[:tokens] for i in range(sets))


def _slots_of(pages: np.ndarray) -> np.ndarray:
    return (pages[:, None] * PAGE_SIZE + np.arange(PAGE_SIZE)).reshape(-1)


@jax.jit
def poisoned(page: jax.Array) -> jax.Array:
    """An array of the same type, every byte 0xDE."""
    width = page.dtype.itemsize
    bits = jnp.full(page.shape, int.from_bytes(bytes([POISON]) * width), f"uint{8 * width}")
    return jax.lax.bitcast_convert_type(bits, page.dtype)


_embed: Callable[..., jax.Array] = jax.jit(llama.embed)
_logits: Callable[..., jax.Array] = jax.jit(jax.vmap(llama.logits, in_axes=(None, None, 0)))


@functools.partial(jax.jit, static_argnames=("config", "pool"), donate_argnames="page")
def _layer(
    weights: Any,
    hidden: jax.Array,
    page: Any,
    slots: jax.Array,
    positions: jax.Array,
    staged: Staged | None,
    *,
    config: llama.LlamaConfig,
    pool: Layout,
) -> tuple[jax.Array, Any]:
    if staged is not None:
        page = write(page, staged)
    return llama.decoder_layer(weights, config, hidden, page, slots, positions, pool=pool, page_size=PAGE_SIZE)
