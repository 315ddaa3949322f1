"""CASES.md E: effects come in the order of the program, whatever is still running when a call is made.

A long computation is queued, then the call, then at once whatever would spoil it: nothing sleeps, and nothing waits.
"""

import functools
import threading

import helpers
import jax
import jax.numpy as jnp
import layers as by_layer
import numpy as np
import pytest
import turning
from helpers import WAYS, Model, Scene, assert_same
from turning import rope

import jaxkv
from jaxkv import host

REPEATS = 100
SLOTS = np.random.default_rng(0).permutation(28)[:20]

ways = pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)


@jax.jit
def busy(pages):
    """The same bytes, after a few milliseconds of work that they depend on."""

    def step(_, x):
        return x @ x * jnp.float32(0.01)

    done = jax.lax.fori_loop(0, 30, step, jnp.eye(160, dtype=jnp.float32))
    nothing = (done[0, 0] > 2).astype(jnp.uint16)

    def after(page):
        return jax.lax.bitcast_convert_type(jax.lax.bitcast_convert_type(page, jnp.uint16) ^ nothing, page.dtype)

    return jax.tree.map(after, pages)


def _wiped(pages):
    return jax.tree.map(jnp.zeros_like, pages)


wipe = jax.jit(_wiped, donate_argnums=0, keep_unused=True)
"""Overwrites pages where they are, as soon as it may."""


@functools.partial(jax.jit, donate_argnums=0)
def flip(pages):
    """Inverts all bits of pages where they are."""
    flipped = [~jax.lax.bitcast_convert_type(page, jnp.uint16) for page in pages]
    return tuple(jax.lax.bitcast_convert_type(bits, page.dtype) for bits, page in zip(flipped, pages, strict=True))


def inverted(arrays):
    return jax.tree.map(lambda x: (~helpers.raw(x)).view(x.dtype), arrays)


def test_the_device_is_busy():
    """That the stall is one: it is dispatched, not run, by the call."""
    pages = busy(Model("A2").random()[1].pages)
    late = sum(not busy(pages)[0].is_ready() for _ in range(5))
    assert late >= 1


def stores(cache, kind, old):
    """A store of every kind, its chunks not waited for."""
    if kind == "bulk":
        return jaxkv.store(cache, SLOTS, chunk_tokens=8), old
    if kind == "into":
        return jaxkv.store(cache, SLOTS, chunk_tokens=8, into=old), ()
    options = dict(ring=host.Ring(2)) if kind == "ring" else {}
    plan = jaxkv.store_plan(cache, SLOTS, chunk_tokens=8)
    return jaxkv.join_layers(by_layer.store(cache, plan, size=2 if kind == "grouped" else 0, **options)), old


@pytest.mark.parametrize("kind", ["bulk", "into", "layer by layer", "ring", "grouped"])
def test_store_then_overwrite_at_once(kind):
    """E1, E2, E5, E11, E13: after an unfinished writer, before a writer into the same pages: the bytes at the call."""
    model, old = Model("A2"), ()
    arrays = [model.arrays(seed) for seed in range(REPEATS)]
    caches = [model.cache(of_one) for of_one in arrays]
    for of_one, cache in zip(arrays, caches, strict=True):
        cache = jaxkv.PagedCache(busy(cache.pages), model.spec)
        chunks, old = stores(cache, kind, old)
        after = wipe(cache.pages)
        assert all(page.is_deleted() for page in cache.pages)
        helpers.stored(model, of_one, chunks, SLOTS, *helpers.follow(20, 8))
        assert not helpers.raw(np.asarray(after[0])).any()
        old = chunks


def test_layers_stored_beside_a_forward_pass():
    """E5: layer i leaves while layer i + 1 is computed, and donated pages are rewritten in the next pass at once."""
    model = Model("A2", layers=6)
    arrays, cache = model.random()
    pages, ring, sent = list(cache.pages), host.Ring(2), []
    plan = jaxkv.store_plan(cache, SLOTS, chunk_tokens=8)
    for _ in range(4):
        parts = []
        for layer in range(6):
            (pages[layer],) = flip(busy((pages[layer],)))
            parts.append(jaxkv.store_layer(pages[layer], plan, layer=layer, ring=ring))
        sent.append(jaxkv.join_layers(parts))
    for turn, chunks in enumerate(sent):
        held = arrays if turn % 2 else inverted(arrays)
        helpers.stored(model, held, chunks, SLOTS, *helpers.follow(20, 8))


