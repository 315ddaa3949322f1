"""CacheSpec and PagedCache: what they hold, and that they are values."""

import copy
import dataclasses
import gc
import pickle
import subprocess
import sys
import weakref

import helpers
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from helpers import POOLS, Model, small

import jaxkv
from jaxkv.testing import oracle


def spec(**changes) -> jaxkv.CacheSpec:
    values = dict(
        layout=jaxkv.layouts.FLASH_ATTENTION,
        num_layers=3,
        num_kv_heads=4,
        head_dim=64,
        page_size=16,
        dtype=jnp.bfloat16,
    )
    return jaxkv.CacheSpec(**{**values, **changes})


@pytest.mark.parametrize("pool", POOLS)
def test_empty_is_a_cache_of_zero_bytes_that_checks(pool):
    """A1 to A36: as many slots as the oracle finds, structure as the layout's levels say."""
    model = small(pool)
    cache = model.spec.empty(num_pages=5)
    assert (cache.num_pages, cache.num_slots) == (5, 20)
    assert not any(np.asarray(x).any() for x in jax.tree.leaves(cache))
    rows = oracle.read_rows(
        jax.tree.map(np.asarray, cache.pages), model.pool.sentence, {**model.sizes, "page": 5}, range(20), model.pad
    )
    assert rows.shape[:3] == (3, model.spec.planes, 20)
    assert jax.tree.structure(cache.pages) == jax.tree.structure(jaxkv.PagedCache(model.arrays(), model.spec).pages)


def test_pages_are_a_tuple_of_layers_or_one_array():
    assert [x.shape for x in spec().empty(7).pages] == [(2, 7, 16, 4, 64)] * 3
    assert spec(layout="CROSS_LAYER").empty(7).pages.shape == (7, 3, 2, 16, 4, 64)
    keys, values = spec(layout="SGLANG_MHA").empty(7).pages
    assert [x.shape for x in (*keys, *values)] == [(112, 4, 64)] * 6
    assert [len(pair) for pair in spec(layout="KV_PAIRS").empty(7).pages] == [2, 2, 2]


def test_layouts_by_sentence_by_name_and_as_values_are_one():
    """A47: the sentence decides; equal specs are equal and hash alike."""
    specs = [spec(), spec(layout="kv page token head dim"), spec(layout="FLASH_ATTENTION")]
    assert len(set(specs)) == 1
    assert specs[0] != spec(layout="page kv token head dim")
    assert spec(dtype="bfloat16") == spec(dtype=ml_dtypes.bfloat16) == spec()
    assert spec(num_layers=np.int64(3)) == spec()


def test_bytes_per_token_counts_kv_and_no_padding():
    assert spec().bytes_per_token == 3 * 2 * 4 * 64 * 2
    assert (
        spec(layout=jaxkv.layouts.padded(jaxkv.layouts.TPU_RAGGED, dim=128)).bytes_per_token == spec().bytes_per_token
    )
    mla = spec(layout="MLA", num_kv_heads=1, head_dim=576, dtype=jnp.uint8)
    assert (mla.planes, mla.bytes_per_token) == (1, 3 * 576)


@pytest.mark.parametrize("pool", ["A26", "A29", "A31", "A36", "A9 flat"])
def test_an_array_and_its_reshape_are_one_cache(pool):
    """A57, A26 to A36: adjacent axes split or merged in the array."""
    model = small(pool)
    arrays = model.arrays(0)
    flat = jax.tree.map(lambda x: x.reshape(x.shape[0], -1), arrays)
    slots = np.arange(10)[::-1]
    for given in (arrays, flat):
        (chunk,) = jaxkv.store(model.cache(given), slots)
        helpers.stored(model, arrays, [chunk], slots, [0], [10])


def test_a_cache_is_a_pytree():
    cache = spec().empty(3)
    leaves, structure = jax.tree.flatten(cache)
    assert len(leaves) == 3
    again = jax.tree.unflatten(structure, leaves)
    assert again.spec is cache.spec
    doubled = jax.jit(lambda c: jax.tree.map(lambda x: x + jnp.ones_like(x), c))(cache)
    assert isinstance(doubled, jaxkv.PagedCache)
    assert doubled.num_slots == 48
    with pytest.raises(dataclasses.FrozenInstanceError):
        cache.pages = ()


def test_empty_goes_where_it_is_told():
    device = jax.devices()[2]
    assert {x.devices() == {device} for x in spec().empty(2, sharding=device).pages} == {True}
    mesh = jax.make_mesh((4,), ("tp",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:4])
    heads = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(None, None, None, "tp"))
    assert spec().empty(2, sharding=heads).pages[0].sharding == heads


@pytest.mark.parametrize("dtype", helpers.DTYPES)
def test_dtypes(dtype):
    """C6."""
    assert spec(dtype=helpers.DTYPES[dtype]).empty(2).pages[0].dtype == helpers.DTYPES[dtype]


@pytest.mark.parametrize("dtype", [jnp.int4, jnp.uint4, bool, jnp.complex64, jnp.float4_e2m1fn, np.dtype("S4"), object])
def test_dtypes_without_whole_bytes_are_refused_by_name(dtype):
    """C10."""
    with pytest.raises(TypeError, match=f"dtype: .*{np.dtype(dtype)}"):
        spec(dtype=dtype)


