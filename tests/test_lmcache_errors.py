"""Generators driven wrongly, left or failed: clear errors, whole caches, nothing carried over (CASES.md H, E, M37)."""

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import Model, assert_same, snapshot
from stepping import ENDS, RANGES, SLOTS, STARTS, bulk, parts_of, rows, run, stored

import jaxkv
from jaxkv import lmcache


def test_stores_refuse_what_does_not_fit():
    """E23, H9, M37, M42: at the call, or at the step with the layer named; what was given works in the next one."""
    model = Model()
    arrays, cache = model.random()
    with pytest.raises(ValueError, match=r"slots: index 0 has slot 28.* 28 slots"):
        lmcache.store_layers(cache, [28])
    with pytest.raises(ValueError, match="layers_per_array: expected an int of at least 1, got 0"):
        lmcache.store_layers(cache, SLOTS, layers_per_array=0)
    with pytest.raises(ValueError, match="implementation: 'cuda' is unknown"):
        lmcache.store_layers(cache, SLOTS, implementation="cuda")
    with pytest.raises(ValueError, match="nope"):
        lmcache.store_layers(cache, SLOTS, format="token nope")
    plan = jaxkv.store_plan(cache, SLOTS, chunk_tokens=8)
    with pytest.raises(TypeError, match=r"slots: a StorePlan has its options already, got \['starts'\]"):
        lmcache.store_layers(cache, plan, starts=[0])
    generator = lmcache.store_layers(model.spec, plan)
    next(generator)
    generator.send(cache.pages[0])
    with pytest.raises(ValueError, match="pages: layer 1 of 3 has none"):
        next(generator)
    generator = lmcache.store_layers(model.spec, plan)
    next(generator)
    with pytest.raises(ValueError, match="pages: got 2 arrays, expected 1"):
        generator.send(cache.pages[:2])
    with pytest.raises(ValueError, match="yielded once more"):
        lmcache.finish(lmcache.store_layers(cache, plan))
    _, chunks = run(lmcache.store_layers(cache, plan))
    helpers.stored(model, arrays, chunks, SLOTS, *helpers.follow(20, 8))


@pytest.mark.parametrize("pool", ["A1", "A2", "A17"])
@pytest.mark.parametrize("steps", range(6))
@pytest.mark.parametrize("how", ["close", "throw", "drop"])
def test_a_load_left_at_any_step_leaves_a_whole_cache(how, steps, pool):
    """E20, E21, E22, H10, H11: finished layers are written, the others old, and the next load is like the first."""
    model = Model(pool)
    chunks = stored(model)
    want = rows(model, bulk(model.poisoned(), chunks)[0].pages)
    before = rows(model, model.arrays())
    cache = model.poisoned()
    generator = lmcache.load_layers(cache, chunks, SLOTS, **RANGES)
    for answer in [None, *parts_of(chunks), None][:steps]:
        cache = generator.send(answer)
    if how == "close":
        generator.close()
    elif how == "throw":
        with pytest.raises((KeyError, StopIteration), match="no such request"):
            generator.throw(KeyError("no such request"))
    del generator
    seen = rows(model, cache.pages)
    done = min(max(steps - 2, 0), 3)
    np.testing.assert_array_equal(seen[:done], want[:done])
    np.testing.assert_array_equal(seen[done:], before[done:])
    _, result = run(lmcache.load_layers(cache, chunks, SLOTS, **RANGES), parts_of(chunks))
    np.testing.assert_array_equal(rows(model, result.cache.pages), want)


