"""The bulk path on CUDA (`-m gpu`): the same bytes, in place, in pinned memory, in bounded device memory."""

import dataclasses

import helpers
import jax
import jax.dlpack
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import DTYPES, Model, Scene, follow, small

import jaxkv
from jaxkv.ops import native

pytestmark = pytest.mark.gpu

HANDLERS = pytest.mark.skipif(not native.available("cuda"), reason="the CUDA handlers are not built")
WAYS = [
    pytest.param({"implementation": "xla"}, id="xla"),
    pytest.param({"implementation": "ffi", "path": "overlapped"}, id="overlapped", marks=HANDLERS),
    pytest.param({"implementation": "ffi", "path": "engine"}, id="engine", marks=HANDLERS),
    pytest.param({"implementation": "ffi", "path": "direct"}, id="direct", marks=HANDLERS),
]
ways = pytest.mark.parametrize("way", WAYS)


def store(cache, slots, way, **options):
    """A store on the way asked for, into chunks of an earlier one that went the same way into new memory."""
    if way.get("path") not in ("engine", "direct"):
        return jaxkv.store(cache, slots, **options, **way)
    old = jaxkv.store(cache, slots, **options, **way)
    kept = () if "format" in options else [row.copy() for chunk in old for row in chunk.rows()]
    chunks = jaxkv.store(cache, slots, **options, **way, into=old)
    helpers.assert_same([row for chunk in chunks for row in chunk.rows()] if kept else (), kept)
    return chunks


def round_trip(model: Model, way, num_tokens: int, chunk_tokens: int, **options) -> None:
    arrays, cache = model.random(0)
    rng = np.random.default_rng(0)
    slots = rng.permutation(model.num_slots)[:num_tokens]
    slots[2] = -1
    other = rng.permutation(model.num_slots)[:num_tokens]
    chunks = store(cache, slots, way, chunk_tokens=chunk_tokens, **options)
    helpers.stored(model, arrays, chunks, slots, *follow(num_tokens, chunk_tokens))
    after = jaxkv.load(model.poisoned(), chunks, other, **way)
    real = slots >= 0
    helpers.assert_same(after.pages, model.written(model.arrays(), model.rows(arrays, slots[real]), other[real]))
    helpers.assert_same(cache.pages, arrays)
    assert {x.sharding.memory_kind for x in jax.tree.leaves(after)} == {"device"}


@ways
@pytest.mark.parametrize("pool", ["A1", "A2", "A4", "A5", "A13", "A22", "A24", "A26", "A32", "A34", "A36"])
def test_layouts(pool, way):
    """A, R1 to R3, R13, I14: three chunks, the last one short, into poisoned pages."""
    round_trip(small(pool, pages=9), way, 21, 8)


@ways
@pytest.mark.parametrize("dtype", DTYPES)
def test_dtypes(dtype, way):
    """C6 to C8, R2."""
    round_trip(Model("A13", dtype=dtype, heads=3, dim=33, pages=9), way, 21, 8)


@ways
@pytest.mark.parametrize("chunk", ["A43 T2D", "A43 2TD", "A44 page", "A45 packed", "A45 layers"])
def test_chunk_formats(chunk, way):
    """A43 to A45."""
    round_trip(Model("A7"), way, 21, 8, format=helpers.CHUNKS[chunk])


@ways
def test_a_larger_transfer(way):
    """D1, B20: 2,144 tokens of a real model's size in nine chunks."""
    model = Model("A2", layers=8, heads=8, dim=128, page_size=16, pages=160)
    round_trip(model, way, 2144, 256)


@ways
def test_plans_of_every_kind(way):
    """D2 to D5, D12, B1, B4, B11, G1: gaps, overlaps, a prefix, equal and missing slots."""
    scene = Scene(Model("A2"), 28, [20, 0, 4, 12], [28, 8, 10, 12])
    scene.check(**way)
    scene.check(gaps="zero", skip_prefix=3, **way)
    slots = np.random.default_rng(1).integers(-2, 33, 28)
    scene.check(slots, gaps="zero", out_of_range="skip", **way)
    scene.check(np.full(28, -1), **way)


