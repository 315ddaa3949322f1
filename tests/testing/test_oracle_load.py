"""The oracle's plans and rotation against answers written by hand."""

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from jaxkv.testing import oracle

bf16 = ml_dtypes.bfloat16


def test_plan_of_adjoining_chunks() -> None:
    table, counts = oracle.plan_rows([2, 3], [10, 11, 12, -1, 14], num_slots=14)
    assert table == [[10, 11], [12, -1, -1]]
    assert counts == {"moved": 3, "skipped": 1, "out_of_range": 1}


def test_plan_with_ranges_gaps_and_order() -> None:
    slots = list(range(100, 110))
    table, counts = oracle.plan_rows([2, 0, 3], slots, starts=[6, 3, 1], ends=[8, 3, 4])
    assert table == [[106, 107], [], [101, 102, 103]]
    assert counts == {"moved": 5, "skipped": 0, "out_of_range": 0}


def test_plan_skips_a_prefix_by_token_not_by_row() -> None:
    table, counts = oracle.plan_rows([2, 2], [5, 6, 7, 8], starts=[2, 0], skip_prefix=3)
    assert table == [[-1, 8], [-1, -1]]
    assert counts == {"moved": 1, "skipped": 3, "out_of_range": 0}


def test_plan_skips_invalid_rows_wherever_they_point() -> None:
    table, counts = oracle.plan_rows([3], [1, 99, 2], num_slots=4, valid=[[True, False, False]])
    assert table == [[1, -1, -1]]
    assert counts == {"moved": 1, "skipped": 2, "out_of_range": 0}


def test_plan_of_duplicates_counts_the_losers_as_moved() -> None:
    table, counts = oracle.plan_rows([3, 2], [4, 4, 5, 5, -1])
    assert table == [[-1, 4, -1], [5, -1]]
    assert counts == {"moved": 4, "skipped": 1, "out_of_range": 0}


def test_plan_lets_only_real_rows_compete() -> None:
    table, _ = oracle.plan_rows([2], [4, 4], valid=[[True, False]])
    assert table == [[4, -1]]


def test_plan_of_overlapping_chunks_goes_by_list_order() -> None:
    table, counts = oracle.plan_rows([3, 2], [0, 1, 2], starts=[0, 1])
    assert table == [[0, -1, -1], [1, 2]]
    assert counts["moved"] == 5


@pytest.mark.parametrize(
    "given",
    [
        {"starts": [0], "ends": [1]},
        {"starts": [0, 2], "ends": [2, 5]},
        {"starts": [-1, 2]},
        {"starts": [0, 9]},
    ],
)
def test_plan_refuses_ranges_that_do_not_fit(given: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"chunk|argument"):
        oracle.plan_rows([2, 2], range(10), **given)


def test_gaps() -> None:
    slots = [10, 11, 12, 13, -1, 15, 16, 17]
    assert oracle.gap_tokens([6, 1], [7, 3]) == [3, 4, 5]
    assert oracle.zero_slots([6, 1], [7, 3], slots) == [13, -1, 15]
    assert oracle.zero_slots([6, 1], [7, 3], slots, skip_prefix=5) == [15]
    assert oracle.zero_slots([6, 4, 1], [7, 4, 3], slots) == [13, -1, 15]
    assert oracle.zero_slots([1, 3], [3, 5], slots) == []
    assert oracle.zero_slots([2], [5], slots) == []
    assert oracle.zero_slots([], [], slots) == []
    assert oracle.zero_slots([7, 0], [7, 2], slots) == []


def test_rotation_by_a_quarter_turn() -> None:
    rows = np.array([1, 2, 3, 4, 9], np.float32).reshape(1, 1, 5)
    quarter = [np.pi / 2, 0.0]
    half = oracle.rotate(rows, quarter, [0], [1], "half", rotary_dim=4)
    assert half.reshape(-1) == pytest.approx([-3, 2, 1, 4, 9], abs=1e-6)
    interleaved = oracle.rotate(rows, quarter, [0], [1], "interleaved", rotary_dim=4)
    assert interleaved.reshape(-1) == pytest.approx([-2, 1, 3, 4, 9], abs=1e-6)
    window = oracle.rotate(rows, quarter[:1], [7], [6], "half", rotary_dim=2, offset=2)
    assert window.reshape(-1) == pytest.approx([1, 2, 4, -3, 9], abs=1e-6)


