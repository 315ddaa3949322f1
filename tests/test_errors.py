"""CASES.md M: what is refused, with which exception and which words, and that nothing has happened by then."""

import dataclasses
import functools

import helpers
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from helpers import Model, Scene, pinned, raw

import jaxkv
from jaxkv.ops import native


class World:
    """A cache, chunks and slots that fit one another; each case below spoils one thing."""

    def __init__(self):
        self.scene = Scene(Model("A2"), 20)
        self.model, self.spec = self.scene.model, self.scene.model.spec
        self.cache, self.chunks, self.slots = self.model.poisoned(), list(self.scene.chunks), self.scene.slots
        self.ranges = dict(starts=[0, 8, 16], ends=[8, 16, 20])

    def load(self, cache=None, chunks=None, slots=None, **options):
        cache, chunks = self.cache if cache is None else cache, self.chunks if chunks is None else chunks
        return jaxkv.load(cache, chunks, self.slots if slots is None else slots, **options)

    def store(self, cache=None, slots=None, **options):
        cache, slots = self.cache if cache is None else cache, self.slots if slots is None else slots
        return jaxkv.store(cache, slots, **options)

    def pages(self, change) -> jaxkv.PagedCache:
        """The cache with other pages."""
        return jaxkv.PagedCache(change(self.cache.pages), self.spec)

    def chunks_of(self, **changes):
        """Chunks of a cache that differs from this one in its spec."""
        spec = dataclasses.replace(self.spec, **changes)
        return jaxkv.store(spec.empty(7), np.arange(20), chunk_tokens=8)

    def chunk(self, **changes):
        """The chunks with the second one changed."""
        return [self.chunks[0], dataclasses.replace(self.chunks[1], **changes), self.chunks[2]]


def at(slots, index, value):
    changed = np.array(slots, np.int64)
    changed[index] = value
    return changed


def in_kind(kind):
    return lambda x: jax.device_put(x, x.sharding.with_memory_kind(kind))


def not_built(function):
    """Calls a function as if no handlers had been built."""

    @functools.wraps(function)
    def call(world):
        reasons = native._reasons
        native._reasons = dict.fromkeys(("cpu", "cuda"), "the extension is missing; install jaxkv from source")
        try:
            return function(world)
        finally:
            native._reasons = reasons

    return call


def sentence(words):
    return lambda w: dataclasses.replace(w.spec, layout=words)


