"""The ways between pages and pinned memory: which is taken, and chunks that are written into again."""

import copy
import dataclasses

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import POOLS, WAYS, Model, Scene, follow, small

import jaxkv
from jaxkv import ways
from jaxkv.ops import native

needs_handlers = pytest.mark.skipif("direct" not in WAYS, reason="the extension is not built")


@pytest.mark.parametrize("first", [0, 1, 2, 8])
@pytest.mark.parametrize("largest", [1, 2, 32])
@pytest.mark.parametrize("count", [0, 1, 2, 3, 31, 32, 33, 100])
def test_runs_cover_all_in_few_sizes(count, largest, first):
    """B30: so that a call of another length compiles nothing."""
    way = ways.Way("engine", 2, largest, first)
    runs = list(way.runs(count, start=3))
    assert [k for run in runs for k in run] == list(range(3, 3 + count))
    powers = {1 << i for i in range(largest.bit_length())}
    sizes = powers | {size - first for size in powers if 0 < 4 * first <= size}
    assert {len(run) for run in runs} <= sizes


@pytest.mark.parametrize(("count", "runs"), [(4, [4]), (8, [2, 6]), (32, [2, 30]), (10, [2, 8]), (40, [2, 6, 32])])
def test_a_long_operation_has_a_short_one_before_it(count, runs):
    assert [len(run) for run in ways.Way("engine", 2, 32, 2).runs(count)] == runs


@pytest.mark.parametrize("staging", [1, 2, 3])
@pytest.mark.parametrize("count", [0, 1, 2, 3, 13, 31, 32, 33, 100])
def test_a_load_that_goes_alone_begins_with_its_longest_run(count, staging):
    """And with as many of its chunks as there are buffers ahead of it."""
    way = ways.Way("engine", staging, 8, 2)
    runs = way.loads(count)
    assert sorted(k for run in runs for k in run) == list(range(count))
    assert [len(run) for run in runs] == sorted((len(run) for run in runs), reverse=True)
    assert {len(run) for run in runs} <= {1, 2, 4, 8}
    for run in runs[:1]:
        assert way.ahead(len(run)) == min(staging, len(run))
    for path in ("direct", "overlapped"):
        assert [*ways.Way(path, staging, 8).loads(count)] == [*ways.Way(path, staging, 8).runs(count)]
        assert ways.Way(path, staging, 8).ahead(8) == 0


@needs_handlers
@pytest.mark.parametrize("pool", POOLS)
def test_store_into_chunks_that_are_no_longer_needed(pool):
    """I8, I10, R13: every pool layout; the buffers are the old ones, their bytes gone, the old chunks consumed."""
    model = small(pool)
    arrays, cache = model.random(0)
    old = jaxkv.store(model.random(1)[1], np.arange(24), chunk_tokens=8)
    jax.block_until_ready([c.data for c in old])
    pointers = {x.unsafe_buffer_pointer() for c in old for x in c.data}
    slots = np.random.default_rng(2).permutation(28)[:21]
    slots[3] = -1
    chunks = jaxkv.store(cache, slots, chunk_tokens=8, into=old, path="direct")
    helpers.stored(model, arrays, chunks, slots, *follow(21, 8))
    helpers.assert_same(cache.pages, arrays)
    assert {x.unsafe_buffer_pointer() for c in chunks for x in c.data} == pointers
    assert all(x.is_deleted() for c in old for x in c.data)


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("count", [1, 3, 5])
@pytest.mark.parametrize("layers_per_array", [None, 2])
def test_fewer_or_more_chunks_than_needed(layers_per_array, count, way):
    """Those that are given and needed are consumed, on any path; the rest of the store takes new memory."""
    model = Model("A5")
    arrays, cache = model.random(0)
    options = dict(chunk_tokens=4, layers_per_array=layers_per_array)
    old = jaxkv.store(model.random(1)[1], np.arange(4 * count), **options)
    slots = np.random.default_rng(2).permutation(28)[:11]
    chunks = jaxkv.store(cache, slots, **options, into=old, **way)
    helpers.stored(model, arrays, chunks, slots, *follow(11, 4))
    assert [all(x.is_deleted() for x in c.data) for c in old] == [k < 3 for k in range(count)]


@needs_handlers
@pytest.mark.parametrize("viewed", ["chunk", "row of rows()"])
def test_a_view_of_a_chunk_never_changes(viewed):
    """I10, I9: a NumPy view of a pinned buffer that is to be written into again keeps its bytes."""
    model = Model("A2", dtype="fp32")
    arrays, cache = model.random(0)
    (old,) = jaxkv.store(model.random(1)[1], np.arange(8), chunk_tokens=8)
    view = np.asarray(old.data[0]) if viewed == "chunk" else old.rows()[0]
    before = view.copy()
    (chunk,) = jaxkv.store(cache, np.arange(8), chunk_tokens=8, into=[old])
    helpers.stored(model, arrays, [chunk], np.arange(8), [0], [8])
    helpers.assert_same(view, before)
    assert old.data[0].is_deleted()


@needs_handlers
def test_a_chunk_written_into_while_its_load_is_in_flight():
    """E10: the pages get the old chunk."""
    model = Model("A2")
    scene = Scene(model, 24)
    after = jaxkv.load(model.poisoned(), scene.chunks, scene.slots, path="direct")
    jaxkv.store(model.random(9)[1], np.arange(24), chunk_tokens=8, into=scene.chunks)
    want = model.written(model.arrays(), np.concatenate(scene.rows, axis=2), scene.slots)
    helpers.assert_same(after.pages, want)


