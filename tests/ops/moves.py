"""What the tests of gather and scatter share: arrays of random bytes, and a move checked against the oracle."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv import layouts, ops
from jaxkv.layout import Layout, Sizes
from jaxkv.ops import native
from jaxkv.testing import oracle

POISON = 0xDE

# Every form of a chunk (A42 to A45): in bulk, for one layer (an array for each), by page, packed, interleaved.
KV_CHUNKS = (
    "kv layer token (head dim)",
    "token kv (head dim)",
    "kv token (head dim)",
    "page layer kv token head dim",
    "page head layer kv token dim",
    "layer token head (kv dim)",
    "layer token (head kv) dim",
    "layer | kv token head dim",
    "kv | layer token head dim",
)
PLANE_CHUNKS = (
    "1 layer token (head dim)",
    "token (head dim)",
    "page layer token head dim",
    "page head layer token dim",
    "layer | token head dim",
)


def bits(x: Any) -> np.ndarray:
    """The payload as unsigned integers."""
    x = np.asarray(x)
    return np.ascontiguousarray(x).view(f"u{x.dtype.itemsize}")


def random_array(shape: tuple[int, ...], dtype: Any, rng: np.random.Generator) -> np.ndarray:
    """Random bytes: among them infinities and every kind of NaN."""
    dtype = np.dtype(dtype)
    return np.frombuffer(rng.bytes(int(np.prod(shape)) * dtype.itemsize), dtype).reshape(shape).copy()


def poison_array(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """Nothing but poison."""
    return np.full(int(np.prod(shape)) * np.dtype(dtype).itemsize, POISON, np.uint8).view(dtype).reshape(shape)


def nested(leaves: Any, layout: Layout, layers: int) -> Any:
    """Leaves as nested tuples of the layout's levels."""
    leaves = list(leaves)
    for level in reversed(layout.levels):
        size = layers if level == "layer" else 2
        leaves = [tuple(leaves[i : i + size]) for i in range(0, len(leaves), size)]
    (tree,) = leaves
    return tree


