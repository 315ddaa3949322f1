"""The arithmetic of a rotation on payloads of every kind, ordinary numbers and the others."""

import jax
import ml_dtypes
import numpy as np
import pytest

from jaxkv.rope import Rope
from jaxkv.rotation import checked_window, deltas_from_angles, rotate

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


def bits(x):
    x = np.asarray(x)
    return x.view(BITS[x.dtype.itemsize])


def normal(shape, dtype, seed=0):
    return np.random.default_rng(seed).standard_normal(shape, np.float32).astype(dtype)


def every_pattern(dtype):
    """Keys [n, 1, 8] that hold every bit pattern of a 1- or 2-byte dtype, or the odd ones of float32."""
    if dtype.itemsize == 4:
        odd = [0, 0x80000000, 1, 0x7F800000, 0xFF800000, 0x7FC00000, 0x7F800001, 0xFFC01234, 0x7F7FFFFF, 0x3F800000]
        patterns = np.resize(np.array(odd, np.uint32), 80)
    else:
        patterns = np.arange(2 ** (8 * dtype.itemsize)).astype(BITS[dtype.itemsize])
    return np.random.default_rng(9).permutation(patterns).view(dtype).reshape(-1, 1, 8)


@pytest.mark.parametrize("dtype", FORMATS, ids=lambda d: d.name)
@pytest.mark.parametrize("pairing", PAIRINGS)
@pytest.mark.parametrize("jitted", [False, True])
def test_what_stays_keeps_its_bits(dtype, pairing, jitted):  # F1, F2
    k, rope = every_pattern(dtype), Rope.from_inv_freq(frequencies(4), pairing=pairing)
    old = np.arange(len(k)) % 1000
    new = old + np.arange(len(k)) % 2  # every other token moves
    shift = jax.jit(rope.shift) if jitted else rope.shift
    moved = np.asarray(shift(k, old, new))
    np.testing.assert_array_equal(bits(moved)[::2], bits(k)[::2])
    np.testing.assert_array_equal(bits(moved)[..., 4:], bits(k)[..., 4:])
    assert (bits(moved)[1::2, :, :4] != bits(k)[1::2, :, :4]).any()


@pytest.mark.parametrize("dtype", [BF16, F16, F32, E4M3, E5M2], ids=lambda d: d.name)
@pytest.mark.parametrize("pairing", PAIRINGS)
@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_stays_in_its_pair(dtype, pairing, poison):  # F31
    clean = normal((50, 1, 16), dtype, seed=10)
    rope, old, new = Rope.from_inv_freq(frequencies(16), pairing=pairing), np.arange(50), np.arange(50) + 7
    first, second = couples(pairing, 8)
    k = clean.copy()
    k[:, 0, first[3]] = np.float32(poison).astype(dtype)
    moved, reference = np.asarray(rope.shift(k, old, new)), np.asarray(rope.shift(clean, old, new))
    others = np.setdiff1d(np.arange(16), [first[3], second[3]])
    np.testing.assert_array_equal(bits(moved[..., others]), bits(reference[..., others]))
    assert not np.isfinite(moved[:, 0, first[3]].astype(np.float32)).any()


@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=lambda d: d.name)
def test_fp8_saturates(dtype):  # F30
    top = ml_dtypes.finfo(dtype).max
    k = np.broadcast_to(np.array([top, top, -top, top], dtype), (1000, 1, 4)).copy()
    moved = np.asarray(Rope.from_inv_freq([1.0, 0.1], pairing="half").shift(k, np.zeros(1000, int), np.arange(1000)))
    values = moved.astype(np.float32)
    assert np.isfinite(values).all()
    assert values.max() == top and values.min() == -top


@pytest.mark.parametrize("dtype", [BF16, E4M3, E5M2], ids=lambda d: d.name)
def test_raw_bits_with_a_declared_format(dtype):  # F30, M26
    rope, k = Rope.from_inv_freq(frequencies(16), pairing="half"), normal((20, 2, 16), dtype)
    old, new = np.arange(20), np.arange(20)[::-1].copy()
    moved = rope.shift(bits(k), old, new, dtype=dtype)
    assert moved.dtype == bits(k).dtype
    np.testing.assert_array_equal(np.asarray(moved), bits(rope.shift(k, old, new)))
    with pytest.raises(TypeError, match=bits(k).dtype.name):
        rope.shift(bits(k), old, new)


@pytest.mark.parametrize(
    "dtype, declared, named",
    [
        (np.int8, None, "int8"),
        (np.uint8, None, "uint8"),
        (np.float64, None, "float64"),
        (np.bool_, None, "bool"),
        (np.int8, E4M3, "int8"),  # signed integers are numbers, not raw bits
        (np.uint16, E4M3, "uint16"),
        (BF16, F16, "bfloat16"),
        (np.uint8, np.int8, "int8"),
    ],
)
def test_payloads_that_cannot_be_rotated(dtype, declared, named):  # M26
    rope = Rope.from_inv_freq(frequencies(4), pairing="half")
    with pytest.raises(TypeError, match=rf"\b{named}\b"):
        rope.shift(np.zeros((2, 1, 4), dtype), [0, 1], [1, 2], dtype=declared)


@pytest.mark.parametrize("offset", [-1, 61])
def test_windows_outside_the_row(offset):  # M24
    rope = Rope.from_inv_freq(frequencies(4), pairing="half")
    with pytest.raises(ValueError, match=rf"width 4 at offset {offset} in rows of 64"):
        rope.shift(np.zeros((1, 1, 64), np.float32), [0], [1], offset=offset)


@pytest.mark.parametrize("limit", [1 << 10, 1 << 17, 1 << 20, 1 << 24])
def test_cos_and_sin_are_good_at_every_position(limit):
    # The tables rest on the backend's float32 cos and sin, large arguments included.
    positions = np.random.default_rng(16).integers(0, limit, 2000).astype(np.int32)
    inv_freq = frequencies(128)
    cos_d, sin_d, _ = deltas_from_angles(np.zeros_like(positions), positions, np.ones(2000, bool), inv_freq, axes=None)
    angles = (positions.astype(np.float32)[:, None] * inv_freq).astype(np.float64)
    assert np.abs(np.asarray(cos_d) - np.cos(angles)).max() <= 2.0**-23
    assert np.abs(np.asarray(sin_d) - np.sin(angles)).max() <= 2.0**-23


@pytest.mark.parametrize("pairing, distance", [("half", 4), ("half", 6), ("interleaved", 1)])
def test_rows_of_any_rank(pairing, distance):
    rng = np.random.default_rng(17)
    tables = Rope("half", tuple(frequencies(8).tolist())).delta_tables(rng.integers(0, 99, 5), rng.integers(0, 99, 5))
    k = rng.standard_normal((5, 2, 3, 11), np.float32)
    options = {"pairing": pairing, "pair_distance": distance, "offset": 1}
    want = np.asarray(rotate(k, *tables, **options))
    assert (want != k).any()
    for head in np.ndindex(2, 3):
        moved = np.asarray(rotate(k[:, *head], *tables, **options))
        np.testing.assert_array_equal(moved, want[:, *head])


def test_width_of_a_window():
    assert checked_window(4, "half", 4, 0, 8) == 8
    assert checked_window(4, "half", 6, 0, 10) == 10
    assert checked_window(4, "interleaved", 1, 2, 10) == 8
    for arguments in ((4, "half", 6, 0, 9), (4, "interleaved", 1, 3, 10), (4, "half", 4, -1, 10)):
        with pytest.raises(ValueError, match=r"width \d+ at offset -?\d in rows of \d+"):
            checked_window(*arguments)
