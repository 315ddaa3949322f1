"""fetch_layers: chunks come to the device layer by layer, ahead of the layer that needs them."""

import functools
import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .. import host
from ..chunk import as_format
from ..layout import Layout
from ..ops import checks, windows
from ..plans import Plan
from ..rope import Rope, stacked_deltas
from ..values import kept
from .staged import Run, Staged
from .store import LayerPart


def fetch_layers(
    plan: Plan,
    *,
    ahead: int = 2,
    parts: Iterable[Sequence[Any]] | None = None,
    first_layer: int = 0,
    grouped: bool = False,
) -> Iterator[Staged]:
    """Sends a load's chunks to the device layer by layer, a few layers ahead of the one that is asked for.

    Touches no page: the caller writes each layer with `write`, in its own program. An array that holds several layers
    is sent once, before the first of them. Iterators share nothing; closing one, at any step, frees what it has
    staged and leaves everything else as it is.

    Args:
        plan: of `jaxkv.plan`; with `parts` its chunks may be descriptions without data.
        ahead: layers (or groups that share an array) that are on their way beyond the current one. With none
            nothing overlaps: a copy waits for what was queued before it. With more than three they arrive out of
            order on an NVIDIA GPU: the runtime hands copies to four streams in turn, and the copy engine works off one
            stream before the next, so that a layer's copy comes after those of later layers.
        parts: the chunks' arrays where they come later: for each layer (or group) in order, a sequence with the
            arrays of each chunk (or a `LayerPart`), asked for when they are to be sent.
        first_layer: where to begin, the first layer of an array; `parts` begin with its.
        grouped: yield the layers that share an array as one, for a `write` of all their pages: for short requests,
            where a step a layer takes longer than the copy.

    Returns:
        An iterator of one `Staged` per layer (or group). Its arrays are committed to the chunks' device, so pages that
        are not make the caller's program compile twice: once for the first layer, once for what that returns.

    Raises:
        TypeError: `plan` is no plan.
        ValueError: `ahead` is negative, chunks have no data and `parts` is not given, chunks differ in the layers
            that share an array, or `first_layer` is not the first of one. From the iterator: parts that do not fit
            the plan, naming the layer.
    """
    if not isinstance(plan, Plan):
        raise TypeError(f"plan: expected a Plan, got {type(plan).__name__}")
    if isinstance(ahead, bool) or not isinstance(ahead, int) or ahead < 0:
        raise ValueError(f"ahead: expected an int of at least 0, got {ahead!r}")
    plan.check(data_later=True)
    if parts is None:
        for i, chunk in enumerate(plan.chunks):
            if not chunk.data:
                raise ValueError(f"plan: chunk {i} has no data; give it with parts=")
    source = _Source(plan, parts, grouped)
    if first_layer == 0:
        return _fetch(source, 0, ahead)
    begins = [layers.start for layers in source.groups]
    if first_layer not in begins:
        raise ValueError(f"first_layer: no array begins with layer {first_layer!r}; they do with {begins}")
    return _fetch(source, begins.index(first_layer), ahead)


def _fetch(source: "_Source", first: int, ahead: int) -> Iterator[Staged]:
    coming = iter(source.groups[first:])
    waiting: deque[tuple[range, list[tuple[jax.Array, ...]]]] = deque()

    def send(count: int) -> None:
        waiting.extend((layers, source.send(layers)) for layers in itertools.islice(coming, count))

    send(1)
    is_first = True
    while waiting:
        layers, arrays = waiting.popleft()
        steps = [layers] if source.grouped else [range(layer, layer + 1) for layer in layers]
        for step in steps:
            staged = source.staged(step, layers, arrays)
            if is_first:
                # The device is idle until the first layer is queued: what is sent before that costs time, but a
                # copy that is sent after it waits until that layer was computed. So one more goes before it.
                send(min(ahead, 1))
                is_first = False
            yield staged
            if step is steps[-1]:
                # The caller has queued these layers and asks for the next one.
                send(ahead + 1 - len(waiting))
        del arrays, staged