# Name (with the row's id first) -> what is called with a World, the exception, and words of its message.
CASES = {
    # Sentences.
    "M1 axis": (sentence("kv page token heads dim"), ValueError, ["'heads'", "kv page token heads dim", "known"]),
    "M1 starred A18": (sentence("layer plane | page token 1 dim"), ValueError, ["'plane'"]),
    "M1 starred A15": (sentence("page (token value + token scale)"), ValueError, ["'value'"]),
    "M1 starred A25": (sentence("page head dim.hi token dim.lo"), ValueError, ["'dim.hi'"]),
    "M1 starred A40": (sentence("page row dim"), ValueError, ["'row'"]),
    "M1 starred A41": (sentence("page state"), ValueError, ["'state'"]),
    "M1 format": (lambda w: w.store(format="kv layer tokens dim"), ValueError, ["'tokens'", "kv layer tokens dim"]),
    "M2 twice": (sentence("kv page token head token dim"), ValueError, ["'token'", "twice", "token dim"]),
    "M2 token": (sentence("kv page head dim"), ValueError, ["'token'", "missing", "kv page head dim"]),
    "M2 page": (sentence("kv token head dim"), ValueError, ["'page'", "missing", "kv token head dim"]),
    "M3 open": (sentence("kv (page token head dim"), ValueError, ["'('", "position", "kv (page"]),
    "M3 close": (sentence("kv page) token head dim"), ValueError, ["')'", "position 7"]),
    "M3 empty": (sentence("kv () page token head dim"), ValueError, ["empty parentheses", "position"]),
    "M3 stray": (sentence("kv page, token head dim"), ValueError, ["','", "position 7"]),
    # Arrays.
    "M4 axes": (lambda w: w.load(w.pages(lambda p: tuple(x[..., 0] for x in p))), ValueError,
                ["kv page token head dim", "(2, 7, 4, 4)"]),
    "M5 sizes": (lambda w: w.load(w.pages(lambda p: tuple(x[..., :5] for x in p))), ValueError,
                 ["kv page token head dim", "(2, 7, 4, 4, 5)", "dim=8"]),
    "M5 order": (lambda w: w.load(w.pages(lambda p: tuple(jnp.swapaxes(x, 2, 4) for x in p))), ValueError,
                 ["(2, 7, 8, 4, 4)", "order"]),
    "M6 pages": (lambda w: w.load(w.pages(lambda p: (p[0], p[1][:, :5], p[2]))), ValueError,
                 ["page", "7", "5", "arrays 0 and 1"]),
    "M7 padding": (lambda w: sentence(jaxkv.Layout("kv page token head dim", {"dim": 7}))(w), ValueError,
                   ["'dim'", "8", "7"]),
    "M8 layers": (lambda w: w.load(w.pages(lambda p: p[:2])), ValueError, ["pages", "2 arrays", "3 (layer)"]),
    "M8 bare": (lambda w: w.load(chunks=w.chunk(data=w.chunks[1].data[0])), TypeError, ["chunk 1", "tuple"]),
    "M8 option": (lambda w: w.load(postions=1), TypeError, ["load", "postions", "positions"]),
    "M8 valid": (lambda w: w.load(chunks=w.chunk(valid=np.ones(8, np.int32))), TypeError, ["chunk 1", "valid", "bool"]),
    "M8 valid list": (lambda w: w.load(chunks=w.chunk(valid=[True] * 8)), TypeError, ["chunk 1", "valid", "bool"]),
    "M8 chunk": (lambda w: w.load(chunks=w.chunks_of(num_layers=2)), ValueError, ["num_layers is 2", "3"]),
    "M9": (lambda w: w.load(w.pages(lambda p: ())), ValueError, ["pages", "no arrays"]),
    "M9 spec": (lambda w: dataclasses.replace(w.spec, num_layers=0), ValueError, ["num_layers", "0"]),
    "M10": (lambda w: w.load(w.pages(lambda p: (p[0], np.asarray(p[1]), p[2]))), TypeError,
            ["pages[1]", "numpy.ndarray"]),
    "M10 cache": (lambda w: jaxkv.load(w.cache.pages, w.chunks, w.slots), TypeError, ["PagedCache", "tuple"]),
    "M10 dtype": (lambda w: w.load(w.pages(lambda p: (p[0], p[1].astype(jnp.float16), p[2]))), TypeError,
                  ["array 1", "float16", "bfloat16"]),
    # Slots. M19 and M20 beside them, for they are judged alike.
    "M11 float": (lambda w: w.load(slots=w.slots.astype(np.float32)), TypeError, ["slots", "float32"]),
    "M11 bool": (lambda w: w.store(slots=w.slots > 3), TypeError, ["slots", "bool"]),
    "M11 device": (lambda w: w.store(slots=jnp.asarray(w.slots, jnp.bfloat16)), TypeError, ["slots", "bfloat16"]),
    "M11 list": (lambda w: w.load(slots=[1.5] * 20), TypeError, ["slots", "float"]),
    "M11 text": (lambda w: w.load(slots="abc"), TypeError, ["slots"]),
    "M11 none": (lambda w: jaxkv.load(w.cache, w.chunks), TypeError, ["slots", "missing"]),
    "M11 huge": (lambda w: w.load(slots=[2**70] * 20), TypeError, ["slots"]),
    "M12 matrix": (lambda w: w.load(slots=w.slots.reshape(4, 5)), ValueError, ["slots", "(4, 5)"]),
    "M12 scalar": (lambda w: w.store(slots=np.int64(3)), ValueError, ["slots", "()"]),
    "M12 ragged": (lambda w: w.store(slots=[[1], [2, 3]]), TypeError, ["slots"]),
    "M13 short": (lambda w: w.load(slots=w.slots[:19]), ValueError, ["slots", "19", "20"]),
    "M13 long": (lambda w: w.load(slots=np.arange(21)), ValueError, ["slots", "21", "20"]),
    "M13 positions": (lambda w: w.store(positions=np.arange(19)), ValueError, ["positions", "19", "20"]),
    "M44": (lambda w: w.load(slots=at(w.slots, [9, 4], 28)), ValueError, ["slots", "index 4", "28", "skip"]),
    "M44 wide": (lambda w: w.load(slots=at(w.slots, 6, 2**32 + 5)), ValueError, ["slots", "index 6", "skip"]),
    "M44 store": (lambda w: w.store(slots=at(w.slots, 7, 30)), ValueError, ["slots", "index 7", "30", "28", "skip"]),
    "M44 device": (lambda w: w.store(slots=jnp.asarray(at(w.slots, 7, 30), jnp.int32)), ValueError, ["index 7", "30"]),
    "M44 plan": (lambda w: jaxkv.load(w.cache, jaxkv.plan(w.spec, w.chunks, at(w.slots, 9, 28))), ValueError,
                 ["row 1 of chunk 1", "28", "skip"]),
    "M44 gap": (lambda w: w.load(chunks=w.chunks[::2], slots=at(w.slots, 12, 99), starts=[0, 16], ends=[8, 20],
                                 gaps="zero"), ValueError, ["index 12", "99", "28"]),
    "M19 load": (lambda w: w.load(skip_prefix=-1), ValueError, ["skip_prefix", "-1"]),
    "M19 store": (lambda w: w.store(skip_prefix=-3), ValueError, ["skip_prefix", "-3"]),
    "M19 float": (lambda w: w.load(skip_prefix=1.0), TypeError, ["skip_prefix", "1.0"]),
    "M20": (lambda w: w.store(positions=np.arange(20.0)), TypeError, ["positions", "float64"]),
    # Ranges.
    "M14 chunks": (lambda w: w.load(chunks=w.chunks[:2], **w.ranges), ValueError, ["3 starts", "3 ends", "2 chunks"]),
    "M14 ends": (lambda w: w.load(starts=[0, 8, 16], ends=[8, 16]), ValueError, ["3 starts", "2 ends", "3 chunks"]),
    "M14 one": (lambda w: w.load(starts=[0, 8, 16]), ValueError, ["starts", "ends", "None"]),
    "M14 store": (lambda w: w.store(starts=[0, 8], ends=[8]), ValueError, ["2 starts", "1 ends"]),
    "M14 float": (lambda w: w.load(starts=[0.0, 8, 16], ends=[8, 16, 20]), TypeError, ["starts"]),
    "M15 reversed": (lambda w: w.load(starts=[0, 16, 16], ends=[8, 8, 20]), ValueError, ["chunk 1", "[16, 8)"]),
    "M15 negative": (lambda w: w.load(starts=[-8, 8, 16], ends=[0, 16, 20]), ValueError, ["chunk 0", "[-8, 0)"]),
    "M15 beyond": (lambda w: w.load(starts=[0, 8, 17], ends=[8, 16, 21]), ValueError, ["chunk 2", "[17, 21)", "20"]),
    "M15 wide": (lambda w: w.store(starts=[2**32], ends=[2**32 + 4]), ValueError, ["chunk 0", "20 tokens"]),
    "M15 store": (lambda w: w.store(starts=[0, 9], ends=[8, 8]), ValueError, ["chunk 1", "[9, 8)"]),
    "M15 size": (lambda w: w.store(starts=[0], ends=[9], chunk_tokens=8), ValueError, ["chunk 0", "[0, 9)", "8"]),
    "M16 more": (lambda w: w.load(starts=[0, 8, 16], ends=[8, 15, 20]), ValueError, ["chunk 1", "8 rows", "7"]),
    "M16 fewer": (lambda w: w.load(starts=[0, 8, 15], ends=[8, 16, 20]), ValueError, ["chunk 2", "4 rows", "5"]),
    "M16 count": (lambda w: w.load(chunks=w.chunk(num_tokens=np.int32(9)), slots=np.arange(21)), ValueError,
                  ["chunk 1", "9", "8"]),
    "chunk_tokens": (lambda w: w.store(chunk_tokens=0), ValueError, ["chunk_tokens", "0"]),
    # Chunks.
    "M17": (lambda w: w.load(chunks=w.chunks_of(dtype=np.float16)), TypeError,
            ["chunk 0", "float16", "layer 0", "bfloat16"]),
    "M17 width": (lambda w: w.load(chunks=w.chunks_of(dtype=np.uint16)), TypeError, ["chunk 0", "uint16"]),
    "M17 data": (lambda w: w.load(chunks=w.chunk(data=(pinned(w.chunks[1].data[0].astype(jnp.float16)),))), TypeError,
                 ["chunk 1", "float16", "bfloat16"]),
    "M18 heads": (lambda w: w.load(chunks=w.chunks_of(num_kv_heads=2)), ValueError, ["num_kv_heads is 2", "4"]),
    "M18 dim": (lambda w: w.load(chunks=w.chunks_of(head_dim=4)), ValueError, ["head_dim is 4", "8"]),
    "M18 model": (lambda w: w.load(chunks=w.chunks_of(model="b")), ValueError, ["model is 'b'", "''"]),
    "M18 planes": (lambda w: w.load(chunks=w.chunks_of(layout="page token head dim")), ValueError,
                   ["planes is 1", "2"]),
    "M18 window": (lambda w: w.load(chunks=w.chunks_of(rope_offset=2)), ValueError, ["rope_offset is 2", "0"]),
    "M18 shape": (lambda w: w.load(chunks=w.chunk(data=(w.chunks[1].data[0][:, :, :7],))), ValueError,
                  ["chunk 1", "(2, 3, 7, 32)", "(2, 3, 8, 32)"]),
    "D21": (lambda w: w.load(chunks=[w.chunks[0], None, w.chunks[2]]), ValueError, ["entry 1", "None"]),
    "D21 type": (lambda w: w.load(chunks=[w.chunks[0], w.chunks[1].data[0], w.chunks[2]]), TypeError, ["entry 1"]),
    "D21 bare": (lambda w: w.load(chunks=w.chunks[0]), TypeError, ["sequence", "Chunk"]),
    "M30 chunk": (lambda w: w.load(chunks=w.chunk(data=tuple(map(in_kind("unpinned_host"), w.chunks[1].data)))),
                  ValueError, ["chunk 1", "unpinned_host", "pinned_host"]),
    "M30 pages": (lambda w: w.load(w.pages(lambda p: tuple(map(in_kind("pinned_host"), p)))), ValueError,
                  ["pages", "pinned_host", "device"]),
    # The call itself.
    "M32": (lambda w: w.load(implementation="cuda"), ValueError, ["'cuda'", "xla", "ffi"]),
    "M32 store": (lambda w: w.store(implementation="XLA"), ValueError, ["'XLA'", "xla", "ffi"]),
    "M33": (not_built(lambda w: w.load(implementation="ffi")), RuntimeError, ["cpu", "install jaxkv from source"]),
    "M33 store": (not_built(lambda w: w.store(implementation="ffi")), RuntimeError, ["cpu", "install"]),
    "out_of_range": (lambda w: w.load(out_of_range="drop"), ValueError, ["'drop'", "raise", "skip"]),
    "gaps": (lambda w: w.load(gaps="fill"), ValueError, ["'fill'", "keep", "zero"]),
    "option": (lambda w: w.load(skip_prefx=1), TypeError, ["skip_prefx"]),
    "plan": (lambda w: w.load(chunks=jaxkv.plan(w.spec, w.chunks, w.slots)), TypeError, ["plan", "slots"]),
    "plan spec": (lambda w: jaxkv.plan(w.cache.pages, w.chunks, w.slots), TypeError, ["PagedCache", "CacheSpec"]),
    "M43": (lambda w: w.load(slots=w.slots[:3].astype(float), skip_prefix=-1, gaps="fill"),
            (TypeError, ValueError), []),
    # M36 and M41: under a tracer everything static is checked all the same.
    "M36 vmap": (lambda w: jax.vmap(w.store)(w.pages(lambda p: tuple(x[None] for x in p))), NotImplementedError,
                 ["gather", "vmap", "flat"]),
    "M36 vmap load": (lambda w: jax.vmap(w.load)(w.pages(lambda p: tuple(x[None] for x in p))), NotImplementedError,
                      ["scatter", "vmap", "flat"]),
    "M36 grad": (lambda w: jax.grad(lambda c: w.store(c)[0].data[0].astype(jnp.float32).sum())(w.cache),
                 NotImplementedError, ["gather", "stop_gradient"]),
    "M36 jvp": (lambda w: jax.jvp(w.load, (w.cache,), (w.cache,)), NotImplementedError, ["scatter", "stop_gradient"]),
    "M41 slots": (lambda w: jax.jit(lambda s: w.load(slots=s))(w.slots.astype(np.float32)), TypeError, ["slots"]),
    "M41 rank": (lambda w: jax.jit(lambda s: w.store(slots=s))(w.slots[None]), ValueError, ["slots", "(1, 20)"]),
    "M41 prefix": (lambda w: jax.jit(lambda n: w.store(skip_prefix=n))(1.5), TypeError, ["skip_prefix"]),
    "M41 dtype": (lambda w: jax.jit(lambda c: w.load(c, w.chunks_of(dtype=np.float16)))(w.cache), TypeError,
                  ["float16"]),
    "M41 pages": (lambda w: jax.jit(lambda p: w.store(jaxkv.PagedCache(p, w.spec)))(w.cache.pages[:2]), ValueError,
                  ["pages", "3 (layer)"]),
    "M41 M44": (lambda w: jax.jit(lambda c: w.load(c, slots=at(w.slots, 3, 28)))(w.cache), ValueError,
                ["index 3", "28"]),
    "M41 ranges": (lambda w: jax.jit(lambda c, s: w.load(c, slots=s, starts=[0, 8, 17], ends=[8, 16, 21]))(
        w.cache, w.slots), ValueError, ["chunk 2", "[17, 21)"]),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_refused(name):
    """R9, M42, M43: the exception and its words; the same objects then work in the next, correct call."""
    world = World()
    call, error, words = CASES[name]
    with pytest.raises(error) as caught:
        call(world)
    text = str(caught.value)
    assert all(word in text for word in words), text
    assert not hasattr(caught.value, "cache")  # which only a call that has begun to write gives
    helpers.assert_same(world.cache.pages, world.model.arrays())
    world.scene.check()
    after = world.load()
    rows = np.concatenate(world.scene.rows, axis=2)
    helpers.assert_same(after.pages, world.model.written(world.model.arrays(), rows, world.slots))


def test_a_consumed_cache_is_refused_by_both_calls():
    """M31, I11: and the result of the call that consumed it is whole."""
    world = World()
    after = world.load()
    for call in (world.load, world.store):
        with pytest.raises(ValueError, match=r"pages\[0\].*deleted or donated"):
            call()
    want = helpers.snapshot(after.pages)
    plan = jaxkv.plan(world.spec, world.chunks, world.slots)
    after = jaxkv.load(after, plan)
    helpers.assert_same(after.pages, want)
    world.chunks[1].data[0].delete()
    for call in (lambda: world.load(after), lambda: jaxkv.load(after, plan)):
        with pytest.raises(ValueError, match="chunk 1 was deleted"):
            call()
    slots = jnp.asarray(world.slots, jnp.int32)
    slots.delete()
    for call in (lambda: world.load(after, world.chunks[:1], slots), lambda: world.store(after, slots)):
        with pytest.raises(ValueError, match=r"slots: .*deleted"):
            call()
    helpers.assert_same(after.pages, want)


@pytest.mark.parametrize("dtype", helpers.DTYPES)
def test_bits_are_never_cast(dtype):
    """R2, C7, C8, C11: every pattern of the dtype out and back; another dtype of its width is refused."""
    model = Model("A13", dtype=dtype, pages=20, heads=2, dim=32)
    scene = Scene(model, 80)
    if model.dtype.itemsize == 1:
        assert len({int(b) for rows in scene.rows for b in raw(rows).reshape(-1)}) == 256
    for way in helpers.WAYS.values():
        scene.check(**way)
    other = np.uint8 if model.dtype.itemsize == 1 and dtype != "uint8" else ml_dtypes.bfloat16
    other = np.float16 if dtype == "bf16" else other
    with pytest.raises(TypeError, match=f"{model.dtype}"):
        jaxkv.load(dataclasses.replace(model.spec, dtype=other).empty(20), scene.chunks, scene.slots)
