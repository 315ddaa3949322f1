"""store and load inside the caller's own programs: jit, loops, branches, donation, x64."""

import functools

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import IMPLEMENTATIONS, Model, Scene, counts_of, follow

import jaxkv

implementations = pytest.mark.parametrize("implementation", IMPLEMENTATIONS)


@implementations
@pytest.mark.parametrize("pool", ["A1", "A5", "A24", "A26"])
def test_jit_gives_what_eager_gives(pool, implementation):
    """R5: traced pages and slots; memory kinds as outside (I14); what cannot be served is not moved (M41, R6)."""
    model = Model(pool)
    arrays, cache = model.random()
    slots = np.random.default_rng(0).permutation(28)[:21].astype(np.int32)
    slots[[2, 9, 13]] = [-1, 28, -(2**31)]
    store = jax.jit(lambda c, s, n: jaxkv.store(c, s, chunk_tokens=8, skip_prefix=n, implementation=implementation))
    chunks = store(cache, slots, np.int32(4))
    helpers.stored(model, arrays, chunks, slots, *follow(21, 8), skip_prefix=4)
    helpers.assert_same(cache.pages, arrays)

    other = np.random.default_rng(1).permutation(28)[:21].astype(np.int32)
    other[[4, 20, 7, 8]] = [-1, 28, 3, 3]
    ranges = follow(21, 8)
    rows = [model.rows(arrays, slots[s:e]) for s, e in zip(*ranges, strict=True)]
    valid = [np.asarray(c.valid)[: int(c.num_tokens)].tolist() for c in chunks]
    want, counts = helpers.loaded(model, model.arrays(), rows, other, *ranges, skip_prefix=6, valid=valid)

    def both(cache, chunks, slots, prefix):
        plan = jaxkv.plan(cache, chunks, slots, skip_prefix=prefix)
        return jaxkv.load(cache, plan, implementation=implementation), plan

    after, plan = jax.jit(both)(model.poisoned(), chunks, other, np.int32(6))
    helpers.assert_same(after.pages, want)
    assert {x.sharding.memory_kind for x in jax.tree.leaves(after)} == {"device"}
    assert counts_of(plan) == counts  # R7, B28: arrays, and the same figures
    eager = jaxkv.plan(model.poisoned(), chunks, other, skip_prefix=6, out_of_range="skip")
    assert np.asarray(plan.slots).tolist() == np.asarray(eager.slots).tolist()
    # The plan that came out of the program is a value like any other.
    helpers.assert_same(jaxkv.load(model.poisoned(), plan, implementation=implementation).pages, want)


@implementations
def test_donation_inside_jit_is_in_place(implementation):
    """E26, R1: by pointer; the chunks stay whole."""
    scene = Scene(Model("A2"), 20)
    load = jax.jit(lambda c, chunks, s: jaxkv.load(c, chunks, s, implementation=implementation), donate_argnames="c")
    cache = scene.model.poisoned()
    before = [x.unsafe_buffer_pointer() for x in cache.pages]
    after = load(cache, scene.chunks, scene.slots)
    assert [x.unsafe_buffer_pointer() for x in after.pages] == before
    assert cache.pages[0].is_deleted()
    helpers.assert_same(
        after.pages, scene.model.written(scene.model.arrays(), np.concatenate(scene.rows, axis=2), scene.slots)
    )
    scene.check()


