"""What is checked before an op is launched: pools, rows and slots, each error naming the argument."""

import concurrent.futures
import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.extend.core
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from ..layout import Layout, Sizes

INT32_MAX = 2**31 - 1
OUT_OF_RANGE = ("raise", "skip")


def is_traced(x: Any) -> bool:
    """Whether the values of `x` are unknown because a function is being traced."""
    return isinstance(x, jax.core.Tracer)


def is_tracing() -> bool:
    """Whether a function is being traced, over values that a call gets or over none of them."""
    return jax.extend.core.get_opaque_trace_state() != _NOT_TRACING


def _not_tracing() -> Any:
    """JAX's trace state where nothing is traced: that of a new thread, since a traced function may import this."""
    with concurrent.futures.ThreadPoolExecutor(1) as new_thread:
        return new_thread.submit(jax.extend.core.get_opaque_trace_state).result()


_NOT_TRACING = _not_tracing()


def check_dtype(dtype: DTypeLike, name: str) -> None:
    """Raises TypeError for a dtype whose elements are not moved as whole bytes."""
    dtype = np.dtype(dtype)
    info = jnp.iinfo if jnp.issubdtype(dtype, jnp.integer) else jnp.finfo
    real = jnp.issubdtype(dtype, jnp.integer) or jnp.issubdtype(dtype, jnp.floating)
    if not real or info(dtype).bits != 8 * dtype.itemsize:
        raise TypeError(f"{name}: dtype {dtype} cannot be moved; integers and floats of 8 to 64 bits can")


def arrays_of(tree: Any, layout: Layout, layers: int, name: str) -> tuple[list[jax.Array], Any]:
    """The arrays of a pytree, in the order of the layout's levels, and its structure.

    Raises:
        TypeError: a leaf is no array.
        ValueError: the pytree is not of the layout's levels, or an array was deleted.
    """
    leaves, structure = jax.tree.flatten(tree)
    if are_alive(leaves):
        if leaves and _nested_as(tree, layout.levels, layers) and not (len(leaves) > 1 and _has_mapping(tree)):
            return leaves, structure
    # Something is wrong: say what, and where in the tree.
    if _has_mapping(tree) and len(leaves) > 1:
        raise TypeError(
            f"{name}: got {_kind_of(tree)}, expected tuples or lists in the order of the layers, "
            f"{_describe(layout, layers)}; JAX orders a dict's arrays by their keys, layers.10 before layers.2"
        )
    paths, structure = jax.tree_util.tree_flatten_with_path(tree)
    if not paths:
        raise ValueError(f"{name}: there are no arrays in {tree!r}, expected {_describe(layout, layers)}")
    for path, leaf in paths:
        if not isinstance(leaf, jax.Array):
            where = name + jax.tree_util.keystr(path)
            raise TypeError(f"{where}: expected a jax.Array, got {type(leaf).__module__}.{type(leaf).__qualname__}")
        if not is_traced(leaf) and leaf.is_deleted():
            where = name + jax.tree_util.keystr(path)
            raise ValueError(f"{where}: this array was deleted or donated to an earlier call; use that call's result")
    found = f"{len(tree)} entries and {len(paths)} arrays" if isinstance(tree, Sequence) else f"{len(paths)} arrays"
    raise ValueError(f"{name}: got {found}, expected {_describe(layout, layers)}")


def are_alive(leaves: Iterable[Any]) -> bool:
    """Whether all of these are arrays that were not deleted."""
    return all(
        isinstance(leaf, jax.core.Tracer) or (isinstance(leaf, jax.Array) and not leaf.is_deleted()) for leaf in leaves
    )


def _has_mapping(tree: Any) -> bool:
    """Whether a tree of sequences has a dict in it, whose arrays come in the order of its keys."""
    if isinstance(tree, Mapping):
        return True
    return isinstance(tree, (list, tuple)) and any(map(_has_mapping, tree))


def _kind_of(tree: Any) -> str:
    return type(tree).__name__ if isinstance(tree, Mapping) else f"a dict inside a {type(tree).__name__}"


