"""Turned keys, layer-wise calls and the order of effects on CUDA (`-m gpu`): what the CPU's tests say, once more."""

import helpers
import jax
import jax.numpy as jnp
import layers as by_layer
import numpy as np
import pytest
import turning
from helpers import Model, Scene, assert_same
from turning import FLOATS, Moving, rope

import jaxkv
from jaxkv import host
from jaxkv.ops import native

pytestmark = pytest.mark.gpu

HANDLERS = pytest.mark.skipif(not native.available("cuda"), reason="the CUDA handlers are not built")
WAYS = {
    "xla": {"implementation": "xla"},
    "overlapped": {"implementation": "ffi", "path": "overlapped"},
    "engine": {"implementation": "ffi", "path": "engine"},
    "direct": {"implementation": "ffi", "path": "direct"},
}
ways = pytest.mark.parametrize(
    "way", [pytest.param(way, id=name, marks=() if name == "xla" else HANDLERS) for name, way in WAYS.items()]
)
both = pytest.mark.parametrize("implementation", ["xla", pytest.param("ffi", marks=HANDLERS)])


def check_every_way(made: Moving, many: bool = False) -> None:
    """F1 to F4, F6, F27, F35, R4: every path and form against float64, forms within a unit, paths equal."""
    before = helpers.snapshot([chunk.data for chunk in made.chunks])
    xla = made.bulk(WAYS["xla"])
    made.check(xla, many=many)
    assert_same(made.layerwise("xla"), xla, "layer by layer xla")
    if native.available("cuda"):
        ffi = made.bulk(WAYS["overlapped"])
        made.check(ffi, many=many)
        made.check_agree(xla, ffi)
        for path in ("engine", "direct"):
            assert_same(made.bulk(WAYS[path]), ffi, path)
        assert_same(made.layerwise("ffi"), ffi, "layer by layer ffi")
    assert_same([chunk.data for chunk in made.chunks], before, "chunks")


@pytest.mark.parametrize("pairing", ["half", "interleaved"])
@pytest.mark.parametrize("dtype", FLOATS)
def test_formats(dtype, pairing):
    """F3, F4, F6, F8, F9, F30: every format and pairing, over 1,000 rows, positions up to 131071."""
    model = Model("A2", layers=2, heads=4, dim=64, page_size=16, pages=40, dtype=dtype, rope=rope(64, pairing=pairing))
    rng = np.random.default_rng(3)
    old = rng.integers(700, 131072, 500)
    new = np.clip(old + rng.choice([0, 1, -1, 16, -16, 1024, -1024, 65536, -65536], 500), 0, 131071)
    check_every_way(Moving(model, 500, old=old, new=new, chunk_tokens=128), many=True)


KINDS = {
    "a quarter": (128, rope(32), 0),
    "half, interleaved": (128, rope(64, pairing="interleaved"), 0),
    "odd head dim": (33, rope(16), 0),
    "odd head dim and offset": (33, rope(8, pairing="interleaved"), 5),
    "one pair": (3, rope(2), 0),
    "one pair at the end": (5, rope(2, pairing="interleaved"), 3),
    "wide pairs": (40, rope(16, pair_distance=13), 3),
    "80 channels": (80, rope(80), 0),
    "576 with the window at its end": (576, rope(64, pairing="interleaved"), 512),
    "odd offset": (96, rope(64), 7),
    "all of 256": (256, rope(256), 0),
}


@pytest.mark.parametrize("dtype", ["bf16", "fp32", "e4m3"])
@pytest.mark.parametrize("kind", KINDS)
def test_windows(kind, dtype):
    """F12, F14: widths, offsets and rows of every kind, aligned or not."""
    dim, turn, offset = KINDS[kind]
    check_every_way(Moving(Model("A2", layers=2, dim=dim, dtype=dtype, rope=turn, rope_offset=offset), 20))


@pytest.mark.parametrize("pool", ["A1", "A2", "A5", "A13", "A19", "A22", "A24", "A26", "A29", "A32", "A34", "A36"])
def test_layouts(pool):
    """F15: K alone turns, wherever it is."""
    check_every_way(Moving(turning.turned_model(pool, rope(6)), 20))


@pytest.mark.parametrize("pool", ["A1", "A2", "A5"])
@pytest.mark.parametrize("layers_per_array", [None, 1, 3])
def test_each_layer_by_its_own(pool, layers_per_array):
    """F10, F11: local, global and no rope; arrays of one layer, some, all."""
    model = Model(pool, layers=4, rope=(rope(8), rope(8, 1e6), None, rope(8)))
    check_every_way(Moving(model, 20, layers_per_array=layers_per_array))


