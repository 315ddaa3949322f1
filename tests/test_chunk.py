"""Chunk, ChunkFormat and Fingerprint: shapes, names, and that they are values."""

import dataclasses

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import CHUNKS, Model

import jaxkv


def spec(planes: int = 2, **more) -> jaxkv.CacheSpec:
    if planes == 2:
        return jaxkv.CacheSpec("kv page token head dim", 3, 4, 64, 16, jnp.bfloat16, **more)
    return jaxkv.CacheSpec("page token dim", 3, 1, 576, 16, jnp.bfloat16, **more)


def test_shapes_are_those_of_lmcache():
    """A42, A43: `get_shape` of each of its formats."""
    for name, planes, shape in [
        ("KV_2LTD", 2, (2, 3, 100, 256)),
        ("KV_T2D", 2, (100, 2, 256)),
        ("KV_2TD", 2, (2, 100, 256)),
        ("KV_MLA", 1, (1, 3, 100, 576)),
        ("KV_MLA_TD", 1, (100, 576)),
    ]:
        assert getattr(jaxkv, name).shape(spec(planes), 100) == shape
        assert jaxkv.ChunkFormat(name) == getattr(jaxkv, name)


def test_shapes_of_every_form():
    """A44, A45: page-first, packed, interleaved, one buffer a layer; with pages, whole ones only."""
    want = {
        "A44 page": ((2, 3, 2, 16, 4, 64),),
        "A44 head": ((2, 4, 3, 2, 16, 64),),
        "A45 packed": ((3, 32, 4, 128),),
        "A45 interleaved": ((3, 32, 8, 64),),
        "A45 layers": ((2, 32, 4, 64),) * 3,
    }
    for name, shapes in want.items():
        assert jaxkv.ChunkFormat(CHUNKS[name]).shapes(spec(), 32) == shapes
    with pytest.raises(ValueError, match="33 tokens are no multiple of the page size 16"):
        jaxkv.ChunkFormat(CHUNKS["A44 page"]).shape(spec(), 33)


@pytest.mark.parametrize(("count", "groups"), [(1, [1, 1, 1]), (2, [2, 1]), (3, [3]), (4, [3]), (None, [3])])
def test_layers_per_array(count, groups):
    format = jaxkv.ChunkFormat("kv layer token (head dim)", count)
    assert [len(layers) for layers in format.groups(3)] == groups
    assert format.shapes(spec(), 8) == tuple((2, n, 8, 256) for n in groups)
    assert [layer for layers in format.groups(3) for layer in layers] == [0, 1, 2]


def test_several_layers_get_an_axis_of_their_own():
    """A format of one layer, made to hold several: `layer` becomes its outermost axis."""
    assert jaxkv.ChunkFormat("KV_T2D", 2).shape(spec(), 8) == (2, 8, 2, 256)
    assert jaxkv.ChunkFormat("layer | kv token head dim", 3).shape(spec(), 8) == (3, 2, 8, 4, 64)
    with pytest.raises(ValueError, match=r"layers_per_array: 2 layers cannot share .*kv layer"):
        jaxkv.ChunkFormat("kv layer | token head dim", 2)


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        (("kv token (head",), ValueError, "head"),
        (("kv layer",), ValueError, "token"),
        ((jaxkv.Layout("kv token head dim", {"dim": 128}),), ValueError, "padded"),
        ((jaxkv.Layout(("token head dim", "token head dim")),), ValueError, "one sentence"),
        ((7,), TypeError, "7"),
        (("KV_2LTD", 0), ValueError, "layers_per_array: .*0"),
        (("KV_2LTD", True), ValueError, "layers_per_array: .*True"),
        (("KV_2LTD", 1.0), ValueError, r"layers_per_array: .*1\.0"),
    ],
)
def test_formats_that_are_none(arguments, error, words):
    with pytest.raises(error, match=words):
        jaxkv.ChunkFormat(*arguments)


