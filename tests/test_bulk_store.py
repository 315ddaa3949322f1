"""store against the oracle: layouts, formats, ranges, slots, and where the bytes end up."""

import collections

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import CHUNKS, IMPLEMENTATIONS, POOLS, WAYS, Model, follow, pinned, small

import jaxkv
from jaxkv import paths

ways = pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)


@ways
@pytest.mark.parametrize("pool", POOLS)
def test_every_pool_layout(pool, way):
    """A1 to A36: three chunks, first and last page among them (A55), the pool unchanged (R1)."""
    model = small(pool)
    arrays, cache = model.random()
    slots = np.concatenate([[model.num_slots - 1, 0], np.random.default_rng(0).integers(0, model.num_slots, 19)])
    chunks = jaxkv.store(cache, slots, chunk_tokens=8, **way)
    helpers.stored(model, arrays, chunks, slots, *follow(21, 8))
    helpers.assert_same(cache.pages, arrays)


@ways
@pytest.mark.parametrize("chunk", CHUNKS)
def test_every_chunk_format(chunk, way):
    """A42 to A45, A43's T known by name."""
    plane = helpers.one_plane(chunk)
    model = Model("A19" if plane else "A7", heads=1 if "MLA" in chunk else 4)
    arrays, cache = model.random(1)
    slots = np.random.default_rng(1).permutation(model.num_slots)[:13]
    chunks = jaxkv.store(cache, slots, chunk_tokens=8, format=CHUNKS[chunk], **way)
    helpers.stored(model, arrays, chunks, slots, *follow(13, 8))
    if "page" not in CHUNKS[chunk]:
        tokens = chunks[1].format.axes.index(("token",))
        assert {rows.shape[tokens] for rows in chunks[1].rows()} == {5}
        helpers.assert_same(chunks[1].rows()[0], np.asarray(chunks[1].data[0]).take(range(5), axis=tokens))