def shapes_of(layout: Layout, sizes: Sizes, num_pages: int) -> list[tuple[int, ...]]:
    """Shapes of a pool's arrays; of a pair of sentences the array of K comes before that of V."""
    pair = len(layout.arrays) == 2
    order = [level for level in layout.levels if level in ("layer", "kv")]
    kinds = [0] * layout.num_leaves(sizes.layers)
    if pair:
        kinds = [i % 2 if order[-1] == "kv" else i // sizes.layers for i in range(len(kinds))]
    return [layout.shape(sizes, num_pages, kv=kind) for kind in kinds]


def device(tree: Any) -> Any:
    """Arrays that own their memory: `device_put` of a NumPy array may share it."""
    return jax.tree.map(lambda x: jnp.array(x, copy=True), tree)


def host(tree: Any) -> Any:
    """NumPy copies, so that no view keeps an array from being donated."""
    return jax.tree.map(lambda x: np.array(x, copy=True), tree)


def assert_same(got: Any, want: Any, what: str) -> None:
    """Equal bytes, leaf by leaf."""
    got, want = jax.tree.leaves(got), jax.tree.leaves(want)
    assert len(got) == len(want), what
    for i, (a, b) in enumerate(zip(got, want, strict=True)):
        a = np.asarray(a)
        assert (a.shape, a.dtype) == (b.shape, b.dtype), f"{what}, array {i}"
        if not np.array_equal(bits(a), bits(b)):
            bad = np.argwhere(bits(a) != bits(b))
            raise AssertionError(f"{what}, array {i}: {len(bad)} of {a.size} elements differ, first at {bad[0]}")


def oracle_sizes(sizes: Sizes, num_pages: int) -> dict[str, int]:
    """The sizes as the oracle takes them."""
    return {
        "layer": sizes.layers,
        "kv": sizes.planes,
        "page": num_pages,
        "token": sizes.page_size,
        "head": sizes.heads,
        "dim": sizes.dim,
    }


class Move:
    """A pool of random bytes, one of poison, and what the oracle says of a gather and a scatter between them."""

    def __init__(
        self,
        pool: Any,
        chunk: Any,
        sizes: Sizes,
        num_pages: int,
        dtype: Any,
        *,
        shapes: Any = None,
        layers: range | None = None,
        seed: int = 0,
    ):
        self.pool, self.chunk = layouts.named(pool), layouts.named(chunk)
        self.layers, self.sizes, self.num_pages, self.dtype = layers, sizes, num_pages, np.dtype(dtype)
        self.rng = np.random.default_rng(seed)
        shapes = shapes or shapes_of(self.pool, sizes, num_pages)
        self.source = nested([random_array(s, dtype, self.rng) for s in shapes], self.pool, sizes.layers)
        self.target = nested([poison_array(s, dtype) for s in shapes], self.pool, sizes.layers)
        self.num_slots = num_pages * sizes.page_size

    @property
    def _oracle(self) -> dict[str, Any]:
        return {
            "sentence": self.pool.sentence,
            "sizes": oracle_sizes(self.sizes, self.num_pages),
            "pad": self.pool.padding,
        }

    def rows(self, slots: Any, pages: Any = None) -> np.ndarray:
        """Canonical rows of some slots of the source (or other pages), all layers."""
        return oracle.read_rows(self.source if pages is None else pages, slots=slots, **self._oracle)

    def packed(self, rows: np.ndarray) -> Any:
        """Canonical rows as a chunk of the layers that move."""
        rows = rows if self.layers is None else rows[self.layers.start : self.layers.stop]
        return oracle.pack(rows, self.chunk.sentence, {"token": self.sizes.page_size})

    def written(self, rows: np.ndarray, slots: Any, target: Any = None) -> Any:
        """The target after a scatter of the layers that move; all other layers keep what they have."""
        target = self.target if target is None else target
        if self.layers is not None:
            keep = oracle.read_rows(target, slots=slots, **self._oracle)
            keep[self.layers.start : self.layers.stop] = rows[self.layers.start : self.layers.stop]
            rows = keep
        return oracle.write_rows(target, rows=rows, slots=slots, **self._oracle)

    def _options(self, options: dict[str, Any]) -> dict[str, Any]:
        return {"pool": self.pool, "chunk": self.chunk, "sizes": self.sizes, "layers": self.layers, **options}

    def gather(self, pages: Any, slots: Any, **options: Any) -> Any:
        """The op."""
        return ops.gather(pages, slots, **self._options(options))

    def scatter(self, pages: Any, rows: Any, slots: Any, **options: Any) -> Any:
        """The op."""
        return ops.scatter(pages, rows, slots, **self._options(options))

    def check(self, implementation: str | None, take: Any, put: Any, *, unique_slots: bool = False) -> None:
        """Gathers and scatters eagerly; compares both with the oracle, and inputs with what they were (N1 to N3)."""
        options = {"implementation": implementation}
        source, target = device(self.source), device(self.target)
        rows = self.rows(take)
        want = self.packed(rows)
        got = self.gather(source, take, **options)
        assert_same(got, want, "gather")
        got = self.scatter(target, device(want), put, unique_slots=unique_slots, **options)
        assert_same(got, self.written(rows, put), "scatter")
        assert_same(source, self.source, "the gather's source")
        assert_same(target, self.target, "the scatter's input")


def distinct_slots(num_slots: int, count: int, seed: int = 0) -> np.ndarray:
    """Some slots in random order."""
    return np.random.default_rng(seed).permutation(num_slots)[:count].astype(np.int32)


def implementations() -> list[str]:
    """The implementations that the default device has."""
    return ["xla"] if _why_no_ffi() else ["xla", "ffi"]


def skip_without_handlers(implementation: str | None) -> None:
    """Skips what needs FFI handlers where there are none, as in a source tree without its extension."""
    if implementation == "ffi" and (why := _why_no_ffi()):
        pytest.skip(why)


def _why_no_ffi() -> str | None:
    return native.why_not({"gpu": "cuda"}.get(jax.default_backend(), jax.default_backend()))
