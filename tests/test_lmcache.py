"""The generator protocol: how often each yields, and that a drained one is the bulk operation (CASES.md H, E)."""

import dataclasses

import helpers
import jax
import jax.numpy as jnp
import layers as by_layer
import numpy as np
import pytest
from helpers import IMPLEMENTATIONS, Model, assert_same
from stepping import ENDS, RANGES, SLOTS, STARTS, bulk, described, parts_of, rows, run, stored

import jaxkv
from jaxkv import lmcache

POOLS = ["A1", "A2", "A4", "A5", "A13", "A17", "A24", "A26"]

# ---- Stores


@pytest.mark.parametrize("pool", POOLS)
def test_a_drained_store_is_the_bulk_store(pool):
    """H1, H6, H7: N + 1 yields, nothing and then the part of each layer; the same from own pages and from sent ones."""
    model = helpers.small(pool)
    _, cache = model.random()
    want = stored(model)
    slots = np.random.default_rng(0).permutation(28)[:20]
    pages = by_layer.split(cache) * (3 if by_layer.is_slab(model.spec) else 1)
    for source, answers in ((cache, ()), (model.spec, pages)):
        seen, chunks = run(lmcache.store_layers(source, slots, **RANGES), answers)
        assert [[part.layers for part in parts] for parts in seen] == [[], [(0, 1)], [(1, 2)], [(2, 3)]]
        assert_same([chunk.data for chunk in chunks], [chunk.data for chunk in want])
        assert [c.fingerprint for c in chunks] == [c.fingerprint for c in want]
        assert_same(
            [(c.num_tokens, c.positions, c.valid) for c in chunks], [(c.num_tokens, c.positions, c.valid) for c in want]
        )


@pytest.mark.parametrize("pool", ["A1", "A5"])
def test_a_store_of_layers_that_share_an_array(pool):
    """H6: the part comes with the last of its layers, and no yield more or less."""
    model = Model(pool)
    _, cache = model.random()
    pages = by_layer.split(cache) * (3 if pool == "A1" else 1)
    want = jaxkv.store(cache, SLOTS, chunk_tokens=8, layers_per_array=2)
    for source, answers in ((cache, ()), (model.spec, pages)):
        generator = lmcache.store_layers(source, SLOTS, chunk_tokens=8, layers_per_array=2, ring=jaxkv.host.Ring(2))
        seen, chunks = run(generator, answers)
        assert [[part.layers for part in parts] for parts in seen] == [[], [], [(0, 2)], [(2, 3)]]
        assert_same([chunk.data for chunk in chunks], [chunk.data for chunk in want])


@pytest.mark.parametrize("layers", [1, 3, 80])
@pytest.mark.parametrize("what", ["all", "none", "negative", "skipped"])
def test_the_yields_of_a_store_do_not_depend_on_what_there_is(what, layers):
    """H3, H4, B15, B16: one layer or many; nothing to store, everything skipped."""
    model = Model(layers=layers, heads=1, dim=2)
    arrays, cache = model.random()
    slots = {"none": SLOTS[:0], "negative": np.full(20, -1)}.get(what, SLOTS)
    prefix = 99 if what == "skipped" else 0
    seen, chunks = run(lmcache.store_layers(cache, slots, chunk_tokens=8, skip_prefix=prefix))
    assert len(seen) == layers + 1
    assert len(chunks) == (0 if what == "none" else 3)
    helpers.stored(model, arrays, chunks, slots, *helpers.follow(len(slots), 8), skip_prefix=prefix)


def test_pages_may_be_overwritten_as_soon_as_they_were_sent():
    """E1, E13: a stored layer holds what its pages held at the step."""
    model = Model()
    arrays, cache = model.random()
    generator = lmcache.store_layers(model.spec, SLOTS, chunk_tokens=8)
    next(generator)
    overwrite = jax.jit(lambda page: page * jnp.asarray(0, page.dtype), donate_argnums=0)
    for page in cache.pages:
        generator.send(page)
        overwrite(page)
    helpers.stored(model, arrays, lmcache.finish(generator), SLOTS, *helpers.follow(20, 8))