class _Source:
    """Where a load's layers come from: what is the same for all of them, worked out once."""

    def __init__(self, plan: Plan, parts: Iterable[Sequence[Any]] | None, grouped: bool) -> None:
        self._plan, self._spec, self.grouped = plan, plan.spec, grouped
        self._parts = None if parts is None else iter(parts)
        formats = [chunk.format for chunk in plan.chunks] or [as_format(self._spec, None, 1)]
        self.groups = formats[0].groups(self._spec.num_layers)
        for i, format in enumerate(formats):
            if format is not formats[0] and format.groups(self._spec.num_layers) != self.groups:
                raise ValueError(
                    f"chunks: chunk {i} has {format.layers_per_array} layers in an array, chunk 0 has "
                    f"{formats[0].layers_per_array}; layer by layer they must agree"
                )
        self._formats = formats
        self._layouts = [_of_one_layer(format.array_layout) for format in formats]
        self._own: dict[Any, list[Any]] = {}
        self._is_slab = self._spec.pool_layout.has_axis("layer")

    # What the first copy does not wait for.
    @functools.cached_property
    def _runs(self) -> list[list[int]]:
        """Neighbours of one shape, which are written by one scatter."""
        kinds = [(format, chunk.num_rows) for format, chunk in zip(self._formats, self._plan.chunks, strict=False)]
        return [list(members) for _, members in itertools.groupby(range(len(kinds)), key=kinds.__getitem__)]

    @functools.cached_property
    def _sharding(self) -> Any:
        """Where the chunks are, None where that is not known."""
        arrays = (array for chunk in self._plan.chunks for array in chunk.data)
        return None if checks.is_tracing() else next((array.sharding for array in arrays), None)

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
        traced = any(map(checks.is_traced, flat))
        sent = iter(host.fetch(flat, None if traced else [_device_sharding(array.sharding) for array in flat]))
        return [tuple(next(sent) for _ in of_chunk) for of_chunk in arrays]

    def staged(self, layers: range, group: range, arrays: Sequence[tuple[jax.Array, ...]]) -> Staged:
        """Some layers of a group that was sent: one of them, or all."""
        turning = self._plan.positions is not None
        turn = self._spec.turn(layers) if turning else None
        slots = self._table("slots", self._slots_of_runs)
        deltas: list[tuple[jax.Array, ...]] = [()] * len(self._runs)
        if turn is not None:
            ropes = self._spec.ropes(layers)
            deltas = self._table(ropes, lambda: self._deltas_of(ropes))
        runs = []
        for number, members in enumerate(self._runs):
            data = [array for k in members for array in arrays[k]]
            layout, axis = self._formats[members[0]].array_layout, None
            if not self.grouped:
                layout, axis = self._layouts[members[0]]
            if axis is not None:
                data = _take_layer(data, np.int32(layers.start - group.start), axis=axis)
            rows = self._plan.chunks[members[0]].num_rows
            runs.append(Run(tuple(data), slots[number], deltas[number], layout, rows, len(members)))
        if not runs:
            runs.append(Run((), slots[0], (), Layout("token head dim"), 0, 0))
        first = layers.start if self._is_slab else None
        of_plan = (self._spec, turn, first, len(layers), self._plan.num_slots)
        return Staged(tuple(runs), self._plan.row_of_token, *of_plan)

    def _slots_of_runs(self) -> list[Any]:
        """The slots of each run's rows; those to be zeroed follow the last ones."""
        by_chunk = self._plan.slots_by_chunk()
        parts = [[by_chunk[k] for k in members] for members in self._runs] or [[]]
        parts[-1] = [*parts[-1], self._plan.zero_slots]
        known = all(isinstance(slots, np.ndarray) for part in parts for slots in part)
        return self._sent([(np if known else jnp).concatenate(part) for part in parts])

    def _deltas_of(self, ropes: tuple[Rope, ...]) -> list[tuple[jax.Array, ...]]:
        """The delta tables of each run, for all layers that turn alike."""
        assert self._plan.positions is not None  # else nothing turns
        sizes = (sum(self._plan.chunks[k].num_rows for k in members) for members in self._runs)
        tables = []
        for first, last in itertools.pairwise(itertools.accumulate(sizes, initial=0)):
            positions = self._sent([side[..., first:last] for side in self._plan.positions])
            tables.append(_deltas(*positions, ropes=ropes))
        return tables

    def _table(self, kind: Any, make: Callable[[], list[Any]]) -> list[Any]:
        """What all layers share: sent once, and kept with the plan for the next time it is loaded."""
        if self._sharding is None or checks.is_tracing():
            own = self._own
        else:
            own = kept(self._plan, "_tables", dict)
        key = (kind, self._sharding)
        if key not in own or not checks.are_alive(jax.tree.leaves(own[key])):  # a `Staged` of it may have been donated
            own[key] = make()
        return own[key]

    def _sent(self, tables: Sequence[Any]) -> list[jax.Array]:
        """Small tables, beside the chunks' device."""
        if self._sharding is None or checks.is_tracing():
            return [jnp.asarray(table) for table in tables]
        return host.send_beside(tables, _device_sharding(self._sharding))

    def _checked(self, given: Any, layers: range) -> list[tuple[jax.Array, ...]]:
        """The arrays of a group that came late, one tuple a chunk."""
        chunks, layer = self._plan.chunks, layers.start
        if given is None:
            raise ValueError(f"parts: none are left for layer {layer}, {self._spec.num_layers} layers are to come")
        if isinstance(given, LayerPart) and given.layers != (layers.start, layers.stop):
            raise ValueError(f"parts: got layers {given.layers} where {(layers.start, layers.stop)} are due")
        entries = given.data if isinstance(given, LayerPart) else given
        if not isinstance(entries, (list, tuple)):
            raise TypeError(
                f"parts: layer {layer}: expected a list with the parts of {len(chunks)} chunks, got "
                f"{type(entries).__name__}"
            )
        if len(entries) != len(chunks):
            raise ValueError(f"parts: layer {layer} has parts of {len(entries)} chunks, the plan has {len(chunks)}")
        shapes: dict[Any, Any] = {}  # the chunks of one store differ in data alone
        arrays = []
        for k, entry in enumerate(entries):
            kind = (self._formats[k], chunks[k].num_rows)
            if kind not in shapes:
                shapes[kind] = self._spec.transfer(kind[0].array_layout, layers).chunk_shapes(kind[1])
            arrays.append((entry,) if isinstance(entry, jax.Array) else entry)
            _check_part(f"parts: layer {layer}, chunk {k}", arrays[-1], shapes[kind], self._spec.dtype)
        return arrays


