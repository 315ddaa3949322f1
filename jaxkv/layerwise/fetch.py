"""fetch_layers: chunks come to the device layer by layer, ahead of the layer that needs them."""

import functools
import itertools
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .. import host
from ..chunk import as_format
from ..layout import Layout
from ..ops import checks
from ..plans import Plan
from ..rope import Rope, stacked_deltas
from .staged import Run, Staged
from .store import LayerPart


def fetch_layers(
    plan: Plan,
    *,
    ahead: int = 2,
    parts: Iterable[Sequence[Any]] | None = None,
) -> Iterator[Staged]:
    """Sends a load's chunks to the device layer by layer, a few layers ahead of the one that is asked for.

    Touches no page: the caller writes each layer with `write`, in its own program. An array that holds several layers
    is sent once, before the first of them. Iterators share nothing; closing one, at any step, frees what it has
    staged and leaves everything else as it is.

    Args:
        plan: of `jaxkv.plan`; with `parts` its chunks may be descriptions without data.
        ahead: layers (or groups that share an array) that are on their way beyond the current one. Two keep the link
            busy; more make the copies wait for computations that were queued before them.
        parts: the chunks' arrays where they come later: for each layer (or group) in order, a sequence with the
            arrays of each chunk (or a `LayerPart`), asked for when they are to be sent.

    Returns:
        An iterator of one `Staged` per layer.

    Raises:
        TypeError: `plan` is no plan.
        ValueError: `ahead` is negative, chunks have no data and `parts` is not given, or chunks differ in the layers
            that share an array. From the iterator: parts that do not fit the plan, naming the layer.
    """
    if not isinstance(plan, Plan):
        raise TypeError(f"plan: expected a Plan, got {type(plan).__name__}")
    if isinstance(ahead, bool) or not isinstance(ahead, int) or ahead < 0:
        raise ValueError(f"ahead: expected an int of at least 0, got {ahead!r}")
    if parts is None:
        for i, chunk in enumerate(plan.chunks):
            if not chunk.data:
                raise ValueError(f"plan: chunk {i} has no data; give it with parts=")
    return _fetch(_Source(plan, parts), ahead)


def _fetch(source: "_Source", ahead: int) -> Iterator[Staged]:
    coming = iter(source.groups)
    waiting = deque((layers, source.send(layers)) for layers in itertools.islice(coming, ahead + 1))
    while waiting:
        layers, arrays = waiting.popleft()
        for layer in layers:
            yield source.staged(layer, layers, arrays)
            if layer == layers[0]:
                # The caller has queued this layer and asks for the next one: its place is free.
                waiting.extend((later, source.send(later)) for later in itertools.islice(coming, 1))
        del arrays


