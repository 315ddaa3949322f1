"""CASES.md G: tokens between chunks, kept or zeroed, in bulk and layer by layer, turned keys or not."""

import dataclasses

import helpers
import jax
import jax.numpy as jnp
import layers as by_layer
import numpy as np
import pytest
import turning
from helpers import DTYPES, IMPLEMENTATIONS, Model, Scene, assert_same
from turning import rope

import jaxkv

LOADS = {
    **{name: lambda cache, plan, way=way: jaxkv.load(cache, plan, **way) for name, way in helpers.WAYS.items()},
    **{
        f"layer by layer {name}": lambda cache, plan, name=name: by_layer.load(cache, plan, implementation=name)
        for name in IMPLEMENTATIONS
    },
}
loads = pytest.mark.parametrize("load", LOADS.values(), ids=LOADS)


def check(load, scene, slots=None, gaps="zero", **options):
    """Loads into poisoned pages and compares with the oracle: bytes, counts and `plan.zeroed`."""
    slots = scene.slots if slots is None else slots
    prefix = options.get("skip_prefix", 0)
    want, counts = helpers.loaded(
        scene.model,
        scene.model.arrays(),
        scene.rows,
        slots,
        scene.starts,
        scene.ends,
        skip_prefix=prefix,
        zero=gaps == "zero",
    )
    cache = scene.model.poisoned()
    plan = jaxkv.plan(cache, scene.chunks, slots, starts=scene.starts, ends=scene.ends, gaps=gaps, **options)
    assert helpers.counts_of(plan) == counts
    gap = helpers.oracle.gap_tokens(scene.starts, scene.ends)
    assert np.flatnonzero(plan.zeroed).tolist() == (gap if gaps == "zero" else [])
    assert_same(load(cache, plan).pages, want)
    return plan


RANGES = {
    "one gap": ([0, 12], [8, 20]),
    "before and after nothing (G2)": ([9, 20], [12, 25]),
    "unsorted (G6)": ([20, 0, 12], [28, 4, 14]),
    "adjoining (G5)": ([4, 12], [12, 20]),
    "overlapping (G5)": ([4, 8], [12, 14]),
    "covered by a later one (G6)": ([0, 16, 6], [8, 20, 14]),
    "one chunk (G5)": ([7], [12]),
    "no chunks (G5)": ([], []),
    "empty chunk in the gap (G15)": ([0, 11, 20], [8, 11, 28]),
    "only empty chunks": ([3, 9], [3, 9]),
    "empty chunk beyond": ([0, 28], [8, 28]),
}


@loads
@pytest.mark.parametrize("gaps", ["keep", "zero"])
@pytest.mark.parametrize("ranges", RANGES)
def test_which_tokens(ranges, gaps, load):
    """G1, G2, G5, G6, G10, G12, G15."""
    check(load, Scene(Model("A2"), 28, *RANGES[ranges]), gaps=gaps)


@loads
def test_slots_that_are_not_there(load):
    """G3: nothing is written for such a gap token, and it is counted like any other."""
    scene = Scene(Model("A2"), 28, [0, 20], [8, 28])
    slots = scene.slots.copy()
    slots[[8, 9, 21]] = [-1, -(2**63), -5]
    check(load, scene, slots)
    slots[[10, 11]] = [28, 2**40]
    check(load, scene, slots, out_of_range="skip")
    slots[8:20] = -1
    slots[[10, 11]] = -1
    check(load, scene, slots)
    with pytest.raises(ValueError, match=r"slots: index 10 has slot 28.*28 slots"):
        check(load, scene, np.where(np.arange(28) == 10, 28, scene.slots))


@loads
@pytest.mark.parametrize("skip_prefix", [0, 5, 8, 9, 15, 20, 23, 99])
def test_skip_prefix(skip_prefix, load):
    """G4, D13: a gap token below it is untouched."""
    check(load, Scene(Model("A2"), 28, [0, 20], [8, 28]), skip_prefix=skip_prefix)


@pytest.mark.parametrize("dtype", DTYPES)
def test_zero_is_zero_bytes(dtype):
    """G7: also of types whose zero has other bits, or none."""
    scene = Scene(Model("A2", layers=1, dtype=dtype), 28, [0, 20], [8, 28])
    for load in LOADS.values():
        check(load, scene)


@pytest.mark.parametrize("pool", ["A1", "A5", "A24", "A26", "A36", "padded heads"])
def test_padding_is_not_zeroed(pool):
    """G1, A54: K and V rows of all layers; other layers, padding and neighbours stay 0xDE."""
    scene = Scene(helpers.small(pool, layers=2), 28, [0, 20], [8, 28])
    for load in LOADS.values():
        check(load, scene)


