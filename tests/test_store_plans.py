"""store with a plan: the same bytes as without, by every way, and what does not fit is refused."""

import copy
import pickle

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import WAYS, Model, assert_same, follow, stored

import jaxkv

ways = pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
SLOTS = np.random.default_rng(0).permutation(28)[:21]


@ways
@pytest.mark.parametrize("made_for", ["cache", "cache, all layers", "spec"])
@pytest.mark.parametrize("pool", ["A1", "A2", "A5"])
def test_a_plan_stores_what_its_slots_do(pool, made_for, way):
    """Once, again, and into older chunks."""
    model = Model(pool)
    arrays, cache = model.random()
    layers = None if "all" in made_for else 1
    of = model.spec if made_for == "spec" else cache
    plan = jaxkv.store_plan(of, SLOTS, chunk_tokens=8, layers=layers)
    older: tuple[jaxkv.Chunk, ...] = ()
    for _ in range(3):
        chunks = jaxkv.store(cache, plan, into=older, **way)
        stored(model, arrays, chunks, SLOTS, *follow(21, 8))
        older = chunks[:2]


@ways
def test_options_are_the_plans(way):
    model = Model("A2")
    arrays, cache = model.random()
    starts, ends = [12, 0, 5], [20, 5, 5]
    plan = jaxkv.store_plan(cache, SLOTS, starts=starts, ends=ends, skip_prefix=3)
    chunks = jaxkv.store(cache, plan, format="KV_2TD", **way)
    stored(model, arrays, chunks, SLOTS, starts, ends, skip_prefix=3)
    assert chunks[0].num_rows == 8  # the longest range

    far = SLOTS.copy()
    far[[2, 9]] = 28, 2**31 - 1
    plan = jaxkv.store_plan(model.spec, far, chunk_tokens=8, out_of_range="skip", positions=np.arange(21) + 5)
    chunks = jaxkv.store(cache, plan, **way)
    assert [np.flatnonzero(~c.valid[: c.num_tokens]).tolist() for c in chunks] == [[2], [1], []]
    assert np.asarray(chunks[1].positions).tolist() == list(range(13, 21))
    stored(model, arrays, jaxkv.store(cache, far, chunk_tokens=8, out_of_range="skip", **way), far, *follow(21, 8))


@ways
def test_with_and_without_a_plan_one_program_serves(way):
    """I6: what one compiled, the other finds."""
    _, cache = Model("A2", pages=30).random()
    jax.block_until_ready(jaxkv.store(cache, SLOTS, chunk_tokens=8, **way))
    with helpers.compilations() as compiled:
        jaxkv.store(cache, jaxkv.store_plan(cache, SLOTS, chunk_tokens=8), **way)
        jaxkv.store(cache, jaxkv.store_plan(cache, SLOTS, chunk_tokens=8, layers=None), **way)
    assert not compiled


@pytest.mark.parametrize("positions", [None, jnp.arange(21), np.arange(21)])
def test_inside_jit_and_then_outside(positions):
    """What is traced is not kept with the plan, by whichever call."""
    model = Model("A2")
    arrays, cache = model.random()
    plan = jaxkv.store_plan(cache, SLOTS, chunk_tokens=8, positions=positions)
    stored(model, arrays, jax.jit(lambda c: jaxkv.store(c, plan))(cache), SLOTS, *follow(21, 8))
    jax.jit(lambda page: jaxkv.store_layer(page, plan, layer=0))(cache.pages[0])
    stored(model, arrays, jaxkv.store(cache, plan), SLOTS, *follow(21, 8))
    part = jaxkv.store_layer(cache.pages[0], plan, layer=0)
    assert np.asarray(part.positions)[0].tolist() == list(range(8))
    pickle.dumps(plan)


def test_a_plan_does_not_need_what_it_was_made_of():
    """Slots and positions may be written over, deleted or donated afterwards; those that are gone are named at once."""
    model = Model("A2")
    arrays, cache = model.random()
    slots, positions = SLOTS.astype(np.int32), jnp.arange(21)
    plan = jaxkv.store_plan(cache, slots, chunk_tokens=8, positions=positions)
    slots[:] = 0
    positions.delete()
    older = jaxkv.store(cache, SLOTS, chunk_tokens=8)
    stored(model, arrays, jaxkv.store(cache, plan, into=older), SLOTS, *follow(21, 8))
    older = jaxkv.store(cache, SLOTS, chunk_tokens=8)
    for call in (jaxkv.store, jaxkv.store_plan):
        with pytest.raises(ValueError, match="positions: this array was deleted"):
            call(cache, SLOTS, chunk_tokens=8, positions=positions, **({"into": older} if call is jaxkv.store else {}))
    assert not any(array.is_deleted() for chunk in older for array in chunk.data)


def test_a_plan_and_its_chunks_do_not_change():
    """What all stores of a plan share is read-only."""
    _, cache = Model("A2").random()
    plan = jaxkv.store_plan(cache, SLOTS, chunk_tokens=8)
    (chunk, *_) = jaxkv.store(cache, plan)
    for table in (plan.slots, chunk.valid, chunk.positions):
        with pytest.raises(ValueError, match="read-only"):
            table[0] = 0


