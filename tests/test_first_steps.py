"""Mistakes that a first user made: each is refused by name, or does what it looks like."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv

SPEC = jaxkv.CacheSpec("kv page token head dim", 2, 1, 8, 4, jnp.float32)


def filled(spec=SPEC, pages=6):
    """A cache whose every element differs."""
    return jax.tree.map(lambda x: jnp.arange(x.size, dtype=x.dtype).reshape(x.shape), spec.empty(pages))


@pytest.fixture
def chunks():
    """Two chunks of eight tokens."""
    return jaxkv.store(filled(), np.arange(16), chunk_tokens=8)


def test_a_dict_of_pages_is_refused():
    """JAX orders a dict by key, layers.10 before layers.2, so its layers would silently change places."""
    pages = {f"layers.{i}": page for i, page in enumerate(filled().pages)}
    for tree in (pages, [pages]):
        with pytest.raises(TypeError, match=r"pages: got .*dict.*order of the layers"):
            jaxkv.store(jaxkv.PagedCache(tree, SPEC), np.arange(4))


def test_a_layer_written_to_a_smaller_pool_is_refused(chunks):
    """Rows past its pages would be left out without a word; the shapes are known when tracing."""
    plan = jaxkv.plan(filled(), chunks, np.arange(16))
    staged = next(jaxkv.fetch_layers(plan))
    with pytest.raises(ValueError, match="page: has 12 slots, the load was planned for 24"):
        jaxkv.write(filled(pages=3).pages[0], staged)
    jaxkv.write(filled(pages=7).pages[0], staged)


def test_a_plan_for_another_page_size_is_refused(chunks):
    """Its slots are other tokens there."""
    plan = jaxkv.plan(SPEC, chunks, np.arange(16))
    other = jaxkv.CacheSpec("kv page token head dim", 2, 1, 8, 2, jnp.float32)
    with pytest.raises(ValueError, match="plan: made for pages of 4 tokens, the cache has pages of 2"):
        jaxkv.load(filled(other, 12), plan)


def test_recycled_chunks_are_not_fetched(chunks):
    """By name, and before anything is sent."""
    plan = jaxkv.plan(SPEC, chunks, np.arange(16))
    jaxkv.store(filled(), np.arange(16), chunk_tokens=8, into=chunks)
    with pytest.raises(ValueError, match="chunks: an array of chunk 0 was deleted or donated"):
        jaxkv.fetch_layers(plan)


def test_what_is_printed(chunks):
    """A log wants to know what it is, not its values; and a consumed cache has none."""
    cache = filled()
    jaxkv.load(cache, chunks, np.arange(16))
    assert "(2, 6, 4, 1, 8)" in repr(cache) and "8 tokens" in repr(chunks[0])
    assert max(map(len, map(repr, (cache, *chunks)))) < 400


def test_caches_and_chunks_compare_by_identity(chunks):
    """There is no one truth in comparing arrays."""
    assert chunks[0] == chunks[0] and chunks[0] != chunks[1] and filled() != filled()


@pytest.mark.parametrize(
    ("call", "error", "says"),
    [
        (lambda c: jaxkv.CacheSpec("page token dim", 1, 1, 8, 4, None), TypeError, "dtype: .*None"),
        (lambda c: jaxkv.CacheSpec("page token dim", 1, 1, 8, 4, "bf16"), TypeError, "dtype: .*'bf16'"),
        (lambda c: jaxkv.load(filled(), None, [0]), TypeError, "chunks: .*NoneType"),
        (lambda c: jaxkv.store(filled(), [0], into=c[0]), TypeError, "into: .*Chunk"),
        (lambda c: jaxkv.join_layers(None), TypeError, "parts: .*NoneType"),
        (lambda c: jaxkv.store(filled(), [0], tuning=4), TypeError, "tuning: .*4"),
        (lambda c: jaxkv.Rope.from_config("a/path"), TypeError, "config: .*'a/path'"),
        (lambda c: jaxkv.Rope.from_config(None), TypeError, "config: .*None"),
        (
            lambda c: jaxkv.store_layer(filled().pages[0], [0], spec=SPEC, layer=0, ring=3),
            TypeError,
            "ring: .*3",
        ),
        (
            lambda c: jaxkv.store_layer(
                filled().pages[0],
                jaxkv.store_plan(SPEC, [0]),
                spec=jaxkv.CacheSpec(SPEC.layout, 3, 1, 8, 4, jnp.float32),
                layer=0,
            ),
            ValueError,
            "spec: another one than the StorePlan",
        ),
        (
            lambda c: jaxkv.plan(
                SPEC,
                [jaxkv.Chunk(c[0].rows(), c[0].num_tokens, c[0].positions, c[0].valid, c[0].fingerprint)],
                np.arange(8),
            ),
            TypeError,
            "chunks: chunk 0 holds a ndarray",
        ),
        (
            lambda c: jaxkv.CacheSpec(
                SPEC.layout, 2, 1, 8, 4, jnp.float32, rope=jaxkv.Rope.from_inv_freq(np.ones(8), pairing="half")
            ),
            ValueError,
            "rope: .*width 16 at offset 0 in rows of 8",
        ),
    ],
)
def test_messages_name_the_argument(chunks, call, error, says):
    """What it is called, and what came."""
    with pytest.raises(error, match=says):
        call(chunks)
