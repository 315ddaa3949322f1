"""What the tests of caches, chunks, plans, store and load share: pools of random bytes, and what the oracle says.

The oracle (`jaxkv.testing.oracle`) shares no code with the package, so a pool is made here twice: as NumPy arrays
for the one, and as a `PagedCache` for the other.
"""

import contextlib
import dataclasses
from typing import Any

import jax
import jax.monitoring
import jax.numpy as jnp
import ml_dtypes
import numpy as np

import jaxkv
from jaxkv.ops import native
from jaxkv.testing import oracle

IMPLEMENTATIONS = ["xla", *(["ffi"] if native.available("cpu") else [])]

WAYS = {
    "xla": {"implementation": "xla"},
    "ffi": {"implementation": "ffi", "path": "overlapped"},
    "direct": {"implementation": "ffi", "path": "direct"},
}
WAYS = {name: way for name, way in WAYS.items() if way["implementation"] in IMPLEMENTATIONS}
"""Every way that a store and a load can take on a CPU."""

DTYPES = {
    "bf16": ml_dtypes.bfloat16,
    "fp16": np.float16,
    "fp32": np.float32,
    "int8": np.int8,
    "uint8": np.uint8,
    "e4m3": ml_dtypes.float8_e4m3fn,
    "e5m2": ml_dtypes.float8_e5m2,
}

POISON = 0xDE


@dataclasses.dataclass(frozen=True)
class Pool:
    """One row of CASES.md A: a sentence, and where the arrays are not of its shape, the shape they have."""

    sentence: str | tuple[str, str]
    planes: int = 2
    split: str | None = None  # "heads" or "tokens": that axis, divided by two, has an axis of two (packing) behind
    pad: tuple[tuple[str, int], ...] = ()  # how much larger than the model's the padded axis is

    def layout(self, sizes: dict[str, int]) -> jaxkv.Layout:
        return jaxkv.Layout(self.sentence, self.padding(sizes))

    def padding(self, sizes: dict[str, int]) -> dict[str, int]:
        return {axis: sizes[axis] + more for axis, more in self.pad}


POOLS = {
    "A1": Pool("page layer kv token head dim"),
    "A2": Pool("layer | kv page token head dim"),
    "A3": Pool("layer | page kv token head dim"),
    "A4": Pool("layer | page token dim", 1),
    "A5": Pool("kv layer | (page token) head dim"),
    "A6": Pool("layer | (page token) 1 dim", 1),
    "A7": Pool("layer | kv page head token dim"),
    "A8": Pool("layer | page kv head token dim"),
    "A9": Pool("page layer kv head token dim"),
    "A9 flat": Pool("page layer kv (head token dim)"),
    "A10": Pool("kv layer | page token head dim"),
    "A11": Pool("layer | page head token kv dim"),
    "A12": Pool("layer | page token head kv dim"),
    "A13": Pool("layer | page head token (kv dim)"),
    "A14": Pool("page token head (kv dim)"),
    "A16": Pool("layer | kv page head 1 token dim"),
    "A17": Pool("layer kv | page token head dim"),
    "A19": Pool("layer | page token head dim", 1),
    "A20": Pool("page layer head token (kv dim)"),
    "A20 NHD": Pool("page layer token head (kv dim)"),
    "A21": Pool("layer page head token (kv dim)"),
    "A21 NHD": Pool("layer page token head (kv dim)"),
    "A22": Pool("layer head page token (kv dim)"),
    "A22 BHLNC": Pool("page head layer token (kv dim)"),
    "A24": Pool(("page head token dim", "page head dim token")),
    "A26": Pool("page token (head kv) dim", split="heads", pad=(("dim", 3),)),
    "A29": Pool("page token head (kv dim)", split="heads"),
    "A31": Pool("page token (head kv) dim", split="heads"),
    "A32": Pool("kv layer | head page token dim"),
    "A33": Pool("kv layer | head page token"),
    "A34": Pool("page token (head kv) dim"),
    "A35": Pool("layer kv | page head token dim"),
    "A36": Pool("page token dim", 1, split="tokens", pad=(("dim", 5), ("token", 2))),
    "padded heads": Pool("kv page token head dim", pad=(("head", 1),)),
}
"""Every unstarred pool layout of CASES.md A."""

