"""Every scaling against its formula in float64."""

import math

import numpy as np
import pytest

from jaxkv.rope import Rope, explain_difference

LLAMA = {"model_type": "llama", "hidden_size": 512, "num_attention_heads": 8, "max_position_embeddings": 4096}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0 + i / 32 for i in range(32)],
    "long_factor": [1.0 + i for i in range(32)],
    "original_max_position_embeddings": 1024,
}


def plain(theta=10_000.0, width=64, count=None):
    return theta ** -(np.arange(0, width if count is None else 2 * count, 2) / width)


def rope_of(*, layer_type=None, sequence_length=None, pairing=None, **fields):
    config = {name: value for name, value in {**LLAMA, **fields}.items() if value != "absent"}
    return Rope.from_config(config, layer_type=layer_type, sequence_length=sequence_length, pairing=pairing)


def check(rope, want, scaling=1.0, rtol=5e-7):
    # A few units in the last place: the formulas are evaluated in float32, as in transformers.
    np.testing.assert_allclose(np.asarray(rope.inv_freq), want, rtol=rtol)
    assert rope.attention_scaling == pytest.approx(scaling, rel=1e-12)


@pytest.mark.parametrize("settings", [None, {}, {"rope_type": "default"}, {"type": "default"}, {"factor": 1.0}])
def test_default(settings):  # F16
    check(rope_of(rope_theta=5e5, rope_scaling=settings), plain(5e5))


