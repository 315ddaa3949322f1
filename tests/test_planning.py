"""plan against the oracle's loop over tokens: rows, slots, counts, gaps; concrete and traced."""

import copy
import dataclasses
import pickle

import helpers
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import Model, Scene, counts_of
from hypothesis import given, settings

import jaxkv
from jaxkv import planning
from jaxkv.testing import oracle

SPEC = jaxkv.CacheSpec("page token dim", 1, 1, 1, 4, jnp.uint8)
NUM_PAGES, NUM_SLOTS, ROWS = 7, 28, 6


def chunk_of(num_tokens: int, valid=None, rows: int = ROWS) -> jaxkv.Chunk:
    """A chunk without a store: nothing of its data matters to a plan but its shape."""
    real = np.arange(rows) < num_tokens
    if valid is not None:
        real[: len(valid)] &= np.asarray(valid, bool)
    format = jaxkv.KV_MLA
    data = tuple(jnp.zeros(shape, jnp.uint8) for shape in format.shapes(SPEC, rows))
    at = np.arange(rows, dtype=np.int32)
    return jaxkv.Chunk(data, np.int32(num_tokens), at, real, jaxkv.Fingerprint.of(SPEC, format))


CHUNKS = {n: chunk_of(n) for n in range(ROWS + 1)}


def rows_of(plan: jaxkv.Plan) -> list[list[int]]:
    """The slots of each chunk's tokens, the bucket's tail checked to be -1 and left out."""
    out = []
    for chunk, slots in zip(plan.chunks, plan.slots_by_chunk(), strict=True):
        slots = np.asarray(slots).tolist()
        held = int(chunk.num_tokens)
        assert len(slots) == ROWS
        assert slots[held:] == [-1] * (ROWS - held)
        out.append(slots[:held])
    return out


@given(st.data())
@settings(max_examples=200)
def test_the_usual_case_is_decided_as_any_other(data):
    """Chunks that follow one another have a shorter way to the same tables."""
    full, last = data.draw(st.integers(0, 4)), data.draw(st.integers(0, ROWS))
    masks = st.none() | st.lists(st.booleans(), min_size=ROWS, max_size=ROWS)
    chunks = [chunk_of(held, data.draw(masks)) for held in (*[ROWS] * full, last)]
    count = ROWS * full + last
    kinds = st.integers(-3, NUM_SLOTS + data.draw(st.sampled_from([-1, 2])))
    slots = np.asarray(data.draw(st.lists(kinds, min_size=count, max_size=count)), np.int32)
    how = {
        "skip_prefix": data.draw(st.integers(0, count + 2)),
        "out_of_range": data.draw(st.sampled_from(["raise", "skip"])),
        "num_pages": data.draw(st.sampled_from([NUM_PAGES, None])),
    }
    how["unique_slots"] = data.draw(st.booleans()) and len(set(slots[slots >= 0])) == (slots >= 0).sum()

    def decide():
        try:
            return jaxkv.plan(SPEC, chunks, slots, **how)
        except ValueError as error:
            return str(error)

    found = decide()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planning, "_consecutive", lambda *args: None)
        want = decide()
        if slots.max(initial=-1) < NUM_SLOTS:
            patch.undo()
            patch.setattr(planning, "_anywhere", None)  # this is the usual case: the other way is not asked
            decide()
    if isinstance(want, str):
        assert found == want
        return
    for field in dataclasses.fields(want):
        mine, its = getattr(found, field.name), getattr(want, field.name)
        assert type(mine) is type(its)
        if field.name not in ("chunks", "spec"):
            for x, y in zip(jax.tree.leaves(mine), jax.tree.leaves(its), strict=True):
                np.testing.assert_array_equal(x, y)
                assert np.asarray(x).dtype == np.asarray(y).dtype


@st.composite
def requests(draw):
    """A request: tokens with slots of every kind, chunks anywhere over them with rows of every kind, a prefix."""
    num_tokens = draw(st.integers(1, 24))
    kinds = st.one_of(
        st.integers(0, NUM_SLOTS - 1), st.integers(0, 3), st.sampled_from([-1, -2, -NUM_SLOTS, -(2**31), -(2**63)])
    )
    beyond = st.sampled_from([NUM_SLOTS, NUM_SLOTS + 1, 2**31 - 1, 2**31, 2**32 + 5, 2**40])
    slots = draw(st.lists(kinds | beyond if draw(st.booleans()) else kinds, min_size=num_tokens, max_size=num_tokens))
    starts = draw(st.lists(st.integers(0, num_tokens), max_size=5))
    ends = [min(num_tokens, start + draw(st.integers(0, ROWS))) for start in starts]
    valid = [
        [draw(st.sampled_from([True, True, True, False])) for _ in range(e - s)]
        for s, e in zip(starts, ends, strict=True)
    ]
    return slots, starts, ends, valid, draw(st.sampled_from([0, 0, 1, 5, num_tokens, num_tokens + 3]))