@implementations
@pytest.mark.parametrize("donate", [(), ("cache",)])
@pytest.mark.parametrize("order", ["store first", "load first"])
def test_store_and_load_in_one_program(order, donate, implementation):
    """E17: as the data flows, whichever comes first, also where both want the same slots."""
    scene = Scene(Model("A14"), 12, seed=3)
    model = scene.model
    arrays = model.arrays(4)
    put, take = np.arange(12), np.arange(6, 18)

    @functools.partial(jax.jit, donate_argnames=donate)
    def both(cache, chunks, put, take):
        options = dict(chunk_tokens=8, implementation=implementation)
        if order == "store first":
            stored = jaxkv.store(cache, take, **options)
            return jaxkv.load(cache, chunks, put, implementation=implementation), stored
        cache = jaxkv.load(cache, chunks, put, implementation=implementation)
        return cache, jaxkv.store(cache, take, **options)

    after, stored = both(model.cache(arrays), scene.chunks, put, take)
    written = model.written(arrays, np.concatenate(scene.rows, axis=2), put)
    helpers.assert_same(after.pages, written)
    helpers.stored(model, arrays if order == "store first" else written, stored, take, *follow(12, 8))


@implementations
def test_many_steps_of_a_loop(implementation):
    """E18: 1,000 steps of store, load elsewhere and overwrite, on a carried pool, each step's chunk right."""
    model = Model("A2", layers=2, heads=1, dim=2, pages=3, page_size=2, dtype="uint8")
    steps, tokens = 1000, 3

    def step(i, carry):
        cache, sums = carry
        slots = (jnp.arange(tokens, dtype=jnp.int32) + i) % 6
        (chunk,) = jaxkv.store(cache, slots, chunk_tokens=tokens, implementation=implementation)
        pages = jax.tree.map(lambda x: x + jnp.uint8(1), cache.pages)
        cache = jaxkv.load(
            jaxkv.PagedCache(pages, model.spec), (chunk,), (slots + 2) % 6, implementation=implementation
        )
        data = jax.device_put(chunk.data[0], jax.memory.Space.Device)
        return cache, sums.at[i].set(data.astype(jnp.int32).sum())

    run = jax.jit(lambda c: jax.lax.fori_loop(0, steps, step, (c, jnp.zeros(steps, jnp.int32))), donate_argnums=0)
    arrays, cache = model.random(5)
    after, sums = run(cache)
    flat = model.rows(arrays, range(6))
    for i in range(steps):
        slots = (np.arange(tokens) + i) % 6
        rows = flat[:, :, slots].copy()
        assert int(sums[i]) == rows.sum()
        flat = flat + np.uint8(1)
        flat[:, :, (slots + 2) % 6] = rows
    helpers.assert_same(model.rows(helpers.snapshot(after.pages), range(6)), flat)


@implementations
def test_scan_with_chunks_as_results(implementation):
    """Chunks stacked by a scan, and consumed by another: the pinned carry and results keep their memory kind (I14)."""
    # Not bf16: the slices of a scan itself quieten NaN on the CPU of jaxlib 0.10.
    model = Model("A21", dtype="int8")
    arrays, cache = model.random(6)
    slots = np.random.default_rng(6).permutation(28)[:12].reshape(4, 3).astype(np.int32)

    def save(cache, slots):
        (chunk,) = jaxkv.store(cache, slots, chunk_tokens=4, implementation=implementation)
        return cache, chunk

    def restore(cache, work):
        slots, chunk = work
        return jaxkv.load(cache, [chunk], slots, implementation=implementation, starts=[0], ends=[3]), ()

    _, chunks = jax.jit(lambda c: jax.lax.scan(save, c, slots))(cache)
    assert chunks.data[0].sharding.memory_kind == "pinned_host"
    other = np.random.default_rng(7).permutation(28)[:12].reshape(4, 3).astype(np.int32)
    after, _ = jax.jit(lambda c, chunks: jax.lax.scan(restore, c, (other, chunks)))(model.poisoned(), chunks)
    want = model.written(model.arrays(), model.rows(arrays, slots.reshape(-1)), other.reshape(-1))
    helpers.assert_same(after.pages, want)


