"""store and load of pools that are sharded over heads, or not on the default device."""

import functools
import itertools
import re

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import IMPLEMENTATIONS, Model, Scene, follow
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxkv

implementations = pytest.mark.parametrize("implementation", IMPLEMENTATIONS)

# Pool layout, and where its arrays are split.
SPLITS = {
    "A1": P(None, None, None, None, "tp"),
    "A2": P(None, None, None, "tp"),
    "A5": P(None, "tp"),
    "A13": P(None, "tp"),
}


def mesh_of(ways: int, kind: AxisType = AxisType.Auto) -> jax.sharding.Mesh:
    return jax.make_mesh((ways,), ("tp",), axis_types=(kind,), devices=jax.devices()[:ways])


class Sharded:
    """A model, slots, and chunks of its unsharded pool to compare with."""

    def __init__(self, pool: str, ways: int, kind: AxisType = AxisType.Auto):
        self.model = Model(pool, heads=8)
        self.mesh = mesh_of(ways, kind)
        self.sharding = NamedSharding(self.mesh, SPLITS[pool])
        self.arrays = self.model.arrays(0)
        self.slots = np.random.default_rng(0).permutation(28)[:20].astype(np.int32)
        self.other = np.random.default_rng(1).permutation(28)[:20].astype(np.int32)
        rows = self.model.rows(self.arrays, self.slots)
        self.want = self.model.written(self.model.arrays(), rows, self.other)

    def cache(self, arrays=None) -> jaxkv.PagedCache:
        arrays = self.model.arrays() if arrays is None else arrays
        return self.model.cache(arrays, self.sharding)

    def check(self, chunks, after) -> None:
        helpers.stored(self.model, self.arrays, chunks, self.slots, *follow(20, 8))
        helpers.assert_same(after.pages, self.want)
        for leaf in jax.tree.leaves(after):
            assert leaf.sharding.is_equivalent_to(self.sharding, leaf.ndim)
            assert leaf.sharding.memory_kind == "device"


@implementations
@pytest.mark.parametrize("ways", [2, 8])
@pytest.mark.parametrize("pool", SPLITS)
def test_heads_over_devices(pool, ways, implementation):
    """K1, K11, K14, I14: equal to the unsharded run; chunks and result keep memory kind and sharding."""
    world = Sharded(pool, ways)
    cache = world.cache(world.arrays)
    chunks = jaxkv.store(cache, world.slots, chunk_tokens=8, implementation=implementation)
    assert chunks[0].data[0].sharding.device_set == set(world.mesh.devices.flat)
    assert chunks[0].data[0].sharding.shard_shape(chunks[0].data[0].shape)[-1] == 64 // ways
    target = world.cache()
    leaves = jax.tree.leaves(target)
    world.check(chunks, jaxkv.load(target, chunks, world.other, implementation=implementation))
    assert all(leaf.is_deleted() for leaf in leaves)
    helpers.assert_same(cache.pages, world.arrays)
    # With gaps, skipped and duplicate tokens it is the plan of an unsharded pool.
    options = dict(starts=[0, 12], ends=[8, 20], gaps="zero", skip_prefix=2)
    plan = jaxkv.plan(world.model.spec, chunks[:2], world.other, **options)
    got = jaxkv.load(world.cache(), plan, implementation=implementation)
    want = jaxkv.load(world.model.poisoned(), plan, implementation=implementation)
    helpers.assert_same(got.pages, helpers.snapshot(want.pages))


def test_chunks_do_not_know_of_shards():
    """A51, K3: stored under one split of the heads, loaded under another, or under none."""
    worlds = [Sharded("A2", 8), Sharded("A2", 2), Sharded("A13", 4)]
    whole = worlds[0].model
    sources = [world.cache(world.arrays) for world in worlds] + [whole.cache(worlds[0].arrays)]
    for source in sources:
        world = next((w for w in worlds if w.model.spec is source.spec), worlds[0])
        chunks = jaxkv.store(source, world.slots, chunk_tokens=8)
        want = world.model.rows(world.arrays, world.slots)
        for target in worlds:
            after = jaxkv.load(target.cache(), chunks, world.other)
            helpers.assert_same(after.pages, target.model.written(target.model.arrays(), want, world.other))
        after = jaxkv.load(whole.poisoned(), chunks, world.other)
        helpers.assert_same(after.pages, whole.written(whole.arrays(), want, world.other))
        assert after.pages[0].devices() == {jax.devices()[0]}