def wrong(chunks, layer):
    """Answers that are wrong for a layer, the error and what it says."""
    good = parts_of(chunks)[layer]
    other = parts_of(stored(Model(dtype="fp16")))[layer]
    deleted = jnp.copy(good[0])
    deleted.delete()
    part = jaxkv.store_layer(Model().random()[1].pages[0], SLOTS, spec=Model().spec, layer=(layer + 1) % 3)
    at = f"layer {layer}"
    return {
        "next": (None, ValueError, rf"parts: {at} has none .*those of 3 chunks are due"),
        "too few": (good[:2], ValueError, rf"parts: {at} has parts of 2 chunks, those of 3 are due"),
        "too many": ([*good, good[0]], ValueError, rf"parts: {at} has parts of 4 chunks, those of 3 are due"),
        "one array": (good[0], TypeError, rf"parts: {at}: expected a list with the parts of 3 chunks"),
        "numpy": ([np.asarray(x) for x in good], TypeError, rf"parts: {at}, chunk 0: expected 1 jax.Array, got"),
        "pairs": ([(x, x) for x in good], ValueError, rf"parts: {at}, chunk 0: got 2 array\(s\).*expected 1"),
        "rows": ([good[0], good[1][:5], good[2]], ValueError, rf"parts: {at}, chunk 1: .*\(5, 2, 32\).*\(8, 2, 32\)"),
        "dtype": (other, TypeError, rf"parts: {at}, chunk 0: got dtype float16, the cache has bfloat16"),
        "deleted": ([deleted, *good[1:]], ValueError, rf"parts: {at}, chunk 0: .*deleted"),
        "another layer": (part, ValueError, r"parts: "),
    }


@pytest.mark.parametrize("layer", [0, 2])
def test_parts_that_do_not_fit(layer):
    """H8, H9, M37, M42: an error that names the layer and both numbers; nothing of the layer is written."""
    model = Model()
    chunks = stored(model)
    want = bulk(model.poisoned(), chunks)[0]
    for name, (answer, kind, words) in wrong(chunks, layer).items():
        generator = lmcache.load_layers(model.poisoned(), chunks, SLOTS, **RANGES, ahead=0)
        cache = next(generator)
        for answer_before in parts_of(chunks)[:layer]:
            cache = generator.send(answer_before)
        with pytest.raises(kind, match=words):
            generator.send(answer)
            pytest.fail(name)
        assert_same(cache.pages[:layer], want.pages[:layer], name)
        assert_same(cache.pages[layer:], model.poisoned().pages[layer:], name)
    generator = lmcache.load_layers(model.poisoned(), chunks, SLOTS, **RANGES)
    next(generator)
    for answer in parts_of(chunks):
        generator.send(answer)
    with pytest.raises(ValueError, match="parts: those of all 3 layers have come"):
        generator.send(parts_of(chunks)[0])


def test_arguments_are_checked_by_the_call():
    """E23, M8 to M22, R9: before anything is launched, and before the first step."""
    model = Model()
    chunks, (_, cache) = stored(model), model.random()
    before = snapshot(cache.pages)

    for error, words, options in [
        (ValueError, r"slots: index 2 has slot 28", dict(slots=[0, 1, 28, *range(3, 20)])),
        (ValueError, r"2 starts, 3 ends and 3 chunks", dict(starts=[0, 8])),
        (ValueError, r"chunk 2 has 2 rows, its range \[18, 19\) has 1", dict(ends=[8, 13, 19])),
        (ValueError, r"gaps: 'drop' is unknown", dict(gaps="drop")),
        (ValueError, r"positions: given, but the cache's spec has no rope", dict(positions=np.arange(20))),
        (ValueError, r"skip_prefix", dict(skip_prefix=-1)),
        (ValueError, r"ahead: expected 0 or 1, got 2", dict(ahead=2)),
        (ValueError, r"ahead: expected 0 or 1, got array", dict(ahead=np.asarray([0, 1]))),
        (ValueError, r"ahead: 1, but an array of all layers", dict(cache=Model("A1").spec)),
        (ValueError, r"implementation: 'cuda' is unknown", dict(implementation="cuda")),
        (ValueError, r"chunks: entry 1 is missing", dict(chunks=[chunks[0], None, chunks[2]])),
        (TypeError, r"chunks: expected a sequence of chunks, got one Chunk", dict(chunks=chunks[0])),
        (TypeError, r"cache: expected a PagedCache or a CacheSpec, got tuple", dict(cache=cache.pages)),
        (ValueError, r"arrays 0 and 1 are one array", dict(cache=jaxkv.PagedCache((cache.pages[0],) * 3, model.spec))),
    ]:
        options = dict(cache=cache, chunks=chunks, slots=SLOTS) | RANGES | options
        with pytest.raises(error, match=words):
            lmcache.load_layers(**options)
    assert_same(cache.pages, before)


