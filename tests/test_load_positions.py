"""Keys that turn on their way into the pages: every layout, format and kind of rope, in bulk and layer by layer."""

import functools

import helpers
import jax
import jax.numpy as jnp
import layers as by_layer
import numpy as np
import pytest
import turning
from helpers import CHUNKS, POOLS, WAYS, Model, assert_same
from turning import FLOATS, Moving, frequencies, rope, turned_model

import jaxkv

ways = pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
BEST = helpers.IMPLEMENTATIONS[-1:]
WITH_DIM = [name for name, pool in POOLS.items() if "dim" in str(pool.sentence)]


@pytest.mark.parametrize("pool", WITH_DIM)
def test_every_pool_layout(pool):
    """F15, F1, F2, F4, F6, F27, F35, R4: K alone turns, packed `(kv dim)` and `(head kv)` and V transposed too."""
    partly = rope(6, pairing="interleaved" if len(pool) % 2 else "half")
    layers = 2 if "layer" in str(POOLS[pool].sentence).split("|")[-1].split() else 1
    Moving(turned_model(pool, partly, layers=layers), 20).check_every_way(layerwise=BEST)


@pytest.mark.parametrize("chunk", CHUNKS)
def test_every_chunk_format(chunk):
    """F15: the chunk's K is found in every format of A42 to A45."""
    pool = "A19" if helpers.one_plane(chunk) else "A11"
    layers = 2 if "layer" in CHUNKS[chunk].split("|")[-1].split() else 1
    model = Model(pool, layers=layers, heads=1 if "MLA" in chunk else 4, rope=rope(8))
    Moving(model, 20, format=CHUNKS[chunk]).check_every_way(layerwise=() if "page" in CHUNKS[chunk] else BEST)


@pytest.mark.parametrize("pairing", ["half", "interleaved"])
@pytest.mark.parametrize("dtype", FLOATS)
def test_formats(dtype, pairing):
    """F3, F4, F6, F8, F9, F30: over 1,000 rows, differences of both signs, positions up to 131071."""
    model = Model("A2", layers=1, heads=4, dim=16, pages=100, dtype=dtype, rope=rope(16, pairing=pairing))
    rng = np.random.default_rng(3)
    old = rng.integers(700, 131072, 400)
    new = np.clip(old + rng.choice([0, 1, -1, 16, -16, 1024, -1024, 65536, -65536], 400), 0, 131071)
    Moving(model, 400, old=old, new=new, chunk_tokens=128).check_every_way(many=True, layerwise=())


@pytest.mark.parametrize("difference", [1, -1, 16, 1024, 4000])
def test_near_positions(difference):
    """F3 where the bound is tightest: P is at most 4,096, and tables in bfloat16 would fail."""
    model = Model("A2", layers=1, heads=4, dim=64, pages=100, rope=rope(64))
    old = np.random.default_rng(4).integers(max(-difference, 0), 4097 - max(difference, 0), 400)
    moving = Moving(model, 400, old=old, new=old + difference, chunk_tokens=128)
    for way in WAYS.values():
        moving.check(moving.bulk(way), many=True)


KINDS = {
    "whole head": (16, rope(16), 0),
    "first half (F12)": (16, rope(8), 0),
    "a quarter, interleaved (F12)": (16, rope(4, pairing="interleaved"), 0),
    "odd head dim": (33, rope(16), 0),
    "odd head dim and offset": (33, rope(8, pairing="interleaved"), 5),
    "one pair": (3, rope(2), 0),
    "one pair at the end": (5, rope(2, pairing="interleaved"), 3),
    "wide pairs": (20, rope(8, pair_distance=7), 0),
    "wide pairs and offset": (20, rope(8, pair_distance=9), 3),
    "window in the middle (F14)": (24, rope(8), 9),
    "window at the end (F14)": (24, rope(8, pairing="interleaved"), 16),
}


@pytest.mark.parametrize("kind", KINDS)
def test_windows(kind):
    """F12, F14: partial, anywhere in the row, of odd rows, pairs further apart than half of the width."""
    dim, turn, offset = KINDS[kind]
    Moving(Model("A2", layers=1, dim=dim, rope=turn, rope_offset=offset), 20).check_every_way(layerwise=BEST)