@implementations
def test_cond(implementation):
    """A branch that loads and one that does not; a branch that stores this or that."""
    scene = Scene(Model("A2"), 8)
    slots = np.asarray(scene.slots[:8], np.int32)

    @jax.jit
    def maybe(hit, cache, chunks):
        return jax.lax.cond(
            hit, lambda c: jaxkv.load(c, chunks, slots, implementation=implementation), lambda c: c, cache
        )

    want = scene.model.written(scene.model.arrays(), scene.rows[0], slots)
    helpers.assert_same(maybe(True, scene.model.poisoned(), scene.chunks).pages, want)
    helpers.assert_same(maybe(False, scene.model.poisoned(), scene.chunks).pages, scene.model.arrays())

    @jax.jit
    def either(first, cache):
        def store(slots):
            return lambda c: jaxkv.store(c, slots, chunk_tokens=8, implementation=implementation)[0].data

        return jax.lax.cond(first, store(slots), store(slots[::-1]), cache)

    arrays, cache = scene.model.random(8)
    for first, where in ((True, slots), (False, slots[::-1])):
        (data,) = either(first, cache)
        assert data.sharding.memory_kind == "pinned_host"
        helpers.assert_same(data, scene.model.chunk_arrays(scene.model.rows(arrays, where), jaxkv.KV_2LTD, 8))


@implementations
@pytest.mark.parametrize("closed", ["cache", "chunks", "slots", "all but slots", "all"])
def test_what_a_program_closes_over(closed, implementation):
    """R5, R1: constants of the program; a closed-over cache outlives the tracing, and the second call."""
    scene = Scene(Model("A2"), 12)
    cache, model = scene.model.poisoned(), scene.model
    given = {"cache": cache, "chunks": scene.chunks, "slots": scene.slots}
    names = {"all but slots": ["slots"], "all": []}.get(closed, [name for name in given if name != closed])
    load = jax.jit(lambda **some: jaxkv.load(**{**given, **some}, implementation=implementation))
    want = model.written(model.arrays(), np.concatenate(scene.rows, axis=2), scene.slots)
    for _ in range(2):
        helpers.assert_same(load(**{name: given[name] for name in names}).pages, want)
    helpers.assert_same(cache.pages, model.arrays())
    store = jax.jit(lambda s: jaxkv.store(cache, s, chunk_tokens=8, implementation=implementation))
    for _ in range(2):
        helpers.stored(model, model.arrays(), store(scene.slots), scene.slots, *follow(12, 8))


@implementations
def test_padded_call(implementation):
    """D18, B30: static shapes, dynamic numbers of tokens: one trace serves all, and padding touches nothing."""
    model = Model("A2")
    traces = 0

    @functools.partial(jax.jit, donate_argnums=0)
    def load(cache, chunks, slots):
        nonlocal traces
        traces += 1
        return jaxkv.load(cache, chunks, slots, implementation=implementation)

    for n in (16, 1, 9, 8, 15):
        scene = Scene(model, n, seed=n)
        empty = Scene(model, 8, [0], [0]).chunks
        chunks = (*scene.chunks, *empty)[:2]  # always two; the last may be empty
        slots = np.concatenate([scene.slots, np.random.default_rng(n).permutation(28)[: 16 - n]])
        want = model.written(model.arrays(), np.concatenate(scene.rows, axis=2), scene.slots)
        helpers.assert_same(load(model.poisoned(), chunks, slots).pages, want)
    assert traces == 1


@implementations
def test_traced_gaps(implementation):
    """G1 with traced slots and a traced prefix, ranges being static."""
    scene = Scene(Model("A2"), 28, [0, 8, 18], [8, 16, 26])
    model = scene.model
    want, counts = helpers.loaded(
        model, model.arrays(), scene.rows, scene.slots, scene.starts, scene.ends, skip_prefix=17, zero=True
    )

    def load(cache, chunks, slots, prefix):
        options = dict(starts=scene.starts, ends=scene.ends, gaps="zero", skip_prefix=prefix)
        plan = jaxkv.plan(cache, chunks, slots, **options)
        return jaxkv.load(cache, plan, implementation=implementation), plan.counts

    with jax.enable_x64(True):
        got, found = jax.jit(load)(model.poisoned(), scene.chunks, scene.slots, 17)
    helpers.assert_same(got.pages, want)
    assert {k: int(v) for k, v in found._asdict().items()} == counts | {"bad_position": 0}


