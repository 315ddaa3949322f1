"""CASES.md M20 to M28, F20, F24 to F26: what is refused about positions and ropes, before anything has happened."""

import dataclasses

import helpers
import jax
import jax.numpy as jnp
import layers as by_layer
import numpy as np
import pytest
import turning
from helpers import Model, assert_same
from turning import Moving, frequencies, rope

import jaxkv


def tables(count: int) -> jaxkv.Rope:
    angles = np.arange(count)[:, None].astype(np.float32) * frequencies(8)[None, :]
    return jaxkv.Rope.from_tables(np.cos(angles), np.sin(angles), pairing="half")


class World:
    """Chunks that can be loaded at other positions; each case below spoils one thing."""

    def __init__(self, turn=None, **more):
        self.model = Model("A2", rope=rope(8) if turn is None else turn, **more)
        self.moving = Moving(self.model, 20, limit=90)
        self.spec, self.cache = self.model.spec, self.model.poisoned()

    def load(self, positions=None, chunks=None, cache=None, **options):
        options["positions"] = self.moving.new if positions is None else positions
        chunks = self.moving.chunks if chunks is None else chunks
        return jaxkv.load(self.cache if cache is None else cache, chunks, self.moving.slots, **options)

    def new(self, token, value, dtype=np.int64):
        positions = self.moving.new.astype(dtype)
        positions[token] = value
        return positions

    def chunk(self, **changes):
        """The chunks, the second one changed."""
        first, second, *rest = self.moving.chunks
        return [first, dataclasses.replace(second, **changes), *rest]

    def old(self, value):
        positions = np.array(self.moving.chunks[1].positions, np.int64)
        positions[2] = value
        return positions

    def other(self, **changes):
        """A cache whose spec differs."""
        spec = dataclasses.replace(self.spec, **changes)
        return jaxkv.PagedCache(self.cache.pages, spec)

    def check_whole(self):
        """Nothing was written, and the same things work (M42)."""
        assert_same(self.cache.pages, self.model.arrays())
        if np.dtype(self.model.dtype).kind != "i":
            after = self.load()
            self.moving.check(self.moving.rows_of(after), inv_freq=frequencies(8))


