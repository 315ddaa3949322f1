"""How a transfer splits over a mesh: heads go with the mesh axes the pool's heads are on, all else is whole.

A custom call is opaque to the compiler, which would gather a sharded pool on every device before it. This says
which array axis carries the heads, for `custom_partitioning` (automatic meshes) and for the types of results
(explicit meshes).
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from jax.sharding import NamedSharding, PartitionSpec

from ..layout import Layout, Sizes
from .transfer import Transfer, leaf_kinds


class Leaf(NamedTuple):
    """One array of a transfer: its shape and which axis of it the heads lead, if one does."""

    shape: tuple[int, ...]
    head_axis: int | None = None

    def sharding(self, mesh: Any, mesh_axes: tuple[str, ...]) -> NamedSharding:
        """The sharding of this leaf where heads are split over `mesh_axes`."""
        entries: list[Any] = [None] * len(self.shape)
        if mesh_axes and self.head_axis is not None:
            entries[self.head_axis] = mesh_axes if len(mesh_axes) > 1 else mesh_axes[0]
        return NamedSharding(mesh, PartitionSpec(*entries))


class Split(NamedTuple):
    """The mesh axes that heads are split over, and into how many parts."""

    mesh_axes: tuple[str, ...] = ()
    ways: int = 1


@dataclasses.dataclass(frozen=True)
class Leaves:
    """All arrays of one call: its slots, the pool's leaves and the leaves of its chunks."""

    transfer: Transfer
    num_pages: int
    rows: int
    slots: Leaf
    pool: tuple[Leaf, ...]
    chunks: tuple[Leaf, ...]

    def split(self, pool_types: Sequence[Any]) -> Split:
        """How the pool (avals or shape-and-sharding structs) is split over heads, if every array can follow."""
        for type_, leaf in zip(pool_types, self.pool, strict=True):
            spec = getattr(type_.sharding, "spec", None)
            if spec is None or leaf.head_axis is None or leaf.head_axis >= len(spec) or not spec[leaf.head_axis]:
                continue
            names: Any = spec[leaf.head_axis]
            axes = (names,) if isinstance(names, str) else tuple(names)
            ways = math.prod(dict(type_.sharding.mesh.shape)[axis] for axis in axes)
            every = (*self.pool, *self.chunks)
            if self.transfer.sizes.heads % ways == 0 and all(
                leaf.head_axis is not None and leaf.shape[leaf.head_axis] % ways == 0 for leaf in every
            ):
                return Split(axes, ways)
        return Split()

    def rule(self, operands: Sequence[Leaf], results: Sequence[Leaf]) -> tuple[str, dict[str, int]]:
        """The Shardy rule: one factor `h` for the heads, each other axis on its own; and sizes of fused factors."""
        leading = [leaf.shape[leaf.head_axis] for leaf in (*self.pool, *self.chunks) if leaf.head_axis is not None]
        common = math.gcd(*leading) if leading else 1
        sizes: dict[str, int] = {}
        number = iter(range(10**9))

        def terms(leaf: Leaf) -> str:
            out = []
            for axis, size in enumerate(leaf.shape):
                if axis == leaf.head_axis and size == common:
                    out.append("h")
                elif axis == leaf.head_axis:
                    rest = f"x{next(number)}"
                    sizes.update({"h": common, rest: size // common})
                    out.append(f"(h {rest})")
                else:
                    out.append(f"x{next(number)}")
            return " ".join(out)

        rule = f"{', '.join(map(terms, operands))} -> {', '.join(map(terms, results))}"
        if any(leaf.head_axis is not None and leaf.shape[leaf.head_axis] == common for leaf in (*operands, *results)):
            sizes.pop("h", None)  # Shardy reads it off the axis that is `h` alone
        return rule, sizes


@functools.lru_cache(maxsize=1024)
def describe(
    transfer: Transfer, num_slots: int, pool_shapes: tuple[tuple[int, ...], ...], num_chunks: int, rows: int
) -> Leaves:
    """The arrays of a call over `num_chunks` chunks of `rows` tokens, each checked against its sentence.

    Raises:
        ValueError: a pool leaf does not fit its sentence, or two disagree on the number of pages.
    """
    num_pages, pool = describe_pool(transfer.pool, transfer.sizes, pool_shapes)
    chunk_sizes, chunk_pages = transfer.chunk_pages(rows)
    chunk = tuple(
        Leaf(shape, _head_axis(transfer.chunk, chunk_sizes, chunk_pages, shape, kind))
        for shape, kind in zip(transfer.chunk_shapes(rows), transfer.chunk_kinds, strict=True)
    )
    return Leaves(transfer, num_pages, rows, Leaf((num_slots,)), pool, chunk * num_chunks)


@functools.lru_cache(maxsize=1024)
def describe_pool(layout: Layout, sizes: Sizes, shapes: tuple[tuple[int, ...], ...]) -> tuple[int, tuple[Leaf, ...]]:
    """The number of pages and the leaves of a pool.

    Raises:
        ValueError: a leaf does not fit its sentence, or two disagree on the number of pages.
    """
    kinds = leaf_kinds(layout, sizes)
    pages = [layout.num_pages(shape, sizes, kv=kind) for shape, kind in zip(shapes, kinds, strict=True)]
    if len(set(pages)) > 1:
        other = next(i for i, n in enumerate(pages) if n != pages[0])
        raise ValueError(
            f"pages: arrays 0 and {other} disagree on axis 'page': {pages[0]} and {pages[other]} pages "
            f"(shapes {shapes[0]} and {shapes[other]}, layout {str(layout)!r})"
        )
    leaves = tuple(
        Leaf(shape, _head_axis(layout, sizes, pages[0], shape, kind)) for shape, kind in zip(shapes, kinds, strict=True)
    )
    return pages[0], leaves


def _head_axis(layout: Layout, sizes: Sizes, num_pages: int, shape: Sequence[int], kv: int) -> int | None:
    """The array axis whose even split is an even split of the heads.

    That is the axis which begins where `head` begins: `head` itself, the outer part of it where the array
    splits it, or a fused axis in which it is outermost. None where heads are padded or lie further in.
    """
    if sizes.heads == 1 or "head" in layout.padding:
        return None
    end_of_heads = layout.strides(sizes, num_pages, kv=kv).head * sizes.heads
    step = 1
    for axis in range(len(shape) - 1, -1, -1):
        step *= shape[axis]
        if step == end_of_heads and shape[axis] > 1:
            return axis
    return None


Place = tuple[tuple[int, ...], Any]
"""Shape and sharding of an array that is to be."""


def places_of(transfer: Transfer, arrays: Sequence[Any], rows: int) -> list[Place]:
    """Where the arrays of a chunk of some pool leaves are to be on the device: sharded as these are."""
    leaves = describe(transfer, rows, tuple(x.shape for x in arrays), 1, rows)
    sharding = arrays[0].sharding
    if not isinstance(sharding, NamedSharding):
        return [(leaf.shape, sharding) for leaf in leaves.chunks]
    axes = leaves.split(arrays).mesh_axes
    return [(leaf.shape, leaf.sharding(sharding.mesh, axes)) for leaf in leaves.chunks]