@settings(max_examples=300)
@given(requests(), st.booleans())
def test_any_request(request, from_spec):
    """B1 to B13, B27, D2 to D6, D12, R7: slots of each row, counts that add up, gaps; against the oracle."""
    slots, starts, ends, valid, prefix = request
    sizes = [e - s for s, e in zip(starts, ends, strict=True)]
    chunks = [dataclasses.replace(CHUNKS[n], valid=chunk_of(n, v).valid) for n, v in zip(sizes, valid, strict=True)]
    want, counts = oracle.plan_rows(sizes, slots, starts, ends, prefix, NUM_SLOTS, valid)
    pool = dict(num_pages=NUM_PAGES) if from_spec else {}
    cache = SPEC if from_spec else SPEC.empty(NUM_PAGES)
    options = dict(starts=starts, ends=ends, skip_prefix=prefix, out_of_range="skip")
    plan = jaxkv.plan(cache, chunks, slots, **options, **pool)
    assert rows_of(plan) == want
    assert counts_of(plan) == counts
    assert sum(counts.values()) == sum(sizes)
    assert not plan.zeroed.any()
    assert plan.zeroed.shape == (len(slots),)
    assert plan.zero_slots.size == 0

    zeroing = jaxkv.plan(cache, chunks, slots, gaps="zero", **options, **pool)
    assert rows_of(zeroing) == want
    assert np.flatnonzero(zeroing.zeroed).tolist() == oracle.gap_tokens(starts, ends)
    written = {slot for rows in want for slot in rows}
    zeroed = {s for s in oracle.zero_slots(starts, ends, slots, prefix) if 0 <= s < NUM_SLOTS} - written
    found = zeroing.zero_slots[zeroing.zero_slots >= 0].tolist()
    assert sorted(found) == sorted(zeroed)  # each once (G9: what a chunk writes is not zeroed)
    assert sum(counts_of(zeroing).values()) == sum(sizes) + zeroing.zeroed.sum()

    # M44 where they are to be served: the first bad token by index, unless a prefix or its row leaves it out.
    served = [
        start + row
        for start, rows in zip(starts, valid, strict=True)
        for row, real in enumerate(rows)
        if real and start + row >= prefix and slots[start + row] >= NUM_SLOTS
    ]
    if served:
        with pytest.raises(ValueError, match=f"slots: index {min(served)} has slot .* the pool has 28 slots; .*skip"):
            jaxkv.plan(cache, chunks, slots, **{**options, "out_of_range": "raise"}, **pool)
    else:
        assert rows_of(jaxkv.plan(cache, chunks, slots, **{**options, "out_of_range": "raise"}, **pool)) == want


@jax.jit
def traced_plan(chunks, slots, prefix):
    return jaxkv.plan(SPEC.empty(NUM_PAGES), chunks, slots, skip_prefix=prefix)


@settings(max_examples=60)
@given(st.lists(st.integers(-3, 33), min_size=18, max_size=18), st.lists(st.integers(0, ROWS), min_size=3, max_size=3))
def test_traced_is_as_concrete_with_skip(slots, sizes):
    """R5, B6, B28, B30, M41: one trace for all lengths, slots and prefixes."""
    chunks = [CHUNKS[n] for n in sizes]
    prefix = sizes[0] // 2
    got = traced_plan(chunks, np.asarray(slots, np.int32), np.int32(prefix))
    want, counts = oracle.plan_rows(sizes, slots, skip_prefix=prefix, num_slots=NUM_SLOTS)
    assert rows_of(got) == want
    assert counts_of(got) == counts
    assert traced_plan._cache_size() <= 2  # NumPy chunks, and those that a hypothesis shrink leaves as they are


def test_without_ranges_chunks_follow_one_another():
    """D11's default: from token 0, in list order, empty chunks included; M13 where they do not cover all."""
    slots = np.arange(13)[::-1]
    plan = jaxkv.plan(SPEC, [CHUNKS[6], CHUNKS[0], CHUNKS[3], CHUNKS[4]], slots)
    assert rows_of(plan) == [slots[:6].tolist(), [], slots[6:9].tolist(), slots[9:].tolist()]
    for n in (12, 14):
        with pytest.raises(ValueError, match=f"slots: {n} slots for the 13 tokens of 4 chunks"):
            jaxkv.plan(SPEC, plan.chunks, np.arange(n))


def test_a_plan_from_a_spec_knows_no_pool():
    """M44 is then left to `load`; what int32 cannot hold is refused at once."""
    plan = jaxkv.plan(SPEC, [CHUNKS[3]], [5, 10**9, 7])
    assert (plan.num_slots, rows_of(plan)) == (None, [[5, 10**9, 7]])
    for slot in (2**31 - 1, 2**31, 2**40):
        with pytest.raises(ValueError, match="slots: index 1 has slot 2147483647, but no pool has that many slots"):
            jaxkv.plan(SPEC, [CHUNKS[3]], [5, slot, 7])
        plan = jaxkv.plan(SPEC, [CHUNKS[3]], [5, slot, 7], out_of_range="skip")
        assert rows_of(plan) == [[5, -1, 7]]
        assert counts_of(plan) == {"moved": 2, "skipped": 0, "out_of_range": 1}


