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


ANGLES = np.arange(10, dtype=np.float32).reshape(5, 2) / 7
TABLES = np.cos(ANGLES), np.sin(ANGLES)
MROPE = jaxkv.Rope.from_inv_freq(np.ones(2, np.float32), pairing="half", mrope_section=[1, 1, 0])
KINDS = {
    "K, V apart": dict(pool="A5"),
    "slab": dict(pool="A24"),
    "one plane": dict(pool="A22", rope=None),
    "M-RoPE": dict(
        pool="A2", rope=jaxkv.Rope.from_inv_freq(np.ones(2, np.float32), pairing="half", mrope_section=[1, 1, 0])
    ),
    "integers with a rope": dict(pool="A2", dtype="uint8"),
    "a short table": dict(pool="A2", rope=jaxkv.Rope.from_tables(*TABLES, pairing="half")),
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_cache(kind):
    """M-RoPE takes three components; keys that cannot be turned are left out; positions stay within a table."""
    options = {"rope": ROPE, **KINDS[kind]}
    model = Model(options.pop("pool"), pages=10, **options)
    arrays, cache = model.random(3)
    helpers.assert_same(jaxkv.precompile(cache, max_tokens=12, chunk_tokens=4, gaps="zero").pages, arrays)


def test_what_fails_leaves_the_cache(monkeypatch):
    """R9: before the first load the caller's own cache, afterwards that of the error."""
    model = Model("A2", pages=10, rope=ROPE)
    arrays, cache = model.random(3)
    with pytest.raises(ValueError, match="layout: a stray"):
        jaxkv.precompile(cache, max_tokens=8, chunk_tokens=4, format="token kv (head dim) | x")
    helpers.assert_same(cache.pages, arrays)

    def fail(*args, **options):
        raise RuntimeError("out of memory")

    monkeypatch.setattr("jaxkv.precompiling._zeroing", fail)
    with pytest.raises(RuntimeError, match="out of memory") as caught:
        jaxkv.precompile(cache, max_tokens=8, chunk_tokens=4, gaps="zero")
    helpers.assert_same(caught.value.cache.pages, arrays)


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
        (ValueError, "chunk_tokens: .*0", after, {"max_tokens": 4, "chunk_tokens": 0}),
        (ValueError, "chunk_tokens: .*-1", after, {"max_tokens": 4, "chunk_tokens": -1}),
        (ValueError, "chunk_tokens: .*2.5", after, {"max_tokens": 4, "chunk_tokens": 2.5}),
        (TypeError, "tuning: expected a Tuning, got 'x'", after, {"max_tokens": 4, "tuning": "x"}),
        (TypeError, "tuning: expected a Tuning, got {}", after, {"max_tokens": 4, "tuning": {}}),
        (ValueError, "gaps: 'zeros' is unknown", after, {"max_tokens": 4, "gaps": "zeros"}),
        (ValueError, "num_pages and sharding: a cache has its own", after, {"max_tokens": 4, "num_pages": 4}),
        (ValueError, "turning: True, but .* no rope", after, {"max_tokens": 4, "turning": True}),
        (TypeError, "turning: expected a bool", after, {"max_tokens": 4, "turning": np.arange(4)}),
    ]:
        with pytest.raises(error, match=words):
            jaxkv.precompile(given, **options)
    helpers.assert_same(after.pages, model.arrays(3))


def test_reserve_where_nothing_is_pinned(caplog):
    """I3: on a CPU there is nothing to do, and it says so; what is no number of bytes is refused."""
    with caplog.at_level(logging.INFO, logger="jaxkv.host"):
        assert host.reserve(1 << 40) == 0.0
    assert "nothing to reserve" in caplog.text
    assert host.reserve(np.int64(1 << 20)) == 0.0
    for bad in (0, -1, True, 1.5, "1G"):
        with pytest.raises(ValueError, match="nbytes: expected an int"):
            host.reserve(bad)
    for device in ("cpu", 0):
        with pytest.raises(TypeError, match=r"device: expected a jax\.Device"):
            host.reserve(1, device=device)


def test_inside_jit_it_is_refused():
    model = Model("A2", pages=10)
    with pytest.raises(TypeError, match="precompile: called inside jit"):
        jax.jit(lambda c: jaxkv.precompile(c, max_tokens=4))(model.random(0)[1])
