"""What the tests of the layer-wise calls share: the pages of each layer, and whole loads and stores made of layers."""

import functools
from collections.abc import Callable, Iterable
from typing import Any

import jax
import numpy as np

import jaxkv


def is_slab(spec: jaxkv.CacheSpec) -> bool:
    """Whether each array holds all layers."""
    return spec.layout.has_axis("layer")


def split(cache: jaxkv.PagedCache) -> list[Any]:
    """The pages of each layer, as `write` takes them; of a slab the one tree that holds all layers."""
    spec, pages = cache.spec, cache.pages
    if is_slab(spec):
        return [pages]
    return list(zip(*pages, strict=True)) if spec.layout.levels[0] == "kv" else list(pages)


def join(pages: Iterable[Any], spec: jaxkv.CacheSpec) -> jaxkv.PagedCache:
    """The cache of these layers: what `split` undoes."""
    pages = list(pages)
    if is_slab(spec):
        return jaxkv.PagedCache(pages[0], spec)
    nested = tuple(zip(*pages, strict=True)) if spec.layout.levels[0] == "kv" else tuple(pages)
    return jaxkv.PagedCache(nested, spec)


@functools.partial(jax.jit, static_argnames="implementation", donate_argnums=0)
def write(page: Any, staged: jaxkv.Staged, *, implementation: str | None = None) -> Any:
    """`jaxkv.write` as a caller has it: in a program of the caller's own, the page donated."""
    return jaxkv.write(page, staged, implementation=implementation)


def load(
    cache: jaxkv.PagedCache,
    plan: jaxkv.Plan,
    *,
    implementation: str | None = None,
    edit: Callable[[int, jaxkv.Staged], jaxkv.Staged] | None = None,
    writer: Callable[..., Any] = write,
    **options: Any,
) -> jaxkv.PagedCache:
    """A whole load, layer by layer."""
    spec, pages, seen = cache.spec, split(cache), 0
    for layer, staged in enumerate(jaxkv.fetch_layers(plan, **options)):
        assert isinstance(staged, jaxkv.Staged)
        staged = staged if edit is None else edit(layer, staged)
        at = 0 if is_slab(spec) else layer
        pages[at] = writer(pages[at], staged, implementation=implementation)
        seen += 1
    assert seen == spec.num_layers
    return join(pages, spec)


def groups(num_layers: int, size: int) -> list[range]:
    return [range(first, min(first + size, num_layers)) for first in range(0, num_layers, size)]


def store(cache: jaxkv.PagedCache, slots: Any, *, size: int = 0, **options: Any) -> tuple[jaxkv.LayerPart, ...]:
    """The parts of a whole store, layer by layer, or in groups of `size` layers."""
    spec, pages = cache.spec, split(cache)
    options = options if isinstance(slots, jaxkv.StorePlan) else {"spec": spec, **options}
    parts = []
    for layers in groups(spec.num_layers, size or 1):
        of_layers = pages[0] if is_slab(spec) else tuple(pages[layers.start : layers.stop])
        if not size and not is_slab(spec):
            of_layers = of_layers[0]
        parts.append(jaxkv.store_layer(of_layers, slots, layer=layers if size else layers.start, **options))
    return tuple(parts)


def numpy(tree: Any) -> Any:
    return jax.tree.map(np.asarray, tree)
