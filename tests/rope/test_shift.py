"""Rotated keys against NumPy: exact in float64 (T2), and as the model makes them at the new position (T1)."""

import functools
import itertools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxkv.rope import Rope
from jaxkv.rotation import rotate

BF16, F16, F32 = np.dtype(ml_dtypes.bfloat16), np.dtype(np.float16), np.dtype(np.float32)
E4M3, E5M2 = np.dtype(ml_dtypes.float8_e4m3fn), np.dtype(ml_dtypes.float8_e5m2)
FORMATS = [BF16, F16, F32, E4M3, E5M2]
BITS = {1: np.uint8, 2: np.uint16, 4: np.uint32}
PAIRINGS = ["half", "interleaved"]


def frequencies(width, theta=10_000.0):
    return (theta ** -(np.arange(0, width, 2) / width)).astype(np.float32)


def couples(pairing, pairs, offset=0):
    """Channel numbers of each pair, by the definition of the pairing."""
    i = np.arange(pairs)
    first, second = (i, i + pairs) if pairing == "half" else (2 * i, 2 * i + 1)
    return first + offset, second + offset


def turn(k, angles, pairing, offset=0, m=1.0):
    """float64 keys with pair i of token t turned by angles[t, i]."""
    out = k.astype(np.float64).copy()
    a, b = couples(pairing, angles.shape[1], offset)
    x, y = out[..., a].copy(), out[..., b].copy()
    c, s = m * np.cos(angles)[:, None, :], m * np.sin(angles)[:, None, :]
    out[..., a], out[..., b] = x * c - y * s, y * c + x * s
    return out


def exact(k, old, new, inv_freq, pairing, offset=0):
    """T2: the stored bytes turned by (new - old) * inv_freq in float64."""
    steps = (np.asarray(new, np.int64) - np.asarray(old, np.int64)).astype(np.float64)
    return turn(k, steps[:, None] * inv_freq.astype(np.float64), pairing, offset)


def model(raw, positions, inv_freq, pairing, m=1.0):
    """T1: raw keys turned as a model does it: angles rounded to float32, float32 tables, float32 arithmetic."""
    angles = np.asarray(positions).astype(np.float32)[:, None] * inv_freq
    c, s = (np.float32(m) * f(angles.astype(np.float64)).astype(np.float32)[:, None, :] for f in (np.cos, np.sin))
    out, (a, b) = raw.astype(np.float32), couples(pairing, len(inv_freq))
    x, y = out[..., a].copy(), out[..., b].copy()
    out[..., a], out[..., b] = x * c - y * s, y * c + x * s
    return out


def l2(got, want):
    got, want = np.asarray(got).astype(np.float64), np.asarray(want).astype(np.float64)
    return np.linalg.norm(got - want) / np.linalg.norm(want)


def pair_norms(k, pairing, pairs, offset=0):
    a, b = couples(pairing, pairs, offset)
    return np.hypot(k[..., a].astype(np.float64), k[..., b].astype(np.float64))


def bits(x):
    x = np.asarray(x)
    return x.view(BITS[x.dtype.itemsize])


def normal(shape, dtype, seed=0):
    return np.random.default_rng(seed).standard_normal(shape, np.float32).astype(dtype)


