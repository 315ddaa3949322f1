"""Configs in all their forms, what they leave unsaid, and what is refused, by name."""

import re
import types

import numpy as np
import pytest

from jaxkv.rope import Rope, explain_difference
from jaxkv.rope.models import MODELS, UNROTATED, model_named, type_of_architecture

LLAMA = {"model_type": "llama", "hidden_size": 512, "num_attention_heads": 8, "max_position_embeddings": 4096}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def plain(theta=10_000.0, width=64):
    return theta ** -(np.arange(0, width, 2) / width)


def rope_of(*, layer_type=None, sequence_length=None, pairing=None, **fields):
    config = {name: value for name, value in {**LLAMA, **fields}.items() if value != "absent"}
    return Rope.from_config(config, layer_type=layer_type, sequence_length=sequence_length, pairing=pairing)


def check(rope, want):
    # A few units in the last place: the formulas are evaluated in float32, as in transformers.
    np.testing.assert_allclose(np.asarray(rope.inv_freq), want, rtol=5e-7)


# ---- layer types

GEMMA = {"model_type": "gemma3_text", "head_dim": 64, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}
NESTED = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    "chunked_attention": None,
}


@pytest.mark.parametrize(
    "config",
    [
        GEMMA,
        {**GEMMA, "rope_theta": 1e6, "rope_local_base_freq": 1e4},
        {**GEMMA, "rope_scaling": None, "rope_parameters": NESTED},
        {"model_type": "gemma3", "text_config": GEMMA, "vision_config": {"head_dim": 72}},
    ],
    ids=["class defaults", "flat", "nested", "multimodal"],
)
def test_local_and_global_layers(config):  # F10
    check(Rope.from_config(config, layer_type="full_attention"), plain(1e6) / 8)
    check(Rope.from_config(config, layer_type="sliding_attention"), plain(1e4))
    for layer_type in (None, "linear_attention", ["full_attention"]):
        words = re.escape(str(layer_type))
        with pytest.raises(ValueError, match=rf"layer_type.*'full_attention', 'sliding_attention'.*{words}"):
            Rope.from_config(config, layer_type=layer_type)


def test_scaling_of_full_attention_alone():
    config = {**LLAMA, "model_type": "olmo3", "rope_theta": 7e5, "rope_scaling": {**LLAMA3, "rope_theta": 7e5}}
    check(Rope.from_config(config, layer_type="sliding_attention"), plain(7e5))
    full = Rope.from_config(config, layer_type="full_attention")
    assert full == rope_of(rope_theta=7e5, rope_scaling=LLAMA3)


def test_layers_without_rope():  # F11
    with pytest.raises(ValueError, match=r"'chunked_attention' have no rope"):
        rope_of(rope_parameters=NESTED, layer_type="chunked_attention")


def test_layer_type_of_a_model_with_one_kind():
    assert rope_of(layer_type="full_attention") == rope_of()


def test_a_layer_types_own_word_goes_first():
    nested = {"full_attention": {"rope_theta": 1e6, "partial_rotary_factor": 0.5}, "sliding_attention": {}}
    options = {"rope_parameters": nested, "rope_theta": 5e5, "partial_rotary_factor": 0.25}
    check(rope_of(layer_type="full_attention", **options), plain(1e6, 32))
    check(rope_of(layer_type="sliding_attention", **options), plain(5e5, 16))


# ---- widths


@pytest.mark.parametrize(
    "fields, width",
    [
        ({}, 64),
        ({"head_dim": 96}, 96),
        ({"partial_rotary_factor": 0.25}, 16),
        ({"rotary_pct": 0.5}, 32),
        ({"rope_parameters": {"partial_rotary_factor": 0.75}}, 48),
        ({"rotary_dim": 24}, 24),
        ({"rotary_dim": 16, "partial_rotary_factor": 0.25}, 16),
        ({"qk_rope_head_dim": 32, "qk_nope_head_dim": 128, "head_dim": 192}, 32),
        ({"qk_rope_head_dim": 32, "head_dim": 256, "partial_rotary_factor": 0.125}, 32),
        ({"model_type": "gpt_neox"}, 16),
        ({"model_type": "phi"}, 32),
        ({"model_type": "gptj", "n_embd": 512, "n_head": 8, "hidden_size": "absent"}, 64),
        ({"model_type": "stablelm", "partial_rotary_factor": 0.5}, 32),
    ],
)
def test_rotary_width(fields, width):  # F12
    rope = rope_of(**fields)
    assert rope.rotary_dim == width
    check(rope, plain(width=width))


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"partial_rotary_factor": 0.3}, r"width 19\b.*64"),  # M24
        ({"head_dim": 33}, r"width 33\b"),
        ({"rotary_dim": 66}, r"width 66\b.*64"),
        ({"rotary_dim": 0}, r"width 0\b"),
        ({"hidden_size": "absent"}, "head_dim"),
        ({"num_attention_heads": 0}, "num_attention_heads"),
        ({"head_dim": "64"}, "head_dim.*'64'"),
        ({"head_dim": 64.5}, "head_dim.*64.5"),
        ({"head_dim": float("nan")}, "head_dim.*nan"),
        ({"head_dim": True}, "head_dim.*True"),
        ({"hidden_size": 512, "n_embd": 256}, r"hidden_size=512.*n_embd=256"),
    ],
)
def test_widths_that_are_none(fields, message):
    with pytest.raises(ValueError, match=message):
        rope_of(**fields)


