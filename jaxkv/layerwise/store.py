"""store_layer and join_layers: layers leave for the host one by one, and become chunks."""

import dataclasses
import functools
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .. import host, ways
from ..chunk import Chunk, ChunkFormat, Fingerprint, as_format
from ..ops import checks, primitive
from ..ops.gather import gather_leaves
from ..ops.pinned import place_leaves
from ..ops.sharding import describe_pool, places_of
from ..ops.transfer import Transfer
from ..plans import Plan
from ..spec import CacheSpec
from ..store_plans import StorePlan, store_plan
from ..tuning import Tuning, check_tuning
from ..values import kept_for
from .pages import pages_of, transfer_of


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
    if isinstance(slots, Plan):
        raise TypeError("slots: expected slots or a StorePlan, got a Plan, which is for fetch_layers")
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
    spec = plan.spec
    if implementation is not None:
        primitive.check_implementation(implementation)
    if layers.stop > spec.num_layers:
        raise ValueError(f"layer: {layer!r} is not in a cache of {spec.num_layers} layers")
    transfer, fingerprint = _prepared(spec, format, layers, layers is layer)
    leaves = pages_of(pages, spec, len(layers), "pages").leaves
    num_pages, described = describe_pool(transfer.pool, transfer.sizes, tuple(leaf.shape for leaf in leaves))
    num_slots = num_pages * spec.page_size
    plan.check(num_slots)
    chosen = plan.chosen_from(num_slots)
    count, traced = len(chosen.slots), checks.is_tracing()
    staging = None
    if path is not None or (not traced and next(iter(leaves[0].devices())).platform == "cpu"):
        staging = _staging(plan, leaves, path, implementation, tuning)
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


def _staging(
    plan: StorePlan, leaves: Sequence[jax.Array], path: str | None, implementation: str | None, tuning: Tuning
) -> int | None:
    """Buffers that one program goes through, 0 for none; None for copies of their own. Kept with the plan."""
    traced = checks.is_tracing()

    def choose() -> int | None:
        how: dict[str, Any] = {"implementation": implementation, "tuning": tuning}
        way = ways.choose(path, leaves, (), traced=traced, nbytes=0, **how)
        return None if way.path == "overlapped" else way.staging

    checks.check_choice("path", path, ways.PATHS)  # it is compared below, and an array is not to be
    if traced:
        return choose()
    key = (leaves[0].sharding, path, implementation, tuning, ways.jit_is_disabled())
    return kept_for(plan, "_layer_staging", key, choose)


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