@pytest.mark.parametrize("name", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize("key", ["type", "rope_type"])
def test_linear(name, key):  # F16
    check(rope_of(**{name: {key: "linear", "factor": 3.0}}), plain() / 3)


def test_llama3():  # F16
    wavelengths = 2 * math.pi / plain(5e5)
    ramp = np.clip((8192 / wavelengths - 1) / (4 - 1), 0, 1)
    check(rope_of(rope_theta=5e5, rope_scaling=LLAMA3), plain(5e5) * (ramp + (1 - ramp) / 8))
    with pytest.raises(ValueError, match=r"low_freq_factor=4.*high_freq_factor=4"):
        rope_of(rope_scaling={**LLAMA3, "low_freq_factor": 4.0})


def yarn_ramp(theta, width, context, fast=32, slow=1, truncate=True):
    first, last = (width * math.log(context / (t * 2 * math.pi)) / (2 * math.log(theta)) for t in (fast, slow))
    if truncate:
        first, last = math.floor(first), math.ceil(last)
    return np.clip((np.arange(width // 2) - max(first, 0)) / (min(last, width - 1) - max(first, 0)), 0, 1)


@pytest.mark.parametrize("factor", [4.0, 40.0])
@pytest.mark.parametrize("truncate", [None, True, False])
@pytest.mark.parametrize("betas", [{}, {"beta_fast": 16, "beta_slow": 2}])
def test_yarn(factor, truncate, betas):  # F16
    rope = rope_of(rope_theta=1e6, rope_scaling={**YARN, "factor": factor, "truncate": truncate, **betas})
    ramp = yarn_ramp(1e6, 64, 4096, *(betas.values() or (32, 1)), truncate=truncate is not False)
    # Near the ends of the ramp float32 cancels.
    check(rope, plain(1e6) * (1 - ramp + ramp / factor), 0.1 * math.log(factor) + 1, rtol=5e-6)


@pytest.mark.parametrize(
    "fields, scaling",
    [
        ({"attention_factor": 1.5}, 1.5),
        ({"mscale": 1.0, "mscale_all_dim": 1.0}, 1.0),
        ({"mscale": 0.707, "mscale_all_dim": 1.0}, (0.0707 * math.log(4) + 1) / (0.1 * math.log(4) + 1)),
        ({"mscale": 1.0}, 0.1 * math.log(4) + 1),
        ({"factor": None, "original_max_position_embeddings": 2048}, 0.1 * math.log(2) + 1),
        ({"factor": 0.5}, 1.0),
    ],
)
def test_yarns_factor_on_the_tables(fields, scaling):
    assert rope_of(rope_scaling={**YARN, **fields}).attention_scaling == pytest.approx(scaling, rel=1e-12)


@pytest.mark.parametrize("name", ["longrope", "su"])
@pytest.mark.parametrize("inside", [True, False])
def test_longrope(name, inside):  # F18
    settings, fields = {**LONGROPE, "rope_type": name}, {}
    if not inside:
        fields["original_max_position_embeddings"] = settings.pop("original_max_position_embeddings")
    scaling = math.sqrt(1 + math.log(4) / math.log(1024))
    make = lambda length: rope_of(rope_scaling=settings, sequence_length=length, **fields)  # noqa: E731
    short, long = make(1024), make(1025)
    check(short, plain() / LONGROPE["short_factor"], scaling)
    check(long, plain() / LONGROPE["long_factor"], scaling)
    assert short == make(1) and long == make(4096)
    assert (short.regime, long.regime) == ("longrope short", "longrope long")
    said = explain_difference(short, long)
    assert "longrope short" in said and "longrope long" in said
    # Where the short regime ends, so do its positions.
    k = np.ones((1, 1, 64), np.float32)
    with pytest.raises(ValueError, match=r"1024\b"):
        short.shift(k, [0], [1024])
    long.shift(k, [0], [1024])
    with pytest.raises(ValueError, match=r"longrope.*sequence_length"):
        make(None)


@pytest.mark.parametrize("factors", [[1.0] * 31, None, 2.0, [1.0] * 31 + ["2"], [1.0] * 31 + [0.0]])
def test_longropes_factors(factors):
    with pytest.raises(ValueError, match=r"long_factor must hold (32|positive) numbers"):
        rope_of(rope_scaling={**LONGROPE, "long_factor": factors}, sequence_length=4096)


def test_dynamic():  # F19
    settings = {"type": "dynamic", "factor": 2.0}
    trained, longer = (rope_of(rope_scaling=settings, sequence_length=n) for n in (1000, 8192))
    check(trained, plain())
    assert trained == rope_of(rope_scaling=settings, sequence_length=4096)
    base = 10_000.0 * (2 * 8192 / 4096 - 1) ** (64 / 62)
    np.testing.assert_allclose(np.asarray(longer.inv_freq), plain(base), rtol=2e-6)
    said = explain_difference(trained, longer)
    assert "dynamic base 10000.0" in said and f"dynamic base {base:.0f}"[:-1] in said
    with pytest.raises(ValueError, match=r"dynamic.*sequence_length"):
        rope_of(rope_scaling=settings)
    with pytest.raises(ValueError, match="max_position_embeddings"):
        rope_of(rope_scaling=settings, sequence_length=8192, max_position_embeddings="absent")
    with pytest.raises(ValueError, match=r"8192\b"):
        longer.shift(np.ones((1, 1, 64), np.float32), [0], [8192])


def test_proportional():  # F12
    settings = {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6}
    rope = rope_of(rope_parameters=settings)
    check(rope, plain(1e6, 64, 8))
    assert (rope.rotary_dim, rope.pair_distance, rope.width) == (16, 32, 40)
    # transformers writes the channels that rest as zero frequencies.
    padded = np.concatenate([np.asarray(rope.inv_freq, np.float32), np.zeros(24, np.float32)])
    assert rope == Rope.from_inv_freq(padded, pairing="half", rotary_dim=64)


@pytest.mark.parametrize(
    "model_type, fields, axes",
    [
        ("qwen2_vl", {"type": "mrope", "mrope_section": [8, 12, 12]}, [0] * 8 + [1] * 12 + [2] * 12),
        ("glm4v_text", {"mrope_section": [8, 12, 12]}, [0] * 8 + [1] * 12 + [2] * 12),
        ("qwen3_vl_text", {"mrope_section": [12, 10, 10]}, [0, 1, 2] * 10 + [0, 0]),
        ("llama", {"mrope_section": [12, 10, 10], "mrope_interleaved": True}, [0, 1, 2] * 10 + [0, 0]),
    ],
)
def test_mrope(model_type, fields, axes):  # F21
    rope = rope_of(model_type=model_type, rope_theta=1e6, rope_scaling=fields)
    assert rope.axes == tuple(axes)
    check(rope, plain(1e6))


@pytest.mark.parametrize(
    "model_type, fields, message",
    [
        ("qwen2_vl", {"mrope_section": [8, 12, 11]}, r"mrope_section .*31.*32"),
        ("qwen2_vl", {"mrope_section": [8, 25, -1]}, "mrope_section must hold whole numbers"),
        ("qwen2_vl", None, "lacks mrope_section"),
        ("qwen2_vl", {"mrope_section": [8, 12, 12], "mrope_interleaved": True}, "mrope_interleaved"),
        ("qwen3_vl_text", {"mrope_section": [4, 14, 14]}, "cannot be interleaved"),
        ("llama", {"mrope_section": [8, 12, 12]}, "mrope_interleaved"),
    ],
)
def test_mrope_that_does_not_fit(model_type, fields, message):
    with pytest.raises(ValueError, match=message):
        rope_of(model_type=model_type, rope_scaling=fields)
