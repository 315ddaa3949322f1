"""Rope as a value: what it is made from, what it equals, and which positions it serves."""

import dataclasses
import pickle
import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxkv.rope import ANGLE_POSITION_LIMIT, Rope, RopeTables, explain_difference

INV_FREQ = (10_000.0 ** -(np.arange(0, 8, 2) / 8)).astype(np.float32)
ANGLES = np.arange(100, dtype=np.float32)[:, None] * INV_FREQ
COS, SIN = np.cos(ANGLES), np.sin(ANGLES)


def half(**options):
    return Rope.from_inv_freq(INV_FREQ, pairing="half", **options)


def key(tokens=2, dim=8):
    return np.ones((tokens, 1, dim), np.float32)


# ---- what it is made from


def test_frequencies_are_kept_to_the_bit():
    rope = half()
    np.testing.assert_array_equal(np.asarray(rope.inv_freq, np.float32), INV_FREQ)
    assert (rope.pairs, rope.rotary_dim, rope.pair_distance, rope.pair_stride, rope.width) == (4, 8, 4, 1, 8)
    assert rope.position_limit == ANGLE_POSITION_LIMIT >= 2**20
    other = Rope.from_inv_freq(jnp.asarray(INV_FREQ), pairing="interleaved")
    assert (other.pair_distance, other.pair_stride, other.width) == (1, 2, 8)


@pytest.mark.parametrize("bad", [[], [[1.0]], [np.nan], [1.0, np.inf], 1.0, [0.0, 0.0]])
def test_frequencies_that_are_none(bad):
    with pytest.raises(ValueError, match="inv_freq"):
        Rope.from_inv_freq(bad, pairing="half")


@pytest.mark.parametrize("make", [half, lambda **o: Rope.from_tables(COS, SIN, pairing="half", **o)])
def test_widths_that_do_not_fit(make):  # M24, M25
    with pytest.raises(ValueError, match=r"width 7\b.*even"):
        make(rotary_dim=7)
    with pytest.raises(ValueError, match=r"4 .* width of 16\b.* 8"):
        make(rotary_dim=16)
    with pytest.raises(ValueError, match="mrope_section"):
        make(mrope_section=[1, 1, 1])
    with pytest.raises(ValueError, match=r"pairing.*'half' or 'interleaved'.*'neox'"):
        Rope.from_inv_freq(INV_FREQ, pairing="neox")


@pytest.mark.parametrize("pairing", ["half", "interleaved"])
@pytest.mark.parametrize("written", ["once", "halves", "side by side"])
def test_tables_of_either_width(pairing, written):
    rope = Rope.from_tables(COS, SIN, pairing=pairing)
    if written == "once":
        again = Rope.from_tables(COS.copy(), SIN.copy(), pairing=pairing, rotary_dim=8)
    else:
        double = (lambda t: np.concatenate([t, t], -1)) if written == "halves" else (lambda t: np.repeat(t, 2, -1))
        with pytest.raises(ValueError, match="rotary_dim=8"):
            Rope.from_tables(double(COS), double(SIN), pairing=pairing)
        again = Rope.from_tables(double(COS), double(SIN), pairing=pairing, rotary_dim=8)
    assert again == rope and hash(again) == hash(rope)
    assert rope.position_limit == 100
    assert rope.rotary_dim == 8


def test_tables_are_a_copy():
    cos = COS.copy()
    rope = Rope.from_tables(cos, SIN, pairing="half")
    cos[:] = 0
    assert rope == Rope.from_tables(COS, SIN, pairing="half")
    with pytest.raises(ValueError, match="read-only"):
        rope.tables.cos[:] = 0
    cos = COS.copy()
    tables = RopeTables(cos, SIN)
    cos[:] = 0
    np.testing.assert_array_equal(tables.cos, COS)


@pytest.mark.parametrize(
    "cos, sin", [(COS, SIN[:50]), (COS[0], SIN[0]), (COS, COS), (COS, 2 * SIN), (COS, SIN * np.nan), (COS[:0], SIN[:0])]
)
def test_tables_that_are_none(cos, sin):
    with pytest.raises(ValueError, match="cos and sin"):
        Rope.from_tables(cos, sin, pairing="half")


