"""store_layer and join_layers: layers leave for the host one by one, and become chunks."""

import dataclasses
import functools
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .. import host, paths
from ..chunk import Chunk, ChunkFormat, Fingerprint, as_format
from ..ops import checks, primitive
from ..ops.gather import gather_leaves
from ..ops.pinned import place_leaves
from ..ops.sharding import describe_pool, places_of
from ..ops.transfer import Transfer
from ..selection import Selection, check_chunk_tokens, check_ranges, select
from ..spec import CacheSpec, PagedCache
from ..tuning import Tuning, check_tuning
from ..values import fields_of, kept
from .pages import pages_of, transfer_of


@dataclasses.dataclass(frozen=True)
class StorePlan:
    """The tokens of a layer-wise store, checked once for all layers; of the host, and no argument of a jitted function.

    Attributes:
        chosen: the slots and positions, in rows of chunks.
        slots: the slots of all rows, int32 `[chunks * rows]`.
        spec: of the cache.
        num_slots: the smallest pool that has all of the slots.
        out_of_range: what was asked for slots past the pool, "raise" or "skip".
    """

    chosen: Selection
    slots: Any
    spec: CacheSpec
    num_slots: int
    out_of_range: str

    def __getstate__(self) -> dict[str, Any]:
        return fields_of(self)  # without what was sent

    def slots_beside(self, page: jax.Array) -> jax.Array:
        """The slots on the devices of some pages: sent there once, for all layers."""
        sent: dict[Any, jax.Array] = kept(self, "_sent", dict)
        sharding = page.sharding
        if sharding not in sent or sent[sharding].is_deleted():
            sent[sharding] = host.send_beside([self.slots], sharding)[0]
        return sent[sharding]


def store_plan(
    cache: PagedCache | CacheSpec,
    slots: Any,
    *,
    starts: Sequence[int] | None = None,
    ends: Sequence[int] | None = None,
    positions: Any = None,
    chunk_tokens: int | None = None,
    layers: int = 1,
    skip_prefix: Any = 0,
    out_of_range: str = "raise",
    tuning: Tuning | None = None,
) -> StorePlan:
    """Decides once what `store_layer` does for every layer, which spares each layer the checks.

    Args:
        cache: the cache or its spec; with a spec, slots are checked against the pages that come.
        slots: as in `store`.
        starts: as in `store`.
        ends: as in `store`.
        positions: as in `store`.
        chunk_tokens: rows of each chunk; by default as many as make an array of `layers` layers about
            `tuning.array_bytes`, but no more than the tokens need.
        layers: layers that share an array.
        skip_prefix: as in `store`.
        out_of_range: as in `store`.
        tuning: sizes; see `Tuning`.

    Returns:
        The plan, to be given to `store_layer` in place of slots.

    Raises:
        TypeError: as `store`.
        ValueError: as `store`.
    """
    spec = cache.spec if isinstance(cache, PagedCache) else cache
    if not isinstance(spec, CacheSpec):
        raise TypeError(f"cache: expected a PagedCache or a CacheSpec, got {type(cache).__name__}")
    num_slots = cache.num_slots if isinstance(cache, PagedCache) else checks.INT32_MAX
    rows = chunk_tokens
    if rows is None:
        checks.check_out_of_range(out_of_range)
        slots = checks.slots_int32(slots, read=out_of_range == "raise")
        longest, count = 0, slots.shape[0]
        if starts is not None and ends is not None:
            longest = int(check_ranges(starts, ends, count).sizes.max(initial=0))
        rows = longest or layer_rows(spec, layers, count, check_tuning(tuning))
    rows = check_chunk_tokens(rows)
    chosen = select(
        spec,
        slots,
        rows=rows,
        num_slots=num_slots,
        starts=starts,
        ends=ends,
        positions=positions,
        skip_prefix=skip_prefix,
        out_of_range=out_of_range,
    )
    flat, least = chosen.slots.reshape(-1), 0
    if isinstance(flat, np.ndarray) and flat.size and out_of_range == "raise":
        least = int(flat.max()) + 1
    return StorePlan(chosen, flat, spec, least, out_of_range)