@pytest.mark.parametrize("pool", ["A4", "A6", "A19", "A36"])
def test_mla(pool):
    """F14: the rotated window lies behind the latent, with padding after it (A36)."""
    turn = rope(8, pairing="interleaved")
    Moving(Model(pool, layers=1, heads=1, dim=24, rope=turn, rope_offset=16), 20).check_every_way(layerwise=BEST)


def mixed_ropes():
    """Gemma's way: local layers, a global one, and one that turns nothing."""
    return (rope(8), rope(8, 1e6), None, rope(8))


@pytest.mark.parametrize(
    ("pool", "layers_per_array"), [("A1", 3), ("A2", None), ("A2", 1), ("A5", None), ("A5", 3), ("A20", 1)]
)
def test_each_layer_by_its_own(pool, layers_per_array):
    """F10, F11: local and global frequencies, layers without rope; layers apart, together, grouped unevenly."""
    model = Model(pool, layers=4, rope=mixed_ropes())
    moving = Moving(model, 20, layers_per_array=layers_per_array)
    found = moving.check_every_way(layerwise=BEST)
    assert turning.differ(found["xla"][0, 0], moving.rows[0, 0])
    same = Moving(model, 20, layers_per_array=layers_per_array, rows=np.repeat(moving.rows[:1], 4, axis=0))
    got = same.bulk({})
    assert_same(got[0], got[3])
    assert turning.differ(got[0], got[1])


def test_all_layers_without_rope():
    """F11: positions are given, nothing turns."""
    moving = Moving(Model("A2", rope=(None, None, None)), 20)
    for way in WAYS.values():
        assert_same(moving.bulk(way), moving.rows)
    assert_same(moving.layerwise(), moving.rows)


@pytest.mark.parametrize("interleaved", [False, True])
def test_mrope(interleaved):
    """F21: three components a token, each driving its own frequencies; a token may move in one alone."""
    turn = rope(12, mrope_section=[2, 2, 2], mrope_interleaved=interleaved)
    model = Model("A13", layers=2, dim=12, rope=turn)
    old = np.random.default_rng(0).integers(0, 5000, (3, 20))
    new = old + np.random.default_rng(1).integers(-1, 2, (3, 20)) * 40
    new[:, 3] = old[:, 3]
    Moving(model, 20, old=np.maximum(old, 40), new=np.maximum(new, 0)).check_every_way()


def test_given_tables():
    """F5's way: the model's own cos and sin, a factor on them divided out (F17)."""
    angles = np.arange(4096)[:, None].astype(np.float32) * frequencies(8)[None, :]
    turn = jaxkv.Rope.from_tables(1.4 * np.cos(angles), 1.4 * np.sin(angles), pairing="half")
    moving = Moving(Model("A2", layers=2, rope=turn), 20, limit=4096)
    for got in [*map(moving.bulk, WAYS.values()), *map(moving.layerwise, helpers.IMPLEMENTATIONS)]:
        moving.check(got, inv_freq=frequencies(8))


@pytest.mark.parametrize("dtype", FLOATS)
def test_what_stays_keeps_its_bits(dtype):
    """F1, F2, F31: NaNs of every payload, infinities and -0.0, while other tokens of the call do move."""
    model = Model("A2", layers=2, dtype=dtype, pages=33, rope=rope(4))
    arrays = model.arrays(5)
    bits = model.rows(arrays, np.arange(128))
    old = np.arange(128) + 7
    new = old + np.arange(128) % 2 * 9
    moving = Moving(model, 128, old=old, new=new, rows=bits, chunk_tokens=64)
    stays = old == new
    for got in [*map(moving.bulk, WAYS.values()), *map(moving.layerwise, helpers.IMPLEMENTATIONS)]:
        assert_same(got[:, :, stays], bits[:, :, stays])
        assert_same(got[:, 1], bits[:, 1])
        assert_same(got[..., 4:], bits[..., 4:])
        assert turning.differ(got[:, 0, ~stays, :, :4], bits[:, 0, ~stays, :, :4])


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_stays_in_its_pair(poison):
    """F31."""
    model = Model("A2", layers=1, rope=rope(8))
    clean = turning.normal_rows(model, 20, 0)
    spoiled = clean.copy()
    spoiled[:, 0, :, :, 1] = poison
    old, new = np.arange(20), np.arange(20) + 7
    for way in WAYS.values():
        want, got = (Moving(model, 20, old=old, new=new, rows=rows).bulk(way) for rows in (clean, spoiled))
        assert_same(got[..., [0, 2, 3, 4, 6, 7]], want[..., [0, 2, 3, 4, 6, 7]])
        assert not np.isfinite(got[0, 0, :, :, 1].astype(np.float32)).any()