def test_formats_that_cannot_hold_the_cache():
    """M5: no axis for V, or for the heads; raised before anything is launched."""
    cache, mla = spec().empty(2), spec(1).empty(2)
    for pool, format, words in [(cache, "KV_MLA", "plane"), (mla, "KV_2LTD", "plane"), (cache, "kv token dim", "head")]:
        with pytest.raises(ValueError, match=words):
            jaxkv.store(pool, np.arange(4), format=format)


def test_the_fingerprint_is_what_makes_bytes_incompatible():
    """A51, M18: page layout and page size are no part of it; each part by name, with both values."""
    _, cache = Model("A2").random()
    (chunk,) = jaxkv.store(cache, np.arange(4))
    for same in ({"layout": "page token (head kv) dim"}, {"page_size": 5}, {"layout": "CROSS_LAYER", "page_size": 1}):
        assert chunk.fingerprint.difference(dataclasses.replace(cache.spec, **same)) is None
    for part, value in [
        ("num_layers", 2),
        ("num_kv_heads", 2),
        ("head_dim", 4),
        ("dtype", np.float16),
        ("rope_offset", 1),
        ("model", "another"),
    ]:
        different = chunk.fingerprint.difference(dataclasses.replace(cache.spec, **{part: value}))
        assert different.startswith(f"{part} is ")
        assert repr(getattr(chunk.fingerprint, part)) in different
        assert str(np.dtype(value) if part == "dtype" else value) in different
    hash(chunk.fingerprint)


def test_a_chunk_is_a_pytree_of_values():
    """Data, counts, positions and valid are leaves: another length is no other program."""
    model = Model("A2")
    arrays, cache = model.random()
    long, short = jaxkv.store(cache, np.arange(13), chunk_tokens=8)
    assert jax.tree.structure(long) == jax.tree.structure(short)
    assert (long.num_rows, int(long.num_tokens), int(short.num_tokens)) == (8, 8, 5)
    assert long.nbytes == short.nbytes == 8 * model.spec.bytes_per_token
    count = jax.jit(lambda c: c.num_tokens)
    assert (int(count(long)), int(count(short))) == (8, 5)
    assert count._cache_size() == 1
    with pytest.raises(dataclasses.FrozenInstanceError):
        long.data = ()
    helpers.stored(model, arrays, [long, short], np.arange(13), [0, 8], [8, 13])


def test_rows_are_copies_of_the_tokens_alone():
    """R13, D6: the bucket's tail is not handed out, and writing to rows writes to nothing else."""
    model = Model("A2", dtype="e5m2")
    arrays, cache = model.random()
    (chunk,) = jaxkv.store(cache, np.arange(5), chunk_tokens=8, layers_per_array=1, format="KV_2TD")
    rows = chunk.rows()
    assert [x.shape for x in rows] == [(2, 5, 32)] * 3
    helpers.assert_same(np.stack(rows), model.rows(arrays, range(5)).reshape(3, 2, 5, 32))
    for x in rows:
        helpers.raw(x)[:] = 0
    helpers.stored(model, arrays, [chunk], np.arange(5), [0], [5])
    (paged,) = jaxkv.store(cache, np.arange(8), chunk_tokens=8, format=CHUNKS["A44 page"])
    with pytest.raises(ValueError, match=r"rows: the tokens of .*page"):
        paged.rows()


def test_a_chunk_with_pages_keeps_its_page_size():
    """A44, M18: where a format has pages, they are of the pool that the chunk was stored from."""
    small, large = Model("A2", page_size=2, pages=14), Model("A2", page_size=4)
    _, cache = small.random()
    for sentence in (CHUNKS["A44 page"], "(layer page kv token head dim)"):
        (chunk,) = jaxkv.store(cache, np.arange(8), chunk_tokens=8, format=sentence)
        with pytest.raises(ValueError, match="page"):
            jaxkv.load(large.poisoned(), [chunk], np.arange(8))
