"""gather: which rows come out, in which bytes, whatever the indices, sizes and dtypes."""

import itertools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxkv import layouts, ops
from jaxkv.layout import Sizes
from jaxkv.layouts import padded

from .moves import KV_CHUNKS, PLANE_CHUNKS, Move, assert_same, bits, device, distinct_slots

SMALL = Sizes(layers=2, heads=2, dim=8, page_size=4)
ONE_PLANE = Sizes(layers=2, heads=1, dim=8, page_size=4, planes=1)
INT32_MIN, INT32_MAX = -(2**31), 2**31 - 1


@pytest.fixture(scope="module")
def move():
    """6 pages of 4 tokens, S = 24."""
    return Move("FLASH_ATTENTION", KV_CHUNKS[0], SMALL, 6, jnp.bfloat16)


def check(move, implementation, slots, **options):
    got = move.gather(device(move.source), slots, implementation=implementation, **options)
    assert_same(got, move.packed(move.rows(np.asarray(slots).tolist())), "gather")


# ---- Chunk forms


@pytest.mark.parametrize("chunk", KV_CHUNKS)
@pytest.mark.parametrize("pool", ["FLASHINFER_HND", "SGLANG_MHA", "CROSS_LAYER", "TPU_RAGGED"])
def test_every_form_of_a_chunk(pool, chunk, implementation):
    """A42 to A45, A52; B19: the slots are exactly as long as the tokens."""
    n = 12 if "page" in chunk else 13
    move = Move(pool, chunk, SMALL, 6, jnp.bfloat16)
    move.check(implementation, distinct_slots(24, n, 1), distinct_slots(24, n, 2))


@pytest.mark.parametrize("chunk", PLANE_CHUNKS)
def test_every_form_of_a_chunk_of_one_plane(chunk, implementation):
    """A42, A43 for MLA."""
    move = Move(padded(layouts.MLA, dim=11), chunk, ONE_PLANE, 6, jnp.uint8)
    move.check(implementation, distinct_slots(24, 12, 1), distinct_slots(24, 12, 2))


def test_equal_kv_in_any_layout_makes_equal_chunks(implementation):
    """A51, A49: gathered from one pool, scattered into a pool of every other layout, gathered again."""
    slots = distinct_slots(24, 24)
    first = Move("FLASH_ATTENTION", KV_CHUNKS[0], SMALL, 6, jnp.bfloat16)
    chunk = first.gather(device(first.source), slots, implementation=implementation)
    for name in ("FLASHINFER_HND", "VLLM_BHLNC", "PALLAS_PAGED", "V_TRANSPOSED", "FUSED_NHD"):
        other = Move(name, KV_CHUNKS[0], SMALL, 6, jnp.bfloat16)
        pages = other.scatter(device(other.target), chunk, slots[::-1], implementation=implementation)
        again = other.gather(pages, slots[::-1], implementation=implementation)
        assert_same(again, np.asarray(chunk), name)


def test_layers_of_a_slab_and_of_a_list(implementation):
    """A53: op on layers [a, b)."""
    sizes = SMALL._replace(layers=5)
    for pool, layers in itertools.product(("CROSS_LAYER", "VLLM_LHBNC", "SGLANG_MHA"), (range(1, 4), range(4, 5))):
        move = Move(pool, "token kv (head dim)", sizes, 3, jnp.int8, layers=layers)
        move.check(implementation, distinct_slots(12, 7, 1), distinct_slots(12, 7, 2))


# ---- Slots


@pytest.mark.parametrize("bad", [-1, -2, -24, INT32_MIN])
def test_a_negative_slot_gives_a_row_of_zeros(move, implementation, bad):
    """B2, B3: never counted from the end."""
    slots = np.array([5, bad, 23, bad, 0], np.int32)
    check(move, implementation, slots)
    got = move.gather(device(move.source), slots, implementation=implementation)
    assert not bits(got)[:, :, [1, 3]].any()


@pytest.mark.parametrize("bad", [24, 25, INT32_MAX])
def test_a_slot_past_the_pool_gives_zeros_where_it_is_skipped(move, implementation, bad):
    """B5, B6: eager with "skip" and traced, alike."""
    slots = np.array([5, bad, 23, bad, 0], np.int32)
    check(move, implementation, slots, out_of_range="skip")
    check(move, implementation, jnp.asarray(slots), out_of_range="skip")
    traced = jax.jit(lambda pages, slots: move.gather(pages, slots, implementation=implementation))
    assert_same(traced(device(move.source), slots), move.packed(move.rows(slots.tolist())), "traced")


def test_wide_slots_are_judged_by_their_true_value(move, implementation):
    """B7: 2^32 + 5 is not 5."""
    slots = np.array([2**32 + 5, 5, -(2**63), 2**40, 2**31, -(2**32) + 5], np.int64)
    check(move, implementation, slots, out_of_range="skip")
    check(move, implementation, np.array([2**63 + 5, 5], np.uint64), out_of_range="skip")


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int16, np.uint16, np.uint32, np.int64, np.uint64])
def test_every_integer_type_of_slots_is_right_by_value(move, implementation, dtype):
    """B8, B9: 200 does not become a negative int8."""
    slots = np.array([3, 23, 100, 120 if dtype == np.int8 else 200, 7]).astype(dtype)
    check(move, implementation, slots, out_of_range="skip")
    if np.dtype(dtype).itemsize < 8:
        check(move, implementation, jnp.asarray(slots), out_of_range="skip")