MROPE = rope(8, mrope_section=[2, 1, 1])
CASES = {
    "M20 float64": (lambda w: w.load(w.moving.new / 1), TypeError, "positions: .*float64"),
    "F26 bfloat16": (lambda w: w.load(jnp.asarray(w.moving.new, jnp.bfloat16)), TypeError, "positions: .*bfloat16"),
    "M20 bool": (lambda w: w.load(w.moving.new > 3), TypeError, "positions: .*bool"),
    "M20 list of floats": (lambda w: w.load([0.5] * 20), TypeError, "positions: .*float64"),
    "M20 ragged": (lambda w: w.load([[1], [1, 2]]), TypeError, "positions: .*list"),
    "M20 strings": (lambda w: w.load(["1"] * 20), TypeError, "positions: .*<U1"),
    "M20 old ones": (
        lambda w: w.load(chunks=w.chunk(positions=np.zeros(8, np.float32))),
        TypeError,
        "old positions of chunk 1: .*float32",
    ),
    "M20 at a store": (
        lambda w: jaxkv.store(w.cache, np.arange(20), positions=np.ones(20)),
        TypeError,
        "positions: .*float64",
    ),
    "M21 negative": (lambda w: w.load(w.new(7, -5)), ValueError, r"token 7 .* to -5, .*0 to 16777215"),
    "M21 past the limit": (lambda w: w.load(w.new(7, 2**24)), ValueError, "token 7 .* to 16777216, .*16777215"),
    "M21 past int32": (lambda w: w.load(w.new(7, 2**40)), ValueError, f"token 7 .* to {2**40},"),
    "M21 past int64": (lambda w: w.load(w.new(7, 2**63 + 5, np.uint64)), ValueError, f"token 7 .* to {2**63 + 5},"),
    "M21 a wrapped negative": (lambda w: w.load(w.new(7, -(2**32) + 3)), ValueError, f"token 7 .* to {3 - 2**32},"),
    "M21 on a device": (lambda w: w.load(jnp.asarray(w.new(7, -5), jnp.int32)), ValueError, "token 7 .* to -5"),
    "M21 old negative": (
        lambda w: w.load(chunks=w.chunk(positions=w.old(-3))),
        ValueError,
        "token 10 .* from position -3 to",
    ),
    "M21 old past int32": (
        lambda w: w.load(chunks=w.chunk(positions=w.old(2**33))),
        ValueError,
        f"token 10 .* from position {2**33} to",
    ),
    "M22 old missing": (lambda w: w.load(chunks=w.chunk(positions=None)), ValueError, "chunk 1 .* 0 .* 8 rows"),
    "M22 too few": (
        lambda w: w.load(chunks=w.chunk(positions=np.arange(5))),
        ValueError,
        "chunk 1 carries 5 old positions for its 8 rows",
    ),
    "M22 too many": (
        lambda w: w.load(chunks=w.chunk(positions=np.arange(9))),
        ValueError,
        "chunk 1 carries 9 .* 8 rows",
    ),
    "M22 other rank": (
        lambda w: w.load(chunks=w.chunk(positions=np.zeros((3, 8), int))),
        ValueError,
        r"chunk 1: .*\(3, 8\).*\(8,\)",
    ),
    "M22 new too few": (lambda w: w.load(np.arange(19)), ValueError, r"positions: .*\(19,\), expected \(20,\)"),
    "M22 new too many": (lambda w: w.load(np.arange(21)), ValueError, r"positions: .*\(21,\), expected \(20,\)"),
    "M22 new of other rank": (
        lambda w: w.load(np.arange(60).reshape(3, 20)),
        ValueError,
        r"\(3, 20\), expected \(20,\)",
    ),
    "M22 a single number": (lambda w: w.load(np.int64(4)), ValueError, r"positions: .*\(\), expected"),
    "M22 stored too few": (
        lambda w: jaxkv.store(w.cache, np.arange(20), positions=np.arange(19)),
        ValueError,
        r"positions: .*\(19,\), expected \(20,\)",
    ),
    "M23": (
        lambda w: jaxkv.Rope.from_config(
            {"rope_theta": 1e4, "head_dim": 8, "rope_scaling": {"rope_type": "spiral", "factor": 2.0}}, pairing="half"
        ),
        ValueError,
        "spiral.*llama3",
    ),
    "M24 odd": (lambda w: rope(8, rotary_dim=7), ValueError, "width 7 must be even"),
    "M24 outside the row": (lambda w: w.other(rope_offset=1), ValueError, "width 8 at offset 1 in rows of 8"),
    "M24 negative offset": (lambda w: w.other(rope_offset=-1), ValueError, "offset -1"),
    "M24 wider than the row": (lambda w: w.other(rope=rope(10)), ValueError, "width 10 at offset 0 in rows of 8"),
    "M25 frequencies": (lambda w: rope(8, rotary_dim=12), ValueError, "4 frequencies .* 12, which takes 6"),
    "M25 number of layers": (lambda w: w.other(rope=(rope(8),) * 2), ValueError, "2 entries for 3 layers"),
    "M25 no rope": (lambda w: w.other(rope=(rope(8), None, "yarn")), TypeError, "layer 2, got str"),
    "M27 other base": (lambda w: w.load(cache=w.other(rope=rope(8, 5e5))), ValueError, "chunk 0 .*rope"),
    "M27 other pairing": (
        lambda w: w.load(cache=w.other(rope=rope(8, pairing="interleaved"))),
        ValueError,
        "half.*interleaved",
    ),
    "M27 other regime": (
        lambda w: w.load(cache=w.other(rope=rope(8, regime="longrope long"))),
        ValueError,
        "longrope long",
    ),
    "M27 none": (lambda w: w.load(cache=w.other(rope=None), positions=w.moving.new), ValueError, "rope"),
    "M27 per layer": (lambda w: w.load(cache=w.other(rope=(rope(8), rope(8), None))), ValueError, "rope"),
    "M27 without positions too": (
        lambda w: jaxkv.load(w.other(rope=rope(8, 5e5)), w.moving.chunks, w.moving.slots),
        ValueError,
        "chunk 0 .*rope",
    ),
    "two kinds of channels": (
        lambda w: jaxkv.plan(w.other(rope=(rope(8), rope(4), None)), (), [], positions=[]),
        NotImplementedError,
        "different channels",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_refused(case):
    """Type and words; raised before anything is written (R9), the same objects work afterwards (M42)."""
    call, error, words = CASES[case]
    world = World()
    with pytest.raises(error, match=words):
        call(world)
    world.check_whole()


def test_past_given_tables():
    """M21, F25: value and limit; old and new."""
    world = World(tables(100))
    with pytest.raises(ValueError, match=r"token 4 .* to 100, .*0 to 99"):
        world.load(world.new(4, 100))
    with pytest.raises(ValueError, match=r"token 10 .* from position 100 "):
        world.load(chunks=world.chunk(positions=world.old(100)))
    world.check_whole()
    far = Moving(Model("A2", rope=rope(8)), 20, limit=1 << 20)  # frequencies have no limit below 2^20
    assert far.bulk({}).shape[2] == 20


@pytest.mark.parametrize("dtype", ["int8", "uint8"])
def test_integers_cannot_be_turned(dtype):
    """M26: layer and dtype; without positions they move as ever (F33)."""
    model = Model("A2", dtype=dtype, rope=(None, rope(8), rope(8)))
    arrays, cache = model.random()
    chunks = jaxkv.store(cache, np.arange(20), chunk_tokens=8)
    for call in (jaxkv.load, jaxkv.plan):
        with pytest.raises(TypeError, match=rf"positions: the keys of layer 1 are {dtype}"):
            call(cache, chunks, np.arange(20), positions=np.arange(20))
    after = jaxkv.load(model.poisoned(), chunks, np.arange(20))
    assert_same(after.pages, model.written(model.arrays(), model.rows(arrays, range(20)), range(20)))
    assert_same(cache.pages, arrays)


def test_positions_of_three_components():
    """F21, M22: a scalar position is never applied to vectors, nor the reverse."""
    model = Model("A2", rope=MROPE)
    moving = Moving(model, 20, limit=90)
    cache = model.poisoned()
    for shape in ((20,), (2, 20), (20, 3), (3, 19)):
        with pytest.raises(ValueError, match=rf"positions: got shape \({shape[0]}.*expected \(3, 20\)"):
            jaxkv.load(cache, moving.chunks, moving.slots, positions=np.zeros(shape, int))
    flat = [dataclasses.replace(c, positions=np.arange(8)) for c in moving.chunks]
    with pytest.raises(ValueError, match=r"chunk 0: got shape \(8,\), expected \(3, 8\)"):
        jaxkv.load(cache, flat, moving.slots, positions=moving.new)
    bad = moving.new.copy()
    bad[1, 6] = -4
    with pytest.raises(ValueError, match=r"token 6 .* to \[.*-4.*\]"):
        jaxkv.load(cache, moving.chunks, moving.slots, positions=bad)
    assert_same(cache.pages, model.arrays())
    moving.check(moving.bulk({}))


def test_no_rope():
    """Positions without a rope to turn by; stored ones travel all the same."""
    model = Model("A2")
    _, cache = model.random()
    chunks = jaxkv.store(cache, np.arange(20), positions=np.arange(20) + 5, chunk_tokens=8)
    with pytest.raises(ValueError, match=r"positions: given, but .* no rope"):
        jaxkv.load(cache, chunks, np.arange(20), positions=np.arange(20))
    jaxkv.load(cache, chunks, np.arange(20))


def test_where_nothing_moves_nothing_is_refused():
    """F32, G8: of tokens that stay behind positions are not looked at; F33: without positions none are needed."""
    world = World()
    slots = world.moving.slots.copy()
    slots[3] = -1
    positions = world.new(3, -9)
    positions[0] = 2**40
    plan = jaxkv.plan(world.cache, world.moving.chunks, slots, positions=positions, skip_prefix=2)
    assert tuple(map(int, plan.counts)) == (17, 3, 0, 0)
    jaxkv.load(world.model.poisoned(), plan)
    bare = [dataclasses.replace(c, positions=None) for c in world.moving.chunks]
    for load in (jaxkv.load, by_layer.load):
        after = load(world.model.poisoned(), jaxkv.plan(world.spec, bare, world.moving.slots))
        assert_same(world.moving.rows_of(after), world.moving.rows)


@pytest.mark.parametrize("turn", [rope(8), tables(100)], ids=["frequencies", "tables"])
@pytest.mark.parametrize("how", ["skip", "traced", "layer by layer"])
def test_bad_positions_where_they_are_not_read(turn, how):
    """F25, F36, R6, R7, M41: the token does not move, and is counted; the others are as ever; one trace."""
    world = World(turn)
    moving, model = world.moving, world.model
    bad = moving.new.astype(np.int32)
    bad[[3, 9, 17]] = [-1, 2**24, -(2**31)]
    slots = moving.slots.copy()
    slots[9] = -1  # a skipped token's position is of no interest
    old = [np.array(c.positions) for c in moving.chunks]
    old[1][5] = -8
    chunks = tuple(dataclasses.replace(c, positions=p) for c, p in zip(moving.chunks, old, strict=True))
    traced = []

    def run(cache, chunks, slots, positions):
        traced.append(1)
        options = {} if how == "traced" else {"out_of_range": "skip"}
        plan = jaxkv.plan(cache, chunks, slots, positions=positions, **options)
        load = by_layer.load if how == "layer by layer" else jaxkv.load
        return load(cache, plan), plan.counts

    call = jax.jit(run) if how == "traced" else run
    after, counts = call(model.poisoned(), chunks, slots, bad)
    assert tuple(map(int, counts)) == (16, 1, 0, 3)
    moved = [t for t in range(20) if t not in (3, 9, 13, 17)]
    pages = helpers.snapshot(after.pages)
    rows = model.rows(pages, slots[moved])
    assert_same(pages, model.written(model.arrays(), rows, slots[moved]))
    for layer in range(3):
        keys = moving.rows[layer, 0][moved]
        turning.check_keys(rows[layer, 0], keys, turn, moving.old[moved], moving.new[moved], inv_freq=frequencies(8))
    # Other values, in range: the same program.
    after, counts = call(model.poisoned(), moving.chunks, moving.slots, moving.new.astype(np.int32))
    assert tuple(map(int, counts)) == (20, 0, 0, 0)
    moving.check(moving.rows_of(after), inv_freq=frequencies(8))
    if how == "traced":
        assert len(traced) == 1


def test_a_plan_is_refused_before_layer_0():
    """E23: whatever is wrong with any layer or chunk is found by `plan`, before a layer is sent."""
    world = World()
    with pytest.raises(ValueError, match="token 19 "):
        jaxkv.fetch_layers(jaxkv.plan(world.spec, world.moving.chunks, world.moving.slots, positions=world.new(19, -1)))
    world.check_whole()