# ---- Loads


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("pool", POOLS)
def test_a_drained_load_is_the_bulk_load(pool, implementation):
    """H2, H6, H7, H13: N + 2 yields; layer i is in yield i + 3 (or i + 2); gaps and prefix as in bulk."""
    model = helpers.small(pool)
    chunks, options = stored(model), dict(gaps="zero", skip_prefix=3)
    want, counts = bulk(model.poisoned(), chunks, **options)
    before, after = rows(model, model.arrays()), rows(model, want.pages)
    for ahead in (0, 1):
        generator = lmcache.load_layers(
            model.poisoned(),
            chunks,
            SLOTS,
            starts=STARTS,
            ends=ENDS,
            ahead=ahead,
            implementation=implementation,
            **options,
        )
        cache, written = next(generator), []
        answers = [*parts_of(chunks), None]
        for answer in answers:
            seen = rows(model, cache.pages)
            written.append([bool((seen[i] == after[i]).all()) for i in range(3)])
            assert all((seen[i] == (after if done else before)[i]).all() for i, done in enumerate(written[-1]))
            cache = generator.send(answer)
        assert [sum(done) for done in written] == [max(step - ahead, 0) for step in range(4)]
        result = lmcache.finish(generator)
        assert result.cache is cache
        assert_same(cache.pages, want.pages)
        assert result.counts == counts
        assert result.mask.dtype == bool
        assert result.mask.tolist() == [t >= 3 and (t < 13 or t >= 18) for t in range(20)]


def test_a_load_moves_keys_to_other_positions():
    """F35, H7: positions travel in the chunks or their descriptions, and the keys turn on their way in."""
    rope = jaxkv.Rope.from_inv_freq(np.array([1, 0.1, 0.01, 0.001], np.float32), pairing="half")
    model = Model(dtype="fp32", rope=rope)
    chunks = stored(model)
    wanted = np.arange(20) + 1000
    want, _ = bulk(model.poisoned(), chunks, positions=wanted)
    descriptions = lmcache.describe(model.spec, STARTS, ENDS)
    assert_same(described(descriptions), described(chunks))
    for expected in (chunks, descriptions):
        generator = lmcache.load_layers(model.poisoned(), expected, SLOTS, positions=wanted, **RANGES)
        _, result = run(generator, parts_of(chunks))
        # One program turns layer by layer, another in bulk: one unit in the last place apart (R4).
        for got, exact in zip(result.cache.pages, want.pages, strict=True):
            np.testing.assert_array_max_ulp(np.asarray(got), np.asarray(exact), 2)
    elsewhere = lmcache.describe(model.spec, STARTS, ENDS, positions=np.arange(20) + 7, chunk_tokens=16)
    assert [chunk.positions[0] for chunk in elsewhere] == [7, 15, 25]
    assert {chunk.num_rows for chunk in elsewhere} == {16}


@pytest.mark.parametrize("layers", [1, 3, 80])
@pytest.mark.parametrize("what", ["hit", "partial", "miss", "no chunks", "skipped", "negative", "no tokens"])
def test_the_yields_of_a_load_do_not_depend_on_what_there_is(what, layers):
    """H3, H4, H5, E25: the pool is written as far as there are chunks, and no yield is more or less."""
    model = Model(layers=layers, heads=1, dim=2)
    chunks = stored(model)
    slots = {"negative": np.full(20, -1), "no tokens": SLOTS[:0]}.get(what, SLOTS)
    found = {"partial": 2, "miss": 0}.get(what, 3)
    given = () if what in ("no chunks", "no tokens") else chunks
    prefix = 20 if what == "skipped" else 0
    answers = [[part if k < found else None for k, part in enumerate(parts)] for parts in parts_of(given, layers)]
    ranges = dict(starts=STARTS[: len(given)], ends=ENDS[: len(given)])
    generator = lmcache.load_layers(model.poisoned(), given, slots, skip_prefix=prefix, **ranges)
    seen, result = run(generator, answers)
    assert len(seen) == layers + 2
    want, _ = bulk(model.poisoned(), given[:found], slots, skip_prefix=prefix)
    assert_same(result.cache.pages, want.pages)
    if what == "hit":
        covered = [t < 13 or t >= 18 for t in range(20)]
    elif what == "partial":
        covered = [t < 13 for t in range(20)]
    else:
        covered = [False] * len(slots)
    assert result.mask.tolist() == covered
    assert sum(result.counts) == sum(end - start for start, end in zip(*ranges.values(), strict=True))
    assert result.counts.moved == sum(covered)


