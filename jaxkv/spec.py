"""CacheSpec, what a model's KV cache is, and PagedCache, the arrays of one together with it."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from . import layouts
from .layout import Layout, Sizes
from .ops import checks
from .ops.sharding import describe_pool
from .ops.transfer import FORMATS, Transfer, Turn, leaf_kinds
from .rope import Rope
from .rotation import checked_window
from .values import fields_of, hashed_once


@hashed_once
@dataclasses.dataclass(frozen=True)
class CacheSpec:
    """A model's KV cache: everything but the number of pages.

    Args:
        layout: of the paged arrays: a `Layout`, a sentence, a pair of sentences (K, V), or the name of one of
            `jaxkv.layouts`.
        num_layers: layers in the cache.
        num_kv_heads: KV heads a layer; 1 for MLA.
        head_dim: elements of one head's K (or V); the latent row's elements for MLA.
        page_size: tokens a page.
        dtype: of the stored KV.
        rope: how keys are rotated: one `Rope` for all layers, one (or None) per layer, or None.
        rope_offset: where the rotated window starts in the row of a head (MLA keeps it behind the latent).
        model: whatever tells caches of different weights or adapters apart; a chunk loads only under the same.

    Raises:
        ValueError: a size is no positive integer, or the layout cannot hold such KV.
        TypeError: the dtype cannot be moved as whole bytes.
    """

    layout: Layout | str | tuple[str, str]
    num_layers: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    dtype: DTypeLike
    rope: Rope | tuple[Rope | None, ...] | None = None
    rope_offset: int = 0
    model: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "layout", layouts.named(self.layout))
        object.__setattr__(self, "dtype", _dtype_of(self.dtype))
        checks.check_dtype(self.dtype, "dtype")
        for name in ("num_layers", "num_kv_heads", "head_dim", "page_size"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < 1:
                raise ValueError(f"{name}: expected an int of at least 1, got {value!r}")
            object.__setattr__(self, name, int(value))
        if isinstance(self.rope, (list, tuple)):
            object.__setattr__(self, "rope", tuple(self.rope))
            if len(self.rope) != self.num_layers:
                raise ValueError(f"rope: {len(self.rope)} entries for {self.num_layers} layers")
        for layer, rope in enumerate(self.rope_of_layer):
            if rope is not None and not isinstance(rope, Rope):
                raise TypeError(f"rope: expected a Rope or None for layer {layer}, got {type(rope).__name__}")
            if rope is not None:
                try:
                    checked_window(rope.pairs, rope.pairing, rope.pair_distance or 0, self.rope_offset, self.head_dim)
                except ValueError as error:
                    raise ValueError(f"rope: with rope_offset and head_dim, {error}") from None
        if not isinstance(self.model, str):
            raise TypeError(f"model: expected a string, got {self.model!r}")
        if not self.pool_layout.has_axis("page"):
            raise ValueError(f"layout: axis 'page' is missing in {str(self.layout)!r}, which is to hold pages")
        for kv in range(len(self.pool_layout.arrays)):
            self.pool_layout.shape(self.sizes, kv=kv)  # raises where the layout cannot hold such KV

    @property
    def planes(self) -> int:
        """2 for K and V, 1 where the layout has one plane (MLA)."""
        return self.pool_layout.planes

    @property
    def sizes(self) -> Sizes:
        """The sizes that layouts are checked against."""
        return Sizes(self.num_layers, self.num_kv_heads, self.head_dim, self.page_size, self.planes)

    @property
    def rope_of_layer(self) -> tuple[Rope | None, ...]:
        """The rope of each layer."""
        return self.rope if isinstance(self.rope, tuple) else (self.rope,) * self.num_layers

    @property
    def position_components(self) -> int | None:
        """Components of a position: 3 where a layer has M-RoPE, None for plain ones."""
        return next((rope.components for rope in self.rope_of_layer if rope and rope.components), None)

    def ropes(self, layers: range | None = None) -> tuple[Rope, ...]:
        """The different ropes of some layers, by default of all, in the order of their first layer."""
        return _ropes(self, range(self.num_layers) if layers is None else layers)

    def turn(self, layers: range | None = None) -> Turn | None:
        """How a scatter turns the keys of some layers, its tables in the order of `ropes`; None where none turns.

        Raises:
            TypeError: the cache holds integers, which cannot be turned.
            NotImplementedError: two of the layers turn different channels.
        """
        return _turn(self, range(self.num_layers) if layers is None else layers)

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token in all layers, padding left out."""
        return self.num_layers * self.sizes.row * np.dtype(self.dtype).itemsize

    @property
    def pool_layout(self) -> Layout:
        """`layout`, parsed."""
        assert isinstance(self.layout, Layout)  # made so above
        return self.layout

    def transfer(self, chunk: Layout, layers: range | None = None) -> Transfer:
        """The transfer between these pages and a chunk layout, of all layers or some."""
        layers = range(self.num_layers) if layers is None else layers
        return Transfer(self.pool_layout, chunk, self.sizes, (layers.start, layers.stop))

    def shapes(self, num_pages: int) -> list[tuple[int, ...]]:
        """Shapes of the cache's arrays, in the order of the layout's levels."""
        return [
            self.pool_layout.shape(self.sizes, num_pages, kv=kind) for kind in leaf_kinds(self.pool_layout, self.sizes)
        ]

    def empty(self, num_pages: int, *, sharding: Any = None) -> "PagedCache":
        """A cache of zero bytes.

        Args:
            num_pages: pages of each array.
            sharding: a device or sharding for the arrays, by default JAX's own choice.

        Raises:
            ValueError: `num_pages` is no positive integer.
        """
        if isinstance(num_pages, bool) or not isinstance(num_pages, (int, np.integer)) or num_pages < 1:
            raise ValueError(f"num_pages: expected an int of at least 1, got {num_pages!r}")
        arrays = [jnp.zeros(shape, self.dtype, device=sharding) for shape in self.shapes(int(num_pages))]
        return PagedCache(checks.nested(arrays, self.pool_layout, self.sizes), self)

    def check(self, pages: Any) -> "Pool":
        """Checks arrays against this spec and says what they are.

        Raises:
            TypeError: a leaf is no array, or of another dtype.
            ValueError: the pytree is not of the layout's levels, an array does not fit its sentence, two arrays
                disagree, one was deleted, or one is not in device memory.
            NotImplementedError: an array is sharded over another axis than heads.
        """
        leaves, structure = checks.arrays_of(pages, self.pool_layout, self.num_layers, "pages")
        checks.check_same_dtype(leaves, self.dtype, "pages")
        num_pages, described = describe_pool(self.pool_layout, self.sizes, tuple(leaf.shape for leaf in leaves))
        if num_pages * self.page_size > checks.INT32_MAX:
            raise ValueError(
                f"pages: {num_pages} pages of {self.page_size} tokens are more slots than int32 can number"
            )
        if not any(map(checks.is_traced, leaves)):
            checks.check_placement(leaves, [leaf.head_axis for leaf in described], "pages")
            leaves = checks.committed(leaves)
        distinct = len(set(map(id, leaves))) == len(leaves)
        shardings = () if any(map(checks.is_traced, leaves)) else tuple(leaf.sharding for leaf in leaves)
        if len(set(shardings)) == 1:
            shardings = shardings[:1]
        return Pool(tuple(leaves), structure, num_pages, num_pages * self.page_size, distinct, shardings)