def _nested_as(tree: Any, levels: Sequence[str], layers: int) -> bool:
    """Whether every level of a tree has its number of entries, as far as it is a sequence, and arrays at its end."""
    sizes = [layers if level == "layer" else 2 for level in levels]
    if not levels and isinstance(tree, jax.Array):
        return True
    if not levels or not isinstance(tree, Sequence):
        return len(jax.tree.leaves(tree)) == math.prod(sizes)
    return len(tree) == sizes[0] and all(_nested_as(entry, levels[1:], layers) for entry in tree)


def _describe(layout: Layout, layers: int) -> str:
    levels = " of ".join(f"{layers if level == 'layer' else 2} ({level})" for level in layout.levels)
    return f"{levels or 'one array'} for layout {str(layout)!r} of {layers} layers"


def check_placement(arrays: Sequence[jax.Array], head_axes: Sequence[int | None], name: str) -> None:
    """Checks where arrays are: in device memory, on the same devices, sharded over heads or not at all.

    Raises:
        ValueError: an array is in host memory, or on other devices than the first.
        NotImplementedError: an array is sharded over another axis than heads.
    """
    first = arrays[0].sharding
    before: tuple[Any, ...] = ()
    for i, (array, head_axis) in enumerate(zip(arrays, head_axes, strict=True)):
        sharding = array.sharding
        this = (sharding, array.shape, head_axis)
        if this == before:
            continue
        before = this
        kind, default, axis = _placement(*this)
        if kind not in (None, default):
            raise ValueError(f"{name}: array {i} is in memory kind {kind!r}, expected {default!r}")
        if sharding != first and sharding.device_set != first.device_set:
            raise ValueError(
                f"{name}: array {i} is on {sorted(map(str, sharding.device_set))}, array 0 on "
                f"{sorted(map(str, first.device_set))}; all layers of one cache must be on the same devices"
            )
        if axis is not None:
            raise NotImplementedError(
                f"{name}: array {i} of shape {array.shape} is sharded over axis {axis} ({sharding}); only the axis "
                f"that the heads lead ({head_axis}) may be"
            )


@functools.lru_cache(maxsize=1024)
def _placement(sharding: Any, shape: tuple[int, ...], head_axis: int | None) -> tuple[str | None, str, int | None]:
    """Memory kind, the kind it should be, and the first axis other than heads that is split."""
    default = next(iter(sharding.device_set)).default_memory().kind
    local = sharding.shard_shape(shape)
    split = (i for i, (size, whole) in enumerate(zip(local, shape, strict=True)) if size != whole and i != head_axis)
    return sharding.memory_kind, default, next(split, None)


def committed(arrays: Sequence[jax.Array]) -> list[jax.Array]:
    """The same arrays, committed to the devices they are on; they share their memory with the given ones.

    What a program is compiled for depends on it: a cache would compile everything anew once it went through a load,
    whose results are committed.
    """
    loose = {id(array): array for array in arrays if not array.committed}
    if not loose:
        return list(arrays)
    bound = jax.device_put(list(loose.values()), [array.sharding for array in loose.values()])
    known = dict(zip(loose, bound, strict=True))
    return [known.get(id(array), array) for array in arrays]


def check_same_dtype(arrays: Sequence[jax.Array], dtype: DTypeLike, name: str) -> None:
    """Raises TypeError where an array is of another dtype than the cache; nothing is ever cast."""
    for i, array in enumerate(arrays):
        if array.dtype != dtype:
            raise TypeError(f"{name}: array {i} has dtype {array.dtype}, the cache has {np.dtype(dtype)}")


def check_choice(name: str, value: Any, choices: Sequence[str | None]) -> None:
    """Raises ValueError where a value, which may be anything, is none of the words a call knows."""
    if isinstance(value, (str, type(None))) and value in choices:
        return
    raise ValueError(f"{name}: {value!r} is unknown, expected one of {choices}")


def check_out_of_range(out_of_range: str) -> None:
    """Raises ValueError for an unknown way to treat slots past the pool."""
    check_choice("out_of_range", out_of_range, OUT_OF_RANGE)