def collectives(compiled) -> list[str]:
    return re.findall(r"(?:all|collective|reduce)-\w+", compiled.as_text())


@implementations
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
@pytest.mark.parametrize("pool", ["A2", "A13"])
def test_inside_jit(pool, kind, implementation):
    """K1, K12, K13: no collective; donated in place; the second step, on the first one's result, compiles nothing."""
    world = Sharded(pool, 4, kind)

    @functools.partial(jax.jit, donate_argnames="target")
    def both(source, target, slots, other):
        chunks = jaxkv.store(source, slots, chunk_tokens=8, implementation=implementation)
        return chunks, jaxkv.load(target, chunks, other, implementation=implementation)

    with jax.set_mesh(world.mesh):
        source, target = world.cache(world.arrays), world.cache()
        assert not collectives(both.lower(source, target, world.slots, world.other).compile())
        before = [[s.data.unsafe_buffer_pointer() for s in x.addressable_shards] for x in jax.tree.leaves(target)]
        chunks, after = both(source, target, world.slots, world.other)
        with helpers.compilations() as compiled:
            chunks, after = both(source, after, world.slots, world.other)
        assert not compiled
    found = [[s.data.unsafe_buffer_pointer() for s in x.addressable_shards] for x in jax.tree.leaves(after)]
    assert found == before
    world.check(chunks, after)


@implementations
def test_the_second_step_compiles_nothing(implementation):
    """K13, B30 outside of jit, other lengths too."""
    world = Sharded("A2", 4)
    source = world.cache(world.arrays)
    chunks = jaxkv.store(source, world.slots, chunk_tokens=8, implementation=implementation)
    after = jaxkv.load(world.cache(), chunks, world.other, implementation=implementation)
    with helpers.compilations() as compiled:
        for n in (20, 3, 17):
            some = jaxkv.store(source, world.slots[:n], chunk_tokens=8, implementation=implementation)
            after = jaxkv.load(after, some, world.other[:n], implementation=implementation)
    assert not compiled
    world.check(chunks, after)


@implementations
def test_inside_shard_map(implementation):
    """K12: each device with its own heads; a chunk per device, put together by the caller's own out_specs."""
    model, mesh = Model("A2", heads=8), mesh_of(4)
    part = Model("A2", heads=2)
    arrays, _ = model.random(3)
    slots, other = np.arange(8, dtype=np.int32), np.arange(8, dtype=np.int32) + 9

    @jax.jit
    @functools.partial(jax.shard_map, mesh=mesh, in_specs=(SPLITS["A2"], P()), out_specs=SPLITS["A2"])
    def move(pages, slots):
        cache = jaxkv.PagedCache(pages, part.spec)
        chunks = jaxkv.store(cache, slots, chunk_tokens=8, implementation=implementation)
        return jaxkv.load(cache, chunks, slots + 9, implementation=implementation).pages

    pages = model.cache(arrays, NamedSharding(mesh, SPLITS["A2"])).pages
    assert not collectives(move.lower(pages, slots).compile())
    helpers.assert_same(move(pages, slots), model.written(arrays, model.rows(arrays, slots), other))


