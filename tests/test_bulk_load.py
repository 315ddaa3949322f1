"""load against the oracle: layouts, chunk lists, slots, gaps, and what is consumed."""

import dataclasses
import weakref

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import CHUNKS, IMPLEMENTATIONS, POOLS, WAYS, Model, Scene, pinned, small

import jaxkv
from jaxkv import paths

WRITERS = ("_scatter_in_place", "_scatter_into_copy", "fetch_leaves")  # what paths.py writes pages with

ways = pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)


@ways
@pytest.mark.parametrize("pool", POOLS)
def test_every_pool_layout(pool, way):
    """A1 to A36, A54: every mapped byte exact, all else (padding too) still 0xDE."""
    Scene(small(pool), 21).check(**way)


@ways
@pytest.mark.parametrize("chunk", CHUNKS)
def test_every_chunk_format(chunk, way):
    """A42 to A45."""
    model = Model("A19" if helpers.one_plane(chunk) else "A11", heads=1 if "MLA" in chunk else 4)
    Scene(model, 21, format=CHUNKS[chunk]).check(**way)


TWO_PLANES = [name for name, pool in POOLS.items() if pool.planes == 2 and name != "A33"]


@pytest.mark.parametrize(("first", "second"), list(zip(TWO_PLANES, TWO_PLANES[1:] + TWO_PLANES[:1], strict=True)))
def test_a_chunk_loads_into_any_other_layout(first, second):
    """A51: other layout, page size and number of pages; no one but the fingerprint is asked."""
    source, target = Model(first, page_size=4), Model(second, page_size=3, pages=11)
    arrays, cache = source.random()
    slots = np.random.default_rng(0).permutation(28)[:20]
    chunks = jaxkv.store(cache, slots, chunk_tokens=8)
    other = np.random.default_rng(1).permutation(33)[:20]
    after = jaxkv.load(target.poisoned(), chunks, other)
    helpers.assert_same(after.pages, target.written(target.arrays(), source.rows(arrays, slots), other))


@pytest.mark.parametrize("pool", ["A1", "A5", "A13"])
@pytest.mark.parametrize("layers_per_array", [1, 2])
@ways
def test_layers_per_array(pool, layers_per_array, way):
    """A53, D19: the same bytes whether an array holds one layer, some or all."""
    Scene(Model(pool), 21, layers_per_array=layers_per_array).check(**way)


CHUNK_LISTS = {
    "gaps of 1 and more": ([0, 6, 7, 20], [5, 7, 12, 28]),
    "unsorted": ([20, 0, 12, 8], [28, 8, 20, 12]),
    "overlapping": ([0, 4, 2, 4], [8, 10, 10, 9]),
    "contained": ([0, 3], [8, 5]),
    "empty in the middle": ([3, 8, 8, 28], [8, 8, 12, 28]),
    "first start not 0": ([9, 17], [17, 20]),
    "one": ([11], [12]),
    "none": ([], []),
}


@ways
@pytest.mark.parametrize("gaps", ["keep", "zero"])
@pytest.mark.parametrize("name", CHUNK_LISTS)
def test_chunk_lists(name, gaps, way):
    """D2 to D6, D11, G1, G2, G5, G6, G15."""
    starts, ends = CHUNK_LISTS[name]
    Scene(Model("A14"), 28, starts, ends).check(gaps=gaps, **way)


