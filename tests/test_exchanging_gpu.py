"""exchange on CUDA (`-m gpu`): one operation moves both ways, chunk by chunk; the same bytes as a store and a load."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from exchanges import check, scene_of
from helpers import Model, Scene, assert_same, compilations, follow, stored
from test_bulk_gpu import peak
from turning import Moving, rope, turned_model

import jaxkv
from jaxkv import exchanging
from jaxkv.ops import native

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not native.available("cuda"), reason="the CUDA handlers are not built"),
]


@pytest.fixture
def operations(monkeypatch):
    """The chunks that go and come in each exchange that is launched."""
    seen = []
    run = exchanging.exchange_leaves

    def counted(*args, going, coming, **options):
        seen.append((going.num_chunks, coming.num_chunks))
        return run(*args, going=going, coming=coming, **options)

    monkeypatch.setattr(exchanging, "exchange_leaves", counted)
    return seen


@pytest.mark.parametrize("pool", ["A1", "A2", "A5", "A13", "A24", "A34"])
@pytest.mark.parametrize(("out", "into"), [(64, 64), (8, 8), (5, 20), (61, 3), (128, 40), (3, 128)])
def test_both_ways(pool, out, into, operations):
    model = Model(pool, pages=80)
    going = np.random.default_rng(2).permutation(160)[:out]
    check(scene_of(model, into, first=160), going, model=model, path="engine")
    both = min(-(-out // 8), -(-into // 8))
    assert sum(count for count, _ in operations) == sum(count for _, count in operations) == both


@pytest.mark.parametrize("first_bytes", [1, 48 << 20])
@pytest.mark.parametrize("staging", [1, 2, 5])
def test_sizes(staging, first_bytes, operations):
    """Many operations, one, and rings of every size; into new memory and into that of older chunks."""
    model = Model("A2", layers=4, heads=8, dim=128, page_size=16, pages=280)
    scene = scene_of(model, 2048, first=2048, chunk_tokens=128)
    tuning = jaxkv.Tuning(staging=staging, first_bytes=first_bytes, chunks_per_call=8)
    going = np.random.default_rng(3).permutation(2048)[:1900]
    older = ()
    for _ in range(3):
        check(scene, going, older=older, rows=128, path="engine", tuning=tuning)
        older = jaxkv.store(model.random(1)[1], going, chunk_tokens=128)  # of which no one has a view
    assert sum(count for count, _ in operations) == 3 * 15


def test_other_formats(operations):
    """Chunks that go need not be as those that come."""
    model = Model("A2", pages=40)
    scene = scene_of(model, 40, first=80, format="KV_T2D", layers_per_array=3)
    check(scene, np.arange(70), model=model, format="layer token head (kv dim)", path="engine")
    assert operations
    operations.clear()
    layer_by_layer = scene_of(model, 40, first=80, format="KV_T2D", layers_per_array=1)
    check(layer_by_layer, np.arange(70), model=model, path="engine")
    assert not operations  # a store and a load


@pytest.mark.parametrize(("rows", "coming_rows"), [(64, 256), (256, 64)])
def test_chunks_of_other_lengths(rows, coming_rows, operations):
    """As many as there are of both, whatever each of them holds."""
    model = Model("A2", layers=4, heads=8, dim=128, page_size=16, pages=280)
    scene = scene_of(model, 2048, first=2048, chunk_tokens=coming_rows)
    check(scene, np.arange(2048), rows=rows, path="engine")
    assert operations and all(count == other for count, other in operations)
    assert sum(count for count, _ in operations) == 8


def test_chunks_of_several_lengths_take_two_calls(operations):
    model = Model("A2", pages=80)
    scene = scene_of(model, 40, first=160)
    more = jaxkv.store(model.random(4)[1], np.arange(16), chunk_tokens=4)
    arrays, cache = model.random(3)
    out = jaxkv.store_plan(cache, np.arange(60), chunk_tokens=8, layers=None)
    plan = jaxkv.plan(cache, [*scene.chunks, *more], np.concatenate([scene.slots, np.arange(200, 216)]))
    chunks, _ = jaxkv.exchange(cache, out, plan, path="engine")
    stored(model, arrays, chunks, np.arange(60), *follow(60, 8))
    assert not operations


def test_pinned_memory_is_written_in_place():
    """R13: the arrays that go are those of the older chunks, by pointer."""
    model = Model("A2", pages=40)
    scene = scene_of(model, 16, first=80)
    arrays, cache = model.random(0)
    out = jaxkv.store_plan(cache, np.arange(16), chunk_tokens=8, layers=None)
    plan = jaxkv.plan(cache, scene.chunks, scene.slots)
    older = jax.block_until_ready(jaxkv.store(cache, out))
    pointers = [array.unsafe_buffer_pointer() for chunk in older for array in chunk.data]
    chunks, _ = jaxkv.exchange(cache, out, plan, into=older, path="engine")
    assert [array.unsafe_buffer_pointer() for chunk in chunks for array in chunk.data] == pointers
    stored(model, arrays, chunks, np.arange(16), *follow(16, 8))


def test_what_fails_half_way_carries_cache_and_chunks(monkeypatch):
    model = Model("A2", pages=80)
    scene = scene_of(model, 80, first=160)
    arrays, cache = model.random(0)
    tuning = jaxkv.Tuning(chunks_per_call=2)
    out = jaxkv.store_plan(cache, np.arange(80), chunk_tokens=8, layers=None)
    plan = jaxkv.plan(cache, scene.chunks, scene.slots)
    run, calls = exchanging.exchange_leaves, []

    def fails_second(*args, **options):
        calls.append(1)
        if len(calls) == 2:
            raise RuntimeError("no memory")
        return run(*args, **options)

    monkeypatch.setattr(exchanging, "exchange_leaves", fails_second)
    with pytest.raises(RuntimeError, match="no memory") as caught:
        jaxkv.exchange(cache, out, plan, path="engine", tuning=tuning)
    done = caught.value.chunks
    stored(model, arrays, done, np.arange(16), *follow(16, 8))
    want = model.written(arrays, np.concatenate(scene.rows[:2], axis=2), scene.slots[:16])
    assert_same(caught.value.cache.pages, want)


def test_what_goes_is_what_was_there_before(operations):
    """E10: slots that go and come."""
    model = Model("A2", pages=40)
    scene = scene_of(model, 40, first=80)
    for going in (scene.slots, np.arange(60, 100)):
        check(scene, going, model=model, path="engine")
    assert not operations


def test_turned_keys(operations):
    model = turned_model("A2", rope(), pages=40)
    scene = Moving(model, 40)
    arrays, cache = model.arrays(), model.poisoned()
    plan = scene.plan(cache)
    free = np.setdiff1d(np.arange(model.num_slots), np.asarray(plan.slots))
    out = jaxkv.store_plan(cache, free, chunk_tokens=8, layers=None)
    chunks, after = jaxkv.exchange(cache, out, plan, path="engine")
    assert operations
    stored(model, arrays, chunks, free, *follow(len(free), 8))
    scene.check(scene.rows_of(after))


def test_in_place_in_bounded_memory_and_compiled_once():
    """E26, B30: by pointer; two rings beyond the pool."""
    model = Model("A2", layers=4, heads=8, dim=128, page_size=16, pages=280)
    rows = 256
    scene = scene_of(model, 2048, first=2048, chunk_tokens=rows)
    cache = model.cache(model.arrays())
    out = jaxkv.store_plan(cache, np.arange(2048), chunk_tokens=rows, layers=None)
    plan = jaxkv.plan(cache, scene.chunks, scene.slots)
    before = [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(cache)]
    chunks, cache = jaxkv.exchange(cache, out, plan, path="engine")
    jax.block_until_ready((chunks, cache))
    del chunks
    held = []

    def again():
        nonlocal cache
        chunks, cache = jaxkv.exchange(cache, out, plan, path="engine")
        held.append(chunks)
        return cache

    with compilations() as compiled:
        again()
    assert not compiled
    took = peak(again)
    assert [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(cache)] == before
    chunk = rows * model.spec.bytes_per_token
    assert took <= 8 * chunk + (1 << 20), took / chunk  # two blocks of the allocator, up to twice as large as asked for


def test_a_view_of_an_older_chunk():
    """I9, I10: refused by name, or left as it is; the cache is whole."""
    model = Model("A2", pages=40)
    scene = scene_of(model, 16, first=80)
    arrays, cache = model.random(0)
    out = jaxkv.store_plan(cache, np.arange(16), chunk_tokens=8, layers=None)
    plan = jaxkv.plan(cache, scene.chunks, scene.slots)
    older = jaxkv.store(cache, out)
    view = np.asarray(older[0].data[0])
    before = view.copy()
    with pytest.raises(ValueError, match="into: a NumPy or DLPack view"):
        jaxkv.exchange(cache, out, plan, into=older, path="engine")
    assert_same(view, before)
    assert_same(cache.pages, arrays)
    chunks, after = jaxkv.exchange(cache, out, plan, path="engine")
    stored(model, arrays, chunks, np.arange(16), *follow(16, 8))
    assert_same(after.pages, model.written(arrays, np.concatenate(scene.rows, axis=2), scene.slots))


def flipped(page):
    bits = jax.lax.bitcast_convert_type(page, jnp.uint16) ^ 1
    return jax.lax.bitcast_convert_type(bits, page.dtype)


def flipped_on_host(page):
    return (np.asarray(page).view(np.uint16) ^ 1).view(page.dtype)


def test_pages_written_and_read_at_once():
    """E1, E10: what comes after an exchange sees it whole, and what came before it is done."""
    model = Model("A2", layers=4, heads=8, dim=128, page_size=16, pages=280)
    scene = scene_of(model, 2048, first=2048, chunk_tokens=256)
    arrays = model.arrays(0)
    want = model.written(arrays, np.concatenate(scene.rows, axis=2), scene.slots)
    bump = jax.jit(lambda pages: jax.tree.map(flipped, pages), donate_argnums=0)
    after = jax.tree.map(flipped_on_host, arrays)
    want_after = model.written(after, np.concatenate(scene.rows, axis=2), scene.slots)
    for _ in range(5):
        cache = model.cache(arrays)
        out = jaxkv.store_plan(cache, np.arange(2048), chunk_tokens=256, layers=None)
        plan = jaxkv.plan(cache, scene.chunks, scene.slots)
        chunks, cache = jaxkv.exchange(cache, out, plan, path="engine")
        wiped = bump(cache.pages)
        stored(model, arrays, chunks, np.arange(2048), *follow(2048, 256))
        assert_same(wiped, jax.tree.map(flipped_on_host, want))
        cache = jaxkv.PagedCache(bump(model.cache(arrays).pages), model.spec)
        chunks, cache = jaxkv.exchange(cache, out, plan, path="engine")
        stored(model, after, chunks, np.arange(2048), *follow(2048, 256))
        assert_same(cache.pages, want_after)


def test_all_at_once_many_times(operations):
    """A pool that is turned over, request by request, against a model of it in NumPy."""
    model = Model("A2", pages=60)
    arrays, cache = model.random(0)
    rng = np.random.default_rng(0)
    slots = rng.permutation(240)
    kept = [Scene(model, 60, seed=k).chunks for k in range(2)]
    rows = [Scene(model, 60, seed=k).rows for k in range(2)]
    for turn in range(12):
        going, coming = slots[:60], slots[120:180]
        out = jaxkv.store_plan(cache, going, chunk_tokens=8, layers=None)
        plan = jaxkv.plan(cache, kept[turn % 2], coming)
        chunks, cache = jaxkv.exchange(cache, out, plan, path="engine")
        stored(model, arrays, chunks, going, *follow(60, 8))
        gone = model.rows(arrays, going)
        arrays = model.written(arrays, np.concatenate(rows[turn % 2], axis=2), coming)
        assert_same(cache.pages, arrays)
        kept[turn % 2], rows[turn % 2] = chunks, [gone[:, :, k : k + 8] for k in range(0, 60, 8)]
        slots = np.roll(slots, 37)
    assert operations
