"""Which tokens a call is about: slot mappings from page tables (the rest is tested through store and plan)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
@pytest.mark.parametrize("page_size", [1, 3, 16])
def test_slots_follow_the_page_table(dtype, page_size):
    """Token t is at `table[t // page_size] * page_size + t % page_size`, whatever pages the sequence was given."""
    table = np.array([5, 0, 9, 2], dtype)
    tokens = 3 * page_size + 1
    found = jaxkv.slot_mapping(table, tokens, page_size=page_size)
    assert found.dtype == dtype
    assert found.tolist() == [int(table[t // page_size]) * page_size + t % page_size for t in range(tokens)]
    later = jaxkv.slot_mapping(table.tolist(), tokens, page_size=page_size, start=2)
    assert later.tolist() == found[2:].tolist()


def test_a_missing_page_is_skipped():
    """A negative page, whatever its value, gives slots of -1."""
    found = jaxkv.slot_mapping([4, -1, -7, 2], 7, page_size=2)
    assert found.tolist() == [8, 9, -1, -1, -1, -1, 4]


def test_far_pages_do_not_wrap():
    """Slots past int32 keep their value in int64."""
    assert jaxkv.slot_mapping(np.array([2**31]), 1, page_size=16).tolist() == [2**35]


def test_a_traced_table():
    """Inside jit, and without reading a device array."""
    mapping = jax.jit(lambda table: jaxkv.slot_mapping(table, 5, page_size=2))
    assert mapping(jnp.asarray([3, -1, 1], jnp.int32)).tolist() == [6, 7, -1, -1, 2]


def test_nothing():
    """No tokens need no pages."""
    assert jaxkv.slot_mapping([], 0, page_size=4).shape == (0,)
    assert jaxkv.slot_mapping([1], 2, page_size=4, start=2).shape == (0,)


def test_it_names_the_rows_of_a_store():
    """Slots of a table are what `store` and `load` take."""
    spec = jaxkv.CacheSpec("kv page token head dim", 1, 1, 2, 4, jnp.int8)
    pages = (jnp.arange(2 * 6 * 4 * 2, dtype=jnp.int8).reshape(2, 6, 4, 1, 2),)
    (chunk,) = jaxkv.store(jaxkv.PagedCache(pages, spec), jaxkv.slot_mapping([5, 1], 6, page_size=4))
    rows = np.asarray(pages[0]).reshape(2, 24, 2)[:, [20, 21, 22, 23, 4, 5]]
    assert (chunk.rows()[0][:, 0] == rows).all()


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        ({"page_table": [0.5]}, TypeError, "page_table.*float64"),
        ({"page_table": [[1]]}, ValueError, r"page_table.*\(1, 1\)"),
        ({"num_tokens": 9}, ValueError, "2 pages of 4 tokens for 9 tokens"),
        ({"num_tokens": -1}, ValueError, "num_tokens.*-1"),
        ({"page_size": 0}, ValueError, "page_size.*0"),
        ({"start": -2}, ValueError, "start.*-2"),
    ],
)
def test_errors_name_the_argument(change, error, says):
    """M11, M12: what came and what was expected."""
    given = {"page_table": [1, 2], "num_tokens": 8, "page_size": 4, "start": 0} | change
    with pytest.raises(error, match=says):
        jaxkv.slot_mapping(given.pop("page_table"), given.pop("num_tokens"), **given)