class _Source:
    """Where a load's layers come from: what is the same for all of them, worked out once."""

    def __init__(self, plan: Plan, parts: Iterable[Sequence[Any]] | None) -> None:
        self._plan, self._spec = plan, plan.spec
        self._parts = None if parts is None else iter(parts)
        formats = [chunk.format for chunk in plan.chunks] or [as_format(self._spec, None, 1)]
        self.groups = formats[0].groups(self._spec.num_layers)
        for i, format in enumerate(formats):
            if format.groups(self._spec.num_layers) != self.groups:
                raise ValueError(
                    f"chunks: chunk {i} has {format.layers_per_array} layers in an array, chunk 0 has "
                    f"{formats[0].layers_per_array}; layer by layer they must agree"
                )
        self._layouts = [_of_one_layer(format.array_layout) for format in formats]
        # Neighbours of one shape are written by one scatter.
        self._runs = [
            list(members)
            for _, members in itertools.groupby(
                range(len(plan.chunks)), key=lambda k: (formats[k], plan.chunks[k].num_rows)
            )
        ]
        self._slots = self._slots_of_runs()
        self._deltas: dict[Rope, list[tuple[jax.Array, ...]]] = {}
        slab = self._spec.pool_layout.has_axis("layer")
        self._slab_layer = (lambda layer: layer) if slab else (lambda layer: None)
        self._row_of_token = _on_device(plan.row_of_token)

    def send(self, layers: range) -> list[tuple[jax.Array, ...]]:
        """Sends the arrays of a group to the device: for each chunk its arrays."""
        chunks = self._plan.chunks
        if self._parts is None:
            per_group = [len(chunk.data) // len(self.groups) for chunk in chunks]
            at = self.groups.index(layers)
            arrays = [chunk.data[at * n : (at + 1) * n] for chunk, n in zip(chunks, per_group, strict=True)]
        else:
            arrays = self._checked(next(self._parts, None), layers)
        flat = [array for of_chunk in arrays for array in of_chunk]
        if any(map(checks.is_traced, flat)):
            flat = list(host.fetch(flat, None))
        elif flat:
            flat = jax.device_put(flat, [_device_sharding(array) for array in flat])
        sent = iter(flat)
        return [tuple(next(sent) for _ in of_chunk) for of_chunk in arrays]

    def staged(self, layer: int, layers: range, arrays: Sequence[tuple[jax.Array, ...]]) -> Staged:
        """One layer of a group that was sent."""
        rope = self._spec.rope_of_layer[layer] if self._plan.positions is not None else None
        turn = None if rope is None else self._spec.turn(range(layer, layer + 1))
        runs = []
        for number, members in enumerate(self._runs):
            data = [array for k in members for array in arrays[k]]
            layout, axis = self._layouts[members[0]]
            if axis is not None:
                data = _take_layer(data, np.int32(layer - layers.start), axis=axis)
            deltas = () if rope is None else self._deltas_of(rope)[number]
            rows = self._plan.chunks[members[0]].num_rows
            runs.append(Run(tuple(data), self._slots[number], deltas, layout, rows, len(members)))
        if not runs:
            runs.append(Run((), self._slots[0], (), Layout("token head dim"), 0, 0))
        return Staged(tuple(runs), self._row_of_token, self._spec, turn, self._slab_layer(layer))

    def _slots_of_runs(self) -> list[Any]:
        """The slots of each run's rows; those to be zeroed follow the last ones."""
        by_chunk = self._plan.slots_by_chunk()
        parts = [[by_chunk[k] for k in members] for members in self._runs] or [[]]
        parts[-1] = [*parts[-1], self._plan.zero_slots]
        known = all(isinstance(slots, np.ndarray) for part in parts for slots in part)
        return [_on_device((np if known else jnp).concatenate(part)) for part in parts]

    def _deltas_of(self, rope: Rope) -> list[tuple[jax.Array, ...]]:
        """The delta tables of each run, made once for all layers that turn alike."""
        if rope not in self._deltas:
            by_chunk = [p for p in self._plan.positions_by_chunk() if p is not None]
            tables = []
            for members in self._runs:
                old, new = (
                    jnp.concatenate([jnp.asarray(by_chunk[k][side]) for k in members], axis=-1) for side in (0, 1)
                )
                tables.append(_deltas(old, new, rope=rope))
            self._deltas[rope] = tables
        return self._deltas[rope]

    def _checked(self, given: Any, layers: range) -> list[tuple[jax.Array, ...]]:
        """The arrays of a group that came late, one tuple a chunk."""
        chunks, layer = self._plan.chunks, layers.start
        if given is None:
            raise ValueError(f"parts: none are left for layer {layer}, {self._spec.num_layers} layers are to come")
        entries = list(given.data) if isinstance(given, LayerPart) else list(given)
        if len(entries) != len(chunks):
            raise ValueError(f"parts: layer {layer} has parts of {len(entries)} chunks, the plan has {len(chunks)}")
        return [(entry,) if isinstance(entry, jax.Array) else tuple(entry) for entry in entries]


@functools.lru_cache(maxsize=64)
def _of_one_layer(layout: Layout) -> tuple[Layout, int | None]:
    """The layout of one layer of an array, and the array's axis of layers (None where it has none)."""
    if not layout.has_axis("layer"):
        return layout, None
    units = layout.arrays[0]
    if ("layer",) not in units:
        raise ValueError(
            f"chunks: the layers of {str(layout)!r} are fused with another axis; they cannot be taken apart"
        )
    axis = units.index(("layer",))
    words = ["1" if not unit else unit[0] if len(unit) == 1 else f"({' '.join(unit)})" for unit in units]
    return Layout(" ".join(words[:axis] + words[axis + 1 :])), axis


@functools.partial(jax.jit, static_argnames="axis")
def _take_layer(arrays: Sequence[jax.Array], layer: Any, *, axis: int) -> list[jax.Array]:
    return [jax.lax.dynamic_index_in_dim(array, layer, axis, keepdims=False) for array in arrays]


@functools.partial(jax.jit, static_argnames="rope")
def _deltas(old: jax.Array, new: jax.Array, *, rope: Rope) -> tuple[jax.Array, ...]:
    return stacked_deltas((rope,), old, new)


def _on_device(values: Any) -> Any:
    """Small tables are sent once, not with every layer."""
    return values if isinstance(values, jax.Array) else jnp.asarray(values)


def _device_sharding(array: jax.Array) -> Any:
    kind = next(iter(array.devices())).default_memory().kind
    return array.sharding.with_memory_kind(kind)