@pytest.mark.parametrize("pool", ["A1", "A2"])
@pytest.mark.parametrize("layer", [0, 1, 2])
def test_a_missing_part_is_a_miss_of_its_chunk_and_of_all_later_ones(layer, pool):
    """H12: from that layer on it is a load of the chunks before; in the mask it is so for every layer."""
    model = Model(pool)
    chunks = stored(model)
    whole, fewer = (bulk(model.poisoned(), chunks[:n], gaps="zero") for n in (3, 1))
    answers = parts_of(chunks)
    answers[layer][1] = None
    generator = lmcache.load_layers(model.poisoned(), chunks, SLOTS, **RANGES, gaps="zero")
    _, result = run(generator, answers)
    assert result.mask.tolist() == [t < 8 for t in range(20)]
    assert tuple(result.counts) == (8, 12, 0, 0)  # the five of the gap were given, too
    seen = rows(model, result.cache.pages)
    for i in range(3):
        want = whole[0] if i < layer else fewer[0]
        np.testing.assert_array_equal(seen[i], rows(model, want.pages)[i])
    # Another miss before it: its chunk goes, too.
    answers[2][0] = None
    generator = lmcache.load_layers(model.poisoned(), chunks, SLOTS, **RANGES)
    assert not run(generator, answers)[1].mask.any()


def test_the_mask_names_tokens_whose_row_is_in_the_pool():
    """H13, B1, B11, B2: not those left out, not those whose slot a later token took, not rows that are not real."""
    model = Model()
    slots = SLOTS.copy()
    slots[[1, 2, 9]] = -1, slots[11], slots[3]
    chunks = stored(model)
    chunks = [dataclasses.replace(c, valid=np.asarray(c.valid) & (np.arange(8) != 4)) for c in chunks]
    generator = lmcache.load_layers(model.poisoned(), chunks, slots, **RANGES)
    _, result = run(generator, parts_of(chunks))
    lost = {1, 2, 3, 4, 12, *range(13, 18)}
    assert result.mask.tolist() == [t not in lost for t in range(20)]
    want, counts = bulk(model.poisoned(), chunks, slots)
    assert_same(result.cache.pages, want.pages)
    assert result.counts == counts
    # Overlapping chunks: a token is there by its last row, and lost with that row's chunk.
    generator = lmcache.load_layers(model.poisoned(), chunks[:2], SLOTS, starts=[0, 6], ends=[8, 11])
    answers = parts_of(chunks[:2])
    assert run(generator, answers)[1].mask.tolist() == [t < 11 and t not in (4, 10) for t in range(20)]
    answers[1][1] = None
    generator = lmcache.load_layers(model.poisoned(), chunks[:2], SLOTS, starts=[0, 6], ends=[8, 11])
    assert run(generator, answers)[1].mask.tolist() == [t < 6 and t != 4 for t in range(20)]
    answers[0][1] = None
    generator = lmcache.load_layers(model.poisoned(), chunks[:2], SLOTS, starts=[0, 6], ends=[8, 11])
    assert run(generator, answers)[1].mask.tolist() == [t < 8 and t != 4 for t in range(20)]