@pytest.mark.parametrize("way", helpers.WAYS.values(), ids=helpers.WAYS)
def test_a_pool_on_another_device_than_the_default(way):
    """K5: work, results and host memory there; the default device holds nothing new."""
    model, device = Model("A2"), jax.devices()[3]
    arrays = model.arrays(5)
    cache, target = model.cache(arrays, device), model.cache(model.arrays(), device)
    slots, other = np.arange(12), np.arange(12)[::-1] + 8
    before = len([x for x in jax.live_arrays() if jax.devices()[0] in x.devices()])
    chunks = jaxkv.store(cache, slots, chunk_tokens=8, implementation=way["implementation"])
    after = jaxkv.load(target, chunks, other, **way)
    assert before == len([x for x in jax.live_arrays() if jax.devices()[0] in x.devices()])
    for array in (*chunks[0].data, *after.pages):
        assert array.devices() == {device}
    helpers.stored(model, arrays, chunks, slots, *follow(12, 8))
    helpers.assert_same(after.pages, model.written(model.arrays(), model.rows(arrays, slots), other))
    # K6: chunks of one device into the pool of another.
    after = jaxkv.load(model.cache(model.arrays(), jax.devices()[5]), chunks, other)
    helpers.assert_same(after.pages, model.written(model.arrays(), model.rows(arrays, slots), other))
    assert after.pages[0].devices() == {jax.devices()[5]}


def test_unsupported_places_are_refused():
    """M35, M34, M30, I12: pages over pages, layers on two devices, pages in host memory; nothing is touched."""
    model, mesh = Model("A2", pages=8), mesh_of(2)
    scene = Scene(model, 8)
    slots = scene.slots[:8]
    cases = [
        (NamedSharding(mesh, P(None, "tp")), NotImplementedError, ["sharded over axis 1", "NamedSharding", "heads"]),
        (NamedSharding(mesh, P(None, None, "tp")), NotImplementedError, ["sharded over axis 2"]),
        (jax.devices()[0].memory("pinned_host"), ValueError, ["pinned_host", "device", "pages: array 0"]),
    ]
    if "unpinned_host" in {memory.kind for memory in jax.devices()[0].addressable_memories()}:
        cases.append((jax.devices()[0].memory("unpinned_host"), ValueError, ["unpinned_host", "device", "pages"]))
    for where, error, words in cases:
        if not isinstance(where, NamedSharding):
            where = jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind=where.kind)
        cache = jaxkv.PagedCache(tuple(jax.device_put(jnp.asarray(x), where) for x in model.arrays()), model.spec)
        for call in (lambda c: jaxkv.store(c, slots), lambda c: jaxkv.load(c, scene.chunks, slots)):
            with pytest.raises(error) as caught:
                call(cache)
            assert all(word in str(caught.value) for word in words), caught.value
        assert not cache.pages[0].is_deleted()
    pages = [*model.poisoned().pages[:2], jax.device_put(model.arrays()[2], jax.devices()[1])]
    with pytest.raises(ValueError, match=r"(?i)array 2 is on .*cpu.*1.*array 0 on .*cpu.*0"):
        jaxkv.load(jaxkv.PagedCache(tuple(pages), model.spec), scene.chunks, slots)
    scene.check()


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("heads_split", [True, False])
@pytest.mark.parametrize("path", [None, "overlapped", "direct"])
def test_a_mesh_of_one_device(path, heads_split, kind):
    """K1, I14: the paths of one device serve it; chunks are sharded as the overlapped path shards them."""
    if path == "direct" and "ffi" not in helpers.IMPLEMENTATIONS:
        pytest.skip("the extension is not built")
    model = Model("A2")
    mesh = jax.make_mesh((1,), ("tp",), axis_types=(kind,), devices=jax.devices()[:1])
    split = P(None, None, None, "tp", None) if heads_split else P()
    arrays = model.arrays(0)
    cache = model.cache(arrays, NamedSharding(mesh, split))
    slots = np.random.default_rng(0).permutation(28)[:21]
    chunks = jaxkv.store(cache, slots, chunk_tokens=8, path=path)
    chunks = jaxkv.store(cache, slots, chunk_tokens=8, path=path, into=chunks[:1])
    helpers.stored(model, arrays, chunks, slots, *helpers.follow(21, 8))
    plain = jaxkv.store(cache, slots, chunk_tokens=8, path="overlapped")
    for mine, other in zip(chunks, plain, strict=True):
        assert all(x.sharding.is_equivalent_to(y.sharding, x.ndim) for x, y in zip(mine.data, other.data, strict=True))
    plan = jaxkv.store_plan(cache, slots, chunk_tokens=8)
    parts = [jaxkv.store_layer(page, plan, layer=i, path=path) for i, page in enumerate(cache.pages)]
    helpers.stored(model, arrays, jaxkv.join_layers(parts), slots, *helpers.follow(21, 8))
    after = jaxkv.load(model.cache(model.arrays(), NamedSharding(mesh, split)), chunks, slots, path=path)
    helpers.assert_same(after.pages, model.written(model.arrays(), model.rows(arrays, slots), slots))


