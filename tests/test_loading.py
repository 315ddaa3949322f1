"""What is kept with a plan that was loaded: found again where it fits, and nowhere else."""

import copy
import dataclasses
import pickle

import helpers
import jax
import numpy as np
import pytest
from helpers import WAYS, Model, Scene, assert_same

import jaxkv
from jaxkv import host

ways = pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)


def written(scene: Scene, model: Model | None = None, slots=None):
    """The pages of a pool into which the scene's chunks were loaded."""
    model = scene.model if model is None else model
    return model.written(model.arrays(), np.concatenate(scene.rows, axis=2), scene.slots if slots is None else slots)


@ways
def test_tables_are_sent_once(way, monkeypatch):
    """With a cache when the plan is made, if that is how it is loaded; else by the first load."""
    scene, sends = Scene(Model("A2"), 21), []
    send = host.send_beside
    monkeypatch.setattr(host, "send_beside", lambda tables, where: sends.append(len(tables)) or send(tables, where))
    plan = jaxkv.plan(scene.model.poisoned(), scene.chunks, scene.slots)
    assert len(sends) == 1
    for _ in range(3):
        assert_same(jaxkv.load(scene.model.poisoned(), plan).pages, written(scene))
    assert len(sends) == 1
    for _ in range(3):
        assert_same(jaxkv.load(scene.model.poisoned(), plan, **way).pages, written(scene))
    assert len(sends) <= 2
    jaxkv.plan(scene.model.spec, scene.chunks, scene.slots)  # nowhere to send them to
    assert len(sends) <= 2


def test_one_plan_for_caches_of_every_kind():
    """A51: one after the other, in turn; another path, layout, size of the pool, device."""
    scene = Scene(Model("A2"), 20, seed=3)
    slots = np.random.default_rng(1).permutation(24)[:20]
    plan = jaxkv.plan(scene.model.poisoned(), scene.chunks, slots)
    others = [Model("A2"), Model("A5"), Model("A2", pages=9), Model("A13", pages=6)]
    for _ in range(2):
        for model in others:
            for way in WAYS.values():
                assert_same(jaxkv.load(model.poisoned(), plan, **way).pages, written(scene, model, slots))
        if len(jax.devices()) > 1:
            there = Model("A2").cache(scene.model.arrays(), device=jax.devices()[1])
            assert_same(jaxkv.load(there, plan).pages, written(scene, slots=slots))


@ways
def test_what_changed_since_is_seen(way):
    """M42: a chunk that was deleted, a pool that is smaller; the cache is whole."""
    scene = Scene(Model("A2"), 21)
    plan = jaxkv.plan(scene.model.poisoned(), scene.chunks, scene.slots)
    jaxkv.load(scene.model.poisoned(), plan, **way)
    small = Model("A2", pages=5)
    with pytest.raises(ValueError, match=r"plan: row \d+ of chunk \d has slot \d+, but the pool has 20 slots"):
        jaxkv.load(small.poisoned(), plan, **way)
    scene.chunks[1].data[0].delete()
    cache = scene.model.poisoned()
    with pytest.raises(ValueError, match="chunks: an array of chunk 1 was deleted"):
        jaxkv.load(cache, plan, **way)
    assert_same(cache.pages, scene.model.arrays())


@ways
def test_another_plan_has_nothing_of_it(way):
    """Altered, copied or pickled after a load."""
    scene = Scene(Model("A2"), 21)
    plan = jaxkv.plan(scene.model.poisoned(), scene.chunks, scene.slots)
    jaxkv.load(scene.model.poisoned(), plan, **way)
    order = (scene.slots + 1) % 28
    moved = np.where(plan.slots < 0, -1, (plan.slots + 1) % 28)
    altered = dataclasses.replace(plan, slots=moved)
    for _ in range(2):
        assert_same(jaxkv.load(scene.model.poisoned(), altered, **way).pages, written(scene, slots=order))
    altered.slots[altered.slots == order[0]] = -1  # nothing of it was kept
    one_less = [*order]
    one_less[0] = -1
    assert_same(jaxkv.load(scene.model.poisoned(), altered, **way).pages, written(scene, slots=one_less))
    for other in (copy.copy(plan), dataclasses.replace(plan)):
        assert_same(jaxkv.load(scene.model.poisoned(), other, **way).pages, written(scene))


def test_a_plan_without_chunks_pickles_after_a_load():
    model = Model("A2")
    plan = jaxkv.plan(model.poisoned(), [], [])
    jaxkv.load(model.poisoned(), plan)
    assert pickle.loads(pickle.dumps(plan)).chunks == ()


@ways
def test_with_and_without_a_plan_one_program_serves(way):
    """I6."""
    scene = Scene(Model("A2"), 21)
    jaxkv.load(scene.model.poisoned(), scene.chunks, scene.slots, **way)
    cache = scene.model.poisoned()
    plan = jaxkv.plan(cache, scene.chunks, scene.slots)
    with helpers.compilations() as compiled:
        jaxkv.load(cache, plan, **way)
    assert not compiled


@pytest.mark.skipif("direct" not in WAYS, reason="the extension is not built")
@pytest.mark.parametrize("donate", [True, False])
@pytest.mark.parametrize("staging", [1, 2, 3])
@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 8, 9, 12])
def test_operations_of_many_chunks(count, staging, donate, monkeypatch):
    """Cut as on a GPU's engine path, the first ones sent ahead, and moved by the CPU's operations."""
    monkeypatch.setattr(jaxkv.ways, "choose", lambda *args, **options: jaxkv.ways.Way("engine", staging, 8, 1))
    model = Model("A2", pages=30)
    scene = Scene(model, 8 * count - 3)
    cache = model.poisoned()
    after = jaxkv.load(cache, jaxkv.plan(cache, scene.chunks, scene.slots), donate=donate)
    assert_same(after.pages, written(scene))
    arrays, cache = model.random(5)
    helpers.stored(
        model, arrays, jaxkv.store(cache, scene.slots, chunk_tokens=8), scene.slots, *helpers.follow(8 * count - 3, 8)
    )