CHUNKS = {
    "A42": "kv layer token (head dim)",
    "A42 MLA": "1 layer token (head dim)",
    "A43 T2D": "token kv (head dim)",
    "A43 2TD": "kv token (head dim)",
    "A43 MLA": "token (head dim)",
    "A44 page": "page layer kv token head dim",
    "A44 head": "page head layer kv token dim",
    "A45 packed": "layer token head (kv dim)",
    "A45 interleaved": "layer token (head kv) dim",
    "A45 layers": "layer | kv token head dim",
    "one plane": "layer token head dim",
}
"""Every chunk layout of CASES.md A42 to A45."""


def one_plane(chunk: str) -> bool:
    return "kv" not in CHUNKS[chunk]


class Model:
    """A spec, and the same said in the oracle's words."""

    def __init__(
        self,
        pool: str = "A2",
        *,
        layers: int = 3,
        heads: int = 4,
        dim: int = 8,
        page_size: int = 4,
        pages: int = 7,
        dtype: str = "bf16",
        **more: Any,
    ) -> None:
        self.pool = POOLS[pool]
        self.sizes = dict(layer=layers, kv=self.pool.planes, page=pages, token=page_size, head=heads, dim=dim)
        self.pad = self.pool.padding(self.sizes)
        self.dtype = np.dtype(DTYPES[dtype])
        layout = self.pool.layout(self.sizes)
        self.spec = jaxkv.CacheSpec(layout, layers, heads, dim, page_size, self.dtype, **more)
        self.pages, self.num_slots = pages, pages * page_size

    def arrays(self, seed: int | None = None) -> Any:
        """The pool as NumPy arrays in the nesting of the layout: random bytes, or poison."""
        leaves = [fill(self._shape(shape), self.dtype, seed, i) for i, shape in enumerate(self.spec.shapes(self.pages))]
        layers = self.sizes["layer"]
        for level in reversed(self.spec.layout.levels):
            size = layers if level == "layer" else 2
            leaves = [tuple(leaves[i : i + size]) for i in range(0, len(leaves), size)]
        return leaves[0]

    def _shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape in which an engine has it: packed axes split in two."""
        at = {None: None, "heads": 2, "tokens": 1}[self.pool.split]
        if at is None or shape[at] % 2:
            return shape
        return (*shape[:at], shape[at] // 2, 2, *shape[at + 1 :])

    def cache(self, arrays: Any, device: Any = None) -> jaxkv.PagedCache:
        """The arrays as a cache that owns its memory (JAX shares that of a NumPy array, and then donates nothing)."""
        return jaxkv.PagedCache(jax.tree.map(lambda x: owned(x, device), arrays), self.spec)

    def random(self, seed: int = 0) -> tuple[Any, jaxkv.PagedCache]:
        arrays = self.arrays(seed)
        return arrays, self.cache(arrays)

    def poisoned(self) -> jaxkv.PagedCache:
        return self.cache(self.arrays())

    def rows(self, arrays: Any, slots: Any) -> np.ndarray:
        """`[layer, kv, n, head, dim]`, zero bytes where a slot is not in the pool."""
        return oracle.read_rows(arrays, self.pool.sentence, self.sizes, slots, self.pad)

    def written(self, arrays: Any, rows: np.ndarray, slots: Any) -> Any:
        return oracle.write_rows(arrays, self.pool.sentence, self.sizes, rows, slots, self.pad)

    def zeroed(self, arrays: Any, slots: Any) -> Any:
        kv, layers, heads, dim = (self.sizes[axis] for axis in ("kv", "layer", "head", "dim"))
        return self.written(arrays, np.zeros((layers, kv, len(slots), heads, dim), self.dtype), slots)

    def chunk_arrays(self, rows: np.ndarray, format: jaxkv.ChunkFormat, num_rows: int) -> list[np.ndarray]:
        """The arrays that a chunk of `num_rows` rows must have, zero bytes past the rows given."""
        full = np.zeros((*rows.shape[:2], num_rows, *rows.shape[3:]), rows.dtype)
        raw(full)[:, :, : rows.shape[2]] = raw(rows)
        out: list[np.ndarray] = []
        for layers in format.groups(self.sizes["layer"]):
            sentence, part = format.layout.sentence, full[layers.start : layers.stop]
            packed = oracle.pack(part, sentence, {"token": self.sizes["token"]})
            out += jax.tree.leaves(packed)
        return out


def fill(shape: tuple[int, ...], dtype: Any, seed: int | None, stream: int = 0) -> np.ndarray:
    """An array of random bytes (every NaN payload among them), or of poison."""
    dtype = np.dtype(dtype)
    count = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    if seed is None:
        flat = np.full(count, POISON, np.uint8)
    else:
        flat = np.random.default_rng([seed, stream]).integers(0, 256, count, np.uint8)
    return flat.view(dtype).reshape(shape)


def owned(array: Any, device: Any = None) -> jax.Array:
    """A copy in memory of JAX's own, which nothing else views."""
    copy = jnp.copy(jax.device_put(array, device))
    return copy.block_until_ready()