def test_the_tables_factor_is_found():  # F17
    assert Rope.from_tables(COS, SIN, pairing="half").attention_scaling == 1.0
    m = 1.1386294361
    scaled = Rope.from_tables(m * COS, m * SIN, pairing="half")
    assert scaled.attention_scaling == pytest.approx(m, rel=1e-7)
    assert Rope.from_tables(m * COS, m * SIN, pairing="half", attention_scaling=m).attention_scaling == m
    with pytest.raises(ValueError, match=r"attention_scaling=1.0.*1.13863"):
        Rope.from_tables(m * COS, m * SIN, pairing="half", attention_scaling=1.0)
    # Taken out of the correction, once: a turn keeps the length.
    cos_d, sin_d, moved = scaled.delta_tables([0, 5], [5, 99])
    assert moved.all()
    np.testing.assert_allclose(np.hypot(cos_d, sin_d), 1, rtol=3e-7)


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16])
def test_coarse_tables_are_undone_exactly(dtype):
    # The model's own keys at the new position, though its tables are no rotation to better than 8 bits.
    cos, sin = COS.astype(dtype), SIN.astype(dtype)
    rope = Rope.from_tables(cos, sin, pairing="half")
    assert rope.attention_scaling == 1.0
    c, s = cos.astype(np.float64), sin.astype(np.float64)
    raw = np.random.default_rng(0).standard_normal((100, 1, 8))

    def at(positions):
        x, y = raw[:, 0, :4], raw[:, 0, 4:]
        turned = x * c[positions] - y * s[positions], y * c[positions] + x * s[positions]
        return np.concatenate(turned, -1)[:, None].astype(np.float32)

    old, new = np.arange(100), np.arange(100)[::-1].copy()
    np.testing.assert_allclose(np.asarray(rope.shift(at(old), old, new)), at(new), rtol=0, atol=3e-6)


def test_made_by_hand():
    assert Rope("half", tuple(INV_FREQ.tolist())) == half()
    with pytest.raises(ValueError, match="either inv_freq or tables"):
        Rope("half")
    with pytest.raises(ValueError, match="pair_distance=3"):
        Rope("half", (1.0,) * 4, pair_distance=3)
    with pytest.raises(ValueError, match="pair_distance=2"):
        Rope("interleaved", (1.0,) * 4, pair_distance=2)
    with pytest.raises(ValueError, match="attention_scaling"):
        half(attention_scaling=0.0)
    with pytest.raises(ValueError, match="axes"):
        Rope("half", (1.0,) * 4, axes=(0, 1, 2))


# ---- what it equals


def test_equal_ropes_are_one_static_argument():
    traces = []

    def shift(k, old, new, rope):
        traces.append(rope)
        return rope.shift(k, old, new)

    jitted = jax.jit(shift, static_argnames="rope")
    for rope in (half(), half(), pickle.loads(pickle.dumps(half()))):
        jitted(key(), jnp.arange(2), jnp.arange(2) + 1, rope=rope)
    assert len(traces) == 1
    jitted(key(), jnp.arange(2), jnp.arange(2) + 1, rope=dataclasses.replace(half(), position_limit=1))
    assert len(traces) == 2  # whatever a program depends on is compared


def test_a_copy_by_pickle_is_equal():
    for rope in (half(), Rope.from_tables(COS, SIN, pairing="interleaved")):
        again = pickle.loads(pickle.dumps(rope))
        assert again == rope and hash(again) == hash(rope)
        np.testing.assert_array_equal(np.asarray(again.shift(key(), [0, 1], [3, 4])), rope.shift(key(), [0, 1], [3, 4]))


def tables(**options):
    return Rope.from_tables(COS, SIN, pairing="half", **options)