def slots_int32(slots: Any, *, name: str = "slots", read: bool = True) -> Any:
    """Slots as int32, by value: what int32 cannot hold becomes -1 (negative) or 2^31 - 1 (too large).

    Args:
        slots: integers `[n]`: a NumPy array, a list or a jax.Array.
        name: what to call them in errors.
        read: whether to read a concrete jax.Array on the host, which waits for it.

    Returns:
        A NumPy copy where the values are known and may be read, else a jax.Array.

    Raises:
        TypeError: they are no integers.
        ValueError: they are not one-dimensional, or the array was deleted.
    """
    if type(slots) is np.ndarray and slots.dtype == np.int32 and slots.ndim == 1:
        return np.maximum(slots, np.int32(-1))  # the usual case: what follows looks up more than it computes
    on_device = isinstance(slots, jax.Array)
    if on_device and not is_traced(slots) and slots.is_deleted():
        raise ValueError(f"{name}: this array was deleted or donated to an earlier call")
    if not on_device:
        try:
            slots = np.asarray(slots)
        except (ValueError, TypeError) as error:
            raise TypeError(
                f"{name}: expected integers in one dimension, got {type(slots).__name__}: {error}"
            ) from None
        if slots.size == 0 and slots.dtype == np.float64:
            slots = slots.astype(np.int32)  # an empty list has no integers to tell its dtype by
    if not jnp.issubdtype(slots.dtype, jnp.integer):
        raise TypeError(f"{name}: expected integers, got dtype {slots.dtype}")
    if slots.ndim != 1:
        raise ValueError(f"{name}: expected one dimension, got shape {slots.shape}")
    if on_device and (is_traced(slots) or not read):
        return narrow_traced(slots if is_traced(slots) else _in_device_memory(slots))
    slots = np.asarray(slots)
    if np.issubdtype(slots.dtype, np.unsignedinteger):
        return np.minimum(slots, slots.dtype.type(min(INT32_MAX, np.iinfo(slots.dtype).max))).astype(np.int32)
    if slots.dtype == np.int64:
        return np.clip(slots, -1, INT32_MAX).astype(np.int32)
    return np.maximum(slots.astype(np.int32), np.int32(-1))


def _in_device_memory(array: jax.Array) -> jax.Array:
    """An array that XLA may index: one in host memory is copied to its own device first."""
    kind = next(iter(array.devices())).default_memory().kind
    if array.sharding.memory_kind in (None, kind):
        return array
    return jax.device_put(array, array.sharding.with_memory_kind(kind))


def narrow_traced(slots: jax.Array) -> jax.Array:
    """Integers as int32, by value: what it cannot hold becomes -1 (negative) or 2^31 - 1 (too large)."""
    if slots.dtype == jnp.int32:
        return slots
    info = jnp.iinfo(slots.dtype)
    if info.max > INT32_MAX:
        slots = jnp.where(slots > jnp.asarray(INT32_MAX, slots.dtype), jnp.asarray(INT32_MAX, slots.dtype), slots)
    if info.min < -(2**31):
        slots = jnp.where(slots < jnp.asarray(-1, slots.dtype), jnp.asarray(-1, slots.dtype), slots)
    return slots.astype(jnp.int32)


def check_slots_in_pool(slots: np.ndarray, num_slots: int, *, name: str = "slots", given: Any = None) -> None:
    """Raises ValueError naming the first slot that is past the pool.

    Args:
        slots: int32 `[n]`.
        num_slots: slots in the pool.
        name: what to call them in the error.
        given: the slots as the caller gave them, where int32 may have cut their values.
    """
    bad = np.flatnonzero(slots >= num_slots)
    if bad.size:
        value = (slots if given is None else np.asarray(given))[bad[0]]
        raise ValueError(
            f"{name}: index {bad[0]} has slot {value}, but the pool has {num_slots} slots "
            f"(0 to {num_slots - 1}); pass out_of_range='skip' to leave such tokens out"
        )


def nested(leaves: Sequence[Any], layout: Layout, sizes: Sizes) -> Any:
    """Leaves as the nested tuples of the layout's levels; a bare array where it has none."""
    leaves = list(leaves)
    for level in reversed(layout.levels):
        size = sizes.layers if level == "layer" else 2
        leaves = [tuple(leaves[i : i + size]) for i in range(0, len(leaves), size)]
    return leaves[0]
