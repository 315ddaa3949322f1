"""Staged: a layer's K and V as values, edited ones put back, and `write` for pages of every kind."""

import dataclasses

import helpers
import jax
import jax.numpy as jnp
import layers as by_layer
import numpy as np
import pytest
import turning
from helpers import DTYPES, IMPLEMENTATIONS, Model, assert_same
from turning import Moving, rope

import jaxkv


def moving(model=None, num_tokens=20, **options):
    return Moving(Model("A2", rope=rope(8)) if model is None else model, num_tokens, **options)


kv_jit = jax.jit(jaxkv.Staged.kv)
replace_jit = jax.jit(jaxkv.Staged.replace)


def kv_of(staged):
    return by_layer.numpy(kv_jit(staged))


@pytest.mark.parametrize(
    ("pool", "format"),
    [("A1", "KV_2LTD"), ("A2", "KV_T2D"), ("A2", "layer kv | token head dim"), ("A13", "KV_2TD"), ("A19", "KV_MLA")],
)
def test_kv_is_what_is_written(pool, format):
    """k, v, valid: the corrected rows of each token, as `write` puts them into the pages."""
    made = moving(turning.turned_model(pool, rope(4, pairing="interleaved")), format=format)
    rows = made.layerwise("xla")
    for layer, staged in enumerate(jaxkv.fetch_layers(made.plan())):
        k, v, valid = kv_of(staged)
        assert valid.all() and k.shape == (20, made.model.sizes["head"], 8) and k.dtype == made.model.dtype
        assert_same(k, rows[layer, 0])
        if made.model.spec.planes == 1:
            assert v is None
        else:
            assert_same(v, rows[layer, 1])


@pytest.mark.parametrize("dtype", DTYPES)
def test_kv_keeps_every_bit(dtype):
    """R2, C7: of every dtype, NaN payloads too, where nothing turns."""
    model = Model("A2", dtype=dtype, pages=32)
    arrays, cache = model.random()
    chunks = jaxkv.store(cache, np.arange(128), chunk_tokens=64)
    for layer, staged in enumerate(jaxkv.fetch_layers(jaxkv.plan(model.spec, chunks, np.arange(128)))):
        k, v, valid = kv_of(staged)
        assert valid.all()
        assert_same([k, v], list(model.rows(arrays, np.arange(128))[layer]))
        page = jaxkv.write(model.poisoned().pages[layer], replace_jit(staged, k, v))
        assert_same(page, model.written(model.arrays(), model.rows(arrays, range(128)), range(128))[layer])


def test_tokens_that_no_row_brings():
    """valid is False and the values are zero: gaps, negative slots, skipped rows and prefix; R13."""
    model = Model("A2", rope=rope(8))
    made = moving(model, 28)
    starts, ends, slots = [16, 0, 20], [20, 8, 28], made.slots.copy()
    chunks = [made.chunks[2], made.chunks[0], made.chunks[3]]
    chunks[0] = jaxkv.store(model.random()[1], np.r_[3, -1, 5, 6], chunk_tokens=8, positions=np.arange(4))[0]
    chunks[2] = jaxkv.store(model.random()[1], np.arange(8), chunk_tokens=8)[0]
    slots[[1, 22]] = -1
    call = jaxkv.plan(model.spec, chunks, slots, starts=starts, ends=ends, positions=np.arange(28) + 5, skip_prefix=1)
    want = np.zeros(28, bool)
    want[[*range(2, 8), 16, 18, 19, 20, 21, *range(23, 28)]] = True
    for staged in jaxkv.fetch_layers(call):
        k, v, valid = kv_of(staged)
        assert valid.tolist() == want.tolist()
        assert not helpers.raw(k)[~want].any() and not helpers.raw(v)[~want].any()
        assert helpers.raw(k)[want].any(axis=(1, 2)).all()