def layer_rows(spec: CacheSpec, layers: int, num_tokens: int, tuning: Tuning) -> int:
    """Rows of a chunk that make an array of some layers worth its dispatch: a power of two, no more than needed."""
    bytes_per_row = max(spec.bytes_per_token * layers // spec.num_layers, 1)
    worth = max(tuning.array_bytes // bytes_per_row, 1)
    needed = 1 << max(num_tokens - 1, 15).bit_length()
    return min(max(1 << (worth.bit_length() - 1), tuning.chunk_tokens), needed)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LayerPart:
    """What `store_layer` sends: some consecutive layers of every chunk, in pinned host memory.

    Attributes:
        data: for each chunk the arrays of these layers.
        num_tokens: tokens of each chunk.
        positions: of each chunk's rows.
        valid: of each chunk's rows.
        layers: first and one past the last.
        fingerprint: of the chunks this is a part of.
    """

    data: tuple[tuple[jax.Array, ...], ...]
    num_tokens: Any
    positions: Any
    valid: Any
    layers: tuple[int, int] = dataclasses.field(metadata={"static": True})
    fingerprint: Fingerprint = dataclasses.field(metadata={"static": True})

    def is_ready(self) -> bool:
        """Whether all bytes have arrived; never waits."""
        return all(array.is_ready() for arrays in self.data for array in arrays)  # type: ignore[attr-defined]


def store_layer(
    pages: Any,
    slots: Any,
    *,
    spec: CacheSpec | None = None,
    layer: int | range,
    format: Any = None,
    ring: host.Ring | None = None,
    path: str | None = None,
    implementation: str | None = None,
    tuning: Tuning | None = None,
    **options: Any,
) -> LayerPart:
    """Sends one layer's KV, or that of a few consecutive layers, to pinned host memory.

    Dispatched, not waited for: the layer's rows are gathered on the device after whatever computes the pages, and
    copied while what comes next computes. What is done to the pages after the call does not change them.

    Args:
        pages: the layer's pages (as `write` takes them), or a tuple of them with `layer=range(a, b)`; the array of
            all layers where the layout has a `layer` axis.
        slots: as in `store`, or a `StorePlan`, which spares each layer the checks.
        spec: of the cache (not needed with a `StorePlan`).
        layer: which layer, or which consecutive ones: they share an array.
        format: of one layer, by default KV_T2D (KV_MLA_TD for one plane); several layers get a leading axis.
        ring: device buffers to gather into, for all layers of a request; without one, each layer that is on its way
            holds device memory of its own. (The other paths have no need of it.)
        path: "overlapped" for a copy that goes on while what comes next computes; "engine" or "direct" for one program
            that ends when the copy does, soonest where nothing computes beside it. By default overlapped, and direct
            on a CPU, where nothing overlaps.
        implementation: None for the best there is, "xla" or "ffi".
        tuning: sizes; see `Tuning`.
        **options: of `store_plan`: `starts`, `ends`, `positions`, `chunk_tokens`, `skip_prefix`, `out_of_range`.

    Returns:
        The layers' part of each chunk, for `join_layers`.

    Raises:
        TypeError: an argument is of the wrong type.
        ValueError: arguments do not fit one another; nothing was launched.
        RuntimeError: `implementation="ffi"` where no handlers were built, or a `path` that is not possible.
    """
    layers = range(layer, layer + 1) if isinstance(layer, (int, np.integer)) else layer
    if not (isinstance(layers, range) and layers.step == 1 and 0 <= layers.start < layers.stop):
        raise ValueError(f"layer: {layer!r} is no layer, nor a range of them")
    if not isinstance(slots, StorePlan):
        if spec is None:
            raise TypeError("spec: missing; give the cache's spec, or a StorePlan for slots")
        slots = store_plan(spec, slots, layers=len(layers), tuning=tuning, **options)
    elif options:
        raise TypeError(f"slots: a StorePlan has its options already, got {sorted(options)}")
    elif spec is not None and spec != slots.spec:
        raise ValueError("spec: another one than the StorePlan was made for; it is not needed beside one")
    tuning = check_tuning(tuning)
    if ring is not None and not isinstance(ring, host.Ring):
        raise TypeError(f"ring: expected a jaxkv.host.Ring, got {ring!r}")
    plan: StorePlan = slots
    spec, chosen = plan.spec, plan.chosen
    if implementation is not None:
        primitive.check_implementation(implementation)
    if layers.stop > spec.num_layers:
        raise ValueError(f"layer: {layer!r} is not in a cache of {spec.num_layers} layers")
    transfer, fingerprint = _prepared(spec, format, layers, layers is layer)
    leaves = pages_of(pages, spec, len(layers), "pages").leaves
    num_pages, described = describe_pool(transfer.pool, transfer.sizes, tuple(leaf.shape for leaf in leaves))
    num_slots = num_pages * spec.page_size
    if plan.num_slots > num_slots:
        checks.check_slots_in_pool(np.asarray(plan.slots), num_slots)
    if plan.out_of_range == "skip":
        # The plan may have been made without the pages: a row past them is zero bytes, and not real.
        chosen = chosen._replace(valid=chosen.valid & (chosen.slots < num_slots))
    count, traced = len(chosen.slots), checks.is_tracing()
    staging = None
    if path is not None or (not traced and next(iter(leaves[0].devices())).platform == "cpu"):
        how: dict[str, Any] = {"implementation": implementation, "tuning": tuning}
        way = paths.choose(path, leaves, (), traced=traced, nbytes=0, **how)
        staging = None if way.path == "overlapped" else way.staging
    meta = (chosen.num_tokens, chosen.positions, chosen.valid, (layers.start, layers.stop), fingerprint)
    if count == 0:
        return LayerPart((), *meta)

    statics: dict[str, Any] = {"transfer": transfer, "num_chunks": count, "implementation": implementation}
    if traced:
        data: Sequence[jax.Array] = host.place(_gather_chunks(plan.slots, leaves, **statics))
    else:
        checks.check_placement(leaves, [leaf.head_axis for leaf in described], "pages")
        on_device = plan.slots_beside(leaves[0])
        if staging is not None:
            data = place_leaves(on_device, None, leaves, transfer=transfer, num_chunks=count, staging=staging)
        elif ring is None:
            data = host.place(_gather_chunks_jit(on_device, leaves, **statics))
        else:
            places = places_of(transfer, leaves, chosen.rows) * count
            gathered = _gather_chunks_into(ring.take(places, spec.dtype), on_device, leaves, **statics)
            ring.give(gathered)
            data = host.place(gathered)
    held = len(data) // count
    return LayerPart(tuple(tuple(data[c * held : (c + 1) * held]) for c in range(count)), *meta)


def join_layers(parts: Iterable[LayerPart]) -> tuple[Chunk, ...]:
    """Makes chunks of the layers' parts.

    Args:
        parts: of `store_layer`, for every layer once and in order.

    Returns:
        The chunks.

    Raises:
        TypeError: an entry is no `LayerPart`.
        ValueError: layers are missing, out of order or grouped unevenly, or the parts are not of the same tokens.
    """
    if isinstance(parts, LayerPart) or not isinstance(parts, Iterable):
        raise TypeError(f"parts: expected the parts of all layers, got one {type(parts).__name__}")
    sent = list(parts)
    for i, part in enumerate(sent):
        if not isinstance(part, LayerPart):
            raise TypeError(f"parts: entry {i} is no LayerPart but {type(part).__name__}")
    if not sent:
        raise ValueError("parts: there are none")
    first = sent[0].fingerprint
    groups = first.format.groups(first.num_layers)
    found = [part.layers for part in sent]
    if found != [(group.start, group.stop) for group in groups]:
        raise ValueError(
            f"parts: {len(found)} parts of layers {found}, expected {len(groups)} that cover {first.num_layers} "
            f"layers in order, {first.format.layers_per_array} in each"
        )
    for i, part in enumerate(sent):
        # The last part may hold fewer layers than the others, in the same layout.
        same = dataclasses.replace(part.fingerprint, format=first.format) == first
        if not same or part.fingerprint.format.layout != first.format.layout or len(part.data) != len(sent[0].data):
            raise ValueError(f"parts: part {i} is of other chunks than part 0")
        for name in ("num_tokens", "positions", "valid"):
            mine, its = getattr(part, name), getattr(sent[0], name)
            # Those of one plan are one array; what is on the device is not read.
            known = isinstance(mine, np.ndarray) and isinstance(its, np.ndarray)
            if mine is not its and known and not np.array_equal(mine, its):
                raise ValueError(f"parts: part {i} is of other tokens than part 0: their {name} differ")
    return tuple(
        Chunk(
            tuple(array for part in sent for array in part.data[c]),
            sent[0].num_tokens[c],
            sent[0].positions[c],
            sent[0].valid[c],
            first,
        )
        for c in range(len(sent[0].data))
    )


@functools.lru_cache(maxsize=1024)
def _prepared(spec: CacheSpec, format: Any, layers: range, grouped: bool) -> tuple[Transfer, Fingerprint]:
    """What is the same for a layer in every request: its transfer, and the fingerprint of its chunks.

    The format gets a leading `layer` axis where a range of layers was asked for (`grouped`).
    """
    if format is None:
        format = as_format(spec, None, 1)
    layout = format.array_layout if isinstance(format, ChunkFormat) else ChunkFormat(format).array_layout
    if grouped and not layout.has_axis("layer"):
        layout = ChunkFormat(layout, 2).array_layout
    first = layers.start if spec.pool_layout.has_axis("layer") else None
    return transfer_of(spec, layout, first, len(layers)), Fingerprint.of(spec, ChunkFormat(layout, len(layers)))


def _gather_chunks(slots: Any, leaves: Sequence[jax.Array], **statics: Any) -> list[jax.Array]:
    return gather_leaves(jnp.asarray(slots), leaves, **statics)


_STATIC = ("transfer", "num_chunks", "implementation")
_gather_chunks_jit = jax.jit(_gather_chunks, static_argnames=_STATIC)


@functools.partial(jax.jit, static_argnames=_STATIC, donate_argnums=0, keep_unused=True)
def _gather_chunks_into(
    staging: tuple[jax.Array, ...], slots: Any, leaves: Sequence[jax.Array], **statics: Any
) -> list[jax.Array]:
    """Gathers into the buffers of an earlier layer: they are donated, and of the results' shapes."""
    del staging
    return _gather_chunks(slots, leaves, **statics)