def test_rotation_there_and_back() -> None:
    rng = np.random.default_rng(0)
    rows = rng.standard_normal((3, 50, 4, 64))
    frequencies = 10000.0 ** -(np.arange(32) / 32)
    old, new = rng.integers(0, 10**5, (2, 50))
    moved = oracle.rotate(rows, frequencies, old, new)
    assert abs(moved - rows).max() > 1
    np.testing.assert_allclose(oracle.rotate(moved, frequencies, new, old), rows, atol=1e-12)
    norms = [np.hypot(r[..., :32], r[..., 32:]) for r in (moved, rows)]
    np.testing.assert_allclose(*norms, atol=1e-12)


def test_what_does_not_move_keeps_its_bits() -> None:
    rng = np.random.default_rng(1)
    rows = rng.integers(0, 2**16, (1, 6, 2, 16), dtype=np.uint16).view(bf16)
    moved = oracle.rotate(rows, [1.0, 0.1], [0, 1, 2, 3, 4, 5], [0, 2, 2, 4, 4, 6], rotary_dim=4)
    before, after = rows.view(np.uint16), moved.view(np.uint16)
    assert (after[:, ::2] == before[:, ::2]).all()
    assert (after[..., 4:] == before[..., 4:]).all()
    assert (after[:, 1::2, :, :4] != before[:, 1::2, :, :4]).any()


def test_nan_and_infinity_spoil_their_own_pair_only() -> None:
    rows = np.ones((1, 1, 8), bf16)
    rows[..., 1], rows[..., 6] = np.nan, np.inf
    moved = oracle.rotate(rows, [1.0, 1.0, 1.0, 1.0], [0], [1])
    assert np.isfinite(moved.astype(np.float32)).reshape(-1).tolist() == [
        True, False, False, True, True, False, False, True,
    ]  # fmt: skip


@pytest.mark.parametrize("dtype", [bf16, np.float16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2])
def test_rounding_happens_once(dtype: Any) -> None:
    # x cos by a half turn is -x: then choose cos so that the product lies just past a tie.
    info = ml_dtypes.finfo(dtype)
    one_ulp = float(info.eps)
    angle = np.arccos(1 - one_ulp / 4 - 2.0**-40)  # below 1 the spacing halves: a tie is at eps / 4
    rows = np.array([1, 0], dtype).reshape(1, 1, 2)
    moved = oracle.rotate(rows, [angle], [0], [1])
    assert float(moved[0, 0, 0]) == 1 - one_ulp / 2
    angle = np.arccos(1 - one_ulp / 4 + 2.0**-40)
    assert float(oracle.rotate(rows, [angle], [0], [1])[0, 0, 0]) == 1


@pytest.mark.parametrize("dtype", [ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2])
def test_eight_bits_saturate(dtype: Any) -> None:
    largest = float(ml_dtypes.finfo(dtype).max)
    rows = np.array([largest, -largest], dtype).reshape(1, 1, 2)
    moved = oracle.rotate(rows, [np.pi / 4], [0], [1]).astype(np.float64).reshape(-1)
    assert moved[0] == largest
    assert abs(moved[1]) < 1


@pytest.mark.parametrize(
    "given",
    [{"rotary_dim": 3}, {"rotary_dim": 8}, {"offset": 2}, {"pairing": "none"}, {"rotary_dim": 2}],
)
def test_rotation_refuses_a_window_that_does_not_fit(given: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"window|pairing"):
        oracle.rotate(np.zeros((1, 1, 4), np.float32), [1.0, 1.0], [0], [1], **given)