def test_mrope():
    """F21."""
    check_every_way(Moving(Model("A13", dim=12, rope=rope(12, mrope_section=[2, 2, 2])), 20))


@ways
@pytest.mark.parametrize("dtype", FLOATS)
def test_what_stays_keeps_its_bits(dtype, way):
    """F1, F2: NaNs of every payload, while other tokens of the call do move."""
    model = Model("A2", layers=2, dtype=dtype, pages=33, rope=rope(4))
    bits = model.rows(model.arrays(5), np.arange(128))
    old = np.arange(128) + 7
    new = old + np.arange(128) % 2 * 9
    got = Moving(model, 128, old=old, new=new, rows=bits, chunk_tokens=64).bulk(way)
    assert_same(got[:, :, old == new], bits[:, :, old == new])
    assert_same(got[:, 1], bits[:, 1])
    assert_same(got[..., 4:], bits[..., 4:])


@ways
def test_gaps_prefix_and_missing_slots_with_turned_keys(way):
    """G1, G8, D13, F32: zeroed gaps, a skipped prefix and negative slots, in bulk and layer by layer alike."""
    model = Model("A2", rope=rope(8))
    made = Moving(model, 28)
    slots = made.slots.copy()
    slots[[2, 10, 26]] = -1
    options = dict(starts=[24, 0], ends=[28, 8], positions=made.new, gaps="zero", skip_prefix=1)
    plan = jaxkv.plan(model.spec, [made.chunks[3], made.chunks[0]], slots, **options)
    pages = helpers.snapshot(jaxkv.load(model.poisoned(), plan, **way).pages)
    layerwise = by_layer.load(model.poisoned(), plan, implementation=way["implementation"])
    assert_same(layerwise.pages, pages)
    gap = [t for t in range(8, 24) if t != 10]
    there = [t for t in (*range(1, 8), *range(24, 28)) if t not in (2, 26)]
    rows = model.rows(pages, slots[there])
    for layer in range(3):
        turning.check_keys(rows[layer, 0], made.rows[layer, 0][there], rope(8), made.old[there], made.new[there])
        assert_same(rows[layer, 1], made.rows[layer, 1][there])
    assert_same(pages, model.written(model.zeroed(model.arrays(), slots[gap]), rows, slots[there]))


@ways
@pytest.mark.parametrize("size", [0, 2])
@pytest.mark.parametrize("pool", ["A1", "A2", "A4", "A5", "A13", "A24"])
def test_layerwise_round_trip(pool, size, way):
    """D19, H7: store and load layer by layer, equal to the oracle and to the bulk calls."""
    model = helpers.small(pool)
    arrays, cache = model.random()
    slots, other = np.random.default_rng(0).permutation(28)[:21], np.random.default_rng(1).permutation(28)[:21]
    parts = by_layer.store(cache, slots, size=size, chunk_tokens=8, **way)
    chunks = jaxkv.join_layers(parts)
    helpers.stored(model, arrays, chunks, slots, *helpers.follow(21, 8))
    want = model.written(model.arrays(), model.rows(arrays, slots), other)
    plan = jaxkv.plan(model.spec, chunks, other)
    assert_same(by_layer.load(model.poisoned(), plan, implementation=way["implementation"]).pages, want)
    assert_same(jaxkv.load(model.poisoned(), chunks, other, **way).pages, want)
    late = jaxkv.plan(model.spec, turning.without_data(chunks), other, data_later=True)
    assert_same(by_layer.load(model.poisoned(), late, parts=iter(parts)).pages, want)


@both
def test_kv_and_replace(implementation):
    """Item 6: a layer's corrected K and V as values, edited ones written back, in one program."""
    made = Moving(Model("A2", rope=rope(8)), 20)

    @jax.jit
    def step(page, staged):
        k, v, _ = staged.kv()
        return jaxkv.write(page, staged.replace(k, -v), implementation=implementation)

    pages = list(made.model.poisoned().pages)
    for layer, staged in enumerate(jaxkv.fetch_layers(made.plan())):
        pages[layer] = step(pages[layer], staged)
    got = made.rows_of(jaxkv.PagedCache(tuple(pages), made.model.spec))
    assert_same(got[:, 1], -made.rows[:, 1])
    assert_same(got[:, 0], made.bulk(WAYS["xla"])[:, 0])


@both
def test_write_is_in_place(implementation):
    """E26: proven by pointer."""
    made = Moving(Model("A2", rope=rope(8)), 20)
    pages = list(made.model.poisoned().pages)
    before = [page.unsafe_buffer_pointer() for page in pages]
    for layer, staged in enumerate(jaxkv.fetch_layers(made.plan(gaps="zero"))):
        pages[layer] = by_layer.write(pages[layer], staged, implementation=implementation)
    assert [page.unsafe_buffer_pointer() for page in pages] == before