@ways
@pytest.mark.parametrize("layers_per_array", [1, 2, 3, 5])
@pytest.mark.parametrize("pool", ["A1", "A2", "A5", "A17", "A21"])
def test_layers_per_array(pool, layers_per_array, way):
    """A53: an array holds its own layers of a slab (or a list) and no others; the last group may be smaller."""
    model = Model(pool)
    arrays, cache = model.random(2)
    slots = np.arange(9)[::-1]
    chunks = jaxkv.store(cache, slots, chunk_tokens=5, layers_per_array=layers_per_array, **way)
    assert len(chunks[0].data) == -(-3 // layers_per_array)
    helpers.stored(model, arrays, chunks, slots, *follow(9, 5))


def test_formats_by_name_are_those_of_lmcache():
    model = Model("A2")
    _, cache = model.random()
    for name, shape in {"KV_2LTD": (2, 3, 8, 32), "KV_T2D": (8, 2, 32), "KV_2TD": (2, 8, 32)}.items():
        (chunk,) = jaxkv.store(cache, np.arange(5), chunk_tokens=8, format=name)
        assert chunk.data[0].shape == shape == chunk.format.shape(model.spec, 8)
        assert chunk.format == getattr(jaxkv, name)
    (chunk,) = jaxkv.store(cache, np.arange(5), chunk_tokens=8)
    assert chunk.format == jaxkv.KV_2LTD


@ways
@pytest.mark.parametrize("count", [1, 4, 5, 32, 33, 100])
def test_numbers_of_chunks(count, way):
    """D1; and with more chunks than staging buffers a buffer's next content never shows in an earlier chunk."""
    model = Model("A14", pages=60)
    arrays, cache = model.random(3)
    slots = np.random.default_rng(3).permutation(model.num_slots)[: 2 * count - 1]
    chunks = jaxkv.store(cache, slots, chunk_tokens=2, **way)
    helpers.stored(model, arrays, chunks, slots, *follow(2 * count - 1, 2))


@pytest.mark.parametrize(("page_size", "chunk_tokens"), [(1, 3), (2, 7), (3, 16), (5, 4), (16, 5), (24, 24)])
@ways
def test_chunk_size_and_page_size_are_independent(page_size, chunk_tokens, way):
    """D7, B17, B18, B19."""
    model = Model("A8", page_size=page_size, pages=5 if page_size > 4 else 19)
    arrays, cache = model.random(4)
    slots = np.random.default_rng(4).permutation(model.num_slots)[:17]
    chunks = jaxkv.store(cache, slots, chunk_tokens=chunk_tokens, **way)
    helpers.stored(model, arrays, chunks, slots, *follow(17, chunk_tokens))


@ways
def test_ranges_of_any_order(way):
    """D2 to D6, D11, D20: gaps, unsorted, overlapping, empty; rows past a range's end are zero bytes (R13)."""
    model = Model("A5", pages=9)
    arrays, cache = model.random(5)
    slots = np.random.default_rng(5).permutation(model.num_slots)[:30]
    starts, ends = [20, 3, 3, 9, 12, 0, 30], [26, 9, 9, 9, 20, 1, 30]
    chunks = jaxkv.store(cache, slots, starts=starts, ends=ends, chunk_tokens=8, **way)
    helpers.stored(model, arrays, chunks, slots, starts, ends)
    assert [int(chunk.num_tokens) for chunk in chunks] == [6, 6, 6, 0, 8, 1, 0]
    assert [chunk.rows()[0].shape[2] for chunk in chunks] == [6, 6, 6, 0, 8, 1, 0]


@ways
@pytest.mark.parametrize("skip_prefix", [0, 1, 7, 8, 9, 16, 21, 1000])
def test_skip_prefix(skip_prefix, way):
    """D12: tokens below it are rows of zero bytes that are not valid."""
    model = Model("A13")
    arrays, cache = model.random(6)
    slots = np.random.default_rng(6).permutation(model.num_slots)[:21]
    chunks = jaxkv.store(cache, slots, chunk_tokens=8, skip_prefix=skip_prefix, **way)
    helpers.stored(model, arrays, chunks, slots, *follow(21, 8), skip_prefix)
    # A slot that the prefix leaves out may be past the pool.
    slots[:skip_prefix] = 10**6
    chunks = jaxkv.store(cache, slots, chunk_tokens=8, skip_prefix=skip_prefix, **way)
    helpers.stored(model, arrays, chunks, slots, *follow(21, 8), skip_prefix)


BAD = [-1, -2, -28, -(2**31), -(2**63)]
BEYOND = [28, 29, 2**31 - 1, 2**31, 2**32 + 5, 2**40]


@ways
def test_slots_that_are_not_there(way):
    """B2, B3, B5, B6, B7, B12, B13: negative and (with "skip") too large ones give rows of zero bytes, not valid."""
    model = Model("A2")
    arrays, cache = model.random(7)
    slots = np.array([5, *BAD, 5, *BEYOND, 0, 27, -1, -1, 28, 28, 5], np.int64)
    chunks = jaxkv.store(cache, slots, chunk_tokens=8, out_of_range="skip", **way)
    helpers.stored(model, arrays, chunks, slots, *follow(len(slots), 8))


@ways
def test_nothing_to_do(way):
    """B15, B16, R8."""
    model = Model("A2")
    arrays, cache = model.random(8)
    assert jaxkv.store(cache, [], **way) == ()
    assert jaxkv.store(cache, np.zeros(0, np.int64), **way) == ()
    assert jaxkv.store(cache, jnp.zeros(0, jnp.int32), **way) == ()
    assert jaxkv.store(cache, np.arange(5), starts=[], ends=[], **way) == ()
    chunks = jaxkv.store(cache, [], starts=[0, 0], ends=[0, 0], chunk_tokens=4, **way)
    helpers.stored(model, arrays, chunks, [], [0, 0], [0, 0])
    chunks = jaxkv.store(cache, np.full(9, -1), chunk_tokens=4, **way)
    helpers.stored(model, arrays, chunks, np.full(9, -1), *follow(9, 4))
    helpers.assert_same(cache.pages, arrays)


def as_dtype(name: str):
    return lambda slots: slots.astype(name)


FORMS = {
    **{name: as_dtype(name) for name in ("int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64")},
    "list": lambda s: s.tolist(),
    "tuple of NumPy integers": tuple,
    "strided view": lambda s: np.repeat(s, 2)[::2],
    "device": lambda s: jnp.asarray(s, jnp.int32),
    "device uint8": lambda s: jnp.asarray(s, jnp.uint8),
    "another device": lambda s: jax.device_put(jnp.asarray(s, jnp.int32), jax.devices()[3]),
    "pinned_host": lambda s: pinned(jnp.asarray(s, jnp.int32)),
}


@pytest.mark.parametrize("out_of_range", ["raise", "skip"])
@pytest.mark.parametrize("name", FORMS)
def test_slot_arrays_of_every_kind(name, out_of_range):
    """B8, B9, B10: right by value (or, on another device, an error that names devices), in both directions."""
    model, form = Model("A2"), FORMS[name]
    arrays, cache = model.random(9)
    slots = np.random.default_rng(9).permutation(model.num_slots)[:11]
    try:
        chunks = jaxkv.store(cache, form(slots), chunk_tokens=8, out_of_range=out_of_range)
        helpers.stored(model, arrays, chunks, slots, *follow(11, 8))
        after = jaxkv.load(model.poisoned(), chunks, form(slots), out_of_range=out_of_range)
    except ValueError as error:
        assert (name, out_of_range) in {("another device", "skip"), ("pinned_host", "skip")}, error
        assert "slots" in str(error), error
    else:
        helpers.assert_same(after.pages, model.written(model.arrays(), model.rows(arrays, slots), slots))


def test_slots_are_read_at_the_call():
    """B29: the caller overwrites its array right after both calls."""
    model = Model("A2")
    arrays, cache = model.random(10)
    for dtype in (np.int32, np.int64):
        slots = np.random.default_rng(10).permutation(model.num_slots)[:20].astype(dtype)
        kept = slots.copy()
        chunks = jaxkv.store(cache, slots, chunk_tokens=8)
        slots[:] = 0
        helpers.stored(model, arrays, chunks, kept, *follow(20, 8))
        slots[:] = kept
        after = jaxkv.load(model.poisoned(), chunks, slots)
        slots[:] = 0
        helpers.assert_same(after.pages, model.written(model.arrays(), model.rows(arrays, kept), kept))


def test_positions_travel_with_the_chunk():
    """F23: by default a token's index, else what the caller gives; cut as the tokens are."""
    model = Model("A2")
    _, cache = model.random(11)
    given = np.array([900, 7, 7, 100000, 0, -1, 3])
    for positions in (given, given.tolist(), jnp.asarray(given, jnp.int32)):
        chunks = jaxkv.store(cache, np.arange(7), positions=positions, chunk_tokens=4)
        assert np.asarray(chunks[0].positions).tolist() == [900, 7, 7, 100000]
        assert np.asarray(chunks[1].positions).tolist() == [0, -1, 3, 0]
        assert chunks[1].positions.dtype == np.int32


@ways
def test_a_chunk_is_a_value(way):
    """E8, E1, A59: what happens to the pages afterwards does not change it, and no earlier pool is remembered."""
    model = Model("A2")
    slots = np.arange(12)
    for seed in (12, 13):
        arrays, cache = model.random(seed)
        chunks = jaxkv.store(cache, slots, chunk_tokens=4, **way)
        wipe = jax.jit(lambda pages: jax.tree.map(jnp.zeros_like, pages), donate_argnums=0)
        wipe(cache.pages)
        helpers.stored(model, arrays, chunks, slots, *follow(12, 4))


def test_waiting_for_a_chunk():
    """E11, E12, I14: `block_until_ready` returns the chunk, which then is ready; the bytes are on the pool's device."""
    model = Model("A2")
    _, cache = model.random(14)
    chunks = jaxkv.store(cache, np.arange(12), chunk_tokens=4)
    for chunk in chunks:
        assert chunk.block_until_ready() is chunk
        assert chunk.is_ready()
        assert chunk.data[0].devices() == cache.pages[0].devices()
        assert chunk.nbytes == 4 * model.spec.bytes_per_token == sum(x.nbytes for x in chunk.data)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("staging", [1, 2, 3])
def test_staging_is_a_ring(staging, implementation, monkeypatch):
    """Device memory of a store: `staging` chunks, allocated once and reused in place, whatever the length."""
    model = Model("A2", pages=40)
    _, cache = model.random(15)
    tuning = jaxkv.Tuning(chunk_tokens=8, staging=staging)
    options = {"tuning": tuning, "implementation": implementation, "path": "overlapped"}
    jaxkv.store(cache, np.arange(8), **options)  # compiles
    seen, alive = collections.Counter(), []
    step = paths._gather_step

    def counted(*args, **options):
        out = step(*args, **options)
        seen[out[0].unsafe_buffer_pointer()] += 1
        alive.append(sum(x.shape == out[0].shape and x.sharding.memory_kind == "device" for x in jax.live_arrays()))
        return out

    monkeypatch.setattr(paths, "_gather_step", counted)
    jax.block_until_ready([c.data for c in jaxkv.store(cache, np.arange(100), **options)])
    assert sum(seen.values()) == 13
    assert len(seen) <= staging
    assert max(alive) <= staging


@ways
def test_other_lengths_compile_nothing(way):
    """B30: prompts of other lengths, other ranges and other slots run the programs that are there."""
    model = Model("A2", pages=40)
    arrays, cache = model.random(16)
    options = dict(chunk_tokens=8, **way)
    jaxkv.store(cache, np.arange(20), **options)
    with helpers.compilations() as compiled:
        for n in (1, 7, 8, 9, 64, 100):
            slots = np.random.default_rng(n).permutation(model.num_slots)[:n]
            chunks = jaxkv.store(cache, slots, **options)
            jaxkv.store(cache, slots, starts=[0], ends=[1], skip_prefix=1, **options)
    assert not compiled
    helpers.stored(model, arrays, chunks, slots, *follow(100, 8))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_chunks_of_several_mebibytes(implementation):
    """The handler asks the system for other pages of memory there; the bytes are the same."""
    model = Model("A2", layers=2, heads=8, dim=128, page_size=16, pages=80)
    arrays, cache = model.random(0)
    slots = np.random.default_rng(0).permutation(1280)[:1027]
    (chunk,) = jaxkv.store(cache, slots, chunk_tokens=1100, path="overlapped", implementation=implementation)
    assert chunk.data[0].nbytes > 4 << 20
    helpers.stored(model, arrays, [chunk], slots, [0], [1027])