def loads(kind, way):
    if kind == "layer by layer":
        return lambda cache, chunks, slots: by_layer.load(cache, jaxkv.plan(cache, chunks, slots))
    return lambda cache, chunks, slots: jaxkv.load(cache, chunks, slots, **way)


@pytest.mark.parametrize("kind", [*WAYS, "layer by layer"])
def test_readers_before_and_after_a_load(kind):
    """E3, E4, E9, E12: a reader in flight sees the old bytes, one after the load the new ones, and nothing waits."""
    scene = Scene(Model("A2"), 20)
    load, model = loads(kind, WAYS.get(kind)), scene.model
    want = model.written(model.arrays(), np.concatenate(scene.rows, axis=2), scene.slots)
    caches = [model.poisoned() for _ in range(REPEATS)]
    for cache in caches:
        cache = jaxkv.PagedCache(busy(cache.pages), model.spec)
        before = busy(cache.pages)
        after = load(cache, scene.chunks, scene.slots)
        copied = tuple(page[:, ::-1] for page in busy(after.pages))
        assert_same(before, model.arrays())
        assert_same(copied, tuple(x[:, ::-1] for x in want))
        assert_same(after.pages, want)


@ways
def test_chunks_given_away_right_after_a_load(way):
    """E10, E15: their memory goes to another store, or every reference is dropped; the pages hold the old chunk."""
    scene, other = Scene(Model("A2"), 20), Model("A2").random(7)[1]
    model = scene.model
    want = model.written(model.arrays(), np.concatenate(scene.rows, axis=2), scene.slots)
    fresh = [Scene(model, 20) for _ in range(REPEATS)]
    for turn in range(REPEATS):
        cache = jaxkv.PagedCache(busy(model.poisoned().pages), model.spec)
        chunks = fresh.pop().chunks
        after = jaxkv.load(cache, chunks, scene.slots, **way)
        if turn % 2:
            jaxkv.store(other, SLOTS, chunk_tokens=8, into=chunks)
        del cache, chunks
        assert_same(after.pages, want)


def test_a_chunk_is_a_value():
    """E8: A, then B of the same tokens from other bytes; a load of A has A."""
    model = Model("A2")
    arrays, cache = model.random()
    first = jaxkv.store(cache, SLOTS, chunk_tokens=8)
    second = jaxkv.store(jaxkv.PagedCache(flip(cache.pages), model.spec), SLOTS, chunk_tokens=8)
    for chunks, held in ((first, arrays), (second, inverted(arrays)), (first, arrays)):
        after = jaxkv.load(model.poisoned(), chunks, SLOTS)
        assert_same(after.pages, model.written(model.arrays(), model.rows(held, SLOTS), SLOTS))


def test_stores_and_loads_interleaved_on_one_pool():
    """E6, E7, G11: two loads and a store advance alternately, layer by layer, on pages of their own."""
    model = Model("A2", layers=4, rope=rope(8))
    arrays, cache = model.random(3)
    pages = list(cache.pages)
    kept, mine = np.arange(0, 8), [np.arange(8, 18), np.arange(18, 28)]
    made = [turning.Moving(model, 8, seed=seed) for seed in range(2)]
    plans = [
        jaxkv.plan(
            model.spec,
            [m.chunks[0]],
            mine[at],
            starts=[at],
            ends=[8 + at],
            positions=np.pad(m.new, (at, 2 - at)),
        )
        for at, m in enumerate(made)
    ]
    steps, parts = [jaxkv.fetch_layers(plan, ahead=at) for at, plan in enumerate(plans)], []
    for layer in range(4):
        for step in steps:
            pages[layer] = by_layer.write(pages[layer], next(step))
        parts.append(jaxkv.store_layer(pages[layer], kept, spec=model.spec, layer=layer, chunk_tokens=8))
        (pages[layer],) = flip((pages[layer],))
    helpers.stored(model, arrays, jaxkv.join_layers(parts), kept, [0], [8])
    seen = inverted(helpers.snapshot(tuple(pages)))
    for at, m in enumerate(made):
        rows = model.rows(seen, mine[at][at : 8 + at])
        for layer in range(4):
            turning.check_keys(rows[layer, 0], m.rows[layer, 0], rope(8), m.old, m.new)
            assert_same(rows[layer, 1], m.rows[layer, 1])
    untouched = np.r_[0:8, 16:19, 27]
    assert_same(model.rows(seen, untouched), model.rows(arrays, untouched))


