"""scatter: which bytes change and which do not, whatever the indices, sizes and duplicates."""

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv.layout import Sizes

from .layout_rows import ROWS
from .moves import KV_CHUNKS, Move, assert_same, device, distinct_slots, implementations

SMALL = Sizes(layers=2, heads=2, dim=8, page_size=4)
INT32_MIN, INT32_MAX = -(2**31), 2**31 - 1


@pytest.fixture(scope="module")
def move():
    """6 pages of 4 tokens, S = 24."""
    return Move("FLASHINFER_HND", KV_CHUNKS[0], SMALL, 6, jnp.bfloat16)


def check(move, implementation, slots, **options):
    """Rows of slots 0 to n - 1 of the source go to `slots` of the poisoned target."""
    rows = move.rows(range(len(slots)))
    target = device(move.target)
    got = move.scatter(target, device(move.packed(rows)), slots, implementation=implementation, **options)
    assert_same(got, move.written(rows, np.asarray(slots).tolist()), "scatter")
    assert_same(target, move.target, "the argument")


# ---- Slots


@pytest.mark.parametrize("bad", [-1, -2, -24, INT32_MIN])
def test_a_negative_slot_writes_nothing(move, implementation, bad):
    """B1, B3, B13, R3."""
    check(move, implementation, np.array([5, bad, 23, bad, 0], np.int32))


@pytest.mark.parametrize("bad", [24, 25, INT32_MAX])
def test_a_slot_past_the_pool_writes_nothing_where_it_is_skipped(move, implementation, bad):
    """B4, B6, B13: eager with "skip" and traced, alike."""
    slots = np.array([5, bad, 23, bad, 0], np.int32)
    check(move, implementation, slots, out_of_range="skip")
    check(move, implementation, jnp.asarray(slots), out_of_range="skip")
    rows = move.rows(range(5))
    traced = jax.jit(lambda *args: move.scatter(*args, implementation=implementation))
    got = traced(device(move.target), device(move.packed(rows)), slots)
    assert_same(got, move.written(rows, slots.tolist()), "traced")


def test_wide_slots_are_judged_by_their_true_value(move, implementation):
    """B7, B9."""
    slots = np.array([2**32 + 5, 5, -(2**63), 2**40, 2**31, -(2**32) + 5], np.int64)
    check(move, implementation, slots, out_of_range="skip")
    check(move, implementation, np.array([200, 3, 24, 23], np.uint8), out_of_range="skip")


@pytest.mark.parametrize(
    "slots",
    [
        [7, 7],
        [7, -1, 7, 3, 7, 3],
        [0] * 20,
        [23, 0, 23, 0, 1, 23],
        [-1, 24, -1, 24, 24, 5, 5],
    ],
    ids=str,
)
def test_of_equal_slots_the_last_wins(move, implementation, slots):
    """B11, B13: whole rows, all layers alike; eager, on the device, and traced."""
    check(move, implementation, slots, out_of_range="skip")
    check(move, implementation, jnp.asarray(slots, jnp.int32), out_of_range="skip")


def test_the_last_wins_a_hundred_times(implementation):
    """B11: the same on 100 runs, of rows long enough to be written by many threads."""
    move = Move("FLASH_ATTENTION", KV_CHUNKS[0], Sizes(2, 8, 128, 16), 4, jnp.bfloat16)
    slots = np.random.default_rng(0).integers(0, 4, 64).astype(np.int32)
    rows = move.rows(range(64))
    want, chunk = move.written(rows, slots), device(move.packed(rows))
    pages = device(move.target)
    for _ in range(100):
        assert_same(move.scatter(pages, chunk, slots, implementation=implementation), want, "again")


def test_a_broken_promise_of_unique_slots_harms_only_those_slots(move, implementation):
    """B14."""
    slots = np.array([7, 3, 7, -1, -1, 20], np.int32)
    rows = move.rows(range(6))
    got = move.scatter(
        device(move.target), device(move.packed(rows)), slots, unique_slots=True, implementation=implementation
    )
    # Slot 7 may hold anything: with it set to what it got, all else is as it must be.
    want = move.written(move.rows([7], got), [7], target=move.written(rows, slots))
    assert_same(got, want, "all but slot 7")


