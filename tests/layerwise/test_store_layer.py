"""store_layer and join_layers: the layers' parts are what a store in bulk gives, byte for byte."""

import copy
import dataclasses
import pickle

import helpers
import jax
import jax.numpy as jnp
import layers as by_layer
import numpy as np
import pytest
import turning
from helpers import IMPLEMENTATIONS, POOLS, WAYS, Model, assert_same, small

import jaxkv
from jaxkv import host

SLOTS = np.random.default_rng(0).permutation(28)[:20]


@pytest.mark.parametrize("pool", POOLS)
def test_every_pool_layout(pool):
    """A1 to A36, D19, H7: one layer at a time, in KV_T2D (KV_MLA_TD), as the oracle has it."""
    model = small(pool)
    arrays, cache = model.random()
    chunks = jaxkv.join_layers(by_layer.store(cache, SLOTS, chunk_tokens=8))
    helpers.stored(model, arrays, chunks, SLOTS, *helpers.follow(20, 8))
    assert_same(cache.pages, arrays)


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("pool", ["A1", "A2", "A5", "A17", "A19"])
def test_grouped_layers(pool, size, way):
    """Grouped: a tuple of consecutive layers in one call, the last group smaller; equal to the bulk store."""
    model = Model(pool, heads=1) if pool == "A19" else Model(pool)
    arrays, cache = model.random()
    options = dict(chunk_tokens=8, **way)
    chunks = jaxkv.join_layers(by_layer.store(cache, SLOTS, size=size, **options))
    helpers.stored(model, arrays, chunks, SLOTS, *helpers.follow(20, 8))
    bulk = jaxkv.store(cache, SLOTS, chunk_tokens=8, format=chunks[0].format)
    assert [c.fingerprint for c in chunks] == [c.fingerprint for c in bulk]
    assert_same([c.data for c in chunks], [c.data for c in bulk])


FORMATS = ["KV_T2D", "KV_2TD", "kv token head dim", "token head (kv dim)", "page kv token head dim", jaxkv.KV_2TD]


@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_formats(format):
    """A43, A45: of one layer, and grouped with a leading axis."""
    model = Model("A13")
    arrays, cache = model.random()
    for size in (0, 2):
        chunks = jaxkv.join_layers(by_layer.store(cache, SLOTS, size=size, chunk_tokens=8, format=format))
        helpers.stored(model, arrays, chunks, SLOTS, *helpers.follow(20, 8))


def test_slots_that_are_not_there():
    """B2, B5, B6, D12: zero rows that are not valid; a plan that never saw the pool still finds slots past it."""
    model = Model("A2")
    arrays, cache = model.random()
    slots = SLOTS.copy()
    slots[[0, 9]] = [-1, -(2**40)]
    chunks = jaxkv.join_layers(by_layer.store(cache, slots, chunk_tokens=8, skip_prefix=3))
    helpers.stored(model, arrays, chunks, slots, *helpers.follow(20, 8), skip_prefix=3)
    slots[[4, 12]] = [28, 2**40]
    for given in (slots, jaxkv.store_plan(cache, slots, chunk_tokens=8, out_of_range="skip")):
        options = {} if given is not slots else dict(chunk_tokens=8, out_of_range="skip")
        chunks = jaxkv.join_layers(by_layer.store(cache, given, **options))
        helpers.stored(model, arrays, chunks, slots, *helpers.follow(20, 8))
    with pytest.raises(ValueError, match="slots: index 12 "):
        by_layer.store(cache, slots, chunk_tokens=8)
    with pytest.raises(ValueError, match=r"slots: row 4 of chunk 0 .* 28 slots"):
        by_layer.store(cache, slots[:12], chunk_tokens=8)
    on_device = jnp.asarray(np.clip(slots, -1, 99), jnp.int32)
    chunks = jaxkv.join_layers(by_layer.store(cache, on_device, chunk_tokens=8, out_of_range="skip"))
    helpers.stored(model, arrays, chunks, slots, *helpers.follow(20, 8))