@loads
def test_a_slot_of_a_gap_and_of_a_chunk(load):
    """G9: the chunk's row wins, wherever it stands in the list; a row that does not move does not."""
    scene = Scene(Model("A2"), 28, [0, 20], [8, 28])
    slots = scene.slots.copy()
    slots[9], slots[10], slots[12] = slots[3], slots[25], slots[11]
    check(load, scene, slots)
    skipped = Scene(Model("A2"), 28, [0, 20], [8, 28])
    skipped.chunks = [dataclasses.replace(c, valid=np.asarray(c.valid) & (np.arange(8) != 3)) for c in skipped.chunks]
    valid = [np.arange(8) != 3] * 2
    want, _ = helpers.loaded(
        skipped.model, skipped.model.arrays(), skipped.rows, slots, [0, 20], [8, 28], valid=valid, zero=True
    )
    plan = jaxkv.plan(skipped.model.spec, skipped.chunks, slots, starts=[0, 20], ends=[8, 28], gaps="zero")
    assert_same(load(skipped.model.poisoned(), plan).pages, want)


@loads
def test_with_turned_keys(load):
    """G8: gap rows are zero whatever their positions, which need not be any; the rest turns."""
    model = Model("A2", rope=rope(8))
    made = turning.Moving(model, 28)
    chunks, starts, ends = [made.chunks[3], made.chunks[0]], [24, 0], [28, 8]
    new = made.new.copy()
    new[8:24:3] = -7
    new[9] = 2**40
    plan = jaxkv.plan(model.spec, chunks, made.slots, starts=starts, ends=ends, positions=new, gaps="zero")
    assert tuple(map(int, plan.counts)) == (28, 0, 0, 0)
    pages = helpers.snapshot(load(model.poisoned(), plan).pages)
    rows = model.rows(pages, made.slots)
    assert not helpers.raw(rows[:, :, 8:24]).any()
    there = np.r_[0:8, 24:28]
    for layer in range(3):
        turning.check_keys(rows[layer, 0][there], made.rows[layer, 0][there], rope(8), made.old[there], made.new[there])
    assert_same(rows[:, 1][:, there], made.rows[:, 1][:, there])
    assert_same(pages, model.written(model.arrays(), rows, made.slots))


def test_gaps_of_two_calls_interleaved():
    """G11: each zeroes its own."""
    scenes = [
        Scene(Model("A2"), 28, *RANGES[name], seed=seed) for seed, name in enumerate(["one gap", "unsorted (G6)"])
    ]
    plans = [jaxkv.plan(s.model.spec, s.chunks, s.slots, starts=s.starts, ends=s.ends, gaps="zero") for s in scenes]
    steps = [jaxkv.fetch_layers(plan) for plan in plans]
    pages = [list(s.model.poisoned().pages) for s in scenes]
    for layer in range(3):
        for at in (0, 1):
            pages[at][layer] = by_layer.write(pages[at][layer], next(steps[at]))
    for at, s in enumerate(scenes):
        want = helpers.loaded(s.model, s.model.arrays(), s.rows, s.slots, s.starts, s.ends, zero=True)[0]
        assert_same(pages[at], want)


def test_staging_never_reaches_a_gap():
    """G12, R13: gap slots keep what they had, call after call through the same staging."""
    scene = Scene(Model("A2"), 28, [0, 20], [8, 28])
    for load in LOADS.values():
        for _ in range(3):
            check(load, scene, gaps="keep")


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_inside_jit(implementation):
    """R5, G3, G10: traced slots; what is zeroed is known all the same, for the ranges are."""
    scene = Scene(Model("A2"), 28, [0, 20], [8, 28])

    @jax.jit
    def run(cache, chunks, slots):
        plan = jaxkv.plan(cache, chunks, slots, starts=[0, 20], ends=[8, 28], gaps="zero")
        return jaxkv.load(cache, plan, implementation=implementation), plan.counts, plan.zeroed

    for change in ({}, {8: -1, 9: 28, 10: 5, 3: 99}):
        slots = scene.slots.copy()
        for token, slot in change.items():
            slots[token] = slot
        after, counts, zeroed = run(scene.model.poisoned(), scene.chunks, jnp.asarray(slots, jnp.int32))
        want, expected = helpers.loaded(
            scene.model, scene.model.arrays(), scene.rows, slots, scene.starts, scene.ends, zero=True
        )
        assert_same(after.pages, want)
        assert {name: int(value) for name, value in counts._asdict().items()} == {**expected, "bad_position": 0}
        assert np.flatnonzero(zeroed).tolist() == list(range(8, 20))


def test_an_unknown_way():
    scene = Scene(Model("A2"), 28, [0, 20], [8, 28])
    with pytest.raises(ValueError, match=r"gaps: 'fill' is unknown, expected one of \('keep', 'zero'\)"):
        check(jaxkv.load, scene, gaps="fill")
