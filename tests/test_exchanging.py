"""exchange against what it stands for: a store, then a load."""

import dataclasses

import helpers
import jax
import numpy as np
import pytest
from exchanges import check, scene_of
from helpers import IMPLEMENTATIONS, WAYS, Model, Scene, assert_same, follow, stored

import jaxkv
from jaxkv import exchanging
from jaxkv.ops import exchange, pinned

ways = pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)


@ways
@pytest.mark.parametrize("pool", ["A1", "A2", "A5", "A24"])
@pytest.mark.parametrize(("out", "into"), [(16, 16), (5, 20), (20, 3), (8, 8), (0, 8), (8, 0)])
def test_both_ways(pool, out, into, way):
    model = Model(pool, pages=12)
    check(scene_of(model, into, first=24), np.random.default_rng(2).permutation(24)[:out], model=model, **way)


@ways
def test_what_goes_is_what_was_there_before(way):
    """E10: the same slots go and come, all of them, some, and one."""
    model = Model("A2", pages=12)
    scene = scene_of(model, 20, first=24)
    for going in (scene.slots, np.arange(12, 32), np.asarray([0, 1, 30])):
        check(scene, going, model=model, **way)


@ways
@pytest.mark.parametrize("layers_per_array", [None, 1])
def test_older_chunks_and_other_formats(layers_per_array, way):
    model = Model("A2", pages=12)
    scene = scene_of(model, 20, first=24)
    going = np.arange(24)
    format = jaxkv.ChunkFormat("token kv (head dim)", layers_per_array) if layers_per_array else jaxkv.KV_2LTD
    chunks, _ = check(scene, going, format=format, **way)
    again, _ = check(scene, going, format=format, older=chunks, **way)
    fewer, _ = check(scene, going, format=format, older=again[:2], **way)
    assert all(array.is_deleted() for chunk in (*chunks, *again[:2]) for array in chunk.data)
    jax.block_until_ready([chunk.data for chunk in fewer])


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_gaps_and_negative_slots(implementation):
    model = Model("A2", pages=12)
    arrays, cache = model.random(3)
    scene = Scene(model, 20, [0, 12], [8, 20])
    going = np.asarray([1, -1, 3])
    slots = np.arange(24, 44)
    plan = jaxkv.plan(cache, scene.chunks, slots, starts=[0, 12], ends=[8, 20], gaps="zero")
    out = jaxkv.store_plan(cache, going, chunk_tokens=8)
    chunks, after = jaxkv.exchange(cache, out, plan, implementation=implementation)
    stored(model, arrays, chunks, going, [0], [3])
    want = model.written(arrays, np.concatenate(scene.rows, axis=2), np.concatenate([slots[:8], slots[12:20]]))
    assert_same(after.pages, model.zeroed(want, slots[8:12]))


def test_inside_jit():
    model = Model("A2", pages=12)
    scene = scene_of(model, 20, first=24)
    arrays, cache = model.random(3)
    out = jaxkv.store_plan(cache, np.arange(20), chunk_tokens=8)
    plan = jaxkv.plan(cache, scene.chunks, scene.slots)
    chunks, after = jax.jit(lambda c: jaxkv.exchange(c, out, plan))(cache)
    stored(model, arrays, chunks, np.arange(20), *follow(20, 8))
    assert_same(after.pages, model.written(arrays, np.concatenate(scene.rows, axis=2), scene.slots))


def test_what_is_refused():
    """M42: named, before anything is launched; cache and chunks are whole."""
    model = Model("A2", pages=12)
    scene = scene_of(model, 16, first=24)
    arrays, cache = model.random(3)
    out, plan = jaxkv.store_plan(cache, np.arange(16), chunk_tokens=8), jaxkv.plan(cache, scene.chunks, scene.slots)
    older = jaxkv.store(cache, out)
    one = scene.chunks[0]
    small, twice = Model("A2", pages=5), dataclasses.replace(cache, pages=(cache.pages[0],) * 3)
    cases = [
        ((cache.pages, out, plan), {}, TypeError, "cache: expected a PagedCache"),
        ((cache, np.arange(16), plan), {}, TypeError, "going: expected a StorePlan, got ndarray"),
        ((cache, out, scene.chunks), {}, TypeError, "coming: expected a Plan, got tuple"),
        ((cache, out, plan), {"into": 3}, TypeError, "into: expected a sequence"),
        ((cache, out, plan), {"into": [one, one]}, ValueError, "into: chunk 1 was deleted, or is given twice"),
        ((cache, out, plan), {"path": "fast"}, ValueError, "path: 'fast'"),
        ((cache, out, plan), {"path": "direct", "implementation": "xla"}, RuntimeError, "path: 'direct' is not"),
        ((cache, out, plan), {"format": "token"}, ValueError, "token"),
        ((small.random()[1], out, plan), {}, ValueError, "pool has 20 slots"),
        ((cache, out, plan), {"into": [older[0], one]}, ValueError, "into: chunk 1 is one of those that come"),
        ((Model("A2", page_size=2).random()[1], out, plan), {}, ValueError, "going: a StorePlan .* page_size"),
        ((twice, out, plan), {}, ValueError, "pages: arrays 0 and 1 are one array"),
    ]
    for args, options, error, words in cases:
        with pytest.raises(error, match=words):
            jaxkv.exchange(*args, **options)
    assert_same(cache.pages, arrays)
    assert not any(array.is_deleted() for chunk in (*older, *scene.chunks) for array in chunk.data)
    helpers.stored(model, arrays, jaxkv.exchange(cache, out, plan, into=older)[0], np.arange(16), *follow(16, 8))