def test_slots_of_any_origin(move, implementation):
    """B10: a list, a list of NumPy integers, another device, pinned memory."""
    want = move.packed(move.rows([3, 9, 20]))
    slots = jnp.asarray([3, 9, 20], jnp.int32)
    pinned = jax.device_put(slots, slots.sharding.with_memory_kind("pinned_host"))
    for given in ([3, 9, 20], [np.int64(3), 9, np.uint8(20)], (3, 9, 20), pinned):
        for out_of_range in ("raise", "skip"):
            got = move.gather(device(move.source), given, implementation=implementation, out_of_range=out_of_range)
            assert_same(got, want, type(given).__name__)
    if len(jax.devices()) > 1:
        got = move.gather(device(move.source), jax.device_put(slots, jax.devices()[1]), implementation=implementation)
        assert_same(got, want, "another device")


def test_repeated_slots_give_the_row_each_time(move, implementation):
    """B12."""
    check(move, implementation, np.array([7, 7, -1, 7, 0, -1], np.int32))


def test_no_tokens(move, implementation):
    """B16, R8: eager, from an empty list, and traced."""
    for slots in (np.zeros(0, np.int32), [], jnp.zeros(0, jnp.int32)):
        got = move.gather(device(move.source), slots, implementation=implementation)
        assert got.shape == (2, 2, 0, 16)
    traced = jax.jit(lambda pages, slots: move.gather(pages, slots, implementation=implementation))
    assert traced(device(move.source), jnp.zeros(0, jnp.int32)).shape == (2, 2, 0, 16)


def test_slots_are_read_at_the_time_of_the_call(move, implementation):
    """B29."""
    slots = np.array([3, 9, 20], np.int32)
    want = move.packed(move.rows(slots))
    for out_of_range in ("raise", "skip"):
        given = slots.copy()
        got = move.gather(device(move.source), given, implementation=implementation, out_of_range=out_of_range)
        given[:] = 0
        assert_same(got, want, out_of_range)


def test_a_second_pool_is_read_and_not_the_first(move, implementation):
    """A59: nothing of an earlier pool is kept."""
    other = Move("FLASH_ATTENTION", KV_CHUNKS[0], SMALL, 6, jnp.bfloat16, seed=5)
    slots = distinct_slots(24, 5)
    check(move, implementation, slots)
    check(other, implementation, slots)


# ---- Sizes and dtypes


def test_sizes_of_one_and_two_everywhere(implementation):
    """A48, B17: heads, pages, layers, page size 2 and dim 1, in layouts that differ only by name."""
    sizes = Sizes(2, 2, 1, 2)
    for pool in ("FLASHINFER_NHD", "FLASHINFER_HND", "TPU_RAGGED", "VLLM_BHLNC"):
        Move(pool, KV_CHUNKS[0], sizes, 2, jnp.uint8).check(implementation, [3, 0], [1, 2])
    Move("FLASH_ATTENTION", KV_CHUNKS[0], Sizes(1, 1, 1, 1), 3, jnp.uint8).check(implementation, [2, 0], [1, 2])


@pytest.mark.parametrize("dtype", ["int4", "uint4", "bool", "complex64", "float4_e2m1fn", "int2"])
def test_what_has_no_whole_bytes_is_refused(dtype):
    """C10."""
    pages = (jnp.zeros((6, 4, 8), jnp.bool_).astype(getattr(jnp, dtype, dtype)),) * 2
    with pytest.raises(TypeError, match=f"pages: dtype {dtype}"):
        ops.gather(pages, [1], pool="MLA", chunk="token dim", sizes=ONE_PLANE)


EVERY_DTYPE = [jnp.bfloat16, jnp.float16, jnp.int8, jnp.uint8, jnp.int16, jnp.uint16]
EVERY_DTYPE += [getattr(ml_dtypes, name) for name in dir(ml_dtypes) if name.startswith("float8") and hasattr(jnp, name)]


@pytest.mark.parametrize("dtype", EVERY_DTYPE, ids=lambda d: np.dtype(d).name)
def test_every_bit_pattern_of_narrow_dtypes(dtype, implementation):
    """C6, C7, C8: all of 256 or 65,536 patterns, signalling NaNs among them, out and in."""
    size = np.dtype(dtype).itemsize
    patterns = np.arange(2 ** (8 * size), dtype=f"u{size}").reshape(-1, 16)
    move = Move("page token dim", "token dim", Sizes(1, 1, 16, 4, 1), len(patterns) // 4, dtype)
    move.source = (patterns.view(np.dtype(dtype)).reshape(-1, 4, 16),)
    n = move.num_slots
    move.check(implementation, distinct_slots(n, n, 1), distinct_slots(n, n, 2))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.int32, jnp.uint32])
def test_bit_patterns_of_wide_dtypes(dtype, implementation):
    """C6, C7: zeros of both signs, subnormals, infinities, quiet and signalling NaNs with payloads."""
    special = [0x80000000, 1, 0x807FFFFF, 0x7F800000, 0xFF800000, 0x7FC00000, 0x7F800001, 0xFFBFFFFF, 0xFFFFFFFF]
    move = Move("page token dim", "token dim", Sizes(1, 1, 9, 4, 1), 4, dtype)
    bits(move.source[0])  # random patterns, and one row of the special ones
    move.source[0].view(np.uint32)[2, 1] = special
    move.check(implementation, distinct_slots(16, 16, 1), distinct_slots(16, 16, 2))