def test_ranges_and_rows():
    """D1, D2: ranges of the caller's, lists or arrays; rows of a chunk from the size, never more than needed."""
    model = Model("A2")
    arrays, cache = model.random()
    for kind in (list, np.asarray):
        parts = by_layer.store(cache, SLOTS, starts=kind([0, 9, 9]), ends=kind([5, 9, 20]))
        chunks = jaxkv.join_layers(parts)
        helpers.stored(model, arrays, chunks, SLOTS, [0, 9, 9], [5, 9, 20])
        assert {c.num_rows for c in chunks} == {11}
    assert [jaxkv.store_plan(model.spec, np.arange(n)).chosen.rows for n in (0, 1, 16, 17, 5000)] == [
        16,
        16,
        16,
        32,
        8192,
    ]
    large = dataclasses.replace(model.spec, num_kv_heads=8, head_dim=128)
    tuning = jaxkv.Tuning(array_bytes=1 << 22)
    assert jaxkv.store_plan(large, np.arange(9000), tuning=tuning).chosen.rows == 1024
    assert jaxkv.store_plan(large, np.arange(9000), layers=4, tuning=tuning).chosen.rows == 256


def test_nothing_to_store():
    """B15, B16, R8: no tokens, no chunks; every slot negative."""
    model = Model("A2")
    arrays, cache = model.random()
    assert jaxkv.join_layers(by_layer.store(cache, np.zeros(0, np.int64))) == ()
    assert jaxkv.join_layers(by_layer.store(cache, SLOTS, starts=[], ends=[])) == ()
    chunks = jaxkv.join_layers(by_layer.store(cache, np.full(8, -1), chunk_tokens=8))
    helpers.stored(model, arrays, chunks, np.full(8, -1), [0], [8])


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_one_plan_and_one_ring_for_all_layers(implementation):
    """Device memory is the ring's; one program serves every layer; a ring serves request after request (R13)."""
    model = Model("A2", layers=6)
    arrays, cache = model.random()
    ring = host.Ring(2)
    kept = []

    def request(seed):
        slots = np.random.default_rng(seed).permutation(28)[: 20 - seed]
        plan = jaxkv.store_plan(cache, slots, chunk_tokens=8)
        parts = by_layer.store(cache, plan, ring=ring, path="overlapped", implementation=implementation)
        kept.append((slots, jaxkv.join_layers(parts)))

    request(0)
    with helpers.compilations() as compiled:
        for seed in (1, 2, 3):
            request(seed)
    assert not compiled
    for slots, chunks in kept:
        helpers.stored(model, arrays, chunks, slots, *helpers.follow(len(slots), 8))


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_one_program_for_all_layers(way):
    """B30: another layer, other slots, another length: nothing to compile."""
    model = Model("A2", layers=5, page_size=5)
    _, cache = model.random()
    options = dict(chunk_tokens=8, **way)
    by_layer.store(cache, SLOTS, **options)
    with helpers.compilations() as compiled:
        by_layer.store(cache, SLOTS[::-1], **options)
        by_layer.store(cache, SLOTS[:17], **options)
    assert not compiled


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_inside_jit(implementation):
    """R5, E5, I14: in the caller's own program, where the layer is computed; slots traced or not."""
    model = Model("A2", layers=2)
    arrays, cache = model.random()

    def forward(pages, slots):
        parts = []
        for layer, page in enumerate(pages):
            page = jax.lax.bitcast_convert_type(~jax.lax.bitcast_convert_type(page, jnp.uint16), page.dtype)
            part = jaxkv.store_layer(
                page, slots, spec=model.spec, layer=layer, chunk_tokens=8, implementation=implementation
            )
            parts.append(part)
        return parts

    flipped = jax.tree.map(lambda x: (~helpers.raw(x)).view(x.dtype), arrays)
    for slots in (SLOTS, jnp.asarray(SLOTS)):
        for call in (jax.jit(forward), jax.jit(lambda pages, slots=slots: forward(pages, slots))):
            chunks = jaxkv.join_layers(call(cache.pages, slots))
            helpers.stored(model, flipped, chunks, SLOTS, *helpers.follow(20, 8))