def test_a_closed_load_frees_what_it_has_staged():
    """E20: no array of the generator's own outlives it."""
    model = Model()
    answers = parts_of(stored(model))

    def on_the_device():
        shape = answers[0][0].shape
        return sum(x.shape == shape and x.sharding.memory_kind != "pinned_host" for x in jax.live_arrays())

    before = on_the_device()
    generator = lmcache.load_layers(model.poisoned(), stored(model), SLOTS, **RANGES)
    next(generator)
    generator.send(answers[0])
    assert on_the_device() == before + 3
    generator.close()
    assert on_the_device() == before


@pytest.mark.parametrize("pool", ["A1", "A2"])
def test_what_is_consumed(pool):
    """R1, I11: the given pages unless donate=False; an array that is gone is named."""
    model = Model(pool)
    chunks = stored(model)
    want = bulk(model.poisoned(), chunks)[0]

    cache = model.poisoned()
    _, result = run(lmcache.load_layers(cache, chunks, SLOTS, **RANGES), parts_of(chunks))
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(cache.pages))
    with pytest.raises(ValueError, match="deleted or donated"):
        lmcache.load_layers(cache, chunks, SLOTS, **RANGES)
    for given in (chunks, ()):
        cache = model.poisoned()
        ranges = dict(starts=STARTS[: len(given)], ends=ENDS[: len(given)])
        _, result = run(lmcache.load_layers(cache, given, SLOTS, donate=False, **ranges), parts_of(given))
        assert_same(result.cache.pages, want.pages if given else model.poisoned().pages)
        jax.tree.map(lambda x: x.delete(), result.cache.pages)
        assert_same(cache.pages, model.poisoned().pages)
    cache = model.poisoned()
    generator = lmcache.load_layers(cache, chunks, SLOTS, **RANGES, ahead=0)
    next(generator)
    jax.tree.leaves(cache.pages)[0].delete()
    with pytest.raises(ValueError, match="pages: those of layer 0 were deleted"):
        generator.send(parts_of(chunks)[0])


def test_pages_that_come_with_the_answers_are_checked():
    """M37, B4: their number, their dtype, and the slots against how many pages there are."""
    model = Model()
    chunks, cache = stored(model), model.poisoned()
    parts = parts_of(chunks)[0]
    for answer, kind, words in [
        (parts, TypeError, r"pages: layer 0: there is no cache, expected \(pages, parts\), got list"),
        ((cache.pages[:2], parts), ValueError, r"pages: layer 0: got 2 arrays, expected 1"),
        ((cache.pages[0].astype(jnp.float32), parts), TypeError, r"pages: layer 0: .*float32, the cache has bfloat16"),
        (
            (cache.pages[0][:, :5], parts),
            ValueError,
            rf"slots: layer 0: index {np.flatnonzero(SLOTS >= 20)[0]} has slot",
        ),
    ]:
        generator = lmcache.load_layers(model.spec, chunks, SLOTS, **RANGES)
        next(generator)
        with pytest.raises(kind, match=words):
            generator.send(answer)
    assert_same(cache.pages, model.poisoned().pages)


def test_the_callers_arrays_may_change_after_the_call():
    """B29: slots, ranges and positions are those of the call, also for the plan that a miss asks for."""
    model = Model()
    chunks = stored(model)
    slots, starts, ends = SLOTS.copy(), list(STARTS), list(ENDS)
    generator = lmcache.load_layers(model.poisoned(), chunks, slots, starts=starts, ends=ends)
    slots[:], starts[:], ends[:] = 0, [0] * 3, [0] * 3
    answers = parts_of(chunks)
    answers[0][2] = None
    _, result = run(generator, answers)
    assert_same(result.cache.pages, bulk(model.poisoned(), chunks[:2])[0].pages)
    # Chunks that follow one another need no ranges, not even where one is missing.
    whole = stored(model, starts=None, ends=None)
    answers = parts_of(whole)
    answers[0][1] = None
    _, result = run(lmcache.load_layers(model.poisoned(), whole, SLOTS), answers)
    assert result.mask.tolist() == [t < 8 for t in range(20)]