@HANDLERS
@pytest.mark.parametrize("staging", [1, 2, 3])
@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 13])
def test_chunks_that_are_sent_ahead(count, staging):
    """As many as there are buffers, which the later ones then go through; all layers in one array, or two in each."""
    how = dict(path="engine", tuning=jaxkv.Tuning(staging=staging, chunks_per_call=8))
    model, num_tokens = Model("A2", layers=4, pages=30), 8 * count - 3
    arrays, cache = model.random(0)
    slots = np.random.default_rng(1).permutation(model.num_slots)[:num_tokens]
    for layers_per_array in (None, 2):
        chunks = jaxkv.store(cache, slots, chunk_tokens=8, layers_per_array=layers_per_array, **how)
        for donate in (True, False):
            after = jaxkv.load(model.poisoned(), chunks, slots, donate=donate, **how)
            helpers.assert_same(after.pages, model.written(model.arrays(), model.rows(arrays, slots), slots))
        helpers.stored(model, arrays, chunks, slots, *follow(num_tokens, 8))  # what is in host memory is as it was


@HANDLERS
def test_one_chunk_sent_ahead_to_two_places():
    """Twice on the device: what was sent is written once it was read."""
    model = Model("A2", pages=30)
    arrays, cache = model.random(0)
    chunks = jaxkv.store(cache, np.arange(32), chunk_tokens=8)
    order = [0, 0, 1, 2, 3, 0]
    slots = np.arange(119, 119 - 48, -1)
    starts, ends = follow(48, 8)
    after = jaxkv.load(model.poisoned(), [chunks[k] for k in order], slots, path="engine", starts=starts, ends=ends)
    rows = np.concatenate([model.rows(arrays, np.arange(8 * k, 8 * k + 8)) for k in order], axis=2)
    helpers.assert_same(after.pages, model.written(model.arrays(), rows, slots))


@ways
@pytest.mark.parametrize("pool", ["A1", "A2", "A5"])
def test_in_place(pool, way):
    """E26: proven by pointer; without donation the pages are copied once and stay as they were."""
    scene = Scene(Model(pool), 28, [0, 20], [8, 28])
    options = dict(starts=scene.starts, ends=scene.ends, gaps="zero", **way)
    cache = scene.model.poisoned()
    leaves = jax.tree.leaves(cache)
    before = [x.unsafe_buffer_pointer() for x in leaves]
    after = jaxkv.load(cache, scene.chunks, scene.slots, **options)
    assert [x.unsafe_buffer_pointer() for x in jax.tree.leaves(after)] == before
    assert all(x.is_deleted() for x in leaves)
    kept = scene.model.poisoned()
    copy = jaxkv.load(kept, scene.chunks, scene.slots, donate=False, **options)
    helpers.assert_same(kept.pages, scene.model.arrays())
    helpers.assert_same(copy.pages, helpers.snapshot(after.pages))


@ways
def test_compiled_once(way):
    """B30, K13: a second prompt of another length compiles nothing (batches of the engine path are warmed up)."""
    model = Model("A2", pages=41)
    _, cache = model.random(0)
    options = dict(chunk_tokens=8)

    def both(num_tokens):
        slots = np.random.default_rng(num_tokens).permutation(model.num_slots)[:num_tokens]
        jaxkv.load(model.poisoned(), store(cache, slots, way, **options), slots, **way)

    for num_tokens in (120, 8, 16, 32, 64):  # runs of 8, 4, 2 and 1 chunks, each the first of a load and a later one
        both(num_tokens)
    with helpers.compilations() as compiled:
        for num_tokens in (120, 1, 9, 64, 113):
            both(num_tokens)
    assert not compiled


def peak(call) -> int:
    """Bytes of device memory that a call takes beyond those in use; the peak so far must be below them."""
    device = jax.devices()[0]
    stats = device.memory_stats()
    before, high = stats["bytes_in_use"], stats["peak_bytes_in_use"]
    filler = None
    if high > before + (1 << 20):  # lift what is in use to the old peak, so that a new one shows
        filler = jnp.zeros(high - before - (1 << 20), jnp.uint8).block_until_ready()
        before = device.memory_stats()["bytes_in_use"]
    result = call()
    jax.block_until_ready(jax.tree.leaves(result))
    after = device.memory_stats()["peak_bytes_in_use"]
    del filler
    return max(after, high) - before