def spread(rng, low, high, count):
    """Positions of every magnitude, not just large ones."""
    return np.concatenate(
        [rng.integers(low, high, count // 2), np.exp(rng.uniform(0, np.log(high - 1), count - count // 2)).astype(int)]
    )


# Against T2: (relative error, error of one component in units of its pair's length, change of that length).
BOUNDS = {
    BF16: (1.75e-3, 2.0**-8, 2.0**-7),
    F16: (2.3e-4, 2.0**-11, 2.0**-10),
    F32: (2e-7, 2.0**-24, 1e-6),
    E4M3: (3e-2, None, None),
    E5M2: (6e-2, None, None),
}


def check_against_exact(k, moved, old, new, inv_freq, pairing, offset=0):
    total, component, length = BOUNDS[k.dtype]
    reach = max(np.abs(old).max(), np.abs(new).max(), np.abs(new - old).max())
    want = exact(k, old, new, inv_freq, pairing, offset)
    turned = np.concatenate(couples(pairing, len(inv_freq), offset))
    rest = np.setdiff1d(np.arange(k.shape[-1]), turned)
    moved = np.asarray(moved)
    assert moved.dtype == k.dtype and moved.shape == k.shape
    assert l2(moved[..., turned], want[..., turned]) <= total + 1e-8 * reach  # F3, F30
    np.testing.assert_array_equal(bits(moved[..., rest]), bits(k[..., rest]))  # F2
    if component is not None:
        norms = pair_norms(k, pairing, len(inv_freq), offset)
        allowed = (component + 2.0**-20 + 2.0**-23 * reach) * np.concatenate([norms, norms], axis=-1)
        # Below the normal range a format has no relative precision to speak of.
        floor = float(jnp.finfo(k.dtype).smallest_normal) * component
        assert (np.abs(moved.astype(np.float64) - want)[..., turned] <= allowed + floor).all()  # F4
        sizable = norms > 1e-2
        after = pair_norms(moved, pairing, len(inv_freq), offset)
        assert np.abs(after[sizable] / norms[sizable] - 1).max() <= length  # F6


@pytest.mark.parametrize("dtype", FORMATS, ids=lambda d: d.name)
@pytest.mark.parametrize("pairing", PAIRINGS)
def test_small_moves_both_ways(dtype, pairing):  # F3, F4, F6, F8
    rng = np.random.default_rng(1)
    old, new = rng.integers(0, 4096, (2, 1000))
    new[:100] = old[:100]
    k, inv_freq = normal((1000, 2, 128), dtype), frequencies(128)
    moved = Rope.from_inv_freq(inv_freq, pairing=pairing).shift(k, old, new)
    check_against_exact(k, moved, old, new, inv_freq, pairing)
    np.testing.assert_array_equal(bits(moved)[:100], bits(k)[:100])


@pytest.mark.parametrize("step", [1, -1, 16, -16, 1024, -1024, 65536, -65536])
@pytest.mark.parametrize("dtype", [BF16, F32], ids=lambda d: d.name)
def test_steps_at_large_positions(step, dtype):  # F9
    rng = np.random.default_rng(2)
    old = spread(rng, 700, 131_072, 1000).clip(max(700, -step), 131_071 - max(step, 0))
    k, inv_freq = normal((1000, 1, 128), dtype), frequencies(128, 500_000.0)
    moved = Rope.from_inv_freq(inv_freq, pairing="half").shift(k, old, old + step)
    check_against_exact(k, moved, old, old + step, inv_freq, "half")


def test_bfloat16_tables_would_fail_the_bound():
    # The bound of F3 is worth its name: rounding the same tables to bfloat16 breaks it.
    rng = np.random.default_rng(3)
    old, new = rng.integers(0, 4096, (2, 1000))
    k, inv_freq = normal((1000, 1, 128), BF16), frequencies(128)
    rope = Rope.from_inv_freq(inv_freq, pairing="half")
    cos_d, sin_d, moves = rope.delta_tables(old, new)
    coarse = (table.astype(jnp.bfloat16).astype(jnp.float32) for table in (cos_d, sin_d))
    moved = rotate(k, *coarse, moves, pairing="half", pair_distance=64)
    assert l2(moved, exact(k, old, new, inv_freq, "half")) > 1.75e-3 + 1e-8 * 4096


@pytest.mark.parametrize("dtype, bound", [(BF16, 2.6e-3), (F16, 3.3e-4), (F32, 2e-7)])
@pytest.mark.parametrize("pairing", PAIRINGS)
@pytest.mark.parametrize("m", [1.0, 1.1386294361])
@pytest.mark.parametrize("given_as", ["inv_freq", "tables"])
def test_as_the_model_at_the_new_position(dtype, bound, pairing, m, given_as):  # F5, F17
    rng = np.random.default_rng(4)
    inv_freq, length = frequencies(64, 1e6), 131_072
    old, new = spread(rng, 0, length, 1000), rng.permutation(spread(rng, 0, length, 1000))
    raw = normal((1000, 1, 64), F32)
    if given_as == "tables":
        angles = np.arange(length, dtype=np.float32)[:, None] * inv_freq
        rope = Rope.from_tables(np.float32(m) * np.cos(angles), np.float32(m) * np.sin(angles), pairing=pairing)
        assert rope.attention_scaling == pytest.approx(m, rel=1e-7)
    else:
        rope = Rope.from_inv_freq(inv_freq, pairing=pairing, attention_scaling=m)
    moved = rope.shift(model(raw, old, inv_freq, pairing, m).astype(dtype), old, new)
    assert l2(moved, model(raw, new, inv_freq, pairing, m)) <= bound


def test_a_single_turn_by_the_difference_would_fail():
    # Why the tables are composed: at these positions the difference alone misses the model's arithmetic.
    rng = np.random.default_rng(5)
    old, new = rng.integers(100_000, 131_072, (2, 1000))
    raw, inv_freq = normal((1000, 1, 64), F32), frequencies(64)
    k = model(raw, old, inv_freq, "half")
    assert l2(exact(k, old, new, inv_freq, "half"), model(raw, new, inv_freq, "half")) > 1e-4
    assert l2(Rope.from_inv_freq(inv_freq, pairing="half").shift(k, old, new), model(raw, new, inv_freq, "half")) < 2e-7


@pytest.mark.parametrize("dtype, there, back", [(BF16, 3.0e-3, 2.0e-3), (F16, 3.9e-4, None), (F32, 5e-5, None)])
def test_two_moves_are_one(dtype, there, back):  # F7
    rng = np.random.default_rng(6)
    a, b, c = rng.integers(0, 4096, (3, 1000))
    rope, k = Rope.from_inv_freq(frequencies(128), pairing="half"), normal((1000, 1, 128), dtype)
    half_way = rope.shift(k, a, b)
    assert l2(rope.shift(half_way, b, c), rope.shift(k, a, c)) <= there
    if back is not None:
        assert l2(rope.shift(half_way, b, a), k) <= back


def test_moves_from_the_original_do_not_add_up():  # F28
    rng = np.random.default_rng(7)
    inv_freq, raw = frequencies(128), normal((1000, 1, 128), F32)
    rope, start = Rope.from_inv_freq(inv_freq, pairing="half"), np.arange(1000)
    stored = model(raw, start, inv_freq, "half").astype(BF16)
    for _ in range(64):
        new = rng.integers(0, 131_072, 1000)
        assert l2(rope.shift(stored, start, new), model(raw, new, inv_freq, "half")) <= 2.6e-3


def test_moves_stored_again_grow_slowly():  # F29
    rng = np.random.default_rng(8)
    inv_freq, raw, at = frequencies(128), normal((1000, 1, 128), F32), np.arange(1000)
    rope, stored = Rope.from_inv_freq(inv_freq, pairing="half"), model(raw, np.arange(1000), inv_freq, "half")
    stored, errors = stored.astype(BF16), []
    for _ in range(64):
        new = rng.integers(0, 8192, 1000)
        stored, at = np.asarray(rope.shift(stored, at, new)), new
        errors.append(l2(stored, model(raw, new, inv_freq, "half")))
    assert errors[15] <= 7.5e-3
    assert errors[63] <= 1.5e-2


@pytest.mark.parametrize("pairing", PAIRINGS)
@pytest.mark.parametrize("width, row, offset", [(24, 96, 0), (64, 576, 512), (64, 640, 512), (2, 7, 3), (8, 8, 0)])
def test_only_the_window_turns(pairing, width, row, offset):  # F12, F14
    rng = np.random.default_rng(11)
    old, new = rng.integers(0, 4096, (2, 1000))
    k, inv_freq = normal((1000, 1, row), F32), frequencies(width)
    rope = Rope.from_inv_freq(inv_freq, pairing=pairing, rotary_dim=width)
    check_against_exact(k, rope.shift(k, old, new, offset=offset), old, new, inv_freq, pairing, offset)


def test_pairs_across_a_wider_span():  # F12: distance head / 2 with the channels between at rest
    rng = np.random.default_rng(12)
    old, new = rng.integers(0, 4096, (2, 1000))
    k, inv_freq = normal((1000, 1, 64), F32), frequencies(64)
    padded = np.where(np.arange(32) < 8, inv_freq, 0).astype(np.float32)
    rope = Rope.from_inv_freq(padded, pairing="half", rotary_dim=64)
    assert (rope.rotary_dim, rope.pair_distance, rope.width) == (16, 32, 40)
    moved = np.asarray(rope.shift(k, old, new))
    assert l2(moved, exact(k, old, new, padded, "half")) <= 2e-7 + 1e-8 * 4096
    rest = np.setdiff1d(np.arange(64), np.r_[0:8, 32:40])
    np.testing.assert_array_equal(bits(moved[..., rest]), bits(k[..., rest]))


@pytest.mark.parametrize("pairing", PAIRINGS)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("given_as", ["inv_freq", "tables"])
def test_three_component_positions(pairing, interleaved, given_as):  # F21
    rng = np.random.default_rng(13)
    inv_freq, sections = frequencies(16), (4, 2, 2)
    axes = np.array([0, 1, 2, 0, 1, 2, 0, 0] if interleaved else [0, 0, 0, 0, 1, 1, 2, 2])
    options = {"pairing": pairing, "mrope_section": sections, "mrope_interleaved": interleaved}
    if given_as == "inv_freq":
        rope = Rope.from_inv_freq(inv_freq, **options)
    else:
        angles = np.arange(4096, dtype=np.float32)[:, None] * inv_freq
        rope = Rope.from_tables(np.cos(angles), np.sin(angles), **options)
    old, new = rng.integers(0, 4096, (2, 3, 1000))
    new[:, :50] = old[:, :50]
    new[1:, 50:100] = old[1:, 50:100]  # time alone moves
    k = normal((1000, 1, 16), F32)
    want = turn(k, (new - old)[axes].T * inv_freq.astype(np.float64), pairing)
    for moved in (rope.shift(k, old, new), jax.jit(rope.shift)(k, old, new)):
        assert l2(moved, want) <= 2e-7 + 1e-8 * 4096
        np.testing.assert_array_equal(bits(moved)[:50], bits(k)[:50])
        at_rest = np.concatenate([c[axes != 0] for c in couples(pairing, 8)])
        np.testing.assert_array_equal(bits(moved)[50:100, :, at_rest], bits(k)[50:100, :, at_rest])
    with pytest.raises(ValueError, match=r"\[3, tokens\]"):
        rope.shift(k, old[0], new[0])
    with pytest.raises(ValueError, match=r"\[tokens\]"):
        Rope.from_inv_freq(inv_freq, pairing=pairing).shift(k, old, new)


@pytest.mark.parametrize("dtype", FORMATS, ids=lambda d: d.name)
@pytest.mark.parametrize("pairing", PAIRINGS)
def test_traced_positions_give_what_eager_ones_give(dtype, pairing):  # F36
    rng = np.random.default_rng(14)
    k, inv_freq = normal((64, 2, 32), dtype), frequencies(32)
    rope = Rope.from_inv_freq(inv_freq, pairing=pairing)
    traces = []

    @jax.jit
    def shift(k, old, new):
        traces.append(1)
        return rope.shift(k, old, new)

    unit = float(jnp.finfo(dtype).eps)
    for _ in range(3):
        old, new = rng.integers(0, 131_072, (2, 64)).astype(np.int32)
        eager, traced = (np.asarray(f(k, old, new)).astype(np.float64) for f in (rope.shift, shift))
        norms = pair_norms(k, pairing, 16)
        allowed = np.concatenate([norms, norms], axis=-1) * unit + float(jnp.finfo(dtype).smallest_normal)
        turned = np.concatenate(couples(pairing, 16))
        assert (np.abs(eager - traced)[..., turned] <= allowed).all()
    assert len(traces) == 1


def test_inside_loops_and_with_x64():
    rope, k = Rope.from_inv_freq(frequencies(32), pairing="half"), normal((16, 2, 32), BF16)
    old, new = np.arange(16), np.arange(16) + 100
    want = np.asarray(rope.shift(k, old, new)).astype(np.float32)

    @jax.jit
    def looped(k, old, new):
        step = lambda i, state: (rope.shift(state[0], *state[1:]), state[2], state[1])  # noqa: E731
        return jax.lax.fori_loop(0, 3, step, (k, old, new))[0]

    assert l2(np.asarray(looped(k, old, new)), want) <= 4e-3
    with jax.enable_x64(True):
        for dtype, jitted in itertools.product((np.int64, np.int32), (False, True)):
            shift = jax.jit(rope.shift) if jitted else rope.shift
            moved = np.asarray(shift(jnp.asarray(k), jnp.asarray(old, dtype), jnp.asarray(new, dtype)))
            assert moved.dtype == BF16
            assert l2(moved, want) <= 1e-4


def test_two_rotations_in_one_program_round_twice():
    # The result of the first is a bfloat16 key, not a float32 one that the compiler kept.
    rng = np.random.default_rng(15)
    a, b, c = rng.integers(0, 4096, (3, 100)).astype(np.int32)
    rope, k = Rope.from_inv_freq(frequencies(32), pairing="half"), normal((100, 1, 32), BF16)
    fused = jax.jit(lambda k, a, b, c: rope.shift(rope.shift(k, a, b), b, c))(k, a, b, c)
    apart = rope.shift(rope.shift(k, a, b), b, c)
    assert (bits(fused) != bits(apart)).mean() < 1e-3


def test_sharded_keys_keep_their_sharding():
    devices = jax.devices()
    if len(devices) < 2:
        pytest.skip("needs two devices")
    rope, k = Rope.from_inv_freq(frequencies(32), pairing="half"), normal((16, 4, 32), BF16)
    old, new = np.arange(16), np.arange(16) + 100
    want = bits(rope.shift(k, old, new))
    for kind in (jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit):
        mesh = jax.make_mesh((2,), ("heads",), devices=devices[:2], axis_types=(kind,))
        sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(None, "heads", None))
        with jax.set_mesh(mesh):
            placed = jax.device_put(k, sharding)
            moved = jax.jit(rope.shift)(placed, jnp.asarray(old), jnp.asarray(new))
        assert moved.sharding.is_equivalent_to(sharding, 3)
        np.testing.assert_array_equal(bits(moved), want)


def test_keys_on_another_device_stay_there():
    if len(jax.devices()) < 2:
        pytest.skip("needs two devices")
    rope, k = Rope.from_inv_freq(frequencies(32), pairing="half"), normal((4, 1, 32), BF16)
    moved = rope.shift(jax.device_put(k, jax.devices()[1]), jnp.arange(4), jnp.arange(4) + 9)
    assert moved.devices() == {jax.devices()[1]}


@given(
    st.sampled_from(PAIRINGS),
    st.sampled_from([BF16, F16, F32]),
    st.lists(st.tuples(st.integers(0, 1 << 20), st.integers(0, 1 << 20)), min_size=4, max_size=4),
    st.integers(0, 2**32 - 1),
)
def test_any_positions(pairing, dtype, positions, seed):
    old, new = np.array(positions).T
    k, inv_freq = normal((4, 3, 24), dtype, seed), frequencies(16)
    moved = np.asarray(_compiled(pairing)(k, old.astype(np.int32), new.astype(np.int32)))
    u = BOUNDS[dtype][1]
    want, norms = exact(k, old, new, inv_freq, pairing), pair_norms(k, pairing, 8)
    turned = np.concatenate(couples(pairing, 8))
    reach = np.maximum(np.maximum(old, new), np.abs(new - old))[:, None, None]
    allowed = (u + 2.0**-20 + 2.0**-23 * reach) * np.concatenate([norms, norms], axis=-1)
    floor = float(jnp.finfo(dtype).smallest_normal) * u
    assert (np.abs(moved.astype(np.float64) - want)[..., turned] <= allowed + floor).all()
    np.testing.assert_array_equal(bits(moved)[..., 16:], bits(k)[..., 16:])


@functools.cache
def _compiled(pairing):
    return jax.jit(Rope.from_inv_freq(frequencies(16), pairing=pairing).shift)