@pytest.mark.parametrize("name", ["unsorted", "overlapping", "gaps of 1 and more"])
def test_one_call_is_as_many_calls(name):
    """D3, D15: chunks one by one, in list order, with summed counts; D16: any subset in any order."""
    starts, ends = CHUNK_LISTS[name]
    scene = Scene(Model("A2"), 28, starts, ends)
    scene.check(order=[2, 0])
    scene.check(order=[3, 2, 1, 0])
    together = jaxkv.plan(scene.model.spec, scene.chunks, scene.slots, starts=starts, ends=ends)
    want = jaxkv.load(scene.model.poisoned(), together)
    cache, moved = scene.model.poisoned(), 0
    for chunk, start, end in zip(scene.chunks, starts, ends, strict=True):
        plan = jaxkv.plan(cache, [chunk], scene.slots, starts=[start], ends=[end])
        cache, moved = jaxkv.load(cache, plan), moved + plan.counts.moved
    helpers.assert_same(cache.pages, helpers.snapshot(want.pages))
    assert moved == together.counts.moved


def test_one_chunk_at_two_places():
    """D17."""
    scene = Scene(Model("A2"), 8)
    scene.chunks, scene.rows = scene.chunks * 2, scene.rows * 2
    scene.starts, scene.ends = [0, 8], [8, 16]
    scene.check(np.random.default_rng(1).permutation(28)[:16])


@ways
@pytest.mark.parametrize("gaps", ["keep", "zero"])
@pytest.mark.parametrize("skip_prefix", [0, 1, 7, 8, 9, 16, 27, 1000])
def test_skip_prefix(skip_prefix, gaps, way):
    """D12, G4: slots that skipped tokens name stay bit-equal, in gaps too."""
    Scene(Model("A7"), 28, [0, 8, 18], [8, 16, 26]).check(skip_prefix=skip_prefix, gaps=gaps, **way)


@ways
@pytest.mark.parametrize("gaps", ["keep", "zero"])
def test_slots_that_are_not_there(gaps, way):
    """B1, B3, B4, B6, B7, B13, G3: negative ones are skipped, with "skip" too large ones left out, both counted."""
    scene = Scene(Model("A2"), 28, [0, 8, 18], [8, 16, 26])
    slots = scene.slots.copy()
    slots[[0, 3, 7, 9, 17]] = [-1, -2, -28, -(2**63), -1]
    scene.check(slots, gaps=gaps, **way)
    slots[[1, 2, 4, 12, 16, 20]] = [28, 29, 2**31 - 1, 2**31, 2**40, 28]
    scene.check(slots, gaps=gaps, **way, out_of_range="skip")
    scene.check(np.full(28, -1), gaps=gaps, **way)
    scene.check(np.full(28, 28), gaps=gaps, **way, out_of_range="skip")


@ways
def test_the_last_of_equal_slots_wins(way):
    """B11, 100 runs: over chunks and within one, across overlapping chunks; losers count as moved."""
    scene = Scene(Model("A2"), 28, [0, 4, 2], [8, 12, 10])
    slots = np.random.default_rng(0).integers(-1, 6, 28)
    for _ in range(2):
        scene.check(slots, **way)
        scene.check(slots, gaps="zero", **way)
    want = helpers.loaded(scene.model, scene.model.arrays(), scene.rows, slots, scene.starts, scene.ends)[0]
    plan = jaxkv.plan(scene.model.spec, scene.chunks, slots, starts=scene.starts, ends=scene.ends)
    for _ in range(100):
        helpers.assert_same(jaxkv.load(scene.model.poisoned(), plan, **way).pages, want)


@ways
def test_a_broken_promise_of_unique_slots(way):
    """B14: the doubled slots hold anything; everything else is as it must be."""
    scene = Scene(Model("A2"), 16)
    slots = scene.slots[:16].copy()
    slots[[3, 9, 12]] = slots[5]
    after = jaxkv.load(scene.model.poisoned(), scene.chunks, slots, unique_slots=True, **way)
    want, _ = helpers.loaded(scene.model, scene.model.arrays(), scene.rows, slots, scene.starts, scene.ends)
    others = np.setdiff1d(np.arange(28), slots[5])
    helpers.assert_same(scene.model.rows(helpers.snapshot(after.pages), others), scene.model.rows(want, others))
    # Gap slots may be doubled without any promise (their bytes are zero whichever is written last).
    gap = Scene(Model("A2"), 28, [0, 20], [8, 28])
    slots = gap.slots.copy()
    slots[9:15] = slots[8]
    gap.check(slots, gaps="zero", **way)


