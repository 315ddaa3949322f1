"""The pages of one layer, or of a few consecutive ones, as leaves in the order of the cache's layout."""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax

from ..layout import Layout
from ..ops import checks
from ..ops.transfer import Transfer
from ..spec import CacheSpec


class LayerPages(NamedTuple):
    """The pages of some layers.

    Attributes:
        leaves: the arrays, in the order of the layout's levels.
        structure: of the pytree they came in.
        order: where in that pytree each of them was, None where the orders are the same.
    """

    leaves: list[jax.Array]
    structure: Any
    order: tuple[int, ...] | None

    def rebuilt(self, leaves: Sequence[jax.Array]) -> Any:
        """Other leaves in the same pytree."""
        if self.order is not None:
            placed = dict(zip(self.order, leaves, strict=True))
            leaves = [placed[i] for i in range(len(leaves))]
        return jax.tree.unflatten(self.structure, leaves)


def pages_of(pages: Any, spec: CacheSpec, layers: int, name: str) -> LayerPages:
    """Takes pages apart.

    Args:
        pages: one array, or (K, V), for one layer; a tuple of these for several; the array of all layers where the
            layout has a `layer` axis.
        spec: of the cache.
        layers: how many layers `pages` is of.
        name: what to call it in errors.

    Raises:
        TypeError: an entry is no array, or of another dtype than the cache's.
        ValueError: there are more or fewer arrays than the layout has, or one was deleted.
    """
    pool = spec.pool_layout
    leaves, structure = jax.tree.flatten(pages)
    slab = pool.has_axis("layer")
    expected = pool.num_leaves(1) * (1 if slab else layers)
    if len(leaves) != expected:
        raise ValueError(
            f"{name}: got {len(leaves)} arrays, expected {expected} for {layers} layer(s) of layout {str(pool)!r}"
        )
    dtype = spec.dtype
    for i, leaf in enumerate(leaves):
        if not isinstance(leaf, jax.Array):
            raise TypeError(f"{name}: array {i} is no jax.Array but {type(leaf).__name__}")
        if leaf.dtype != dtype:
            raise TypeError(f"{name}: array {i} has dtype {leaf.dtype}, the cache has {dtype}")
        if not checks.is_traced(leaf) and leaf.is_deleted():
            raise ValueError(f"{name}: array {i} was deleted or donated to an earlier call; use that call's result")
    if slab or layers == 1 or pool.levels[0] != "kv":
        return LayerPages(leaves, structure, None)
    # Layer by layer (K, V) in the pytree, all K before all V in the layout.
    order = tuple(2 * layer + kv for kv in range(2) for layer in range(layers))
    return LayerPages([leaves[i] for i in order], structure, order)


@functools.lru_cache(maxsize=1024)
def transfer_of(spec: CacheSpec, layout: Layout, first: int | None, layers: int) -> Transfer:
    """The transfer between such pages and a chunk array.

    Args:
        spec: of the cache.
        layout: of the chunk array, of as many layers.
        first: the first layer, where the pages are those of all layers; else None, so that all layers share one value.
        layers: how many.
    """
    if first is not None:
        return Transfer(spec.pool_layout, layout, spec.sizes, (first, first + layers))
    return Transfer(spec.pool_layout, layout, spec.sizes._replace(layers=layers), (0, layers))
