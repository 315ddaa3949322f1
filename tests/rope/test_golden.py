"""Keys rotated by transformers at one position, moved to another."""

import json
import pathlib

import ml_dtypes
import numpy as np
import pytest

from jaxkv.rope import Rope

GOLDEN = pathlib.Path(__file__).parent.parent / "golden"
CASES = sorted(path.stem for path in GOLDEN.glob("*.json"))


def load(name):
    with np.load(GOLDEN / f"{name}.npz") as arrays:
        return json.loads((GOLDEN / f"{name}.json").read_text()), dict(arrays)


def rope_of(case, **changes):
    config = {**case["config"], **changes.pop("config", {})}
    options = {"layer_type": case["layer_type"], "sequence_length": case["sequence_length"], **changes}
    return Rope.from_config(config, **options)


def error(got, want, rotary_dim):
    got, want = (np.asarray(x)[..., :rotary_dim].astype(np.float64) for x in (got, want))
    return np.linalg.norm(got - want) / np.linalg.norm(want)


def ulps(a, b):
    return np.abs(a.view(np.int32).astype(np.int64) - b.view(np.int32)).max()


def test_all_eight_cases_are_here():
    assert len(CASES) == 8


@pytest.mark.parametrize("name", CASES)
def test_config_gives_the_models_frequencies(name):
    case, arrays = load(name)
    rope = rope_of(case)
    assert rope.pairing == case["pairing"]
    assert rope.rotary_dim == case["rotary_dim"]
    assert rope.attention_scaling == case["attention_scaling"]
    # torch's float32 pow is itself off by a unit in a few places.
    assert ulps(np.asarray(rope.inv_freq, np.float32), arrays["inv_freq"]) <= 1


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("source", ["config", "inv_freq", "tables"])
def test_moved_keys_are_the_models_own(name, source):
    case, arrays = load(name)
    rotary_dim, old, new = case["rotary_dim"], arrays["pos_old"], arrays["pos_new"]
    if source == "config":
        rope = rope_of(case)
    elif source == "inv_freq":
        rope = Rope.from_inv_freq(arrays["inv_freq"], pairing=case["pairing"], rotary_dim=rotary_dim)
    else:
        # The rows that are asked for, at other numbers: what is in them is the model's all the same.
        rows, numbers = np.unique(np.concatenate([old, new]), return_inverse=True)
        angles = rows.astype(np.float32)[:, None] * arrays["inv_freq"][None, :]
        scaling = np.float32(arrays["attention_scaling"])
        rope = Rope.from_tables(np.cos(angles) * scaling, np.sin(angles) * scaling, pairing=case["pairing"])
        old, new = np.split(numbers.astype(np.int64), 2)
    moved = np.asarray(rope.shift(arrays["k_old"], old, new))
    assert error(moved, arrays["k_new"], rotary_dim) <= 2e-7
    moved_bf16 = np.asarray(rope.shift(arrays["k_old_bf16"].view(ml_dtypes.bfloat16), old, new))
    assert moved_bf16.dtype == ml_dtypes.bfloat16
    assert error(moved_bf16, arrays["k_new"], rotary_dim) <= 2.6e-3
    # Not the average alone: each token's keys, at the worst.
    for token in range(len(old)):
        assert error(moved[token], arrays["k_new"][token], rotary_dim) <= 4e-7
    # The rest of the head, and what stays, to the bit.
    np.testing.assert_array_equal(moved[..., rotary_dim:], arrays["k_old"][..., rotary_dim:])
    still = old == new
    assert still.any() and not still.all()
    np.testing.assert_array_equal(moved[still].view(np.uint32), arrays["k_old"][still].view(np.uint32))
    np.testing.assert_array_equal(moved_bf16[still].view(np.uint16), arrays["k_old_bf16"][still])


def test_channel_order_of_transformers_own_cache():
    case, arrays = load("deepseek_v3_mla")
    rope = rope_of(case, pairing=case["hf_layout_pairing"])
    moved = rope.shift(arrays["k_old_hf_layout"], arrays["pos_old"], arrays["pos_new"])
    assert error(moved, arrays["k_new_hf_layout"], 64) <= 2e-7


# The comparison itself must be able to fail: each of these mistakes has to show.
@pytest.mark.parametrize("name", CASES)
def test_the_other_pairing_shows(name):
    case, arrays = load(name)
    rope = rope_of(case, pairing="half" if case["pairing"] == "interleaved" else "interleaved")
    moved = rope.shift(arrays["k_old"], arrays["pos_old"], arrays["pos_new"])
    assert error(moved, arrays["k_new"], case["rotary_dim"]) > 0.1


@pytest.mark.parametrize("name", CASES)
def test_swapped_positions_show(name):
    case, arrays = load(name)
    moved = rope_of(case).shift(arrays["k_old"], arrays["pos_new"], arrays["pos_old"])
    assert error(moved, arrays["k_new"], case["rotary_dim"]) > 0.1


@pytest.mark.parametrize("name", ["llama3_1_8b", "qwen2_5_7b_yarn", "llama2_7b_linear2", "deepseek_v3_mla"])
def test_unscaled_frequencies_show(name):
    case, arrays = load(name)
    moved = rope_of(case, config={"rope_scaling": None}).shift(arrays["k_old"], arrays["pos_old"], arrays["pos_new"])
    assert error(moved, arrays["k_new"], case["rotary_dim"]) > 0.1


def test_the_other_layer_types_frequencies_show():
    case, arrays = load("gemma3_27b_global")
    rope = rope_of(case, layer_type="sliding_attention")
    moved = rope.shift(arrays["k_old"], arrays["pos_old"], arrays["pos_new"])
    assert error(moved, arrays["k_new"], 128) > 0.1