@pytest.mark.parametrize("dtype", FLOATS)
def test_bulk_layerwise_and_shift_are_one(dtype):
    """F35: the pool loaded plainly and turned on its own gives what the fused load gives (R4)."""
    turn = rope(8)
    moving = Moving(Model("A2", layers=2, dtype=dtype, rope=turn), 20, limit=8192)
    plain = moving.bulk({}, positions=None)
    assert_same(plain, moving.rows)
    alone = np.stack([np.asarray(turn.shift(k, moving.old, moving.new)) for k in plain[:, 0]])
    for got in (moving.bulk({"implementation": "xla"}), moving.layerwise("xla")):
        assert_same(got[:, 0], alone)
    for got in (moving.bulk({}), moving.layerwise()):
        for layer in range(2):
            turning.check_forms_agree(got[layer, 0], alone[layer], turn)


def test_old_positions_travel_with_the_chunk():
    """F23: any integers, equal and reversed ones too; what `store` was given is what the chunk has; default: index."""
    model = Model("A2", layers=1, rope=rope(8))
    old = np.asarray([5, 5, 5, 900, 899, 898, 0, 131071] * 2)
    moving = Moving(model, 16, old=old, new=np.arange(16))
    assert np.concatenate([np.asarray(c.positions) for c in moving.chunks]).tolist() == old.tolist()
    moving.check_every_way()
    _, cache = model.random()
    chunks = jaxkv.store(cache, np.arange(16), starts=[8, 0], ends=[16, 8], chunk_tokens=8)
    assert [np.asarray(c.positions).tolist() for c in chunks] == [list(range(8, 16)), list(range(8))]
    parts = by_layer.store(cache, np.arange(16), positions=old, chunk_tokens=8)
    assert np.asarray(jaxkv.join_layers(parts)[1].positions).tolist() == old[8:].tolist()


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int16, np.uint32, np.int64, np.uint64])
def test_positions_of_every_integer_type(dtype):
    """F23, B9: by value, also from a device and of 64 bits, where nothing is cut to 32 of them."""
    model = Model("A2", layers=1, rope=rope(8))
    old, new = np.arange(20), np.arange(20)[::-1] * 6
    want = Moving(model, 20, old=old, new=new).bulk({})
    typed = Moving(model, 20, old=old.astype(dtype), new=new.astype(dtype))
    assert_same(typed.bulk({}), want)
    with jax.enable_x64(True):
        cache = model.poisoned()
        plan = typed.plan(cache, positions=jnp.asarray(typed.new), out_of_range="skip")
        assert_same(typed.rows_of(jaxkv.load(cache, plan)), want)
        if np.dtype(dtype).itemsize == 8:
            far = jnp.asarray(typed.new).at[7].add(dtype(2**32))
            counts = typed.plan(model.poisoned(), positions=far, out_of_range="skip").counts
            assert tuple(map(int, counts)) == (19, 0, 0, 1)


def test_ten_requests_through_one_object():
    """F37, F28: each from the stored original, each as through a fresh one."""
    moving = Moving(Model("A2", layers=1, rope=rope(8)), 20)
    cache, rng = moving.model.poisoned(), np.random.default_rng(2)
    for _ in range(10):
        moving.new = rng.integers(0, 131072, 20)
        cache = jaxkv.load(cache, moving.plan(cache))
        got = moving.rows_of(cache)
        moving.check(got)
        assert_same(got, moving.bulk({}))


