"""The shapes that are measured: one model's KV each."""

import dataclasses

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from .. import layouts
from ..layout import Layout
from ..spec import CacheSpec


@dataclasses.dataclass(frozen=True)
class Shape:
    """A cache and how many slots of it are used.

    Attributes:
        name: of the model.
        spec: its cache.
        num_slots: slots of the pool.
        order: of the pages that tokens are in: "random", "sorted" (with gaps between them) or "contiguous".
    """

    name: str
    spec: CacheSpec
    num_slots: int
    order: str = "random"

    @property
    def num_pages(self) -> int:
        """Pages of the pool."""
        return self.num_slots // self.spec.page_size

    def slots(self, tokens: int, seed: int) -> np.ndarray:
        """The slots of `tokens` tokens, int32; other pages for another seed."""
        size, rng = self.spec.page_size, np.random.default_rng(seed)
        count = -(-tokens // size)
        pages = rng.permutation(self.num_pages)[:count]
        if self.order == "sorted":
            pages.sort()
        elif self.order == "contiguous":
            pages = rng.integers(self.num_pages - count + 1) + np.arange(count)
        return (pages[:, None] * size + np.arange(size)).reshape(-1)[:tokens].astype(np.int32)


def shape(
    name: str,
    *,
    layers: int,
    heads: int,
    dim: int,
    page_size: int = 16,
    layout: Layout = layouts.FLASH_ATTENTION,
    dtype: DTypeLike = jnp.bfloat16,
    num_slots: int = 65536,
    order: str = "random",
) -> Shape:
    """A shape by its numbers."""
    return Shape(name, CacheSpec(layout, layers, heads, dim, page_size, dtype), num_slots, order)


LLAMA_8B = shape("Llama-3.1-8B", layers=32, heads=8, dim=128)
"""128 KiB a token: the shape of every headline figure."""
SMALL = shape("small", layers=8, heads=4, dim=64, num_slots=4096)
"""What `--quick` uses on a CPU."""
MORE = (
    shape("Llama-3.1-70B, one rank of TP8", layers=80, heads=1, dim=128),
    shape("Qwen3-30B-A3B", layers=48, heads=4, dim=128),
    shape("DeepSeek-V3 MLA", layers=61, heads=1, dim=576, layout=layouts.MLA),
    shape("Gemma-3-27B", layers=62, heads=16, dim=128, num_slots=32768),
    shape("Llama-3.1-8B fp8", layers=32, heads=8, dim=128, dtype=jnp.float8_e4m3fn),
    shape("Llama-3.1-8B, pages of 1", layers=32, heads=8, dim=128, page_size=1),
    shape("Llama-3.1-8B, pages of 64", layers=32, heads=8, dim=128, page_size=64),
    shape("Llama-3.1-8B, pages of 256", layers=32, heads=8, dim=128, page_size=256),
    shape("Llama-3.1-8B, sorted pages", layers=32, heads=8, dim=128, order="sorted"),
    shape("Llama-3.1-8B, contiguous pages", layers=32, heads=8, dim=128, order="contiguous"),
    shape("Llama-3.1-8B HND", layers=32, heads=8, dim=128, layout=layouts.FLASH_ATTENTION_HND),
    shape("Llama-3.1-8B K, V apart", layers=32, heads=8, dim=128, layout=layouts.KV_LISTS),
    shape("Llama-3.1-8B cross-layer", layers=32, heads=8, dim=128, layout=layouts.CROSS_LAYER),
    shape("132-byte rows", layers=32, heads=1, dim=132, layout=layouts.MLA, dtype=jnp.uint8, num_slots=262144),
    shape("656-byte rows", layers=32, heads=1, dim=656, layout=layouts.MLA, dtype=jnp.uint8, num_slots=262144),
)