@needs_handlers
def test_other_numbers_of_chunks_compile_nothing():
    """B30, I6: a store into recycled chunks."""
    model = Model("A2", pages=30)
    _, cache = model.random(0)
    chunks = jaxkv.store(cache, np.arange(24), chunk_tokens=8)
    chunks = jaxkv.store(cache, np.arange(24), chunk_tokens=8, into=chunks)
    with helpers.compilations() as compiled:
        for n in (24, 1, 17, 24):
            stored = jaxkv.store(cache, np.arange(n), chunk_tokens=8, into=chunks, path="direct")
            chunks = (*stored, *chunks[len(stored) :])
    assert not compiled


def test_what_cannot_be_written_into_is_refused():
    """M42: nothing is consumed by a call that is refused."""
    model = Model("A2")
    _, cache = model.random(0)
    old = jaxkv.store(cache, np.arange(8), chunk_tokens=4)
    deleted = jaxkv.store(cache, np.arange(4), chunk_tokens=4)
    deleted[0].data[0].delete()
    on_device = dataclasses.replace(old[0], data=tuple(map(to_device, old[0].data)))
    cases = [
        ([old[0].data], TypeError, "entry 0 is no Chunk but tuple"),
        (
            [old[0], dataclasses.replace(old[1], data=None)],
            TypeError,
            "chunk 1 has no tuple of jax.Arrays but NoneType",
        ),
        ([dataclasses.replace(old[0], data=(np.zeros(4),))], TypeError, "chunk 0 has no tuple of jax.Arrays but tuple"),
        ([old[0], deleted[0]], ValueError, "chunk 1 was deleted"),
        ([old[0], old[0]], ValueError, "chunk 1 was deleted, or is given twice"),
        (jaxkv.store(cache, np.arange(8), chunk_tokens=8), ValueError, "needs"),
        (jaxkv.store(cache, np.arange(4), chunk_tokens=4, format="KV_T2D"), ValueError, "needs"),
        ([on_device], ValueError, "in memory kind 'device', expected 'pinned_host'"),
    ]
    for into, error, words in cases:
        with pytest.raises(error, match=f"into: .*{words}"):
            jaxkv.store(cache, np.arange(8), chunk_tokens=4, into=into)
    assert not any(x.is_deleted() for c in old for x in c.data)
    jaxkv.store(cache, np.arange(8), chunk_tokens=4, into=old)


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_chunks_that_are_alike_are_still_told_apart(way):
    """Of chunks that a store marked as alike one is looked at: what is not of them, or was altered, has no mark."""
    model = Model("A2")
    arrays, cache = model.random(0)
    how = dict(chunk_tokens=4, **way)
    plan = jaxkv.store_plan(cache, np.arange(12), chunk_tokens=4)
    first, second = jaxkv.store(cache, plan, **way), jaxkv.store(cache, plan, **way)
    wider, other = jaxkv.store(cache, np.arange(8), chunk_tokens=8, **way), jaxkv.store(cache, np.arange(4), **how)
    halved = tuple(helpers.pinned(x[..., :2, :]) for x in first[1].data)
    cases = [
        ((first[0], wider[0]), "chunk 1 has arrays of"),
        ((first[0], dataclasses.replace(first[1], data=halved)), "chunk 1 has arrays of"),
        ((first[0], second[0], first[0]), "chunk 2 was deleted, or is given twice"),
        ((first[0], copy.copy(first[0])), "chunk 1 was deleted, or is given twice"),
        ((first[0], dataclasses.replace(first[1], data=tuple(map(to_device, first[1].data)))), "chunk 1 is in memory"),
    ]
    for into, words in cases:
        with pytest.raises(ValueError, match=f"into: {words}"):
            jaxkv.store(cache, plan, into=into, **way)
    assert not any(x.is_deleted() for chunk in (*first, *second, *wider) for x in chunk.data)
    mixed = jaxkv.store(cache, np.arange(12), into=[first[0], other[0], second[1]], **how)
    again = jaxkv.store(cache, np.arange(12), into=mixed, **how)
    helpers.stored(model, arrays, again, np.arange(12), *follow(12, 4))


def test_paths_that_are_not_possible_say_why(monkeypatch):
    """R14: a named path is taken or refused, by both calls, before anything is written."""
    scene = Scene(Model("A2"), 8)
    cache, slots = scene.model.poisoned(), scene.slots[:8]

    def refused(error, words, **options):
        with pytest.raises(error, match=words):
            jaxkv.load(cache, scene.chunks, slots, **options)

    refused(ValueError, "path: 'fast' is unknown, expected one of", path="fast")
    refused(RuntimeError, "path: 'direct' is not possible here: .*XLA", path="direct", implementation="xla")
    with pytest.raises(RuntimeError, match=r"path: 'direct' is not possible here: .*jit"):
        jax.jit(lambda c: jaxkv.load(c, scene.chunks, slots, path="direct"))(cache)
    if native.available("cpu"):
        refused(RuntimeError, "path: 'engine' is not possible here: .*copy engine on cpu", path="engine")
        on_device = [dataclasses.replace(c, data=tuple(map(jnp.copy, map(to_device, c.data)))) for c in scene.chunks]
        with pytest.raises(RuntimeError, match=r"path: 'direct' is not possible here: .*pinned"):
            jaxkv.load(cache, on_device, slots, path="direct")
    monkeypatch.setattr(native, "_reasons", {"cpu": "not built", "cuda": "not built"})
    refused(RuntimeError, "no handlers for cpu", path="direct")
    monkeypatch.undo()
    helpers.assert_same(cache.pages, scene.model.arrays())
    jaxkv.load(cache, scene.chunks, slots)


def to_device(array: jax.Array) -> jax.Array:
    return jax.device_put(array, array.sharding.with_memory_kind("device"))