# ---- pairing


@pytest.mark.parametrize(
    "fields, pairing",
    [
        ({}, "half"),
        ({"model_type": "glm4"}, "interleaved"),
        ({"rope_interleave": True}, "interleaved"),
        ({"model_type": "deepseek_v3", "rope_interleave": False}, "half"),
        ({"model_type": "deepseek_v3", "rope_interleave": None}, "interleaved"),
        ({"model_type": "unheard_of", "is_neox_style": False, "rope_theta": 1e4}, "interleaved"),
        ({"model_type": "absent", "architectures": ["Cohere2ForCausalLM"]}, "interleaved"),
        ({"model_type": "absent", "architectures": ["SomeHead", "GPTNeoXForCausalLM"]}, "half"),
    ],
)
def test_pairing(fields, pairing):  # F13
    assert rope_of(**fields).pairing == pairing
    other = "half" if pairing == "interleaved" else "interleaved"
    assert rope_of(pairing=other, **fields).pairing == other


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"model_type": "unheard_of", "rope_theta": 1e4}, r"pairing.*'unheard_of'.*'half' or 'interleaved'"),
        ({"model_type": "absent", "rope_theta": 1e4}, r"pairing.*None"),
        ({"rope_interleave": "yes"}, r"rope_interleave.*'yes'"),
        ({"rope_interleave": True, "is_neox_style": True}, "rope_interleave and is_neox_style"),
        ({"pairing": "neox"}, r"'half' or 'interleaved'.*'neox'"),
    ],
)
def test_pairing_is_never_guessed(fields, message):  # F13
    with pytest.raises(ValueError, match=message):
        rope_of(**fields)


def test_the_table_of_model_types():
    for name, architecture in {
        "llama": "LlamaForCausalLM",
        "llama4_text": "Llama4ForCausalLM",
        "gptj": "GPTJForCausalLM",
        "deepseek_v3": "DeepseekV3ForCausalLM",
        "qwen2_vl_text": "Qwen2VLForConditionalGeneration",
        "gemma3_text": "Gemma3ForConditionalGeneration",
        "bloom": "BloomModel",
        "gpt2": "GPT2LMHeadModel",
        None: "BertForMaskedLM",
    }.items():
        assert type_of_architecture(architecture) == name
    assert not set(MODELS) & set(UNROTATED)
    assert model_named("llama4") is MODELS["llama4_text"]
    assert model_named(None) is model_named("unheard_of") is None
    with pytest.raises(TypeError):
        MODELS["llama"] = None


# ---- refusals

ACCEPTED = ["default", "linear", "dynamic", "yarn", "longrope", "llama3"]


@pytest.mark.parametrize("field", ["type", "rope_type"])
def test_unknown_rope_type(field):  # F22, M23
    with pytest.raises(ValueError, match="'xpos'") as error:
        rope_of(rope_scaling={field: "xpos", "factor": 2.0})
    assert all(name in str(error.value) for name in ACCEPTED)


@pytest.mark.parametrize(
    "fields, scheme",
    [
        ({"model_type": "bloom"}, "alibi"),
        ({"model_type": "falcon", "alibi": True}, "alibi"),
        ({"model_type": "unheard_of", "attn_config": {"alibi": True}}, "alibi"),
        ({"model_type": "gpt2"}, "learned"),
        ({"model_type": "absent", "architectures": ["OPTForCausalLM"]}, "learned"),
        ({"position_embedding_type": "learned_absolute"}, "learned_absolute"),
        ({"model_type": "granitemoehybrid", "position_embedding_type": "nope"}, "nope"),
    ],
)
def test_keys_that_are_not_rotated(fields, scheme):  # F22, M23
    with pytest.raises(ValueError, match=scheme) as error:
        rope_of(**fields)
    assert all(name in str(error.value) for name in ACCEPTED)
    rope_of(model_type="granitemoehybrid", position_embedding_type="rope", alibi=False)


