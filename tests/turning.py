"""What the tests of moved keys share: ropes of every kind, chunks of ordinary numbers, and the bounds of CASES.md F.

The truth is `oracle.rotate` in float64 (T2 of CASES.md): the stored bytes, turned by (new - old) * inv_freq.
"""

import dataclasses
from typing import Any

import helpers
import jax
import layers as by_layer
import ml_dtypes
import numpy as np
from helpers import DTYPES, Model, assert_same, raw

import jaxkv
from jaxkv.testing import oracle

FLOATS = {name: DTYPES[name] for name in ("bf16", "fp16", "fp32", "e4m3", "e5m2")}

UNIT = {"bf16": 2.0**-8, "fp16": 2.0**-11, "fp32": 2.0**-24, "e4m3": 2.0**-4, "e5m2": 2.0**-3}
"""F4's u: half of the distance between neighbours, relative."""

RELATIVE = {"bf16": 1.75e-3, "fp16": 2.3e-4, "fp32": 2e-7, "e4m3": 3e-2, "e5m2": 6e-2}
"""F3 and F30: the relative L2 error over many rows, to which 1e-8 P comes."""

LENGTH = {"bf16": 2.0**-7, "fp16": 2.0**-10, "fp32": 1e-6, "e4m3": 2.0**-3, "e5m2": 2.0**-2}
"""F6: how well the length of a pair is kept."""


def frequencies(width: int, theta: float = 10_000.0) -> np.ndarray:
    return (theta ** -(np.arange(0, width, 2) / width)).astype(np.float32)


def rope(width: int = 8, theta: float = 10_000.0, pairing: str = "half", **more: Any) -> jaxkv.Rope:
    return jaxkv.Rope.from_inv_freq(frequencies(width, theta), pairing=pairing, **more)