def test_bad_arguments_of_a_plan():
    """M42."""
    _, cache = Model("A2").random()
    for layers in (0, -1, True, 1.5, "a"):
        with pytest.raises(ValueError, match="layers: expected an int of at least 1"):
            jaxkv.store_plan(cache, SLOTS, chunk_tokens=8, layers=layers)
    with pytest.raises(TypeError, match="tuning: expected a Tuning"):
        jaxkv.store_plan(cache, SLOTS, chunk_tokens=8, tuning="x")
    load_plan = jaxkv.plan(cache, jaxkv.store(cache, SLOTS, chunk_tokens=8), SLOTS)
    with pytest.raises(TypeError, match="slots: expected slots or a StorePlan, got a Plan"):
        jaxkv.store(cache, load_plan)
    with pytest.raises(TypeError, match="slots: expected slots or a StorePlan, got a Plan"):
        jaxkv.store_layer(cache.pages[0], load_plan, layer=0)
    with pytest.raises(TypeError, match="slots: a StorePlan, which is for store"):
        jaxkv.load(cache, load_plan.chunks, jaxkv.store_plan(cache, SLOTS))
    with pytest.raises(TypeError, match="chunks: expected chunks or a Plan, got a StorePlan"):
        jaxkv.load(cache, jaxkv.store_plan(cache, SLOTS))
    store_plan, of_layer = jaxkv.store_plan(cache, SLOTS), jaxkv.store_plan(cache.spec, SLOTS)
    calls = [
        lambda **how: jaxkv.store(cache, SLOTS, **how),
        lambda **how: jaxkv.store(cache, store_plan, **how),
        lambda **how: jaxkv.load(cache, load_plan, donate=False, **how),
        lambda **how: jaxkv.store_layer(cache.pages[0], of_layer, layer=0, **how),
    ]
    for call in calls:
        call(path="overlapped")  # what a plan keeps of it does not hide what comes next
        with pytest.raises(ValueError, match=r"path: array.* is unknown"):
            call(path=np.asarray(["direct", "engine"]))
        with pytest.raises(ValueError, match=r"implementation: array.* is unknown"):
            call(implementation=np.asarray(["xla", "ffi"]))


def test_a_plan_for_a_store_has_its_rows():
    """Those of a store by itself, so that what was compiled for it serves, and its chunks may be written into."""
    _, cache = Model("A2", pages=200).random()
    plan = jaxkv.store_plan(cache, np.arange(600), layers=None)
    assert repr(plan).startswith("StorePlan(3 chunks of 256 rows")
    older = jaxkv.store(cache, np.arange(600))
    with helpers.compilations() as compiled:
        chunks = jaxkv.store(cache, plan)
    assert not compiled
    jaxkv.store(cache, plan, into=older)
    assert [chunk.num_rows for chunk in chunks] == [256] * 3
    small = jaxkv.Tuning(chunk_tokens=64)
    assert jaxkv.store_plan(cache, np.arange(600), layers=None, tuning=small).rows.slots.shape == (10, 64)


@pytest.mark.parametrize("how", [copy.copy, copy.deepcopy, lambda plan: pickle.loads(pickle.dumps(plan))])
def test_copies_of_a_plan(how):
    model = Model("A2")
    arrays, cache = model.random()
    plan = jaxkv.store_plan(cache, SLOTS, chunk_tokens=8)
    jaxkv.store(cache, plan)
    stored(model, arrays, jaxkv.store(cache, how(plan)), SLOTS, *follow(21, 8))


@pytest.mark.parametrize("option", ["starts", "ends", "positions", "chunk_tokens", "skip_prefix", "out_of_range"])
def test_a_plan_and_an_option_are_refused(option):
    """M42."""
    _, cache = Model("A2").random()
    plan = jaxkv.store_plan(cache, SLOTS, chunk_tokens=8)
    value = {"skip_prefix": 2, "out_of_range": "skip", "chunk_tokens": 8}.get(option, np.arange(21))
    with pytest.raises(TypeError, match=rf"slots: a StorePlan has its options already, got \['{option}'\]"):
        jaxkv.store(cache, plan, **{option: value})


def test_a_plan_of_another_cache_is_refused():
    """M42: the pages of another shape, or fewer of them."""
    large, small = Model("A2"), Model("A2", pages=5)
    plan = jaxkv.store_plan(large.random()[1], SLOTS, chunk_tokens=8)
    arrays, cache = small.random()
    with pytest.raises(ValueError, match=r"slots: row \d of chunk \d has slot 2\d, but the pool has 20 slots"):
        jaxkv.store(cache, plan)
    with pytest.raises(ValueError, match=r"slots: a StorePlan .* its page_size is 4, the cache's 2"):
        jaxkv.store(Model("A2", page_size=2).random()[1], plan)
    low = np.arange(20)
    assert_same(cache.pages, arrays)
    stored(small, arrays, jaxkv.store(cache, jaxkv.store_plan(large.spec, low, chunk_tokens=8)), low, *follow(20, 8))


@pytest.mark.skipif("direct" not in WAYS, reason="the extension is not built")
def test_a_plan_does_not_grow_with_the_ways_it_is_stored(monkeypatch):
    """Into none, some or as many older chunks: what is on the device for one way replaces that for the one before."""
    monkeypatch.setattr(jaxkv.ways, "choose", lambda *args, **options: jaxkv.ways.Way("engine", 2, 8, 1))
    model = Model("A2", pages=30)
    arrays, cache = model.random()
    slots = np.arange(96)
    plan = jaxkv.store_plan(cache, slots, chunk_tokens=8)
    sizes = set()
    for count in (0, 1, 5, 12, 0, 7):
        older = jaxkv.store(cache, slots[: 8 * count], chunk_tokens=8)
        chunks = jaxkv.store(cache, plan, into=older)
        helpers.stored(model, arrays, chunks, slots, *helpers.follow(96, 8))
        held = [x for x in jax.tree.leaves(list(vars(plan).values())) if isinstance(x, jax.Array)]
        sizes.add(sum(x.nbytes for x in held))
    assert max(sizes) <= 2 * 4 * 96  # the tables of the last way, and the one that store_layer would take