def raw(array: Any) -> np.ndarray:
    """The bits of an array as unsigned integers."""
    array = np.ascontiguousarray(array)
    return array.view(f"u{array.dtype.itemsize}")


def snapshot(tree: Any) -> Any:
    """NumPy copies of arrays that leave no view of them behind (a view would keep them from being donated)."""
    return jax.tree.map(_read, tree)


def _read(x: Any) -> np.ndarray:
    if not isinstance(x, jax.Array) or x.sharding.memory_kind == "pinned_host":  # nothing computes on host memory
        return np.array(x)
    return np.array(jnp.copy(x))


def assert_same(got: Any, want: Any, what: str = "") -> None:
    """Checks that two trees of arrays are equal in bytes."""
    got, want = jax.tree.leaves(got), jax.tree.leaves(want)
    assert len(got) == len(want), (what, len(got), len(want))
    for i, (x, y) in enumerate(zip(got, want, strict=True)):
        x, y = _read(x), np.asarray(y)
        assert (x.dtype, x.size) == (y.dtype, y.size), (what, i, x.dtype, y.dtype, x.shape, y.shape)
        different = np.flatnonzero(raw(x).reshape(-1) != raw(y).reshape(-1))
        assert not different.size, f"{what}: leaf {i} {x.shape} differs at {different[:8]} ({different.size} elements)"


def stored(model: Model, arrays: Any, chunks: Any, slots: Any, starts: Any, ends: Any, skip_prefix: int = 0) -> None:
    """Checks what `store` gave against the oracle: bytes, `valid`, `num_tokens`, `positions`, memory kind."""
    assert len(chunks) == len(starts)
    for k, (chunk, start, end) in enumerate(zip(chunks, starts, ends, strict=True)):
        part = [s if t >= skip_prefix else -1 for t, s in enumerate(int(s) for s in slots)][start:end]
        want = model.chunk_arrays(model.rows(arrays, part), chunk.format, chunk.num_rows)
        assert_same(list(chunk.data), want, f"chunk {k}")
        assert [x.shape for x in chunk.data] == [x.shape for x in want]
        assert {x.sharding.memory_kind for x in chunk.data} == {"pinned_host"}
        valid = [0 <= s < model.num_slots for s in part] + [False] * (chunk.num_rows - len(part))
        assert np.asarray(chunk.valid).tolist() == valid
        assert int(chunk.num_tokens) == end - start
        assert np.asarray(chunk.positions)[: end - start].tolist() == list(range(start, end))