def test_the_last_of_overlapping_chunks():
    """D4: a token that two chunks bring is the later one's, in `kv` as in the pages."""
    made = moving(Model("A2", rope=rope(8)), 8, new=np.arange(8))
    other = moving(made.model, 8, seed=1)
    call = jaxkv.plan(
        made.model.spec, [*made.chunks, *other.chunks], made.slots, starts=[0, 0], ends=[8, 8], positions=other.new
    )
    for layer, staged in enumerate(jaxkv.fetch_layers(call)):
        k, v, valid = kv_of(staged)
        assert valid.all()
        turning.check_keys(k, other.rows[layer, 0], rope(8), other.old, other.new)
        assert_same(v, other.rows[layer, 1])
        page = jaxkv.write(made.model.poisoned().pages[layer], replace_jit(staged, k, v))
        rows = np.stack([np.stack([k, v])] * 3)
        assert_same(page, made.model.written(made.model.arrays(), rows, made.slots)[layer])


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("pool", ["A1", "A2", "A5", "A19", "A26"])
def test_replace(pool, implementation):
    """Edited K and V are written as they are, to valid tokens alone; gaps stay gaps; what is replaced is unchanged."""
    model = turning.turned_model(pool, rope(8))
    made = moving(model, 28)
    chunks, starts, ends = made.chunks[1:3], [8, 18], [16, 26]
    slots = made.slots.copy()
    slots[[10, 17]] = -1
    options = dict(starts=starts, ends=ends, positions=made.new, gaps="zero")
    edited = turning.normal_rows(model, 28, 9)

    def edit(layer, staged):
        k, v = (jnp.asarray(x) for x in (edited[layer, 0], edited[layer, -1]))
        changed = replace_jit(staged, k, v if model.spec.planes == 2 else None)
        again, _, valid = kv_of(changed)
        kept = [t for t in range(28) if (8 <= t < 16 or 18 <= t < 26) and t != 10]
        assert np.flatnonzero(valid).tolist() == kept
        assert_same(again[kept], edited[layer, 0][kept])
        twice = replace_jit(changed, k, v if model.spec.planes == 2 else None)
        assert_same(by_layer.numpy(twice.runs[0].slots), by_layer.numpy(changed.runs[0].slots))
        return changed

    call = jaxkv.plan(model.spec, chunks, slots, **options)
    after = by_layer.load(model.poisoned(), call, edit=edit, implementation=implementation)
    want = model.zeroed(model.arrays(), [slots[16]])
    tokens = [t for t in range(28) if 8 <= t < 16 or 18 <= t < 26]
    assert_same(after.pages, model.written(want, edited[:, :, tokens], slots[tokens]))


def test_kv_and_replace_inside_jit():
    """R5, item 6: edit and write in the caller's own program, one trace for all layers and requests."""
    model = Model("A2", layers=4, rope=rope(8))
    traced = []

    def step(page, staged, factor):
        traced.append(1)
        k, v, valid = staged.kv()
        v = jnp.where(valid[:, None, None], v * factor.astype(v.dtype), v)
        return jaxkv.write(page, staged.replace(k, v))

    step = jax.jit(step, donate_argnums=0)
    for seed in range(2):
        made = moving(model, seed=seed)
        pages = list(model.poisoned().pages)
        for layer, staged in enumerate(jaxkv.fetch_layers(made.plan())):
            pages[layer] = step(pages[layer], staged, jnp.float32(-1))
        got = made.rows_of(jaxkv.PagedCache(tuple(pages), model.spec))
        assert_same(got[:, 1], -made.rows[:, 1])
        assert_same(got[:, 0], made.layerwise("xla")[:, 0])
    assert len(traced) == 1


def test_with_64_bit_types():
    """R5: x64 on."""
    made = moving()
    want = made.layerwise()
    with jax.enable_x64(True):
        assert_same(made.layerwise(), want)
        assert_same(made.bulk({}), want)
        for layer, staged in enumerate(jaxkv.fetch_layers(made.plan())):
            k, v, _ = kv_jit(staged)
            changed = replace_jit(staged, k, v)
            assert changed.row_of_token.dtype == np.int32
            page = jaxkv.write(made.model.poisoned().pages[layer], changed)
            assert_same(kv_jit(changed)[0], k)
            assert page.dtype == made.model.dtype
        parts = by_layer.store(made.model.random()[1], np.arange(20), chunk_tokens=8)
    helpers.stored(made.model, made.model.arrays(0), jaxkv.join_layers(parts), np.arange(20), *helpers.follow(20, 8))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("pool", ["A1", "A2", "A5"])