@pytest.mark.parametrize(
    "fields, names",
    [
        (
            {"rope_scaling": {"rope_type": "linear", "type": "yarn", "factor": 2.0}},
            ["rope_type='linear'", "type='yarn'"],
        ),
        ({"rope_scaling": {"factor": 2.0}}, ["default", "factor=2.0"]),
        ({"rope_scaling": YARN, "rope_parameters": LLAMA3}, ["rope_parameters", "rope_scaling"]),
        ({"rope_theta": 1e4, "rope_parameters": {"rope_theta": 1e6}}, ["rope_theta=10000.0", "1000000.0"]),
        ({"rope_theta": 1e4, "rotary_emb_base": 5e5}, ["rope_theta=10000.0", "rotary_emb_base=500000.0"]),
        ({"rotary_pct": 0.25, "partial_rotary_factor": 0.5}, ["rotary_pct=0.25", "partial_rotary_factor=0.5"]),
        (
            {"partial_rotary_factor": 0.5, "rope_parameters": {"partial_rotary_factor": 0.25}},
            ["partial_rotary_factor=0.5", "partial_rotary_factor=0.25"],
        ),
        ({"rotary_dim": 32, "partial_rotary_factor": 0.25}, ["rotary_dim=32", "partial_rotary_factor=0.25"]),
        ({"qk_rope_head_dim": 32, "partial_rotary_factor": 0.25}, ["qk_rope_head_dim=32", "partial_rotary_factor"]),
        ({"rope_scaling": YARN, "original_max_position_embeddings": 2048}, ["original_max_position_embeddings=2048"]),
    ],
)
def test_contradictions(fields, names):
    with pytest.raises(ValueError, match="contradicts itself") as error:
        rope_of(**fields)
    assert all(name in str(error.value) for name in names), error.value


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"rope_scaling": {"type": "linear", "factor": 2.0, "alpha": 8.0}}, "unknown rope field 'alpha'"),
        ({"rope_scaling": {"type": "linear"}}, "factor"),
        ({"rope_scaling": {"type": "linear", "factor": 0.0}}, "factor.*0.0"),
        ({"rope_scaling": {"type": "linear", "factor": "two"}}, "factor.*'two'"),
        ({"rope_scaling": {"type": "llama3", "factor": 8.0}}, "low_freq_factor"),
        ({"rope_scaling": {**YARN, "beta_fast": 1, "beta_slow": 2}}, "beta_fast=1.*beta_slow=2"),
        ({"rope_scaling": {**YARN, "attention_factor": -1.0}}, "attention_factor.*-1.0"),
        ({"rope_scaling": "linear"}, "rope_scaling must be a mapping"),
        ({"rope_theta": 1.0}, "rope_theta.*1"),
        ({"rope_theta": "10000"}, "rope_theta.*'10000'"),
        ({"model_type": "unheard_of", "is_neox_style": True}, "rope_theta"),
        ({"model_type": "gpt_oss"}, "rope_theta"),
    ],
)
def test_unknown_or_missing_fields(fields, message):
    with pytest.raises(ValueError, match=message):
        rope_of(**fields)


# ---- forms of a config


def test_objects_read_as_mappings_do():
    settings = {"rope_scaling": LLAMA3, "rope_theta": 5e5}
    assert Rope.from_config(types.SimpleNamespace(**LLAMA, **settings)) == rope_of(**settings)
    nested = types.SimpleNamespace(model_type="outer", text_config=types.SimpleNamespace(**LLAMA, **settings))
    assert Rope.from_config(nested) == rope_of(**settings)


def test_the_newer_form_says_the_same():
    assert rope_of(rope_parameters={**LLAMA3, "rope_theta": 5e5}) == rope_of(rope_scaling=LLAMA3, rope_theta=5e5)
    both = {"rope_parameters": LLAMA3, "rope_scaling": dict(LLAMA3), "rope_theta": 5e5}
    assert rope_of(**both) == rope_of(rope_scaling=LLAMA3, rope_theta=5e5)


def test_numpy_numbers_are_numbers():
    assert rope_of(hidden_size=np.int64(512), rope_theta=np.float32(10_000.0)) == rope_of()


def test_the_config_is_left_alone():
    config = {**LLAMA, "rope_scaling": dict(YARN)}
    Rope.from_config(config)
    assert config == {**LLAMA, "rope_scaling": YARN}


def test_different_bases_and_scalings_differ():  # F20, M27
    ropes = [
        rope_of(),
        rope_of(rope_theta=5e5),
        rope_of(rope_scaling={"type": "linear", "factor": 2.0}),
        rope_of(rope_scaling=YARN),
        rope_of(rope_scaling=LLAMA3),
    ]
    for i, a in enumerate(ropes):
        for j, b in enumerate(ropes):
            assert (a == b) == (i == j)
            assert bool(explain_difference(a, b)) == (i != j)
    said = explain_difference(ropes[0], ropes[1])
    assert "inv_freq[1]" in said and "theta 10000" in said and "theta 500000" in said