def test_unique_slots_keep_their_promise(move, implementation):
    check(move, implementation, distinct_slots(24, 17), unique_slots=True)
    repeated_outside = np.array([-1, 24, -1, 5, 24, INT32_MAX], np.int32)
    check(move, implementation, repeated_outside, unique_slots=True, out_of_range="skip")


def test_nothing_to_do_changes_nothing(move, implementation):
    """B15, B16, R8."""
    check(move, implementation, np.full(5, -1, np.int32))
    check(move, implementation, [])
    check(move, implementation, jnp.zeros(0, jnp.int32))


def test_all_of_the_pool(move, implementation):
    """A55, B31: page 0, the last page, and every page in another physical order."""
    check(move, implementation, distinct_slots(24, 24))
    check(move, implementation, np.arange(24, dtype=np.int32)[::-1])


def test_slots_are_read_at_the_time_of_the_call(move, implementation):
    """B29."""
    rows = move.rows(range(3))
    for out_of_range in ("raise", "skip"):
        slots = np.array([3, 9, 20], np.int32)
        got = move.scatter(
            device(move.target),
            device(move.packed(rows)),
            slots,
            implementation=implementation,
            out_of_range=out_of_range,
        )
        slots[:] = 0
        assert_same(got, move.written(rows, [3, 9, 20]), out_of_range)


NUM = 16
_indices = st.one_of(
    st.integers(-3, 27), st.sampled_from([INT32_MIN, INT32_MAX, -24, 24, 2**30]), st.just(5), st.just(-1)
)


@pytest.mark.parametrize("pool", ["FLASHINFER_HND", "VLLM_LHBNC"])
@hypothesis.settings(max_examples=60)
@hypothesis.given(*[st.lists(_indices, min_size=NUM, max_size=NUM)] * 2)
def test_any_pattern_of_slots(pool, take, slots):
    """B1 to B15 in any mixture, in and out, both implementations: one compiled program for all of them."""
    move, programs = _programs(pool)
    rows = move.rows(take)
    want = (move.packed(rows), move.written(rows, slots))
    for name, program in programs.items():
        got = program(move.source, move.target, np.array(take, np.int32), np.array(slots, np.int32))
        assert_same(got, want, name)


_made = {}


def _programs(pool):
    if pool not in _made:
        move = Move(pool, KV_CHUNKS[0], SMALL, 6, jnp.bfloat16)

        def program(implementation):
            def run(source, target, take, put):
                rows = move.gather(source, take, implementation=implementation)
                return rows, move.scatter(target, rows, put, implementation=implementation)

            return jax.jit(run)

        _made[pool] = move, {name: program(name) for name in implementations()}
    return _made[pool]


# ---- Sizes


def test_a_hundred_thousand_tiny_rows(implementation):
    """C12, B25: page size 1, the last page among them."""
    move = Move("page token dim", "token dim", Sizes(1, 1, 3, 1, 1), 120_000, jnp.uint8)
    move.check(implementation, distinct_slots(120_000, 100_000, 1), distinct_slots(120_000, 100_000, 2))


@pytest.mark.parametrize("layers", [1, 5, 33])
def test_any_number_of_layers(implementation, layers):
    """C13; more layers are in the grid and, past those of one launch, in the GPU's tests."""
    move = Move("MLA", "1 layer token dim", Sizes(layers, 1, 5, 2, 1), 3, jnp.uint8)
    move.check(implementation, distinct_slots(6, 4, 1), distinct_slots(6, 4, 2))


def test_a_wide_row(implementation):
    """C14: 128 heads of 576."""
    move = Move("FLASHINFER_HND", KV_CHUNKS[0], Sizes(1, 128, 576, 2), 3, jnp.uint8)
    move.check(implementation, distinct_slots(6, 3, 1), distinct_slots(6, 3, 2))


@pytest.mark.parametrize("name", ["A26", "A36-token"])
def test_padding_never_enters_a_chunk_and_is_never_written(implementation, name):
    """A54: the oracle's target is poison in the padding too."""
    row = ROWS[name]
    chunk = KV_CHUNKS[1] if row.sizes.planes == 2 else "token dim"
    move = Move(row.layout, chunk, row.sizes, row.num_pages, row.dtype, shapes=row.shapes)
    move.check(implementation, np.arange(move.num_slots), np.arange(move.num_slots)[::-1])
    chunk = move.gather(device(move.target), [0, 1], implementation=implementation)
    assert all(part.size == 2 * row.sizes.row for part in jax.tree.leaves(chunk))