@jax.jit
def busy(pages):
    """The same bytes, after some milliseconds of work that they depend on."""
    done = jax.lax.fori_loop(0, 60, lambda _, x: x @ x * jnp.float32(1e-3), jnp.eye(2048, dtype=jnp.float32))
    nothing = (done[0, 0] > 2).astype(jnp.uint16)

    def after(page):
        return jax.lax.bitcast_convert_type(jax.lax.bitcast_convert_type(page, jnp.uint16) ^ nothing, page.dtype)

    return jax.tree.map(after, pages)


wipe = jax.jit(lambda pages: jax.tree.map(jnp.zeros_like, pages), donate_argnums=0, keep_unused=True)
SLOTS = np.random.default_rng(0).permutation(1024)[:512]


def large() -> Model:
    return Model("A2", layers=4, heads=8, dim=128, page_size=16, pages=64)


@pytest.mark.parametrize("kind", ["bulk", pytest.param("into", marks=HANDLERS), "layer by layer", "ring", "grouped"])
def test_store_then_overwrite_at_once(kind):
    """E1, E2, E5, E13: the device busy, a store queued, the pages overwritten at once: the bytes at the call."""
    model, old = large(), ()
    arrays = model.arrays(0)
    for _ in range(20):
        cache = jaxkv.PagedCache(busy(model.cache(arrays).pages), model.spec)
        if kind in ("bulk", "into"):
            chunks = jaxkv.store(cache, SLOTS, into=old if kind == "into" else ())
        else:
            options = {"ring": host.Ring(2)} if kind == "ring" else {}
            plan = jaxkv.store_plan(cache, SLOTS, chunk_tokens=256)
            chunks = jaxkv.join_layers(by_layer.store(cache, plan, size=2 if kind == "grouped" else 0, **options))
        wipe(cache.pages)
        helpers.stored(model, arrays, chunks, SLOTS, *helpers.follow(512, 256))
        # The check keeps NumPy views of what it read, and nothing with a view is recycled.
        old = jaxkv.store(model.cache(arrays), SLOTS) if kind == "into" else ()


@ways
@pytest.mark.parametrize("layerwise", [False, True])
def test_readers_before_and_after_a_load(layerwise, way):
    """E3, E4, E10: a reader in flight sees the old bytes, the pages the new ones; chunks are dropped at once."""
    model = large()
    scene = Scene(model, 512, chunk_tokens=256)
    want = model.written(model.arrays(), np.concatenate(scene.rows, axis=2), scene.slots)
    for _ in range(10):
        cache = jaxkv.PagedCache(busy(model.poisoned().pages), model.spec)
        before = busy(cache.pages)
        plan = jaxkv.plan(cache, scene.chunks, scene.slots)
        if layerwise:
            after = by_layer.load(cache, plan, implementation=way["implementation"])
        else:
            after = jaxkv.load(cache, plan, **way)
        copied = busy(after.pages)
        assert_same(before, model.arrays())
        assert_same(copied, want)
        assert_same(after.pages, want)


@HANDLERS
def test_pinned_memory_is_taken_again():
    """E10, I10: `store(into=)` writes into the chunks of an earlier store right after a load of them was queued."""
    model = large()
    arrays, others = model.arrays(0), model.arrays(1)
    want = model.written(model.arrays(), model.rows(arrays, SLOTS), SLOTS)
    for path in ("engine", "direct"):
        for _ in range(10):
            chunks = jaxkv.store(model.cache(arrays), SLOTS)
            after = jaxkv.load(model.poisoned(), chunks, SLOTS, path=path)
            again = jaxkv.store(model.cache(others), SLOTS, into=chunks, path=path)
            assert_same(after.pages, want)
            helpers.stored(model, others, again, SLOTS, *helpers.follow(512, 256))


def test_iterators_interleaved_and_left():
    """E6, E20: several at once, one closed on the way; the others are exact, and so is the next one."""
    model = Model("A2", layers=4, rope=rope(8))
    made = [Moving(model, 20, seed=seed) for seed in range(3)]
    steps = [jaxkv.fetch_layers(m.plan()) for m in made]
    pages = [list(model.poisoned().pages) for _ in made]
    for layer in range(4):
        for at, step in enumerate(steps):
            if at == 1 and layer == 2:
                step.close()
            if at == 1 and layer >= 2:
                continue
            pages[at][layer] = by_layer.write(pages[at][layer], next(step))
    for at in (0, 2):
        made[at].check(made[at].rows_of(jaxkv.PagedCache(tuple(pages[at]), model.spec)))
    assert_same(pages[1][2:], model.arrays()[2:])
    made[1].check(made[1].layerwise())