def test_positions_of_three_components():
    """F21, F23: M-RoPE's positions travel with the parts."""
    model = Model("A2", dim=12, rope=turning.rope(12, mrope_section=[2, 2, 2]))
    _, cache = model.random()
    positions = np.arange(60).reshape(3, 20)
    chunks = jaxkv.join_layers(by_layer.store(cache, SLOTS, positions=positions, chunk_tokens=8))
    assert [np.asarray(c.positions).shape for c in chunks] == [(3, 8)] * 3
    assert np.asarray(chunks[1].positions).tolist() == positions[:, 8:16].tolist()
    plain = jaxkv.join_layers(by_layer.store(cache, SLOTS, chunk_tokens=8))
    assert np.asarray(plain[1].positions).tolist() == [list(range(8, 16))] * 3


def test_heads_over_two_devices():
    """K1, K14: each shard's part pinned beside its own device."""
    model = Model("A2")
    arrays, cache = model.random()
    mesh = jax.make_mesh((2,), ("x",), devices=jax.devices()[:2])
    sharding = jax.NamedSharding(mesh, jax.P(None, None, None, "x", None))
    cache = jaxkv.PagedCache(tuple(jax.device_put(x, sharding) for x in cache.pages), model.spec)
    for options in ({}, {"ring": host.Ring(2)}):
        chunks = jaxkv.join_layers(by_layer.store(cache, SLOTS, chunk_tokens=8, **options))
        helpers.stored(model, arrays, chunks, SLOTS, *helpers.follow(20, 8))
        assert {len(x.devices()) for c in chunks for x in c.data} == {2}
    after = by_layer.load(model.poisoned(), jaxkv.plan(model.spec, chunks, np.arange(20)))
    assert_same(after.pages, model.written(model.arrays(), model.rows(arrays, SLOTS), np.arange(20)))


class World:
    def __init__(self):
        self.model = Model("A2")
        self.arrays, self.cache = self.model.random()
        self.page, self.spec = self.cache.pages[0], self.model.spec

    def store(self, pages=None, slots=SLOTS, **options):
        options = {"spec": self.spec, "layer": 0, "chunk_tokens": 8, **options}
        return jaxkv.store_layer(self.page if pages is None else pages, slots, **options)

    def join(self, change):
        return jaxkv.join_layers(change(list(by_layer.store(self.cache, SLOTS, chunk_tokens=8))))


def deleted(page):
    page = jnp.copy(page)
    page.delete()
    return page