@ways
def test_rows_that_are_not_valid_stay_behind(way):
    """B2: rows stored from a skipped slot, below a prefix or past the pool are never real KV, and count as skipped."""
    model = Model("A2")
    arrays, cache = model.random()
    source = np.random.default_rng(0).permutation(28)[:20]
    source[[0, 5, 11]] = [-1, 40, -7]
    chunks = jaxkv.store(cache, source, chunk_tokens=8, skip_prefix=3, out_of_range="skip")
    scene = Scene(model, 20)
    scene.chunks, scene.starts, scene.ends = chunks, [0, 8, 16], [8, 16, 20]
    scene.rows = [model.rows(arrays, source[s:e]) for s, e in zip(scene.starts, scene.ends, strict=True)]
    scene.check(**way)
    # An invalid row does not compete for its slot either.
    slots = scene.slots[:20].copy()
    slots[4] = slots[5]
    slots[10] = slots[11]
    scene.check(slots, **way)
    # One whose bucket is longer than its tokens has zero bytes there, which are not loaded (D6, D18).
    short = Scene(model, 5, chunk_tokens=16)
    assert short.chunks[0].num_rows == 16
    short.check(**way)


@ways
def test_nothing_to_do(way):
    """R8, B15, B16: the pool is bit-equal, whether or not it was to be consumed, and the result is nobody else's."""
    scene = Scene(Model("A2"), 8)
    for chunks, slots in [((), []), (scene.chunks, np.full(8, -1)), ((), jnp.zeros(0, jnp.int32))]:
        after = jaxkv.load(scene.model.poisoned(), chunks, slots, **way)
        helpers.assert_same(after.pages, scene.model.arrays())
        kept = scene.model.poisoned()
        after = jaxkv.load(kept, chunks, slots, donate=False, **way)
        jaxkv.load(after, scene.chunks, np.arange(8), **way)
        helpers.assert_same(kept.pages, scene.model.arrays())


def pointers(cache: jaxkv.PagedCache) -> list[int]:
    return [x.unsafe_buffer_pointer() for x in jax.tree.leaves(cache)]


@ways
@pytest.mark.parametrize("pool", ["A1", "A2", "A5", "A24", "A26"])
def test_a_load_is_in_place_and_consumes_its_cache(pool, way):
    """E26, R1: proven by pointer; gap zeroing too. Without donation one copy, and the argument is as it was."""
    scene = Scene(Model(pool), 28, [0, 20], [8, 28])
    options = dict(starts=scene.starts, ends=scene.ends, gaps="zero", **way)
    cache = scene.model.poisoned()
    before, leaves = pointers(cache), jax.tree.leaves(cache)
    after = jaxkv.load(cache, scene.chunks, scene.slots, **options)
    assert pointers(after) == before
    assert all(leaf.is_deleted() for leaf in leaves)
    kept = scene.model.poisoned()
    copy = jaxkv.load(kept, scene.chunks, scene.slots, donate=False, **options)
    helpers.assert_same(kept.pages, scene.model.arrays())
    helpers.assert_same(copy.pages, helpers.snapshot(after.pages))
    assert not set(pointers(kept)) & set(pointers(copy))