def loaded(
    model: Model,
    before: Any,
    rows: list[np.ndarray],
    slots: Any,
    starts: Any,
    ends: Any,
    *,
    skip_prefix: int = 0,
    valid: Any = None,
    zero: bool = False,
) -> tuple[Any, dict[str, int]]:
    """The pool after a load of chunks of these rows, and its counts, by the oracle."""
    sizes = [x.shape[2] for x in rows]
    table, counts = oracle.plan_rows(sizes, slots, starts, ends, skip_prefix, model.num_slots, valid)
    after = before
    if zero:
        after = model.zeroed(after, oracle.zero_slots(starts, ends, slots, skip_prefix))
        for token in oracle.gap_tokens(starts, ends):  # counted like any other token (G3, G4)
            slot = int(slots[token])
            left = slot < 0 or token < skip_prefix
            counts["skipped" if left else "moved" if slot < model.num_slots else "out_of_range"] += 1
    for part, where in zip(rows, table, strict=True):
        after = model.written(after, part, where)
    return after, counts


def counts_of(plan: jaxkv.Plan) -> dict[str, int]:
    assert int(plan.counts.bad_position) == 0
    return {name: int(getattr(plan.counts, name)) for name in ("moved", "skipped", "out_of_range")}


def small(pool: str = "A2", **more) -> Model:
    """A model that the pool layout can hold: one head where there is no head axis, dim 1 where there is no dim."""
    if "head" not in str(POOLS[pool].sentence):
        more.setdefault("heads", 1)
    if "dim" not in str(POOLS[pool].sentence):
        more.setdefault("dim", 1)
    return Model(pool, **more)


def follow(num_tokens: int, size: int) -> tuple[list[int], list[int]]:
    starts = list(range(0, num_tokens, size))
    return starts, [min(start + size, num_tokens) for start in starts]


def pinned(array: jax.Array) -> jax.Array:
    return jax.device_put(array, array.sharding.with_memory_kind("pinned_host"))


class Scene:
    """Chunks stored from one pool, and the rows that are in them."""

    def __init__(self, model: Model, num_tokens: int, starts=None, ends=None, *, seed=0, chunk_tokens=8, **options):
        self.model = model
        rng = np.random.default_rng(seed)
        arrays, cache = model.random(seed)
        if starts is None:
            starts, ends = follow(num_tokens, chunk_tokens)
        source = rng.permutation(model.num_slots)[:num_tokens]
        self.starts, self.ends = list(starts), list(ends)
        self.chunks = jaxkv.store(cache, source, starts=starts, ends=ends, chunk_tokens=chunk_tokens, **options)
        self.rows = [model.rows(arrays, source[start:end]) for start, end in zip(starts, ends, strict=True)]
        self.slots = rng.permutation(model.num_slots)[:num_tokens].astype(np.int64)

    def check(
        self, slots=None, *, implementation=None, path=None, gaps="keep", skip_prefix=0, order=None, **options
    ) -> None:
        """Loads into a poisoned pool and compares pool, chunks and counts with the oracle."""
        order = range(len(self.chunks)) if order is None else order
        slots = self.slots if slots is None else slots
        chunks, rows, starts, ends = ([x[k] for k in order] for x in (self.chunks, self.rows, self.starts, self.ends))
        valid = [np.asarray(c.valid)[: int(c.num_tokens)].tolist() for c in chunks]
        want, counts = loaded(
            self.model,
            self.model.arrays(),
            rows,
            slots,
            starts,
            ends,
            skip_prefix=skip_prefix,
            valid=valid,
            zero=gaps == "zero",
        )
        before = snapshot([c.data for c in chunks])
        cache = self.model.poisoned()
        plan = jaxkv.plan(cache, chunks, slots, starts=starts, ends=ends, gaps=gaps, skip_prefix=skip_prefix, **options)
        assert counts_of(plan) == counts
        tokens = sum(end - start for start, end in zip(starts, ends, strict=True)) + int(plan.zeroed.sum())
        assert sum(counts.values()) == tokens
        after = jaxkv.load(cache, plan, implementation=implementation, path=path)
        assert_same(after.pages, want)
        assert_same([c.data for c in chunks], before)


_compiled: list[str] = []
jax.monitoring.register_event_duration_secs_listener(
    lambda event, duration, **_: _compiled.append(event) if event.endswith("backend_compile_duration") else None
)


@contextlib.contextmanager
def compilations():
    """Collects what is compiled inside of the `with`."""
    events: list[str] = []
    first = len(_compiled)
    yield events
    events += _compiled[first:]