@pytest.mark.parametrize("table", [0, planning._TABLE_SLOTS])
def test_equal_slots_far_apart(table, monkeypatch):
    """B11: the same winners by a table of all slots and by sorting."""
    monkeypatch.setattr(planning, "_TABLE_SLOTS", table)
    rng = np.random.default_rng(0)
    for _ in range(20):
        slots = rng.choice([-1, 0, 1, 2, 2**20], 18)
        plan = jaxkv.plan(SPEC, [CHUNKS[6]] * 3, slots)
        assert rows_of(plan) == oracle.plan_rows([6, 6, 6], slots)[0]


def test_a_promise_of_unique_slots_is_taken():
    """B14."""
    plan = jaxkv.plan(SPEC, [CHUNKS[4]], [3, 3, -1, 3], unique_slots=True)
    assert rows_of(plan) == [[3, 3, -1, 3]]
    assert jaxkv.plan(SPEC, [CHUNKS[4]], [3, 3, -1, 3]).counts == plan.counts


def test_a_plan_is_a_value():
    """B29: the caller's arrays may change; a pytree whose leaves are the arrays, so that it passes through jit."""
    slots = np.arange(6, dtype=np.int32)
    plan = jaxkv.plan(SPEC.empty(2), [CHUNKS[6]], slots)
    slots[:] = 0
    assert rows_of(plan) == [list(range(6))]
    again = jax.jit(lambda p: p)(plan)
    assert rows_of(again) == rows_of(plan)
    assert (again.spec, again.num_slots, again.out_of_range) == (SPEC, 8, "raise")
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.slots = None


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"])
def test_ranges_of_every_integer_type(dtype):
    starts, ends = np.array([0, 9], dtype), np.array([6, 12], dtype)
    for form in (lambda x: x, lambda x: x.tolist(), tuple):
        plan = jaxkv.plan(SPEC, [CHUNKS[6], CHUNKS[3]], np.arange(12), starts=form(starts), ends=form(ends))
        assert rows_of(plan) == [list(range(6)), [9, 10, 11]]


def test_a_traced_plan_needs_to_know_its_pool():
    """B11 for traced slots wants a table of all slots; without a pool a promise does, or an error says so."""

    def of_spec(slots, **options):
        return jaxkv.plan(SPEC, [CHUNKS[6]], slots, **options).slots

    slots = np.array([3, 3, 9, -1, 0, 3], np.int32)
    with pytest.raises(ValueError, match="num_pages"):
        jax.jit(of_spec)(slots)
    assert jax.jit(lambda s: of_spec(s, num_pages=7))(slots).tolist() == [-1, -1, 9, -1, 0, 3]
    assert jax.jit(lambda s: of_spec(s, unique_slots=True))(slots).tolist() == slots.tolist()


def test_gaps_under_a_tracer_need_static_ranges():
    chunks = [CHUNKS[6], CHUNKS[3]]
    with pytest.raises(ValueError, match=r"gaps: .*starts and ends must be given"):
        jax.jit(lambda c, s: jaxkv.plan(SPEC.empty(7), c, s, gaps="zero").slots)(chunks, np.arange(12))


def test_a_plan_stays_what_was_checked():
    """What was checked cannot be edited in place; copies and pickles are checked anew, also after a load."""
    made = Scene(Model("A2"), 8)
    cache = made.model.poisoned()
    plan = jaxkv.plan(cache, made.chunks, made.slots[:8], gaps="zero")
    for table in (plan.slots, plan.zero_slots, plan.zeroed, plan.row_of_token):
        with pytest.raises(ValueError, match="read-only"):
            table[:] = 0
    for _ in range(2):  # before and after a layer-wise load has sent its tables
        for copied in (pickle.loads(pickle.dumps(plan)), copy.copy(plan), copy.deepcopy(plan)):
            helpers.assert_same(
                jaxkv.load(made.model.poisoned(), copied).pages, jaxkv.load(cache, plan, donate=False).pages
            )
        altered = dataclasses.replace(plan, slots=np.full_like(plan.slots, 4000))
        with pytest.raises(ValueError, match="slot 4000"):
            jaxkv.load(cache, altered)
        by_layer = jaxkv.plan(cache, jaxkv.store(cache, made.slots[:8], layers_per_array=1), made.slots[:8])
        staged = list(jaxkv.fetch_layers(by_layer))
        jax.tree.map(lambda x: x.delete() if isinstance(x, jax.Array) else None, staged)
        assert len(list(jaxkv.fetch_layers(by_layer))) == 3  # its tables are sent again
        pages = [jaxkv.write(page, s) for page, s in zip(cache.pages, jaxkv.fetch_layers(by_layer), strict=True)]
        helpers.assert_same(pages, cache.pages)
        plan = pickle.loads(pickle.dumps(by_layer))
    with pytest.raises(ValueError, match="missing"):
        jaxkv.fetch_layers(dataclasses.replace(plan, chunks=(None, *plan.chunks[1:])))