def couples(rope: jaxkv.Rope, offset: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """The channels of each pair, by the definition of the pairing."""
    i = np.arange(rope.pairs)
    first, second = (i, i + rope.pair_distance) if rope.pairing == "half" else (2 * i, 2 * i + 1)
    return first + offset, second + offset


def exact(rope: jaxkv.Rope, k: np.ndarray, old: Any, new: Any, offset: int = 0, inv_freq: Any = None) -> np.ndarray:
    """Keys `[n, head, dim]` turned in float64 and not rounded; of M-RoPE one component after the other."""
    old, new = np.atleast_2d(old).astype(np.int64), np.atleast_2d(new).astype(np.int64)
    pairs = rope.pairs
    # The oracle knows no pair distance of its own: frequencies of zero fill the stretch between the halves.
    span = rope.pair_distance if rope.pairing == "half" else pairs
    every = np.zeros(span)
    every[:pairs] = np.asarray(rope.inv_freq if inv_freq is None else inv_freq, np.float64)
    axes = np.zeros(span, int)
    axes[:pairs] = rope.axes or 0
    # Wide pairs may end where the row does, before the oracle's window.
    room = max(offset + 2 * span - k.shape[-1], 0)
    out = np.pad(k.astype(np.float64), ((0, 0), (0, 0), (0, room)))
    for axis in sorted(set(axes.tolist())):
        chosen = np.where(axes == axis, every, 0.0)
        out = oracle.rotate(out, chosen, old[axis], new[axis], rope.pairing, 2 * span, offset)
    return out[..., : k.shape[-1]]


def spacing(values: np.ndarray, dtype: Any) -> np.ndarray:
    """One unit in the last place of numbers of a format, as float64."""
    info = ml_dtypes.finfo(dtype)
    exponent = np.floor(np.log2(np.maximum(np.abs(values), float(info.smallest_normal))))
    return 2.0 ** (exponent - info.nmant)


def check_keys(
    got: np.ndarray,
    k: np.ndarray,
    rope: jaxkv.Rope | None,
    old: Any,
    new: Any,
    offset: int = 0,
    *,
    inv_freq: Any = None,
    many: bool = False,
    what: str = "",
) -> None:
    """F1, F2, F4, F6, and with `many` rows F3: keys `[n, head, dim]` of one layer after a move."""
    name = next(name for name, dtype in DTYPES.items() if np.dtype(dtype) == k.dtype)
    old, new = np.asarray(old), np.asarray(new)
    if rope is None:
        return assert_same(got, k, f"{what} unrotated layer")
    first, second = couples(rope, offset)
    stays = (old == new).reshape(-1, old.shape[-1]).all(axis=0)
    assert_same(got[stays], k[stays], f"{what} what stays (F1)")
    others = np.setdiff1d(np.arange(k.shape[-1]), np.concatenate([first, second]))
    assert_same(got[..., others], k[..., others], f"{what} channels of no pair (F2)")
    if stays.all():
        return None
    got, k = got[~stays], k[~stays]
    old, new = old[..., ~stays], new[..., ~stays]
    truth = exact(rope, k, old, new, offset, inv_freq)
    largest = max(np.abs(old).max(), np.abs(new).max(), np.abs(old.astype(np.int64) - new).max())
    x, y = truth[..., first], truth[..., second]
    length = np.hypot(x, y)
    a, b = got[..., first].astype(np.float64), got[..., second].astype(np.float64)
    tiny = float(ml_dtypes.finfo(k.dtype).smallest_subnormal)
    error = np.maximum(np.abs(a - x), np.abs(b - y))
    bound = (UNIT[name] + 2.0**-20 + 2.0**-23 * largest) * length + tiny
    assert (error <= bound).all(), f"{what} F4: {(error / np.maximum(bound, 1e-300)).max()} of the bound"
    ordinary = length > 2.0**-3  # F6 leaves out tiny pairs
    stretch = np.abs(np.hypot(a, b) / np.where(ordinary, length, 1) - 1)[ordinary]
    assert (stretch <= LENGTH[name]).all(), f"{what} F6: {stretch.max()}"
    if many:
        assert x.size >= 1000 * rope.pairs
        relative = np.sqrt(((a - x) ** 2 + (b - y) ** 2).sum() / (x**2 + y**2).sum())
        assert relative <= RELATIVE[name] + 1e-8 * largest, f"{what} F3: {relative}"
    return None


def check_forms_agree(one: np.ndarray, other: np.ndarray, rope: jaxkv.Rope | None, offset: int = 0) -> None:
    """R4: keys of two forms, from the same tables, within one unit of the pair's larger component."""
    if rope is None:
        return assert_same(one, other)
    first, second = couples(rope, offset)
    a, b = ([x[..., at].astype(np.float64) for at in (first, second)] for x in (one, other))
    larger = np.maximum(np.maximum(*map(np.abs, a)), np.maximum(*map(np.abs, b)))
    unit = spacing(larger, one.dtype)
    for x, y in zip(a, b, strict=True):
        assert (np.abs(x - y) <= unit).all(), f"R4: {(np.abs(x - y) / unit).max()} units"
    return None


def normal_rows(model: Model, tokens: int, seed: int) -> np.ndarray:
    """`[layer, kv, n, head, dim]` of N(0, 1), in the model's format."""
    kv, layers, heads, dim = (model.sizes[axis] for axis in ("kv", "layer", "head", "dim"))
    values = np.random.default_rng(seed).standard_normal((layers, kv, tokens, heads, dim), np.float32)
    return values.astype(model.dtype)


class Moving:
    """Chunks that carry old positions, and the rows in them; each check loads them at new positions.

    Args:
        model: whose spec has a rope.
        num_tokens: of the request.
        old: the positions that keys were made for; random ones by default, some of which stay.
        new: the positions that keys are wanted at.
        limit: of random positions.
        rows: what is stored, N(0, 1) by default.
        seed: of everything that is random.
        **options: of `store`.
    """

    def __init__(self, model, num_tokens, *, old=None, new=None, limit=131072, rows=None, seed=0, **options):
        self.model, self.num_tokens = model, num_tokens
        rng = np.random.default_rng([seed, 77])
        components = model.spec.position_components
        shape = (num_tokens,) if components is None else (components, num_tokens)
        self.old = rng.integers(0, limit, shape) if old is None else np.asarray(old)
        if new is None:
            new = rng.integers(0, limit, shape)
            new[..., ::5] = self.old[..., ::5]
        self.new = np.asarray(new)
        self.rows = normal_rows(model, num_tokens, seed) if rows is None else rows
        source, self.slots = (rng.permutation(model.num_slots)[:num_tokens] for _ in range(2))
        cache = model.cache(model.written(model.arrays(), self.rows, source))
        options = {"chunk_tokens": 8, **options}
        self.chunks = jaxkv.store(cache, source, positions=self.old, **options)

    def plan(self, cache=None, **options) -> jaxkv.Plan:
        options = {"positions": self.new, **options}
        return jaxkv.plan(self.model.spec if cache is None else cache, self.chunks, self.slots, **options)

    def bulk(self, way, **options) -> np.ndarray:
        """The rows after a load in bulk; everything beside them is checked."""
        cache = self.model.poisoned()
        return self.rows_of(jaxkv.load(cache, self.plan(cache, **options), **way))

    def layerwise(self, implementation=None, **options) -> np.ndarray:
        """The rows after a load layer by layer; everything beside them is checked."""
        cache = self.model.poisoned()
        return self.rows_of(by_layer.load(cache, self.plan(cache, **options), implementation=implementation))

    def rows_of(self, cache) -> np.ndarray:
        pages = helpers.snapshot(cache.pages)
        rows = self.model.rows(pages, self.slots)
        assert_same(pages, self.model.written(self.model.arrays(), rows, self.slots), "beside the rows")
        return rows

    def check(self, got: np.ndarray, **more: Any) -> None:
        """Values and planes that stay, and keys that move, of every layer."""
        spec = self.model.spec
        assert_same(got[:, 1:], self.rows[:, 1:], "V (F2)")
        for layer, rope in enumerate(spec.rope_of_layer):
            what, old, new = f"layer {layer}", self.old, self.new
            check_keys(got[layer, 0], self.rows[layer, 0], rope, old, new, spec.rope_offset, what=what, **more)

    def check_agree(self, one: np.ndarray, other: np.ndarray) -> None:
        for layer, rope in enumerate(self.model.spec.rope_of_layer):
            check_forms_agree(one[layer, 0], other[layer, 0], rope, self.model.spec.rope_offset)

    def check_every_way(
        self, *, layerwise: Any = tuple(helpers.IMPLEMENTATIONS), many: bool = False
    ) -> dict[str, np.ndarray]:
        """R4, F27, F35: every way against the truth, the forms against one another, chunks whole.

        Args:
            layerwise: implementations that load layer by layer, too.
            many: whether there are rows enough for F3.
        """
        before = helpers.snapshot([chunk.data for chunk in self.chunks])
        found = {name: self.bulk(way) for name, way in helpers.WAYS.items()}
        for implementation in layerwise:
            found[f"layer by layer {implementation}"] = self.layerwise(implementation)
        for got in found.values():
            self.check(got, many=many)
            self.check_agree(found["xla"], got)
        for one, other in (("ffi", "direct"), ("ffi", "layer by layer ffi"), ("xla", "layer by layer xla")):
            if one in found and other in found:
                assert_same(found[one], found[other], f"{one} and {other}")
        assert_same([chunk.data for chunk in self.chunks], before, "chunks (F27)")
        return found


def turned_model(pool: str, rope: Any, **more: Any) -> Model:
    return helpers.small(pool, rope=rope, **more)


def differ(one: np.ndarray, other: np.ndarray) -> bool:
    return bool((raw(one) != raw(other)).any())


def without_data(chunks: Any) -> list[jaxkv.Chunk]:
    return [dataclasses.replace(chunk, data=()) for chunk in chunks]


def on_device(tree: Any) -> Any:
    return jax.tree.map(lambda x: jax.device_put(x, x.sharding.with_memory_kind("device")), tree)