def test_what_is_past_the_pool_takes_no_memory():
    """B11: slots of a plan that was made without the pool, and leaves such out."""
    model = Model("A2", pages=12)
    scene = scene_of(model, 16, first=24)
    arrays, cache = model.random(3)
    far = np.asarray([0, 2**31 - 2, 10**9, -5, 3])
    out = jaxkv.store_plan(model.spec, far, chunk_tokens=8, out_of_range="skip")
    plan = jaxkv.plan(cache, scene.chunks, scene.slots)
    chunks, after = jaxkv.exchange(cache, out, plan)
    stored(model, arrays, chunks, far, [0], [5])
    assert_same(after.pages, model.written(arrays, np.concatenate(scene.rows, axis=2), scene.slots))


def test_what_fails_after_the_store_carries_cache_and_chunks(monkeypatch):
    model = Model("A2", pages=12)
    scene = scene_of(model, 16, first=24)
    arrays, cache = model.random(3)
    out, plan = jaxkv.store_plan(cache, np.arange(16), chunk_tokens=8), jaxkv.plan(cache, scene.chunks, scene.slots)

    def fails(*args, **options):
        raise RuntimeError("no memory")

    monkeypatch.setattr(exchanging, "load", fails)
    with pytest.raises(RuntimeError, match="no memory") as caught:
        jaxkv.exchange(cache, out, plan)
    stored(model, arrays, caught.value.chunks, np.arange(16), *follow(16, 8))


@pytest.mark.skipif("direct" not in WAYS, reason="the extension is not built")
def test_a_chunk_that_comes_to_two_places_takes_two_calls(monkeypatch):
    """Cut as on a GPU's engine path, where one operation would refuse an array that is there twice."""
    monkeypatch.setattr(jaxkv.ways, "choose", lambda *args, **options: jaxkv.ways.Way("engine", 0, 8, 1))
    model = Model("A2", pages=12)
    scene = scene_of(model, 8, first=24)
    arrays, cache = model.random(0)
    out = jaxkv.store_plan(cache, np.arange(16), chunk_tokens=8, layers=None)
    slots = np.concatenate([scene.slots, scene.slots + 12])
    chunks, after = jaxkv.exchange(cache, out, jaxkv.plan(cache, [*scene.chunks, *scene.chunks], slots))
    stored(model, arrays, chunks, np.arange(16), *follow(16, 8))
    assert_same(after.pages, model.written(arrays, np.concatenate(scene.rows * 2, axis=2), slots))


def one_after_the_other(slots, recycled, hosts, pages, *, going, coming, staging, **options):
    """The operation of a GPU as the two that it is made of, which a CPU has."""
    sizes = {"transfer": going.transfer, "num_chunks": going.num_chunks, "staging": staging}
    went = pinned.place_leaves(slots[0], recycled, pages, **sizes)
    sizes = {"transfer": coming.transfer, "num_chunks": coming.num_chunks, "rows": coming.rows, "staging": staging}
    return exchange.Exchanged(went, pinned.fetch_leaves(slots[1], hosts, pages, **sizes, donate=True, **options))


@pytest.mark.skipif("direct" not in WAYS, reason="the extension is not built")
def test_what_is_kept_is_of_one_pair(monkeypatch):
    """Cut as on a GPU's engine path: one load beside other stores, into other chunks, in other formats, and back."""
    monkeypatch.setattr(jaxkv.ways, "choose", lambda *args, **options: jaxkv.ways.Way("engine", 2, 8, 1))
    monkeypatch.setattr(exchanging, "exchange_leaves", one_after_the_other)
    model = Model("A2", pages=60)
    scene = scene_of(model, 40, first=160)
    out = [jaxkv.store_plan(model.spec, np.arange(n), chunk_tokens=8, layers=None) for n in (40, 96, 16)]
    plan = jaxkv.plan(model.spec, scene.chunks, scene.slots, num_pages=60)
    older: dict[int, tuple[jaxkv.Chunk, ...]] = {}
    calls = [(0, None, False), (1, None, False), (1, None, True), (0, "kv layer token (head dim)", False)]
    calls += [(0, None, True), (2, None, False), (2, None, True), (1, None, True), (0, None, False)]
    for seed, (which, format, recycles) in enumerate(calls):
        arrays, cache = model.random(seed)
        count = out[which].slots.size
        into = older.pop(which, ()) if recycles else ()
        chunks, after = jaxkv.exchange(cache, out[which], plan, into=into, format=format)
        stored(model, arrays, chunks, np.arange(count), *follow(count, 8))
        assert_same(after.pages, model.written(arrays, np.concatenate(scene.rows, axis=2), scene.slots))
        if format is None:
            older[which] = chunks


def test_an_exchange_and_a_store_of_one_plan_share_what_is_kept(monkeypatch):
    """Nothing is worked out anew where the two take turns."""
    model = Model("A2", pages=12)
    scene = scene_of(model, 16, first=24)
    _, cache = model.random(3)
    out, plan = jaxkv.store_plan(cache, np.arange(16), chunk_tokens=8), jaxkv.plan(cache, scene.chunks, scene.slots)
    _, cache = jaxkv.exchange(cache, out, plan)
    jaxkv.store(cache, out)
    chosen = []
    choose = jaxkv.ways.choose
    monkeypatch.setattr(jaxkv.ways, "choose", lambda *args, **options: chosen.append(1) or choose(*args, **options))
    for _ in range(3):
        _, cache = jaxkv.exchange(cache, out, plan)
        jaxkv.store(cache, out)
    assert not chosen