@ways
@pytest.mark.parametrize("view", [np.asarray, np.from_dlpack], ids=["numpy", "dlpack"])
def test_a_view_from_outside_never_changes(view, way):
    """I9: CPU then makes a copy and deletes nothing; the cache is consumed all the same, the view as it was."""
    scene = Scene(Model("A2", dtype="fp32"), 16)
    cache = scene.model.poisoned()
    leaves = jax.tree.leaves(cache)
    views = [view(leaf) for leaf in leaves]
    after = jaxkv.load(cache, scene.chunks, scene.slots[:16], **way)
    assert all(leaf.is_deleted() for leaf in leaves)
    want = scene.model.written(scene.model.arrays(), np.concatenate(scene.rows, axis=2), scene.slots[:16])
    helpers.assert_same(after.pages, want)
    helpers.assert_same(views, scene.model.arrays())
    # Pages that share the memory of a NumPy array of the caller's, which JAX never writes.
    mine = [np.ascontiguousarray(x) for x in scene.model.arrays()]
    cache = jaxkv.PagedCache(tuple(jax.device_put(x) for x in mine), scene.model.spec)
    helpers.assert_same(jaxkv.load(cache, scene.chunks, scene.slots[:16]).pages, want)
    helpers.assert_same(mine, scene.model.arrays())


def test_one_array_given_twice():
    """I11: as two layers of a cache that is to be consumed it is an error; else each layer gets its own copy."""
    scene = Scene(Model("A2"), 8)
    first, second, _ = scene.model.poisoned().pages
    cache = jaxkv.PagedCache((first, second, first), scene.model.spec)
    with pytest.raises(ValueError, match="pages: arrays 0 and 2 are one array"):
        jaxkv.load(cache, scene.chunks, scene.slots[:8])
    want = scene.model.written(scene.model.arrays(), scene.rows[0], scene.slots[:8])
    helpers.assert_same(jaxkv.load(cache, scene.chunks, scene.slots[:8], donate=False).pages, want)
    # Two names of one buffer: JAX itself finds that, when it is to donate it twice.
    twin = jax.device_put(first, first.sharding)
    assert twin is not first
    cache = jaxkv.PagedCache((first, second, twin), scene.model.spec)
    with pytest.raises((RuntimeError, ValueError), match="donate the same buffer twice"):
        jaxkv.load(cache, scene.chunks, scene.slots[:8])
    helpers.assert_same(cache.pages, scene.model.arrays())


def test_chunks_in_device_memory_are_accepted():
    """I12, R1: and are whole afterwards, though the cache is donated."""
    scene = Scene(Model("A2"), 16)
    scene.chunks = [
        dataclasses.replace(c, data=tuple(jax.device_put(x, cache_device(x)) for x in c.data)) for c in scene.chunks
    ]
    scene.check()
    mixed = [scene.chunks[0], dataclasses.replace(scene.chunks[1], data=tuple(map(pinned, scene.chunks[1].data)))]
    scene.chunks = mixed
    scene.check()


def cache_device(array: jax.Array):
    return array.sharding.with_memory_kind("device")


def test_a_plan_is_loaded_as_often_as_you_like():
    """D16, M44: made from a spec alone, into pools of different sizes; those too small are refused when loading."""
    scene = Scene(Model("A2"), 28, [0, 20], [8, 28])
    plan = jaxkv.plan(scene.model.spec, scene.chunks, scene.slots, starts=scene.starts, ends=scene.ends, gaps="zero")
    assert plan.num_slots is None
    for pages in (7, 9):
        model = Model("A2", pages=pages)
        want, _ = helpers.loaded(model, model.arrays(), scene.rows, scene.slots, scene.starts, scene.ends, zero=True)
        for _ in range(2):
            helpers.assert_same(jaxkv.load(model.poisoned(), plan).pages, want)
    few = Model("A2", pages=6)
    cache = few.poisoned()
    with pytest.raises(ValueError, match="24 slots") as caught:
        jaxkv.load(cache, plan)
    assert "out_of_range='skip'" in str(caught.value)
    helpers.assert_same(cache.pages, few.arrays())
    skipping = jaxkv.plan(few.spec, scene.chunks, scene.slots, starts=[0, 20], ends=[8, 28], out_of_range="skip")
    want, _ = helpers.loaded(few, few.arrays(), scene.rows, scene.slots, scene.starts, scene.ends)
    helpers.assert_same(jaxkv.load(cache, skipping).pages, want)


