"""precompile: afterwards no call of any length compiles, and no byte has changed."""

import logging

import helpers
import jax
import numpy as np
import pytest
from helpers import WAYS, Model

import jaxkv
from jaxkv import host

ROPE = jaxkv.Rope.from_inv_freq(np.ones(2, np.float32), pairing="half")
ways = pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)


def calls(cache, most, **way):
    """Stores and loads of many lengths, also beside and into one another."""
    for n in range(1, most + 1, 3):
        slots = np.random.default_rng(n).permutation(cache.num_slots)[:n]
        chunks = jaxkv.store(cache, slots, chunk_tokens=4, **way)
        chunks = jaxkv.store(cache, slots, chunk_tokens=4, into=chunks[:2], **way)
        cache = jaxkv.load(cache, chunks, slots, **way)
        cache = jaxkv.load(cache, chunks, slots, positions=np.arange(n) + 1, **way)
        first = chunks[:1], [0], [int(chunks[0].num_tokens)]
        two = (*first[0], *first[0]), [0, n - first[2][0]], [first[2][0], n]
        cache = jaxkv.load(cache, two[0], slots, starts=two[1], ends=two[2], gaps="zero", **way)
    return cache


@ways
@pytest.mark.parametrize("given", ["cache", "spec"])
def test_no_call_compiles_afterwards(given, way):
    """B30: every length up to the longest, new and older memory, turned keys, gaps."""
    model = Model("A2", pages=10, rope=ROPE)
    arrays, cache = model.random(3)
    options = dict(max_tokens=37, chunk_tokens=4, gaps="zero", **way)
    if given == "cache":
        cache = jaxkv.precompile(cache, **options)
        helpers.assert_same(cache.pages, arrays)
    else:
        jaxkv.precompile(model.spec, num_pages=10, **options)
        cache = jax.block_until_ready(jax.device_put(cache, jax.devices()[0]))
    with helpers.compilations() as compiled:
        calls(cache, 37, **way)
    assert not compiled


@pytest.mark.gpu
def test_no_call_compiles_afterwards_on_the_device():
    """The same where calls of many chunks are one program, and small calls take another path than large ones."""
    tuning = jaxkv.Tuning(direct_bytes=3 * 4 * Model("A2").spec.bytes_per_token, chunks_per_call=8)
    cache = jaxkv.precompile(
        Model("A2", pages=30, rope=ROPE).random(3)[1], max_tokens=97, chunk_tokens=4, gaps="zero", tuning=tuning
    )
    with helpers.compilations() as compiled:
        calls(cache, 97, tuning=tuning)
    assert not compiled


def test_the_cache_is_consumed_and_bad_arguments_are_named():
    model = Model("A2", pages=10)
    _, cache = model.random(3)
    after = jaxkv.precompile(cache, max_tokens=8, chunk_tokens=4)
    with pytest.raises(ValueError, match="deleted or donated"):
        jaxkv.store(cache, [0])
    for error, words, given, options in [
        (ValueError, "num_pages: missing", model.spec, {"max_tokens": 8}),
        (ValueError, "max_tokens: .*0", after, {"max_tokens": 0}),
        (ValueError, "max_tokens: 41 is more than the pool's 40 slots", after, {"max_tokens": 41}),
        (TypeError, "cache: expected .* got list", list(after.pages), {"max_tokens": 4}),
        (TypeError, "fast", after, {"max_tokens": 4, "fast": True}),
        (ValueError, "path: 'fast' is unknown", after, {"max_tokens": 4, "path": "fast"}),
    ]:
        with pytest.raises(error, match=words):
            jaxkv.precompile(given, **options)
    helpers.assert_same(after.pages, model.arrays(3))


def test_reserve_where_nothing_is_pinned(caplog):
    """I3: on a CPU there is nothing to do, and it says so; what is no number of bytes is refused."""
    with caplog.at_level(logging.INFO, logger="jaxkv.host"):
        assert host.reserve(1 << 40) == 0.0
    assert "nothing to reserve" in caplog.text
    for bad in (0, -1, True, 1.5, "1G"):
        with pytest.raises(ValueError, match="nbytes: expected an int"):
            host.reserve(bad)
