"""The acceptance grid, sampled: each value of each axis, random cells, every row width; all pairs with `-m grid`."""

import os
import random

import jax.numpy as jnp
import pytest

from jaxkv.layout import AXES, Sizes

from . import grid
from .moves import Move, distinct_slots

SEED = int(os.environ.get("JAXKV_GRID_SEED", "20251"))

# Elements: the largest values of every axis fit into the first, the second keeps random cells quick.
LARGE, SMALL = 1_500_000, 400_000

EACH = grid.each_value(LARGE)
RANDOM = grid.random_cells(40, SEED, SMALL)


@pytest.mark.parametrize("number", range(len(EACH)))
def test_each_value_of_each_axis(number, implementation):
    grid.run(EACH[number], implementation, seed=number)


@pytest.mark.parametrize("number", range(len(RANDOM)))
def test_random_cells(number, implementation):
    """Five patterns of slots each: 200 cells. Another sample: JAXKV_GRID_SEED."""
    print(f"JAXKV_GRID_SEED={SEED}")
    grid.run(RANDOM[number], implementation, seed=SEED + number, patterns=5)


@pytest.mark.parametrize("row_bytes", grid.ROW_BYTES)
def test_each_width_of_row(row_bytes, implementation):
    """C1, C2, C9, and B18: no condition on the width; a page of five, and a second layer at an odd offset."""
    move = Move("layer page token dim", "1 layer token dim", Sizes(2, 1, row_bytes, 5, 1), 3, jnp.uint8, seed=row_bytes)
    move.check(implementation, distinct_slots(15, 6, 1), distinct_slots(15, 6, 2))


def test_the_sample_has_every_value():
    for axis, values in grid.AXES.items():
        assert {getattr(cell, axis) for cell in EACH} >= set(values)


@pytest.mark.grid
@pytest.mark.parametrize("part", range(64))
def test_each_pair_of_values(part, implementation):
    """On request: every two values of two axes together at least once."""
    for number, cell in list(enumerate(_pairs()))[part::64]:
        grid.run(cell, implementation, seed=number)


_all_pairs = []


def _pairs():
    if not _all_pairs:
        _all_pairs.extend(grid.each_pair(SEED, SMALL * 4))
    return _all_pairs


@pytest.mark.grid
@pytest.mark.parametrize("part", range(10))
def test_a_thousand_random_orders_and_fusings(part, implementation):
    """A58 through the ops (fewer of the XLA form, which compiles long); test_layout compares the addresses alone."""
    rng = random.Random(part)
    for number in range(100 if implementation == "ffi" else 20):
        order = rng.sample(AXES, 6)
        cuts = sorted(rng.sample(range(1, 6), rng.randrange(6)))
        units = [order[a:b] for a, b in zip([0, *cuts], [*cuts, 6], strict=True)]
        sentence = " ".join(unit[0] if len(unit) == 1 else f"({' '.join(unit)})" for unit in units)
        sizes = Sizes(*(rng.randint(1, 5) for _ in range(4)))
        pages = rng.randint(1, 5)
        move = Move(sentence, rng.choice(grid.KV_CHUNKS[:3]), sizes, pages, jnp.bfloat16, seed=number)
        slots = pages * sizes.page_size
        move.check(implementation, distinct_slots(slots, 3, 1), distinct_slots(slots, 3, 2))