def test_rotation_in_place():
    """E26, F27: turned keys go straight into the donated pages."""
    moving = Moving(Model("A2", rope=rope(8)), 20)
    for way in WAYS.values():
        cache = moving.model.poisoned()
        before = [x.unsafe_buffer_pointer() for x in cache.pages]
        after = jaxkv.load(cache, moving.plan(cache), **way)
        assert [x.unsafe_buffer_pointer() for x in after.pages] == before


@ways
def test_other_positions_compile_nothing(way):
    """F36, B30: positions and lengths are values."""
    model = Model("A2", pages=21, rope=rope(8))
    requests = [Moving(model, n, seed=n) for n in (64, 20, 7)]
    cache = jaxkv.load(model.poisoned(), requests[0].plan(), **way)
    cache = jaxkv.load(cache, requests[1].plan(), **way)
    cache = jaxkv.load(cache, requests[2].plan(), **way)
    with helpers.compilations() as compiled:
        for request in requests:
            request.new = request.new[::-1].copy()
            cache = jaxkv.load(cache, request.plan(cache), **way)
    assert not compiled


def test_heads_over_two_devices():
    """K11: on a sharded pool as on a whole one."""
    moving = Moving(Model("A2", layers=2, rope=rope(8)), 20)
    mesh = jax.make_mesh((2,), ("x",), devices=jax.devices()[:2])
    sharding = jax.NamedSharding(mesh, jax.P(None, None, None, "x", None))
    for implementation in helpers.IMPLEMENTATIONS:
        pages = tuple(jax.device_put(x, sharding) for x in moving.model.poisoned().pages)
        cache = jaxkv.PagedCache(pages, moving.model.spec)
        after = jaxkv.load(cache, moving.plan(cache), implementation=implementation)
        assert {x.sharding for x in after.pages} == {sharding}
        assert_same(moving.rows_of(after), moving.bulk({"implementation": implementation}))


def test_slots_prefix_and_order():
    """F32, B11, D3, D12, D13: tokens that stay behind, equal slots and unsorted chunks, as without a rotation."""
    model = Model("A2", rope=rope(8))
    made = Moving(model, 28)
    slots = made.slots.copy()
    slots[[4, 9]] = [-1, -(2**40)]
    slots[[12, 20]] = [99, 2**40]
    slots[6] = slots[13]  # the later chunk in the list is that of token 6
    starts, ends = [8, 24, 16, 0], [16, 28, 24, 8]
    options = dict(starts=starts, ends=ends, positions=made.new, skip_prefix=2, out_of_range="skip")
    plan = jaxkv.plan(model.poisoned(), [made.chunks[at] for at in (1, 3, 2, 0)], slots, **options)
    assert tuple(map(int, plan.counts)) == (22, 4, 2, 0)
    moved = [t for t in range(2, 28) if t not in (4, 9, 12, 13, 20)]
    for load in (
        *(functools.partial(jaxkv.load, **way) for way in WAYS.values()),
        *(functools.partial(by_layer.load, implementation=name) for name in helpers.IMPLEMENTATIONS),
    ):
        pages = helpers.snapshot(load(model.poisoned(), plan).pages)
        rows = model.rows(pages, slots[moved])
        assert_same(pages, model.written(model.arrays(), rows, slots[moved]))
        assert_same(rows[:, 1], made.rows[:, 1][:, moved])
        for layer in range(3):
            keys = made.rows[layer, 0][moved]
            turning.check_keys(rows[layer, 0], keys, rope(8), made.old[moved], made.new[moved])


def test_nothing_retrieved():
    """F34, F33: no chunks, or no positions, though the cache has a rope."""
    moving = Moving(Model("A2", rope=rope(8)), 20)
    none = np.zeros(0, np.int64)
    for way in WAYS.values():
        after = jaxkv.load(moving.model.poisoned(), (), none, positions=none, **way)
        assert_same(after.pages, moving.model.arrays())
        after = jaxkv.load(moving.model.poisoned(), moving.chunks, np.full(20, -1), positions=moving.new, **way)
        assert_same(after.pages, moving.model.arrays())
