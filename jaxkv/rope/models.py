"""What the model types of the field leave unsaid in their configs: pairing, default base, rotated part.

A `config.json` rarely says which channels of a head form a pair, and older ones leave out the base or
the rotated fraction where the model's own code has a default. The table below holds these three facts
for decoders whose code was read (huggingface/transformers 5.24, the modeling and configuration file of
each type). A type that is not here is not guessed: the caller names the pairing.
"""

import dataclasses
import re
from collections.abc import Mapping
from types import MappingProxyType

from ..rotation import Pairing


@dataclasses.dataclass(frozen=True)
class RopeModel:
    """Rope facts of one model type.

    Attributes:
        pairing: which channels turn together.
        theta: the base where the config has none; None where the type has no default worth trusting.
        rotated: the fraction of the head that turns where the config does not say.
        rotary_dim: the number of channels that turn where the type counts them instead.
        local_theta: the base of sliding-window layers where they have one of their own.
        local_unscaled: True where a flat `rope_scaling` applies to full-attention layers alone.
        interleaved_sections: for M-RoPE types, whether the sections alternate channel by channel.
    """

    pairing: Pairing
    theta: float | None = 10_000.0
    rotated: float = 1.0
    rotary_dim: int | None = None
    local_theta: float | None = None
    local_unscaled: bool = False
    interleaved_sections: bool | None = None


def _models() -> Mapping[str, RopeModel]:
    half, interleaved = RopeModel("half"), RopeModel("interleaved")
    # Plain types: base 10,000 unless the config says otherwise, the whole head turns.
    plain_half = (
        "afmoe arcee aria_text chameleon dbrx diffllama doge dots1 exaone4 exaone_moe falcon falcon_h1 gemma "
        "gemma2 granite granitemoe granitemoehybrid granitemoeshared internlm3 jetmoe "
        "llama minicpm3 ministral mistral olmo olmo2 olmo_hybrid olmoe phi3 qwen2 qwen2_moe qwen3 "
        "qwen3_moe seed_oss starcoder2 vaultgemma zamba2"
    )
    # For MLA types the interleaved window is the checkpoint's channel order, which serving engines
    # keep; transformers itself stores even channels first (then the caller says pairing="half").
    plain_interleaved = "cohere2 cohere2_moe deepseek_v2 deepseek_v3 glm4_moe_lite glm_moe_dsa kimi_k2 youtu"
    table = {name: half for name in plain_half.split()}
    table |= {name: interleaved for name in plain_interleaved.split()}
    table |= {
        "apertus": RopeModel("half", 12e6),
        "bamba": RopeModel("half", rotated=0.5),
        "bitnet": RopeModel("half", 5e5),
        "codegen": RopeModel("interleaved", rotary_dim=64),
        "cohere": RopeModel("interleaved", 5e5),
        "ernie4_5": RopeModel("interleaved", 5e5),
        "ernie4_5_moe": RopeModel("interleaved", 5e5),
        "exaone": RopeModel("half", 5e5),
        "gemma3_text": RopeModel("half", 1e6, local_theta=1e4, local_unscaled=True),
        "gemma3n_text": RopeModel("half", 1e6, local_theta=1e4, local_unscaled=True),
        "glm": RopeModel("interleaved", rotated=0.5),
        "glm4": RopeModel("interleaved", rotated=0.5),
        "glm4_moe": RopeModel("half", rotated=0.5),
        "glm4v_text": RopeModel("interleaved", interleaved_sections=False),
        "gpt_neox": RopeModel("half", rotated=0.25),
        "gpt_neox_japanese": half,
        "gpt_oss": RopeModel("half", None),
        "gptj": RopeModel("interleaved", rotary_dim=64),
        "helium": RopeModel("interleaved", 1e5),
        "lfm2": RopeModel("half", 1e6),
        "lfm2_moe": RopeModel("half", 1e6),
        "llama4_text": RopeModel("interleaved", 5e5),
        "minimax": RopeModel("half", 1e6),
        "minimax_m2": RopeModel("half", 5e6),
        "mixtral": RopeModel("half", 1e6),
        "mllama_text_model": RopeModel("half", 5e5),
        "nemotron": RopeModel("half", rotated=0.5),
        "olmo3": RopeModel("half", 5e5, local_unscaled=True),
        "persimmon": RopeModel("half", rotated=0.5),
        "phi": RopeModel("half", rotated=0.5),
        "qwen2_5_omni_text": RopeModel("half", 1e6, interleaved_sections=False),
        "qwen2_5_vl_text": RopeModel("half", 1e6, interleaved_sections=False),
        "qwen2_vl_text": RopeModel("half", 1e6, interleaved_sections=False),
        "qwen3_5_moe_text": RopeModel("half", rotated=0.25, interleaved_sections=True),
        "qwen3_5_text": RopeModel("half", rotated=0.25, interleaved_sections=True),
        "qwen3_next": RopeModel("half", rotated=0.25),
        "qwen3_omni_moe_text": RopeModel("half", 1e6, interleaved_sections=True),
        "qwen3_vl_moe_text": RopeModel("half", 5e5, interleaved_sections=True),
        "qwen3_vl_text": RopeModel("half", 5e5, interleaved_sections=True),
        "recurrent_gemma": RopeModel("half", rotated=0.5),
        "smollm3": RopeModel("half", 2e6),
        "solar_open": RopeModel("half", 1e6),
        "stablelm": RopeModel("half", rotated=0.25),
    }
    return MappingProxyType(table)


MODELS: Mapping[str, RopeModel] = _models()
"""Model type (a config's `model_type`) to its rope facts."""

UNROTATED: Mapping[str, str] = MappingProxyType(
    {
        "bloom": "alibi",
        "mpt": "alibi",
        "gpt2": "learned positions",
        "gpt_bigcode": "learned positions",
        "gpt_neo": "learned positions",
        "opt": "learned positions",
        "t5": "relative position bias",
        "jamba": "no positions",
    }
)
"""Model types whose keys are not rotated at all, and what they use instead."""


def model_named(model_type: str | None) -> RopeModel | None:
    """The rope facts of a model type; a multimodal one stands for its text part."""
    return MODELS.get(f"{model_type}") or MODELS.get(f"{model_type}_text")


def _squash(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


def type_of_architecture(architecture: str) -> str | None:
    """The model type that a class name stands for.

    Args:
        architecture: an entry of a config's `architectures`, such as `"GPTNeoXForCausalLM"`.

    Returns:
        The key of `MODELS` or `UNROTATED` that it spells (the text part of a multimodal type answers to
        the type's own name), or None.
    """
    stem = _squash(re.sub(r"(For[A-Z]\w*|LMHeadModel|Model)$", "", architecture))
    for name in (*MODELS, *UNROTATED):
        if stem in (_squash(name), _squash(name.removesuffix("_text"))):
            return name
    return None