@pytest.mark.parametrize(
    "a, b, part, values",
    [
        (half(), Rope.from_inv_freq(INV_FREQ, pairing="interleaved"), "pairing", ["half", "interleaved"]),
        (half(), Rope.from_inv_freq(INV_FREQ[:3], pairing="half"), "rotary_dim", ["8", "6"]),
        (half(), Rope("half", tuple(INV_FREQ.tolist()), pair_distance=16), "pair_distance", ["4", "16"]),
        (half(), half(mrope_section=(2, 1, 1)), "axes", ["None", "(0, 0, 1, 2)"]),
        (half(), half(regime="longrope short"), "regime", ["None", "longrope short"]),
        (half(), half(attention_scaling=1.25), "attention_scaling", ["1.0", "1.25"]),
        (half(), Rope.from_inv_freq(INV_FREQ * np.float32(0.5), pairing="half"), "inv_freq[0]", ["1.0", "0.5"]),
        (half(), tables(), "tables", ["None", tables().tables.digest]),
        (tables(), Rope.from_tables(SIN, -COS, pairing="half"), "tables", [tables().tables.digest]),
        (half(), dataclasses.replace(half(), position_limit=64), "position_limit", ["16777216", "64"]),
        (half(), None, "rope", ["4 given frequencies", "None"]),
    ],
)
def test_differences_are_named(a, b, part, values):  # F20, M27
    assert a != b
    for x, y in ((a, b), (b, a)):
        said = explain_difference(x, y)
        assert said.startswith(part + " is "), said
        assert all(value in said for value in values), said


def test_no_difference():
    assert explain_difference(half(), half()) == ""
    assert explain_difference(None, None) == ""
    # How it came about is not what it is.
    renamed = dataclasses.replace(half(), description="another name")
    assert renamed == half() and explain_difference(renamed, half()) == ""


# ---- positions


@pytest.mark.parametrize("jitted", [False, True])
@pytest.mark.parametrize(
    "bad", [np.array([0, 1], np.float32), np.array([0, 1], ml_dtypes.bfloat16), np.array([False, True])]
)
def test_positions_have_to_be_integers(bad, jitted):  # F26, M20
    shift = jax.jit(half().shift) if jitted else half().shift
    with pytest.raises(TypeError, match=rf"old positions.*{bad.dtype}"):
        shift(key(), jnp.asarray(bad) if jitted else bad, np.arange(2))
    with pytest.raises(TypeError, match=rf"new positions.*{bad.dtype}"):
        shift(key(), np.arange(2), jnp.asarray(bad) if jitted else bad)


@pytest.mark.parametrize("rope", [half(), tables()], ids=["inv_freq", "tables"])
@pytest.mark.parametrize("container", [list, np.asarray, jnp.asarray])
def test_concrete_positions_that_cannot_be_served(rope, container):  # F25, M21
    limit = rope.position_limit
    for bad in (-1, -(2**31), limit, 2**31 - 1):
        with pytest.raises(ValueError, match=rf"new position {bad} of token 1\b.*\b{limit}\b"):
            rope.shift(key(), container([0, 1]), container([5, bad]))
        with pytest.raises(ValueError, match=rf"old position {bad} of token 0\b.*\b{limit}\b"):
            rope.shift(key(), container([bad, 1]), container([5, 5]))
        assert np.asarray(rope.position_ok(container([0, bad, 3]), container([1, 1, bad]))).tolist() == [
            True,
            False,
            False,
        ]
    rope.shift(key(), container([0, limit - 1]), container([limit - 1, 0]))


def test_wide_positions_are_judged_before_they_could_wrap():
    for bad in (2**32 + 5, 2**63 - 1):
        with pytest.raises(ValueError, match=str(bad)):
            half().shift(key(), np.array([0, bad]), np.arange(2))
        assert half().position_ok(np.array([0, bad]), np.arange(2)).tolist() == [True, False]
        assert half().delta_tables(np.array([0, bad]), np.arange(2) + 1)[2].tolist() == [True, False]
    with pytest.raises(ValueError, match=str(2**64 - 1)):
        half().shift(key(), np.array([0, 2**64 - 1], np.uint64), np.arange(2))


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int16, np.uint16, np.int32, np.uint32, np.int64, np.uint64])
@pytest.mark.parametrize("rope", [half(), tables()], ids=["inv_freq", "tables"])
def test_every_integer_dtype(dtype, rope):
    want = np.asarray(rope.shift(key(), [1, 99], [99, 3]))
    old, new = np.array([1, 99], dtype), np.array([99, 3], dtype)
    np.testing.assert_array_equal(np.asarray(rope.shift(key(), old, new)), want)
    with jax.enable_x64(True):
        moved = jax.jit(rope.shift)(key(), jnp.asarray(old), jnp.asarray(new))
        np.testing.assert_allclose(np.asarray(moved), want, rtol=0, atol=2e-7)
        ok = jax.jit(rope.position_ok)(jnp.asarray(old), jnp.asarray(new))
        assert np.asarray(ok).all()


