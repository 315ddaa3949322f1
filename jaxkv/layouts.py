"""The layouts of the engines, by name.

Each is the sentence of one engine's KV arrays (`jaxkv.layout`). Where the arrays of an engine are packed or
padded on a TPU, the sentence stays the same: axes may be split in the array, and a padded `dim` is a size beside
the sentence (`padded`).
"""

from .layout import Layout

# Split K and V, as attention kernels on GPUs take them.
FLASH_ATTENTION = Layout("kv page token head dim")
"""vLLM FlashAttention, LMCache NL_X_TWO_NB_BS_NH_HS: one (2, pages, tokens, heads, dim) a layer."""
FLASH_ATTENTION_HND = Layout("kv page head token dim")
"""LMCache NL_X_TWO_NB_NH_BS_HS: the same with heads outside of tokens."""
FLASH_ATTENTION_HND_1 = Layout("kv page head 1 token dim")
"""LMCache NL_X_TWO_NB_NH_ONE_BS_HS: the same with an axis of length one."""
FLASHINFER_NHD = Layout("page kv token head dim")
"""FlashInfer NHD, LMCache NL_X_NB_TWO_BS_NH_HS."""
FLASHINFER_HND = Layout("page kv head token dim")
"""FlashInfer HND, LMCache NL_X_NB_TWO_NH_BS_HS."""
SGLANG_MHA = Layout("kv layer | (page token) head dim")
"""SGLang, LMCache TWO_X_NL_X_NBBS_NH_HS: a list of K and a list of V arrays, one flat slot axis."""
KV_LISTS = Layout("kv layer | page token head dim")
"""LMCache TWO_X_NL_X_NB_BS_NH_HS: a list of K and a list of V arrays."""
KV_PAIRS = Layout("layer kv | page token head dim")
"""LMCache NL_X_TWO_X_NB_BS_NH_HS, EasyDeL unified: a pair of arrays a layer."""
KV_PAIRS_HND = Layout("layer kv | page head token dim")
"""cuDNN HND, ejkernel: a pair of arrays a layer, heads outside of tokens."""
KEYS_ONLY = Layout("page token head dim")
"""LMCache NL_X_NB_BS_NH_HS: one plane a layer."""
V_TRANSPOSED = Layout(("page head token dim", "page head dim token"))
"""K by token, V transposed: a pair of arrays a layer."""

# K and V in one row.
FUSED_HND = Layout("page head token (kv dim)")
"""vLLM from 0.26, LMCache NL_X_NB_NH_BS_CS."""
FUSED_NHD = Layout("page token head (kv dim)")
"""vLLM from 0.26, LMCache NL_X_NB_BS_NH_CS; tpu-inference at head size 64 (heads packed in two axes)."""
FUSED_HND_SPLIT = Layout("page head token kv dim")
"""LMCache NL_X_NB_NH_BS_TWO_HS."""
FUSED_NHD_SPLIT = Layout("page token head kv dim")
"""LMCache NL_X_NB_BS_NH_TWO_HS."""

# All layers in one array.
CROSS_LAYER = Layout("page layer kv token head dim")
"""LMCache NB_NL_TWO_BS_NH_HS: one array for all layers, a page of all layers contiguous."""
CROSS_LAYER_HND = Layout("page layer kv head token dim")
"""LMCache NB_NL_TWO_NH_BS_HS."""
CROSS_LAYER_HND_FLAT = Layout("page layer kv (head token dim)")
"""LMCache NB_NL_TWO_NH_BS_HS as three axes and a flat rest."""
VLLM_BLHNC = Layout("page layer head token (kv dim)")
VLLM_BLNHC = Layout("page layer token head (kv dim)")
VLLM_LBHNC = Layout("layer page head token (kv dim)")
VLLM_LBNHC = Layout("layer page token head (kv dim)")
VLLM_LHBNC = Layout("layer head page token (kv dim)")
VLLM_BHLNC = Layout("page head layer token (kv dim)")

# Multi-head latent attention: one plane, one row a token.
MLA = Layout("page token dim")
"""vLLM and LMCache NL_X_NB_BS_HS; tpu-inference MLA (tokens packed in two axes, dim padded)."""
SGLANG_MLA = Layout("(page token) 1 dim")
"""SGLang, LMCache NL_X_NBBS_ONE_HS."""

# TPU and Pallas.
TPU_RAGGED = Layout("page token (head kv) dim")
"""Pallas TPU ragged paged attention, EasyDeL v2 and v3, Levanter, tpu-inference v3, sglang-jax (there packed)."""
PALLAS_PAGED = Layout("kv layer | head page token dim")
"""Pallas GPU paged attention, JetStream, MaxText."""
PALLAS_SCALES = Layout("kv layer | head page token")
"""The scale arrays beside PALLAS_PAGED: a row without dim."""


def padded(layout: Layout, **sizes: int) -> Layout:
    """The same layout in arrays whose axes are padded, such as `padded(TPU_RAGGED, dim=128)`."""
    return Layout(layout.sentence, {**layout.padding, **sizes})


def named(layout: "Layout | str | tuple[str, str]") -> Layout:
    """A layout from itself, a sentence (or a pair of them), or the name of one of this module's layouts.

    Raises:
        ValueError: the sentence does not parse, or there is no layout of that name.
    """
    if isinstance(layout, Layout):
        return layout
    if isinstance(layout, str) and layout.isidentifier() and layout.isupper():
        found = globals().get(layout)
        if not isinstance(found, Layout):
            names = sorted(name for name, value in globals().items() if isinstance(value, Layout))
            raise ValueError(f"layout: there is none of the name {layout!r}; the names are {', '.join(names)}")
        return found
    return Layout(layout)