def _dtype_of(dtype: Any) -> np.dtype:
    """The dtype; None, which NumPy takes for float64, is none."""
    try:
        if dtype is not None:
            return np.dtype(dtype)
    except TypeError:
        pass
    raise TypeError(f"dtype: expected a dtype such as jnp.bfloat16 or 'bfloat16', got {dtype!r}")


@functools.lru_cache(maxsize=1024)
def _ropes(spec: CacheSpec, layers: range) -> tuple[Rope, ...]:
    return tuple(dict.fromkeys(rope for layer in layers if (rope := spec.rope_of_layer[layer]) is not None))


@functools.lru_cache(maxsize=1024)
def _turn(spec: CacheSpec, layers: range) -> Turn | None:
    ropes = _ropes(spec, layers)
    if not ropes:
        return None
    if np.dtype(spec.dtype).name not in FORMATS:
        layer = next(layer for layer in layers if spec.rope_of_layer[layer] is not None)
        raise TypeError(
            f"positions: the keys of layer {layer} are {np.dtype(spec.dtype)}, which cannot be turned; formats are "
            f"{', '.join(FORMATS)}"
        )
    kinds = {(rope.pairing, rope.pairs, rope.pair_distance) for rope in ropes}
    if len(kinds) > 1:
        raise NotImplementedError(
            f"positions: layers that turn different channels in one cache: {sorted(map(str, kinds))}"
        )
    first, at = ropes[0], {rope: i for i, rope in enumerate(ropes)}
    tables = tuple(at[rope] if (rope := spec.rope_of_layer[layer]) is not None else -1 for layer in layers)
    return Turn(first.pairing, first.pairs, first.pair_distance or 0, spec.rope_offset, tables)