@pytest.mark.parametrize("kind", [*WAYS, "layer by layer"])
def test_a_slow_consumer_of_the_staging_ring(kind):
    """E16: loads back to back through the same staging memory, each read by a slow program, all exact."""
    scenes = [Scene(Model("A2"), 20, seed=seed) for seed in range(6)]
    load, model = loads(kind, WAYS.get(kind)), scenes[0].model
    read = []
    for scene in scenes * 3:
        cache = load(model.poisoned(), scene.chunks, scene.slots)
        read.append(busy(cache.pages))
    for scene, pages in zip(scenes * 3, read, strict=True):
        want = model.written(model.arrays(), np.concatenate(scene.rows, axis=2), scene.slots)
        assert_same(pages, want)


@pytest.mark.parametrize("donate", [False, True])
@pytest.mark.parametrize("first", ["store", "load"])
def test_store_and_load_in_one_program(first, donate):
    """E17: in either order, as the data flows; with the pool donated too."""
    scene = Scene(Model("A14"), 8, seed=3)
    model, put = scene.model, np.arange(8)
    arrays = model.arrays(4)

    def run(cache, chunks, slots):
        if first == "store":
            stored = jaxkv.store(cache, slots, chunk_tokens=8)
            return jaxkv.load(cache, chunks, slots), stored
        cache = jaxkv.load(cache, chunks, slots)
        return cache, jaxkv.store(cache, slots, chunk_tokens=8)

    cache = model.cache(arrays)
    after, stored = jax.jit(run, donate_argnums=0 if donate else ())(cache, scene.chunks, put)
    want = model.written(arrays, scene.rows[0], put)
    assert_same(after.pages, want)
    helpers.stored(model, arrays if first == "store" else want, stored, put, [0], [8])
    if not donate:
        assert_same(cache.pages, arrays)


def test_a_thousand_steps_in_a_loop():
    """E18: store, then overwrite, with a carried pool; each step's chunk has what was there then."""
    model = Model("A2", layers=1, dtype="fp32")

    def step(cache, i):
        (chunk,) = jaxkv.store(cache, np.arange(8), chunk_tokens=8)
        held = jax.device_put(chunk.data[0], jax.memory.Space.Device)
        pages = tuple(jnp.full_like(page, i.astype(page.dtype)) for page in cache.pages)
        return jaxkv.PagedCache(pages, cache.spec), (held.min(), held.max())

    run = jax.jit(lambda cache: jax.lax.scan(step, cache, jnp.arange(1000)))
    _, (low, high) = run(model.cache(jax.tree.map(np.zeros_like, model.arrays())))
    assert np.asarray(low).tolist() == np.asarray(high).tolist() == [0, *range(999)]