WRONG = {
    "no spec": (lambda w: w.store(spec=None), TypeError, "spec: missing"),
    "spec of another kind": (lambda w: w.store(spec="A2"), TypeError, "cache: .*str"),
    "plan and options": (
        lambda w: jaxkv.store_layer(w.page, jaxkv.store_plan(w.spec, SLOTS), layer=0, chunk_tokens=8),
        TypeError,
        r"slots: a StorePlan has its options already, got \['chunk_tokens'\]",
    ),
    "layer past the last": (lambda w: w.store(layer=3), ValueError, "layer: 3 .* 3 layers"),
    "negative layer": (lambda w: w.store(layer=-1), ValueError, "layer: -1"),
    "layer of another kind": (lambda w: w.store(layer=1.5), ValueError, "layer: 1.5"),
    "layers with a step": (lambda w: w.store(w.cache.pages, layer=range(0, 3, 2)), ValueError, "layer: range"),
    "no layers": (lambda w: w.store((), layer=range(1, 1)), ValueError, "layer: range"),
    "fewer pages than layers": (
        lambda w: w.store(w.cache.pages[:2], layer=range(3)),
        ValueError,
        "pages: got 2 arrays, expected 3",
    ),
    "no array": (lambda w: w.store(np.zeros((2, 7, 4, 4, 8), np.float32)), TypeError, "pages: .*ndarray"),
    "deleted": (lambda w: w.store(deleted(w.page)), ValueError, "pages: .*deleted"),
    "other shape": (lambda w: w.store(w.page[:, :, :, :2]), ValueError, r"\(2, 7, 4, 2, 8\)"),
    "other dtype": (lambda w: w.store(w.page.astype(jnp.float32)), TypeError, "float32.*bfloat16"),
    "pinned": (lambda w: w.store(helpers.pinned(w.page)), ValueError, "'pinned_host', expected 'device'"),
    "slot past the pool": (lambda w: w.store(slots=SLOTS + 28), ValueError, "slots: row 0 of chunk 0 .* 28 slots"),
    "float slots": (lambda w: w.store(slots=SLOTS / 1), TypeError, "slots: .*float64"),
    "two-dimensional slots": (lambda w: w.store(slots=SLOTS[None]), ValueError, r"slots: .*\(1, 20\)"),
    "the same without rows": (lambda w: w.store(slots=SLOTS[None], chunk_tokens=None), ValueError, r"\(1, 20\)"),
    "rows": (lambda w: w.store(chunk_tokens=0), ValueError, "chunk_tokens: .*got 0"),
    "ranges": (lambda w: w.store(starts=[0], ends=[4, 8]), ValueError, "1 starts and 2 ends"),
    "ranges without rows": (lambda w: w.store(starts=[4], ends=[2], chunk_tokens=None), ValueError, r"\[4, 2\)"),
    "half a range": (lambda w: w.store(starts=[4], chunk_tokens=None), ValueError, "both or neither"),
    "implementation": (lambda w: w.store(implementation="metal"), ValueError, "metal"),
    "no parts": (lambda w: jaxkv.join_layers([]), ValueError, "parts: there are none"),
    "no part": (lambda w: jaxkv.join_layers([3]), TypeError, "parts: entry 0 .*int"),
    "a layer missing": (lambda w: w.join(lambda parts: parts[:2]), ValueError, "2 parts .*3 layers"),
    "out of order": (lambda w: w.join(lambda parts: parts[::-1]), ValueError, "in order"),
    "of other tokens": (
        lambda w: w.join(lambda parts: [*parts[:2], w.store(w.cache.pages[2], SLOTS[:19], layer=2)]),
        ValueError,
        "part 2 is of other tokens than part 0: their num_tokens",
    ),
    "of other positions": (
        lambda w: w.join(lambda p: [*p[:2], w.store(w.cache.pages[2], layer=2, positions=np.arange(20) + 1)]),
        ValueError,
        "part 2 .* positions differ",
    ),
    "of another format": (
        lambda w: w.join(lambda p: [p[0], w.store(w.cache.pages[1], layer=1, format="KV_2TD"), p[2]]),
        ValueError,
        "part 1",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_errors(case):
    """R9, M42: named, before anything is launched; the pages are whole."""
    call, error, words = WRONG[case]
    world = World()
    with pytest.raises(error, match=words):
        call(world)
    assert_same(world.cache.pages, world.arrays)
    helpers.stored(world.model, world.arrays, world.join(list), SLOTS, *helpers.follow(20, 8))


def test_a_store_plan_with_other_slots_is_another():
    """What was sent for one is not taken for the other, nor pickled with it."""
    model = Model("A2")
    arrays, cache = model.random()
    first = jaxkv.store_plan(cache, np.arange(8), chunk_tokens=8)
    by_layer.store(cache, first, path="overlapped")
    other = jaxkv.store_plan(cache, np.arange(8, 16), chunk_tokens=8)
    altered = dataclasses.replace(first, rows=other.rows)
    for plan in (altered, pickle.loads(pickle.dumps(altered)), copy.deepcopy(other)):
        chunks = jaxkv.join_layers(by_layer.store(cache, plan, path="overlapped"))
        helpers.stored(model, arrays, chunks, np.arange(8, 16), [0], [8])