@implementations
@pytest.mark.parametrize("traced", [False, True])
def test_x64(traced, implementation):
    """B8, B7, R5: int64 slots on a device, judged by their true value."""
    model = Model("A2")
    arrays, cache = model.random(9)
    slots = np.random.default_rng(9).permutation(28)[:11]
    slots[[1, 4, 5]] = [2**32 + 5, -(2**40), -(2**63)]

    def both(cache, to, slots):
        chunks = jaxkv.store(cache, slots, chunk_tokens=8, out_of_range="skip", implementation=implementation)
        return chunks, jaxkv.load(to, chunks, slots, out_of_range="skip", implementation=implementation)

    with jax.enable_x64(True):
        chunks, after = (jax.jit(both) if traced else both)(cache, model.poisoned(), jnp.asarray(slots))
        helpers.stored(model, arrays, chunks, slots, *follow(11, 8))
    helpers.assert_same(after.pages, model.written(model.arrays(), model.rows(arrays, slots), slots))


def test_a_jitted_store_is_read_and_checked_like_any_other():
    """M44, M42, D21: `valid` and `num_tokens` are then device arrays, which are as concrete as NumPy ones."""
    scene = Scene(Model("A2"), 12)
    _, cache = scene.model.random()
    chunks = jax.jit(lambda c: jaxkv.store(c, scene.slots, chunk_tokens=8))(cache)
    assert isinstance(chunks[0].num_tokens, jax.Array)
    target = scene.model.poisoned()
    with pytest.raises(ValueError, match="slots: index 3 has slot 99"):
        jaxkv.load(target, chunks, np.where(np.arange(12) == 3, 99, scene.slots))
    with pytest.raises(ValueError, match="11 slots for the 12 tokens"):
        jaxkv.load(target, chunks, scene.slots[:11])
    with pytest.raises(ValueError, match="chunk 1 has 4 rows"):
        jaxkv.load(target, chunks, scene.slots, starts=[0, 8], ends=[8, 11])
    with jax.transfer_guard_device_to_host("disallow"):
        jaxkv.load(scene.model.poisoned(), chunks, scene.slots, out_of_range="skip")
    after = jaxkv.load(target, chunks, scene.slots)
    want = scene.model.rows(helpers.snapshot(cache.pages), scene.slots)
    helpers.assert_same(after.pages, scene.model.written(scene.model.arrays(), want, scene.slots))


@pytest.mark.parametrize("how", ["grad", "vmap", "disable_jit"])
@implementations
def test_concrete_calls_beside_a_transformation(implementation, how):
    """R5: what is not transformed is stored and loaded as ever, also where nothing is compiled."""
    model = Model("A2")
    arrays, cache = model.random(0)
    slots = np.random.default_rng(1).permutation(28)[:13]
    target, seen = model.poisoned(), []

    def run(x):
        chunks = jaxkv.store(cache, slots, chunk_tokens=8, implementation=implementation)
        seen.append((chunks, jaxkv.load(target, chunks, slots, donate=False, implementation=implementation)))
        return x * 2.0

    if how == "grad":
        assert jax.grad(run)(1.0) == 2.0
    elif how == "vmap":
        assert jax.vmap(run)(jnp.ones(2)).tolist() == [2.0, 2.0]
    else:
        with jax.disable_jit():
            run(1.0)
    chunks, after = seen[0]
    for chunk, first in zip(chunks, (0, 8), strict=True):
        want = model.rows(arrays, slots[first : first + 8])
        helpers.assert_same(chunk.rows()[0].reshape(want.transpose(1, 0, 2, 3, 4).shape), want.transpose(1, 0, 2, 3, 4))
    helpers.assert_same(after.pages, model.written(model.arrays(), model.rows(arrays, slots), slots))