@ways
@pytest.mark.parametrize("donate", [True, False])
@pytest.mark.parametrize("fails_at", [0, 1, 3, "fetch"])
def test_what_fails_after_the_first_write_carries_the_cache(fails_at, donate, way, monkeypatch):
    """`error.cache` is whole, holds what was written, and takes the load again (M42)."""
    scene = Scene(Model("A2"), 28)
    done = fetched = 0

    def counting(function, is_fetch=False):
        def step(*args, **options):
            nonlocal done, fetched
            if fetched == 3 if is_fetch else done == fails_at:
                raise RuntimeError("the link is down")
            fetched, done = fetched + is_fetch, done + (not is_fetch)
            return function(*args, **options)

        return step

    for name in WRITERS:
        monkeypatch.setattr(paths, name, counting(getattr(paths, name)))
    if fails_at == "fetch":
        if way.get("path") == "direct":
            pytest.skip("that path fetches nothing beforehand")
        monkeypatch.setattr(paths, "fetch", counting(paths.fetch, is_fetch=True))
    cache = scene.model.poisoned()
    with pytest.raises(RuntimeError, match="the link is down") as caught:
        jaxkv.load(cache, scene.chunks, scene.slots, donate=donate, **way)
    monkeypatch.undo()
    left = caught.value.cache
    rows = np.concatenate(scene.rows, axis=2)
    want = scene.model.written(scene.model.arrays(), rows[:, :, : 8 * done], scene.slots[: 8 * done])
    helpers.assert_same(left.pages, want)
    after = jaxkv.load(left, scene.chunks, scene.slots, **way)
    helpers.assert_same(after.pages, scene.model.written(scene.model.arrays(), rows, scene.slots))
    scene.check(**way)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("staging", [1, 2])
def test_staging_is_bounded(staging, implementation, monkeypatch):
    """Device memory of a load: the chunks on their way and the one being scattered, whatever the length."""
    scene = Scene(Model("A2", pages=40), 160)
    cache = scene.model.poisoned()
    alive, arrived = [], []
    fetch = paths.fetch

    def counted(arrays, shardings):
        out = fetch(arrays, shardings)
        arrived.append(weakref.ref(out[0]))
        alive.append(sum(ref() is not None and not ref().is_deleted() for ref in arrived))
        return out

    monkeypatch.setattr(paths, "fetch", counted)
    tuning = jaxkv.Tuning(staging=staging)
    options = dict(tuning=tuning, path="overlapped", implementation=implementation)
    jaxkv.load(cache, scene.chunks, scene.slots, **options)
    assert len(alive) == 20
    assert max(alive) <= staging + 1
    assert sum(ref() is not None for ref in arrived) == 0


@ways
def test_other_lengths_compile_nothing(way):
    """B30: another number of tokens, of chunks, other slots and ranges; gaps in powers of two."""
    model = Model("A2", pages=41)
    scene = Scene(model, 100)
    other = [Scene(model, n, seed=n) for n in (1, 9, 64)]
    with helpers.compilations() as first:
        cache = jaxkv.load(model.poisoned(), scene.chunks[:2], scene.slots[:16], **way)
    assert first
    with helpers.compilations() as compiled:
        for part in other:
            cache = jaxkv.load(cache, part.chunks, part.slots, **way)
            cache = jaxkv.load(cache, part.chunks[-1:], part.slots, starts=part.starts[-1:], ends=part.ends[-1:], **way)
    assert not compiled
    for tokens in (20, 19):  # gaps of 12 and 11
        with helpers.compilations() as compiled:
            chunks = [scene.chunks[0], scene.chunks[1]]
            options = dict(starts=[0, tokens], ends=[8, tokens + 8], gaps="zero")
            cache = jaxkv.load(cache, chunks, scene.slots, **options, **way)
    assert not compiled