def _check_part(where: str, arrays: Any, shapes: tuple[tuple[int, ...], ...], dtype: Any) -> None:
    """Checks what came as one layer of one chunk."""
    if not isinstance(arrays, (list, tuple)) or not all(isinstance(array, jax.Array) for array in arrays):
        kind = [type(array).__name__ for array in arrays] if isinstance(arrays, (list, tuple)) else type(arrays)
        raise TypeError(f"{where}: expected {len(shapes)} jax.Array, got {kind}")
    found = [array.shape for array in arrays]
    if found != list(shapes):
        raise ValueError(
            f"{where}: got {len(found)} array(s) of shapes {found}, expected {len(shapes)}: {list(shapes)}"
        )
    for array in arrays:
        if array.dtype != dtype:
            raise TypeError(f"{where}: got dtype {array.dtype}, the cache has {dtype}")
        if checks.is_traced(array):
            continue
        if array.is_deleted():
            raise ValueError(f"{where}: this array was deleted or donated to an earlier call")
        if array.sharding.memory_kind == "unpinned_host":
            raise ValueError(f"{where}: memory kind 'unpinned_host', expected 'pinned_host' (or 'device')")


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
    levels = [level for level in layout.levels if level != "layer"]
    return Layout(" ".join([*levels, "|"] * bool(levels) + words[:axis] + words[axis + 1 :])), axis


@functools.partial(jax.jit, static_argnames="axis")
def _take_layer(arrays: Sequence[jax.Array], layer: Any, *, axis: int) -> list[jax.Array]:
    # As integers: XLA's slices of floats may change the payload of a NaN.
    taken = [jax.lax.dynamic_index_in_dim(windows.as_bits(x), layer, axis, keepdims=False) for x in arrays]
    return [windows.from_bits(bits, x.dtype) for bits, x in zip(taken, arrays, strict=True)]


@functools.partial(jax.jit, static_argnames="ropes")
def _deltas(old: jax.Array, new: jax.Array, *, ropes: tuple[Rope, ...]) -> tuple[jax.Array, ...]:
    return stacked_deltas(ropes, old, new)


@functools.lru_cache(maxsize=256)
def _device_sharding(sharding: Any) -> Any:
    """The same in the devices' own memory."""
    return sharding.with_memory_kind(next(iter(sharding.device_set)).default_memory().kind)
