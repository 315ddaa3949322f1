"""The layouts of the engines with their arrays' shapes, as CASES.md's group A lists them."""

from typing import Any, NamedTuple

import jax.numpy as jnp

from jaxkv import layouts
from jaxkv.layout import Layout, Sizes
from jaxkv.layouts import padded

KV = Sizes(layers=3, heads=4, dim=64, page_size=16)
MLA = Sizes(layers=3, heads=1, dim=576, page_size=16, planes=1)


class Row(NamedTuple):
    """A layout and the shape of each of its arrays (one shape where all are alike)."""

    layout: Layout
    shape: Any
    sizes: Sizes = KV
    num_pages: int = 7
    dtype: Any = jnp.bfloat16

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """The shape of every array."""
        several = isinstance(self.shape, list)
        return self.shape if several else [self.shape] * self.layout.num_leaves(self.sizes.layers)


ROWS = {
    "A1": Row(layouts.CROSS_LAYER, (7, 3, 2, 16, 4, 64)),
    "A2": Row(layouts.FLASH_ATTENTION, (2, 7, 16, 4, 64)),
    "A3": Row(layouts.FLASHINFER_NHD, (7, 2, 16, 4, 64)),
    "A4": Row(layouts.MLA, (7, 16, 576), MLA),
    "A5": Row(layouts.SGLANG_MHA, (112, 4, 64)),
    "A6": Row(layouts.SGLANG_MLA, (112, 1, 576), MLA),
    "A7": Row(layouts.FLASH_ATTENTION_HND, (2, 7, 4, 16, 64)),
    "A8": Row(layouts.FLASHINFER_HND, (7, 2, 4, 16, 64)),
    "A9": Row(layouts.CROSS_LAYER_HND, (7, 3, 2, 4, 16, 64)),
    "A9-flat": Row(layouts.CROSS_LAYER_HND_FLAT, (7, 3, 2, 4096)),
    "A9-given-flat": Row(layouts.CROSS_LAYER_HND, (7, 3, 2, 4096)),
    "A10": Row(layouts.KV_LISTS, (7, 16, 4, 64)),
    "A11": Row(layouts.FUSED_HND_SPLIT, (7, 4, 16, 2, 64)),
    "A12": Row(layouts.FUSED_NHD_SPLIT, (7, 16, 4, 2, 64)),
    "A13": Row(layouts.FUSED_HND, (7, 4, 16, 128)),
    "A14": Row(layouts.FUSED_NHD, (7, 16, 4, 128)),
    "A16": Row(layouts.FLASH_ATTENTION_HND_1, (2, 7, 4, 1, 16, 64)),
    "A17": Row(layouts.KV_PAIRS, (7, 16, 4, 64)),
    "A19": Row(layouts.KEYS_ONLY, (7, 16, 4, 64), KV._replace(planes=1)),
    "A20-BLHNC": Row(layouts.VLLM_BLHNC, (7, 3, 4, 16, 128)),
    "A20-BLNHC": Row(layouts.VLLM_BLNHC, (7, 3, 16, 4, 128)),
    "A21-LBHNC": Row(layouts.VLLM_LBHNC, (3, 7, 4, 16, 128)),
    "A21-LBNHC": Row(layouts.VLLM_LBNHC, (3, 7, 16, 4, 128)),
    "A22-LHBNC": Row(layouts.VLLM_LHBNC, (3, 4, 7, 16, 128)),
    "A22-BHLNC": Row(layouts.VLLM_BHLNC, (7, 4, 3, 16, 128)),
    "A24": Row(layouts.V_TRANSPOSED, [(7, 4, 16, 64), (7, 4, 64, 16)] * 3),
    "A26": Row(padded(layouts.TPU_RAGGED, dim=128), (7, 16, 4, 2, 128)),
    "A27-fp8": Row(padded(layouts.TPU_RAGGED, dim=128), (7, 16, 2, 4, 128), dtype=jnp.float8_e4m3fn),
    "A27-f32": Row(padded(layouts.TPU_RAGGED, dim=128), (7, 16, 8, 1, 128), dtype=jnp.float32),
    "A29": Row(layouts.FUSED_NHD, (7, 16, 2, 2, 128)),
    "A31": Row(layouts.TPU_RAGGED, (8, 16, 4, 2, 64), num_pages=8),
    "A32": Row(layouts.PALLAS_PAGED, (4, 7, 16, 64)),
    "A33": Row(layouts.PALLAS_SCALES, (4, 7, 16), KV._replace(dim=1), dtype=jnp.float32),
    "A34": Row(layouts.TPU_RAGGED, (7, 16, 8, 64)),
    "A35-cuDNN": Row(layouts.KV_PAIRS, (7, 16, 4, 64)),
    "A35-HND": Row(layouts.KV_PAIRS_HND, (7, 4, 16, 64)),
    "A36": Row(padded(layouts.MLA, dim=640), (7, 8, 2, 640), MLA),
    "A36-token": Row(padded(layouts.MLA, dim=640, token=16), (7, 8, 2, 640), MLA._replace(page_size=15)),
}

# Rows that wait for fused padding, planes of unequal size or state, in as far as a plain sentence says the same.
EXPRESSIBLE = {
    "A28": Row(
        padded(layouts.TPU_RAGGED, dim=128, head=4), (7, 16, 2, 4, 128), KV._replace(heads=3), dtype=jnp.float8_e4m3fn
    ),
    "A30": Row(Layout("page (head kv) dim token"), (7, 8, 32, 2, 128), KV._replace(page_size=128)),
    "A37": Row(Layout("page dim token"), (7, 576, 128), MLA._replace(page_size=128)),
    "A38-opaque": Row(layouts.MLA, (8, 8, 2, 384), MLA._replace(dim=384), 8),
}

# The rows that are to come: the sentence, and the name that is refused.
REFUSED = {
    "A15": ("layer | page (token value + token scale)", "value"),
    "A18": ("layer plane | page token 1 dim", "plane"),
    "A25": ("page head dim.hi token dim.lo", "dim.hi"),
    "A38": ("page token (latent + rope)", "latent"),
    "A39": ("layer plane | page token head dim", "plane"),
    "A40": ("page row dim", "row"),
    "A40-part": ("page (token part) dim", "part"),
    "A41": ("page state", "state"),
}