@pytest.mark.parametrize("rope", [half(), tables()], ids=["inv_freq", "tables"])
def test_traced_positions_that_cannot_be_served(rope):  # F25
    k = np.random.default_rng(1).standard_normal((6, 1, 8), np.float32)
    limit = rope.position_limit
    old = np.array([-1, 0, limit, 0, 7, -(2**31)], np.int32)
    new = np.array([3, limit, 3, 2**31 - 1, 7, 1], np.int32)
    moved = np.asarray(jax.jit(rope.shift)(k, old, new))
    np.testing.assert_array_equal(moved.view(np.uint32), k.view(np.uint32))
    assert np.asarray(jax.jit(rope.position_ok)(old, new)).tolist() == [False] * 4 + [True, False]
    assert np.asarray(jax.jit(rope.delta_tables)(old, new)[2]).tolist() == [False] * 6
    # Their neighbours are not affected.
    old[1], new[1] = 2, 9
    moved = np.asarray(jax.jit(rope.shift)(k, old, new))
    np.testing.assert_allclose(moved[1], np.asarray(rope.shift(k[1:2], [2], [9]))[0], rtol=0, atol=4e-7)


def test_positions_that_are_not_one_per_token():  # M22
    rope = half()
    with pytest.raises(ValueError, match="old positions are missing"):
        rope.shift(key(), None, [0, 1])
    with pytest.raises(ValueError, match="new positions are missing"):
        rope.shift(key(), [0, 1], None)
    with pytest.raises(ValueError, match="3 old positions for 2 tokens"):
        rope.shift(key(), [0, 1, 2], [0, 1])
    with pytest.raises(ValueError, match="1 new positions for 2 tokens"):
        jax.jit(rope.shift)(key(), jnp.arange(2), jnp.arange(1))
    with pytest.raises(ValueError, match="3 old positions but 2 new"):
        rope.delta_tables([0, 1, 2], [0, 1])
    with pytest.raises(ValueError, match=re.escape("[tokens]")):
        rope.shift(key(), np.zeros((2, 1), int), np.zeros((2, 1), int))
    with pytest.raises(ValueError, match=r"^chunk 3: 1 old positions for 2 tokens"):
        rope.check_positions([1], [1, 2], 2, where="chunk 3: ")
    with pytest.raises(ValueError, match=re.escape("k must be [tokens, heads, head_dim]")):
        rope.shift(np.ones((2, 8), np.float32), [0, 1], [1, 2])


def test_no_tokens():
    for rope in (half(), tables()):
        assert rope.shift(key(0), [], []).shape == (0, 1, 8)
        assert jax.jit(rope.shift)(key(0), jnp.arange(0), jnp.arange(0)).shape == (0, 1, 8)
        cos_d, sin_d, moved = rope.delta_tables([], [])
        assert (cos_d.shape, sin_d.shape, moved.shape) == ((0, 4), (0, 4), (0,))


@pytest.mark.parametrize("rope", [half(), tables()], ids=["inv_freq", "tables"])
def test_delta_tables(rope):
    old, new = [3, 5, 99], [3, 50, 0]
    for cos_d, sin_d, moved in (
        rope.delta_tables(old, new),
        jax.jit(rope.delta_tables)(jnp.array(old), jnp.array(new)),
    ):
        assert (cos_d.dtype, sin_d.dtype, moved.dtype) == (jnp.float32, jnp.float32, jnp.bool_)
        assert moved.tolist() == [False, True, True]
        angles = (np.array(new) - np.array(old))[:, None] * INV_FREQ.astype(np.float64)
        np.testing.assert_allclose(np.asarray(cos_d), np.cos(angles), rtol=0, atol=1e-5)
        np.testing.assert_allclose(np.asarray(sin_d), np.sin(angles), rtol=0, atol=1e-5)
        # What stays is the identity to the bit for whoever forgets to look at `moved`.
        assert (np.asarray(cos_d)[0] == 1).all() and (np.asarray(sin_d)[0] == 0).all()


def test_position_ok_reads_no_device_array():
    assert isinstance(half().position_ok([0], [1]), np.ndarray)
    with jax.transfer_guard_device_to_host("disallow"):
        assert isinstance(half().position_ok(jnp.arange(2), jnp.arange(2)), jax.Array)
        half().delta_tables(jnp.arange(2), jnp.arange(2))