@pytest.mark.parametrize("pool", ["A1", "A5"])
def test_a_load_of_layers_that_share_an_array(pool):
    """The array comes with the first of its layers; the others are stepped without parts."""
    model = Model(pool)
    chunks = stored(model, layers_per_array=2)
    want, _ = bulk(model.poisoned(), chunks)
    answers = [[c.data[0] for c in chunks], (), [c.data[1] for c in chunks]]

    seen, result = run(lmcache.load_layers(model.poisoned(), chunks, SLOTS, **RANGES), answers)
    assert len(seen) == 5
    assert_same(result.cache.pages, want.pages)
    answers[0][0] = None
    seen, result = run(lmcache.load_layers(model.poisoned(), chunks, SLOTS, **RANGES), answers)
    assert len(seen) == 5
    assert_same(result.cache.pages, model.poisoned().pages)
    answers = [[c.data[0] for c in chunks], None, [c.data[1] for c in chunks[:2]] + [None]]
    seen, result = run(lmcache.load_layers(model.poisoned(), chunks, SLOTS, **RANGES), answers)
    assert len(seen) == 5
    assert result.mask.tolist() == [t < 13 for t in range(20)]
    fewer = bulk(model.poisoned(), chunks[:2])[0]
    for i, whole in enumerate((want, want, fewer)):
        np.testing.assert_array_equal(rows(model, result.cache.pages)[i], rows(model, whole.pages)[i])
    generator = lmcache.load_layers(model.poisoned(), chunks, SLOTS, **RANGES)
    next(generator)
    generator.send([c.data[0] for c in chunks])
    with pytest.raises(ValueError, match="parts: those of layer 1 have come"):
        generator.send([c.data[1] for c in chunks])


@pytest.mark.parametrize("pool", ["A1", "A2", "A5"])
def test_generators_take_turns_on_one_pool(pool):
    """E6, E7, G11: two loads with their own gaps and a store, each stepped once a layer, on pages they hand on."""
    model = Model(pool, pages=14)
    one, two = stored(model, 1), stored(model, 2, starts=[0, 11, 15], ends=[8, 13, 20])
    slots = np.random.default_rng(4).permutation(56)
    first, second, kept = slots[:20], slots[20:40], slots[40:]
    other = dict(starts=[0, 11, 15], ends=[8, 13, 20], gaps="zero")
    arrays, cache = model.random(5)
    loads = [
        lmcache.load_layers(model.spec, one, first, **RANGES, gaps="zero", ahead=0),
        lmcache.load_layers(model.spec, two, second, ahead=0, **other),
    ]
    store = lmcache.store_layers(model.spec, kept, chunk_tokens=8)
    assert [next(load) for load in loads] == [None, None]
    next(store)
    pages = by_layer.split(cache)
    for layer in range(3):
        at = 0 if by_layer.is_slab(model.spec) else layer
        for load, chunks in zip(loads, (one, two), strict=True):
            pages[at] = load.send((pages[at], parts_of(chunks)[layer]))
        store.send(pages[at])
    for load in loads:
        next(load)
    results = [lmcache.finish(load) for load in loads]
    assert [result.cache for result in results] == [None, None]
    assert [result.mask.sum() for result in results] == [15, 15]
    helpers.stored(model, arrays, lmcache.finish(store), kept, *helpers.follow(16, 8))
    want = bulk(bulk(model.cache(arrays), one, first, gaps="zero")[0], two, second, **other)[0]
    assert_same(by_layer.join(pages, model.spec).pages, want.pages)


def test_inside_jit():
    """R5: the same bytes where pages, parts and slots are traced."""
    model = Model()
    chunks = stored(model)
    want = bulk(model.poisoned(), chunks)[0]

    @jax.jit
    def through(cache, chunks, slots):
        generator = lmcache.load_layers(cache, chunks, slots, **RANGES)
        _, result = run(generator, parts_of(chunks))
        _, again = run(lmcache.store_layers(result.cache, slots, **RANGES))
        return result, again

    result, again = through(model.poisoned(), chunks, jnp.asarray(SLOTS))
    assert_same(result.cache.pages, want.pages)
    assert result.mask.tolist() == [t < 13 or t >= 18 for t in range(20)]
    assert_same([c.data for c in again], [c.data for c in chunks])