@dataclasses.dataclass(frozen=True)
class Pool:
    """The arrays of a cache, checked.

    Attributes:
        leaves: the arrays in order.
        structure: their pytree.
        num_pages, num_slots: what they hold.
        are_distinct: whether no two leaves are one array, which could not be donated twice.
        shardings: of the leaves; one where all are alike, none of what is traced.
    """

    leaves: tuple[jax.Array, ...]
    structure: Any
    num_pages: int
    num_slots: int
    are_distinct: bool
    shardings: tuple[Any, ...]

    def with_leaves(self, leaves: Sequence[jax.Array]) -> "Pool":
        """The same pool of other arrays, which an operation made of these: distinct if they are, and where they are."""
        if len(self.shardings) > 1:
            # Operations give all results one sharding.
            pairs = zip(leaves, self.shardings, strict=True)
            leaves = [_on(leaf, where) for leaf, where in pairs]
        return dataclasses.replace(self, leaves=tuple(leaves))


def _on(leaf: jax.Array, sharding: Any) -> jax.Array:
    return leaf if checks.is_traced(leaf) or leaf.sharding == sharding else jax.device_put(leaf, sharding)


def _is_frozen(tree: Any) -> bool:
    """Whether a tree of arrays is of tuples alone."""
    return isinstance(tree, jax.Array) or (type(tree) is tuple and all(map(_is_frozen, tree)))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class PagedCache:
    """Paged KV arrays and what they are; a pytree whose leaves are the arrays.

    Attributes:
        pages: the arrays as `spec.layout` describes them: a tuple of one array a layer for a sentence without
            levels, one bare array where the sentence has a `layer` axis.
        spec: what they hold.
    """

    pages: Any
    spec: CacheSpec = dataclasses.field(metadata={"static": True})

    def __post_init__(self) -> None:
        if not isinstance(self.spec, CacheSpec):
            raise TypeError(f"spec: expected a CacheSpec, got {type(self.spec).__name__}")

    def __getstate__(self) -> dict[str, Any]:
        return fields_of(self)  # without what `pool` keeps, which does not pickle

    def __repr__(self) -> str:
        # Not the values: a log wants to know what it is, and a consumed cache has none.
        shapes = [getattr(leaf, "shape", leaf) for leaf in jax.tree.leaves(self.pages)]
        arrays = f"{len(shapes)} arrays of {shapes[0]}" if len(set(map(str, shapes))) == 1 else str(shapes)
        return f"PagedCache({arrays}, {self.spec!r})"

    @property
    def pool(self) -> Pool:
        """The arrays, checked: raises as `CacheSpec.check` does.

        What was found is kept where `pages` cannot change (it is an array, or made of tuples), since the checks of many
        arrays take longer than queueing a transfer of them.
        """
        pool: Pool | None = self.__dict__.get("_pool")
        if pool is None or any([leaf.is_deleted() for leaf in pool.leaves]) or checks.is_tracing():
            pool = self.spec.check(self.pages)
            self._keep(pool)
        return pool

    def _keep(self, pool: Pool) -> None:
        if not checks.is_tracing() and _is_frozen(self.pages):
            object.__setattr__(self, "_pool", pool)

    @classmethod
    def of(cls, pool: Pool, spec: CacheSpec) -> "PagedCache":
        """A cache of arrays that were checked, or that an operation made of such."""
        cache = cls(jax.tree.unflatten(pool.structure, pool.leaves), spec)
        cache._keep(pool)
        return cache

    @property
    def num_pages(self) -> int:
        """Pages of each array."""
        return self.pool.num_pages

    @property
    def num_slots(self) -> int:
        """Slots: pages times tokens a page."""
        return self.pool.num_slots
