"""CacheBlend's choice and merge against NumPy, and what they are for: reuse of passages, glued in another order."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from helpers import DTYPES, compilations, fill, raw

import jaxkv
from jaxkv import blend, ops
from jaxkv.testing import llama

FLOATS = ["bf16", "fp16", "fp32", "e4m3"]


def kv(seed, tokens=40, dtype="bf16", shape=(2, 8)):
    rng = np.random.default_rng(seed)
    return tuple(rng.normal(size=(tokens, *shape)).astype(DTYPES[dtype]) for _ in range(2))


def chosen_by_numpy(cached, fresh, k, must=None):
    deviation = sum(
        ((a.astype(np.float64) - b.astype(np.float64)) ** 2).sum((1, 2)) for a, b in zip(cached, fresh, strict=True)
    )
    if must is not None:
        deviation = np.where(must, np.inf, deviation)
    return sorted(np.argsort(-deviation, kind="stable")[:k].tolist())


# ---- select_tokens


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(
    "tokens, ratio, k", [(40, 0.15, 6), (41, 0.15, 7), (100, 0.07, 7), (40, 0, 0), (40, 1, 40), (0, 0.15, 0)]
)
def test_the_tokens_with_the_largest_deviation(tokens, ratio, k, dtype):
    cached, fresh = kv(0, tokens, dtype), kv(1, tokens, dtype)
    for sides in ((cached, fresh), (cached[:1], fresh[:1]), ((cached[0], None), (fresh[0], None))):
        indices = blend.select_tokens(*sides, ratio=ratio)
        assert indices.dtype == jnp.int32
        planes = 2 if sides[0] is cached else 1
        assert indices.tolist() == chosen_by_numpy(cached[:planes], fresh[:planes], k)
    assert blend.select_tokens(cached[0], fresh[0], ratio=ratio).tolist() == indices.tolist()
    assert (
        jax.jit(blend.select_tokens, static_argnames="ratio")(cached[0], fresh[0], ratio=ratio).tolist()
        == indices.tolist()
    )


def test_of_equal_deviations_the_first_and_nan_above_all():
    cached = np.zeros((10, 1, 2), np.float32)
    fresh = cached + 1
    assert blend.select_tokens(cached, fresh, count=3).tolist() == [0, 1, 2]
    fresh[[4, 7]] = 2
    fresh[8], cached[9], fresh[9] = np.nan, np.inf, np.inf
    fresh[6] = 1e30  # its square is infinite
    assert blend.select_tokens(cached, fresh, count=3).tolist() == [6, 8, 9]
    assert blend.select_tokens(cached, fresh, count=5).tolist() == [4, 6, 7, 8, 9]
    must = np.arange(10) < 2
    assert blend.select_tokens(cached, fresh, count=2, always=must).tolist() == [0, 1]


def test_tokens_that_must_be_computed_come_first():
    """Those without cached KV and those named: before all others, in their share, and never left out where known."""
    cached, fresh = kv(0), kv(1)
    valid, always = np.arange(40) != 11, np.arange(40) >= 38
    must = ~valid | always
    for masks in ((valid, always), (jnp.asarray(valid), jnp.asarray(always)), (valid.tolist(), always.tolist())):
        indices = blend.select_tokens(cached, fresh, valid=masks[0], always=masks[1])
        assert indices.tolist() == chosen_by_numpy(cached, fresh, 6, must)
        assert {11, 38, 39} <= set(indices.tolist())
    many = np.arange(40) % 2 == 0
    assert blend.select_tokens(cached, fresh, always=many).tolist() == list(range(0, 40, 2))
    assert blend.select_tokens(cached, fresh, always=many, count=21).shape == (21,)
    with pytest.raises(ValueError, match="count: 19 is less than the 20 tokens that must be computed"):
        blend.select_tokens(cached, fresh, always=many, count=19)
    traced = jax.jit(functools.partial(blend.select_tokens, count=21))
    assert set(range(0, 40, 2)) < set(traced(cached, fresh, always=many).tolist())
    assert jax.jit(blend.select_tokens)(cached, fresh, valid=~many).tolist() == [0, 2, 4, 6, 8, 10]


def test_one_program_serves_all_values():
    select = jax.jit(blend.select_tokens)
    select(*(jax.device_put(kv(seed)) for seed in (0, 1))).block_until_ready()
    sides = [jax.device_put(kv(seed)) for seed in (2, 3)]
    with compilations() as events:
        select(*sides).block_until_ready()
    assert not events


def test_without_and_with_x64():
    sides = kv(0), kv(1)
    want = blend.select_tokens(*sides).tolist()
    with jax.enable_x64(True):
        indices = blend.select_tokens(*sides)
        merged = blend.merge_rows(*sides, np.asarray(want))
        assert (indices.dtype, merged[0].dtype) == (jnp.int32, jnp.bfloat16)
        assert indices.tolist() == want
        assert blend.chosen_mask(indices, 40).sum() == 6


@pytest.mark.parametrize(
    "words, error, options",
    [
        ("ratio: expected a number between 0 and 1, got 1.5", ValueError, dict(ratio=1.5)),
        ("ratio: .*got True", ValueError, dict(ratio=True)),
        ("count: expected an int between 0 and 40, .*got 41", ValueError, dict(count=41)),
        ("count: .*got 1.0", ValueError, dict(count=1.0)),
        (r"valid: got shape \(39,\), expected \(40,\)", ValueError, dict(valid=np.ones(39, bool))),
        ("always: expected bool, got dtype int32", TypeError, dict(always=np.ones(40, np.int32))),
        ("fresh: got 1 planes", ValueError, dict(fresh=kv(1)[:1])),
        ("fresh: got 2 planes", ValueError, dict(fresh=(kv(1)[0], None))),
        (r"fresh: k has shape \(39, 2, 8\), expected \(40, 2, 8\)", ValueError, dict(fresh=kv(1, 39))),
        (r"cached: k has shape \(40, 8\), expected \[tokens, heads", ValueError, dict(cached=kv(0, 40, "bf16", (8,)))),
        ("cached k: expected floats, got dtype int8", TypeError, dict(cached=kv(0, 40, "int8"))),
        ("fresh: expected an array for v, got list", TypeError, dict(fresh=[kv(1)[0], [1.0]])),
    ],
)
def test_what_select_tokens_refuses(words, error, options):
    with pytest.raises(error, match=words):
        blend.select_tokens(**(dict(cached=kv(0), fresh=kv(1)) | options))


# ---- merge_rows and chosen_mask


@pytest.mark.parametrize("dtype", DTYPES)
def test_merged_rows_keep_their_bits(dtype):
    """Every bit pattern, NaN payloads among them: of chosen rows the fresh ones, of the others the cached ones."""
    cached, fresh = ([fill((9, 2, 8), DTYPES[dtype], seed, i) for i in range(2)] for seed in (0, 1))
    indices = np.array([1, 2, 8], np.int32)
    want = [raw(old).copy() for old in cached]
    for old, new in zip(want, fresh, strict=True):
        old[indices] = raw(new)[indices]
    for rows in (fresh, [new[indices] for new in fresh]):
        for merge, at in ((blend.merge_rows, indices.tolist()), (jax.jit(blend.merge_rows), indices)):
            merged = merge(cached, rows, at)
            assert isinstance(merged, tuple)
            for got, exact in zip(merged, want, strict=True):
                np.testing.assert_array_equal(raw(got), exact)
    alone = blend.merge_rows(cached[0], fresh[0], indices)
    np.testing.assert_array_equal(raw(alone), want[0])
    merged, none = blend.merge_rows((cached[0], None), (fresh[0], None), indices)
    assert none is None
    np.testing.assert_array_equal(raw(merged), want[0])


def test_indices_that_are_left_out():
    cached, fresh = kv(0, 9), kv(1, 9)
    merged, _ = blend.merge_rows(cached, fresh, [-1, 3, -5])
    assert (raw(merged) == raw(fresh[0])).all((1, 2)).tolist() == [t == 3 for t in range(9)]
    np.testing.assert_array_equal(raw(merged)[4:], raw(cached[0])[4:])
    assert blend.chosen_mask([-1, 3, -5], 5).tolist() == [False, False, False, True, False]
    assert not blend.chosen_mask([], 3).any()
    merged, _ = blend.merge_rows(cached, [x[:0] for x in fresh], [])
    np.testing.assert_array_equal(raw(merged), raw(cached[0]))
    order = [4, 0, 3, 1, 2, 8, 7, 6, 5]  # as many as there are tokens: rows in the order of the indices
    merged, _ = blend.merge_rows(cached, [x[order] for x in fresh], order)
    np.testing.assert_array_equal(raw(merged), raw(fresh[0]))


@pytest.mark.parametrize(
    "words, error, fresh, indices",
    [
        ("indices: 9 is past the 9 tokens of k", ValueError, kv(1, 9), [0, 9]),
        ("indices: expected integers, got dtype float64", TypeError, kv(1, 9), [0.0]),
        (r"fresh: k has shape \(3, 2, 8\), expected \(2, 2, 8\) or \(9, 2, 8\)", ValueError, kv(1, 3), [0, 1]),
        ("fresh: k has dtype float16, the cached one bfloat16", TypeError, kv(1, 9, "fp16"), [0]),
        ("fresh: got 1 planes", ValueError, kv(1, 9)[0], [0]),
    ],
)
def test_what_merge_rows_refuses(words, error, fresh, indices):
    with pytest.raises(error, match=words):
        blend.merge_rows(kv(0, 9), fresh, indices)


# ---- What it is for

CONFIG = llama.LlamaConfig(hidden=64, layers=4, heads=4, kv_heads=2, head_dim=16, ffn=128, dtype=jnp.float32)
PAGE_SIZE, PASSAGE, QUESTION, CHECK = 8, 48, 8, 1
TOKENS = 2 * PASSAGE + QUESTION


@functools.cache
def params():
    return llama.init(CONFIG)


@functools.cache
def scene():
    """The model, and two passages cached apart, each from position 0 on."""
    rope = jaxkv.Rope.from_inv_freq(CONFIG.inv_freq(), pairing="half")
    sizes = (CONFIG.layers, CONFIG.kv_heads, CONFIG.head_dim, PAGE_SIZE)
    spec = jaxkv.CacheSpec("layer | page token kv head dim", *sizes, CONFIG.dtype, rope=rope)
    tokens = np.random.default_rng(0).integers(0, 256, TOKENS).astype(np.int32)
    slots = np.random.default_rng(1).permutation(TOKENS).astype(np.int32)
    chunks = []
    for first in (0, PASSAGE):
        cache, hidden = spec.empty(TOKENS // PAGE_SIZE), llama.embed(params(), tokens[first : first + PASSAGE])
        pages, where = list(cache.pages), slots[:PASSAGE]
        for i in range(CONFIG.layers):
            hidden, pages[i] = layer(i, hidden, pages[i], where, np.arange(PASSAGE, dtype=np.int32))
        chunks += jaxkv.store(jaxkv.PagedCache(tuple(pages), spec), where, chunk_tokens=PASSAGE, layers_per_array=1)
    return spec, tokens, slots, chunks


@jax.jit
def _layer(weights, hidden, page, slots, positions):
    pool = jaxkv.Layout("layer | page token kv head dim")
    return llama.decoder_layer(weights, CONFIG, hidden, page, slots, positions, pool=pool, page_size=PAGE_SIZE)


def layer(i, hidden, page, slots, positions):
    return _layer(params()["layers"][i], hidden, page, slots, positions)


def reused(count):
    """The last layer's hidden states of the question where `count` tokens are recomputed (None: all, as a prefill)."""
    spec, tokens, slots, chunks = scene()
    # Glued in the other order: the second passage, the first, and a question that nobody has cached.
    prompt = np.concatenate([tokens[PASSAGE : 2 * PASSAGE], tokens[:PASSAGE], tokens[2 * PASSAGE :]])
    every = np.arange(TOKENS, dtype=np.int32)
    ranges = dict(starts=[0, PASSAGE], ends=[PASSAGE, 2 * PASSAGE])
    plan = jaxkv.plan(spec, chunks[::-1], slots, positions=every, num_pages=TOKENS // PAGE_SIZE, **ranges)
    hidden, positions, chosen = llama.embed(params(), prompt), every, every
    pages = list(spec.empty(TOKENS // PAGE_SIZE).pages)
    for i, staged in enumerate(jaxkv.fetch_layers(plan)):
        if count is not None and i >= CHECK:
            _, computed = layer(i, hidden, pages[i], slots, positions)
            if i == CHECK:
                chosen = choose(staged, computed, slots, count=count)
                hidden, positions = hidden[chosen], np.asarray(chosen)
            pages[i], k, written = merge(staged, pages[i], computed, slots, chosen)
            np.testing.assert_array_equal(written[: 2 * PASSAGE], k[: 2 * PASSAGE])
        hidden, pages[i] = layer(i, hidden, pages[i], slots, positions)
    assert positions[-QUESTION:].tolist() == list(range(2 * PASSAGE, TOKENS))
    return np.asarray(hidden[-QUESTION:]), np.asarray(chosen)


@functools.partial(jax.jit, static_argnames="count")
def choose(staged, computed, slots, *, count):
    k, v, valid = staged.kv()
    return blend.select_tokens((k, v), by_token(computed, slots), valid=valid, count=count)


@jax.jit
def merge(staged, page, computed, slots, chosen):
    """The page with what is loaded and recomputed, the K that was merged, and the K that is in the page."""
    k, v, _ = staged.kv()
    k, v = blend.merge_rows((k, v), by_token(computed, slots), chosen)
    page = jaxkv.write(page, staged.replace(k, v))
    return page, k, by_token(page, slots)[0]


def by_token(page, slots):
    """K and V of one layer's pages, `[tokens, heads, dim]`."""
    sizes = CONFIG.sizes(PAGE_SIZE, layers=1)
    pool = "layer | page token kv head dim"
    (rows,) = ops.gather((page,), slots, pool=jaxkv.Layout(pool), chunk="kv token head dim", sizes=sizes)
    return tuple(rows)


def test_recomputing_the_tokens_that_deviate_brings_reuse_nearer_to_a_prefill():
    """Two passages cached apart, glued in the other order, their keys corrected."""
    exact, _ = reused(None)
    everything, chosen = reused(TOKENS)
    assert chosen.tolist() == list(range(TOKENS))
    np.testing.assert_allclose(everything, exact, rtol=1e-4, atol=1e-4)

    def error(count):
        hidden, chosen = reused(count)
        assert len(chosen) == count
        return np.linalg.norm(hidden - exact) / np.linalg.norm(exact)

    fewest = QUESTION  # what nobody has cached is computed in any case
    share = -(-15 * 2 * PASSAGE // 100)
    without, blended = error(fewest), error(fewest + share)
    assert 0 < blended < 0.9 * without
    assert ml_dtypes.finfo(ml_dtypes.bfloat16).eps < without  # there was something to make good