@pytest.mark.parametrize("name", ["num_layers", "num_kv_heads", "head_dim", "page_size"])
@pytest.mark.parametrize("value", [0, -1, 2.0, True, None, "3"])
def test_sizes_are_positive_integers(name, value):
    with pytest.raises(ValueError, match=f"{name}: .*{value!r}"):
        spec(**{name: value})


@pytest.mark.parametrize("value", [0, -1, 1.5, True, None])
def test_a_cache_has_pages(value):
    with pytest.raises(ValueError, match=f"num_pages: .*{value!r}"):
        spec().empty(value)


def test_layouts_that_cannot_hold_the_model():
    """M2, M7: no pages, no head axis for several heads, a padded axis smaller than the model's."""
    for layout, words in [
        ("kv token head dim", "page"),
        ("page token dim", "head"),
        ("page kv token head", "dim"),
        (jaxkv.layouts.padded(jaxkv.layouts.TPU_RAGGED, dim=32), "32"),
        ("NO_SUCH_LAYOUT", "FLASH_ATTENTION"),
    ]:
        with pytest.raises(ValueError, match=f"layout.*{words}"):
            spec(layout=layout)
    for value in (3, None, ["page token dim"]):
        with pytest.raises(TypeError, match="layout"):
            spec(layout=value)
    with pytest.raises(TypeError, match=r"model: .*3"):
        spec(model=3)


def test_rope_is_one_or_one_a_layer():
    """M8."""
    assert spec(rope=[None, None, None]).rope == (None, None, None)
    with pytest.raises(ValueError, match="rope: 2 entries for 3 layers"):
        spec(rope=(None, None))


def test_more_slots_than_int32_numbers():
    """B25's limit: refused where a pool is checked, from its shape alone."""
    huge = jax.ShapeDtypeStruct((2**16, 2**16, 1), jnp.uint8)
    tiny = spec(layout="page token dim", num_layers=1, num_kv_heads=1, head_dim=1, page_size=2**16, dtype=jnp.uint8)

    def check(pages):
        with pytest.raises(ValueError, match=r"65536 pages of 65536 tokens .*int32"):
            tiny.check((pages,))
        return pages

    jax.eval_shape(check, huge)


def test_what_was_checked_is_kept_where_pages_cannot_change():
    """A list may be given other arrays, or another structure: it is checked every time, and nothing is held."""
    model = Model("A2")
    cache = model.random(0)[1]
    assert cache.pool is cache.pool
    for copied in (copy.copy(cache), copy.deepcopy(cache), pickle.loads(pickle.dumps(cache))):
        assert copied.pool is not cache.pool and copied.num_pages == cache.num_pages
    cache.pages[1].delete()
    with pytest.raises(ValueError, match="deleted or donated"):
        assert cache.pool

    changing = jaxkv.PagedCache(list(model.random(1)[1].pages), model.spec)
    assert changing.num_pages == model.pages
    first = weakref.ref(changing.pages[0])
    changing.pages[0] = model.random(2)[1].pages[0]
    gc.collect()
    assert first() is None
    helpers.assert_same(changing.pool.leaves[0], changing.pages[0])
    changing.pages.append(None)
    with pytest.raises(ValueError, match="pages: "):
        assert changing.pool
    changing.pages[:] = [list(changing.pages[:3])]
    with pytest.raises(ValueError, match="pages: "):
        assert changing.pool


def test_a_traced_function_may_import_the_package():
    """R12: what is traced during the import is not taken for the state in which nothing is."""
    program = """
import jax, jax.numpy as jnp
jax.config.update("jax_platforms", "cpu")
@jax.jit
def f(x):
    import jaxkv
    return x + 1
f(jnp.ones(2))
import jaxkv
spec = jaxkv.CacheSpec("kv page token head dim", 1, 1, 4, 4, jnp.bfloat16)
print(len(jaxkv.store(spec.empty(2), [0, 1])))
"""
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True).stdout.strip() == "1"


@pytest.mark.parametrize("committed", [False, True])
def test_what_is_kept_does_not_hold_the_pages(committed):
    """E26: a cache that was stored from is donated in place, and is then known to be gone; so where it is deleted."""
    made = Model("A2").spec
    for gone in ("donated", "deleted"):
        pages = tuple(jnp.full(shape, 7, made.dtype) for shape in made.shapes(7))
        cache = jaxkv.PagedCache(tuple(jax.device_put(list(pages), jax.devices()[0])) if committed else pages, made)
        jax.block_until_ready([chunk.data for chunk in jaxkv.store(cache, [0, 1])])
        before = [page.unsafe_buffer_pointer() for page in cache.pages]
        if gone == "donated":
            after = jax.jit(lambda pages: [page + 1 for page in pages], donate_argnums=0)(cache.pages)
            assert [page.unsafe_buffer_pointer() for page in after] == before
        else:
            for page in cache.pages:
                page.delete()
        with pytest.raises(ValueError, match="deleted or donated"):
            jaxkv.store(cache, [0, 1])