def test_without_jit_payloads_are_kept():
    """I12, C6: op by op nothing splits the operation, and what brings shards together must not touch a NaN."""
    world = Sharded("A2", 2)
    cache = world.cache(world.arrays)
    with jax.disable_jit():
        chunks = jaxkv.store(cache, world.slots, chunk_tokens=8)
        after = jaxkv.load(world.cache(), chunks, world.other)
    helpers.stored(world.model, world.arrays, chunks, world.slots, *follow(20, 8))
    helpers.assert_same(after.pages, world.want)


def test_chunks_of_pools_that_are_whole_everywhere():
    """A51: of a replicated pool, into a pool on one device, on other devices, sharded, and replicated."""
    world = Sharded("A2", 4)
    replicated = NamedSharding(world.mesh, P())
    chunks = jaxkv.store(world.model.cache(world.arrays, replicated), world.slots, chunk_tokens=8)
    for where in (*jax.devices()[:2], jax.devices()[5], world.sharding, NamedSharding(mesh_of(2), P()), replicated):
        after = jaxkv.load(world.model.cache(world.model.arrays(), where), chunks, world.other)
        helpers.assert_same(after.pages, world.want)
        assert jax.tree.leaves(after)[0].devices() == (where.device_set if hasattr(where, "device_set") else {where})


def test_one_op_at_a_time_the_custom_call_is_refused():
    """R14: nothing splits it there, and payloads would not be whole; nothing was launched."""
    if "ffi" not in IMPLEMENTATIONS:
        pytest.skip("the extension is not built")
    world = Sharded("A2", 2)
    cache, words = world.cache(world.arrays), "implementation: 'ffi' is not possible on several devices"
    with jax.disable_jit(), pytest.raises(RuntimeError, match=words):
        jaxkv.store(cache, world.slots, chunk_tokens=8, implementation="ffi")
    helpers.assert_same(cache.pages, world.arrays)


MIXED = {
    "whole and split": lambda: (NamedSharding(mesh_of(4), P()), NamedSharding(mesh_of(4), SPLITS["A2"])),
    "split and whole": lambda: (NamedSharding(mesh_of(4), SPLITS["A2"]), NamedSharding(mesh_of(4), P())),
    "one device, two words for it": lambda: (jax.devices()[0], NamedSharding(mesh_of(1), P())),
}


@pytest.mark.parametrize("mixed", MIXED.values(), ids=MIXED)
def test_arrays_that_are_sharded_differently(mixed):
    """K1, K13: each stays as it is; a plan tells such a pool from one whose first array is sharded alike."""
    model = Model("A2", heads=4)
    arrays = model.arrays(0)
    first, second = mixed()

    def cache(values, *where):
        places = itertools.cycle(where)  # one layer so, the next one so
        return jaxkv.PagedCache(tuple(jax.device_put(x, next(places)) for x in values), model.spec)

    plan = jaxkv.store_plan(model.spec, np.arange(20), chunk_tokens=8)
    alike, chunks = (jaxkv.store(cache(arrays, first, other), plan) for other in (first, second))
    helpers.stored(model, arrays, chunks, np.arange(20), *follow(20, 8))
    if [x.sharding for x in alike[0].data] != [x.sharding for x in chunks[0].data]:
        assert alike[0].alike is not chunks[0].alike
    pool = cache(model.arrays(), first, second)
    places = [leaf.sharding for leaf in jax.tree.leaves(pool)]
    loading = jaxkv.plan(model.spec, chunks, np.arange(20))
    for _ in range(2):
        pool = jaxkv.load(pool, loading)
        assert [leaf.sharding for leaf in jax.tree.leaves(pool)] == places
    want = model.written(model.arrays(), model.rows(arrays, np.arange(20)), np.arange(20))
    helpers.assert_same(pool.pages, want)