@ways
def test_device_memory_is_that_of_the_ring(way):
    """Store: two chunks. Load: three at most, the one being scattered among them. Whatever the number of tokens."""
    model = Model("A2", layers=4, heads=8, dim=128, page_size=16, pages=256)  # 64 MiB, chunks of 4 MiB
    cache = model.cache(model.arrays())
    slots = np.random.default_rng(0).permutation(model.num_slots)
    chunk = 256 * model.spec.bytes_per_token
    slack = chunk // 2 + (1 << 20)
    chunks = store(cache, slots, way)
    jax.block_until_ready([c.data for c in chunks])
    cache = jaxkv.load(cache, chunks, slots, **way)  # compiles, and stays the only pool
    jax.block_until_ready(cache.pages)
    old = chunks if way.get("path") in ("engine", "direct") else ()
    took = peak(lambda: jaxkv.store(cache, slots, **way, into=old))
    # The allocator hands out blocks up to twice as large as asked for: one for both buffers of the engine path, and
    # for what the XLA form works with.
    most = 2 if way.get("path") in ("overlapped", "direct") else 4
    assert took <= most * chunk + slack, took / chunk
    chunks = jaxkv.store(cache, slots)
    jax.block_until_ready([c.data for c in chunks])
    took = peak(lambda: jaxkv.load(cache, chunks, slots, **way))
    assert took <= 4 * chunk + slack, took / chunk


@ways
def test_pages_with_a_view_are_refused(way):
    """I9: a DLPack view holds the pages, so they cannot be consumed; the view does not change, and no crash."""
    scene = Scene(Model("A2", dtype="fp32"), 8)
    cache = scene.model.poisoned()
    view = jax.dlpack.from_dlpack(cache.pages[0])
    slots = scene.slots[:8]
    want = scene.model.written(scene.model.arrays(), scene.rows[0], slots)
    try:
        after = jaxkv.load(cache, scene.chunks, slots, **way)
    except (RuntimeError, ValueError) as error:
        assert "donat" in str(error) or "external reference" in str(error), error
    else:
        helpers.assert_same(after.pages, want)
    helpers.assert_same(view, scene.model.arrays()[0])
    again = jaxkv.load(scene.model.poisoned(), scene.chunks, slots, **way)
    helpers.assert_same(again.pages, want)


@ways
def test_store_then_overwrite_at_once(way):
    """E1, E12, E10: pages donated to a writer, and chunks written into, right after the call."""
    model = Model("A2", layers=4, heads=8, dim=128, page_size=16, pages=64)
    arrays = model.arrays(0)
    wipe = jax.jit(lambda pages: jax.tree.map(jnp.zeros_like, pages), donate_argnums=0)
    slots = np.random.default_rng(0).permutation(model.num_slots)[:512]
    for _ in range(10):
        cache = model.cache(arrays)
        chunks = store(cache, slots, way)
        wipe(cache.pages)
        target = jaxkv.load(model.poisoned(), chunks, slots, **way)
        if way["implementation"] == "ffi":
            jaxkv.store(model.cache(model.arrays()), slots, into=chunks, **{**way, "path": None})
        else:
            helpers.stored(model, arrays, chunks, slots, *follow(512, 256))
        helpers.assert_same(target.pages, model.written(model.arrays(), model.rows(arrays, slots), slots))


@ways
def test_inside_jit(way):
    """R5, I14, E17: store and load in one program, the pool donated."""
    implementation = way["implementation"]
    scene = Scene(Model("A14"), 12, seed=3)
    model, put = scene.model, np.arange(12)
    arrays = model.arrays(4)

    def both(cache, chunks, slots):
        stored = jaxkv.store(cache, slots, chunk_tokens=8, implementation=implementation)
        return jaxkv.load(cache, chunks, slots, implementation=implementation), stored

    after, stored = jax.jit(both, donate_argnums=0)(model.cache(arrays), scene.chunks, put)
    helpers.assert_same(after.pages, model.written(arrays, np.concatenate(scene.rows, axis=2), put))
    helpers.stored(model, arrays, stored, put, *follow(12, 8))


def test_memory_kinds_are_refused_by_name():
    """I12, M30: a pool in pinned memory; chunks in device memory are taken."""
    scene = Scene(Model("A2"), 8)
    slots = scene.slots[:8]
    cache = jaxkv.PagedCache(tuple(map(helpers.pinned, scene.model.poisoned().pages)), scene.model.spec)
    with pytest.raises(ValueError, match=r"pages: .*'pinned_host', expected 'device'"):
        jaxkv.load(cache, scene.chunks, slots)
    scene.chunks = [
        dataclasses.replace(c, data=tuple(jax.device_put(x, x.sharding.with_memory_kind("device")) for x in c.data))
        for c in scene.chunks
    ]
    scene.check()