def test_threads_on_pools_of_their_own():
    """E19: 64 threads, bulk and layer by layer; exact, and in time."""
    model = Model("A2", rope=rope(8))
    scenes = [turning.Moving(model, 20, seed=seed) for seed in range(4)]
    want = [scene.bulk({}) for scene in scenes]
    by_layer.load(model.poisoned(), scenes[0].plan())  # compiles
    faults = []

    def work(at):
        try:
            scene = scenes[at % 4]
            for turn in range(2):
                plan = scene.plan()
                load = by_layer.load if (at + turn) % 2 else jaxkv.load
                cache = load(model.poisoned(), plan)
                assert_same(scene.rows_of(cache), want[at % 4])
                made = jaxkv.join_layers(by_layer.store(cache, scene.slots, positions=scene.new, chunk_tokens=8))
                again = jaxkv.load(model.poisoned(), made, scene.slots)
                assert_same(scene.rows_of(again), want[at % 4])
        except BaseException as error:
            faults.append((at, error))

    threads = [threading.Thread(target=work, args=(at,), daemon=True) for at in range(64)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
    assert not any(thread.is_alive() for thread in threads)
    assert not faults, faults[0]


class Sequential:
    """Pages, chunks and what is done to them, in NumPy, one step after the other."""

    def __init__(self, model, seed):
        self.model, self.arrays, self.chunks = model, model.arrays(seed), []

    def store(self, slots):
        self.chunks.append(self.model.rows(self.arrays, slots))

    def load(self, number, slots):
        self.arrays = self.model.written(self.arrays, self.chunks[number], slots)

    def rewrite(self):
        self.arrays = inverted(self.arrays)


@pytest.mark.parametrize("seed", range(4))
def test_random_interleavings(seed):
    """E24: 1,000 runs in all of stores, loads and rewrites, against a sequential model, nothing waited for."""
    print("seed", seed)
    rng = np.random.default_rng(seed)
    model = Model("A2", layers=2, heads=1, dim=4, pages=3)
    for run in range(250):
        truth = Sequential(model, run % 7)
        cache, chunks = model.cache(truth.arrays), []
        if run % 10 == 0:
            cache = jaxkv.PagedCache(busy(cache.pages), model.spec)
        for _ in range(rng.integers(4, 9)):
            what, slots = rng.integers(0, 5), rng.permutation(model.num_slots)[:4]
            if what == 0 and len(chunks) < 4:
                chunks += jaxkv.store(cache, slots, chunk_tokens=4)
                truth.store(slots)
            elif what == 1 and len(chunks) < 4:
                chunks += jaxkv.join_layers(by_layer.store(cache, slots, chunk_tokens=4, format="KV_2TD"))
                truth.store(slots)
            elif what in (2, 3) and chunks:
                number = rng.integers(len(chunks))
                plan = jaxkv.plan(model.spec, [chunks[number]], slots)
                cache = (jaxkv.load if what == 2 else by_layer.load)(cache, plan)
                truth.load(number, slots)
            else:
                cache = jaxkv.PagedCache(flip(cache.pages), model.spec)
                truth.rewrite()
        assert_same(cache.pages, truth.arrays, f"seed {seed}, run {run}")
        for number, chunk in enumerate(chunks):
            want = model.chunk_arrays(truth.chunks[number], chunk.format, 4)
            assert_same(list(chunk.data), want, f"seed {seed}, run {run}, chunk {number}")


@ways
def test_nothing_to_load_releases_nothing(way):
    """E25: a load of no tokens while another transfer is on its way changes nothing for that one."""
    scene = Scene(Model("A2"), 20)
    model = scene.model
    want = model.written(model.arrays(), np.concatenate(scene.rows, axis=2), scene.slots)
    for _ in range(5):
        cache = jaxkv.load(jaxkv.PagedCache(busy(model.poisoned().pages), model.spec), scene.chunks, scene.slots, **way)
        cache = jaxkv.load(cache, (), [], **way)
        assert_same(cache.pages, want)


def test_slots_and_positions_are_those_at_the_call():
    """B29: the caller changes its arrays right after the call."""
    model = Model("A2", rope=rope(8))
    made = turning.Moving(model, 20)
    slots, positions = made.slots.copy(), made.new.copy()
    cache = jaxkv.PagedCache(busy(model.poisoned().pages), model.spec)
    plan = jaxkv.plan(cache, made.chunks, slots, positions=positions)
    steps = jaxkv.fetch_layers(plan)
    pages = [by_layer.write(cache.pages[0], next(steps))]
    slots[:], positions[:] = 0, 5
    pages += [by_layer.write(page, staged) for page, staged in zip(cache.pages[1:], steps, strict=True)]
    assert_same(made.rows_of(jaxkv.PagedCache(tuple(pages), model.spec)), made.layerwise())
    slots, old = SLOTS.copy(), np.arange(20)
    arrays, cache = model.random()
    store = jaxkv.store_plan(cache, slots, positions=old, chunk_tokens=8)
    slots[:], old[:] = 0, 7
    chunks = jaxkv.join_layers(by_layer.store(cache, store))
    helpers.stored(model, arrays, chunks, SLOTS, *helpers.follow(20, 8))