def test_write_is_pure_and_in_place(pool, implementation):
    """R1, E26: eager it leaves the page as it was; donated, in the caller's program, it is the same buffer."""
    made = moving(turning.turned_model(pool, rope(8)), 20)
    cache = made.model.poisoned()
    pages = by_layer.split(cache)
    for layer, staged in enumerate(jaxkv.fetch_layers(made.plan(gaps="zero"))):
        at = 0 if by_layer.is_slab(made.model.spec) else layer
        before = [x.unsafe_buffer_pointer() for x in jax.tree.leaves(pages[at])]
        kept = helpers.snapshot(pages[at])
        apart = jaxkv.write(pages[at], staged, implementation=implementation)
        assert_same(pages[at], kept)
        pages[at] = by_layer.write(pages[at], staged, implementation=implementation)
        assert [x.unsafe_buffer_pointer() for x in jax.tree.leaves(pages[at])] == before
        assert_same(apart, helpers.snapshot(pages[at]))
        assert jax.tree.structure(apart) == jax.tree.structure(kept)
    made.check(made.rows_of(by_layer.join(pages, made.model.spec)))


def test_staged_is_a_value():
    """Written twice and into other pages; it keeps its layer alive after the iterator is gone."""
    made = moving()
    steps = jaxkv.fetch_layers(made.plan())
    staged = next(steps)
    steps.close()
    del steps
    for _ in range(2):
        page = by_layer.write(made.model.poisoned().pages[0], staged)
        twice = by_layer.write(page, staged)
        rows = made.model.rows([np.asarray(jnp.copy(twice))] * 3, made.slots)
        turning.check_keys(rows[0, 0], made.rows[0, 0], rope(8), made.old, made.new)
    kv, want = staged.kv(), kv_of(staged)
    assert_same(kv, want)
    assert_same(kv_of(staged.replace(*kv[:2])), want)
    leaves, structure = jax.tree.flatten(staged)
    assert jax.tree.structure(jax.tree.unflatten(structure, leaves)) == structure


def spoiled(staged, **changes):
    return dataclasses.replace(staged, **changes)


KV = ((20, 4, 8), (20, 4, 8))
WRONG = {
    "no staged": (lambda p, s: jaxkv.write(p, 3), TypeError, "staged: .*int"),
    "two arrays": (lambda p, s: jaxkv.write((p, p), s), ValueError, "page: got 2 arrays"),
    "no array": (lambda p, s: jaxkv.write(np.asarray(jnp.copy(p)), s), TypeError, "page: .*ndarray"),
    "deleted page": (lambda p, s: jaxkv.write(gone(p), s), ValueError, "page: .*deleted"),
    "other dtype": (lambda p, s: jaxkv.write(p.astype(jnp.float32), s), TypeError, "float32.*bfloat16"),
    "other shape": (lambda p, s: jaxkv.write(p[..., :4], s), ValueError, r"\(2, 7, 4, 4, 4\)"),
    "implementation": (lambda p, s: jaxkv.write(p, s, implementation="metal"), ValueError, "metal"),
    "k of other shape": (
        lambda p, s: s.replace(*zeros((19, 4, 8), KV[1])),
        ValueError,
        r"k: .*\(19, 4, 8\).*\(20, 4, 8\)",
    ),
    "v of other shape": (lambda p, s: s.replace(*zeros(KV[0], (20, 4, 7))), ValueError, r"v: .*\(20, 4, 7\)"),
    "v missing": (lambda p, s: s.replace(zeros(*KV)[0]), ValueError, r"v: .* 2 plane\(s\), got 1"),
    "k of other dtype": (lambda p, s: s.replace(*(x.astype("float32") for x in zeros(*KV))), TypeError, "k: .*float32"),
}


def zeros(*shapes):
    return [jnp.zeros(shape, jnp.bfloat16) for shape in shapes]


def gone(page):
    page = jnp.copy(page)
    page.delete()
    return page


@pytest.mark.parametrize("case", WRONG)
def test_errors(case):
    """R9, M42: named; the page is whole, and the same staged layer is written afterwards."""
    call, error, words = WRONG[case]
    made = moving()
    page, staged = made.model.poisoned().pages[0], next(jaxkv.fetch_layers(made.plan()))
    with pytest.raises(error, match=words):
        call(page, staged)
    assert_same(page, made.model.arrays()[0])
    jaxkv.write(page, staged)
