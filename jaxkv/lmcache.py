"""LMCache's generator protocol, for engines that step a transfer with `next` and `send` beside the forward pass.

A thin adapter over `store_layer`, `fetch_layers` and `write`. A store yields `num_layers + 1` times and a load
`num_layers + 2` times, whatever there is to move. What LMCache's connectors keep on themselves (buffers, gaps, slot
mappings) is here in the locals of one generator: two of them share nothing, and one that is closed, dropped or
failed leaves nothing behind. Arguments are checked, and slots and positions read, by the call that makes a generator.

Made from a `PagedCache`, a generator walks over that cache's pages. Made from a `CacheSpec`, it has no pages: each
answer brings those of the layer along, so that several transfers and the forward pass can take turns on one pool.

    load = lmcache.load_layers(cache, chunks, slots)            # chunks: descriptions are enough
    cache = next(load)
    for layer in range(num_layers):
        cache = load.send([chunk.data[layer] for chunk in chunks])
    cache = next(load)
    cache, mask, counts = lmcache.finish(load)
"""

import dataclasses
import itertools
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from . import host
from .calls import check_distinct
from .chunk import Chunk, Fingerprint, as_format
from .layerwise import LayerPart, Staged, fetch_layers, join_layers, store_layer, write
from .layerwise.pages import pages_of
from .ops import checks, primitive
from .ops.sharding import describe_pool
from .planning import plan
from .plans import Counts, Plan
from .spec import CacheSpec, PagedCache
from .store_plans import StorePlan, store_plan
from .tuning import Tuning


class Loaded(NamedTuple):
    """What a load returns.

    Attributes:
        cache: the cache, written; None where the pages came with the answers.
        mask: bool `[tokens]`, true exactly for the tokens that are now in the pages from this load.
        counts: what became of the tokens; those of missing chunks count as skipped.
    """

    cache: PagedCache | None
    mask: Any
    counts: Counts


def finish(generator: Generator[Any, Any, Any]) -> Any:
    """Steps a generator from its last yield and gives what it returns; ValueError if it yields once more."""
    try:
        next(generator)
    except StopIteration as stop:
        return stop.value
    raise ValueError("generator: it yielded once more, and was to end; steps are missing before finish")


def describe(
    spec: CacheSpec,
    starts: Sequence[int],
    ends: Sequence[int],
    *,
    chunk_tokens: int | None = None,
    positions: Any = None,
    format: Any = None,
    layers_per_array: int = 1,
) -> tuple[Chunk, ...]:
    """Descriptions of chunks, for `load_layers`, where nothing but their token ranges is known.

    Args:
        spec: of the cache.
        starts: the first token that each chunk covers.
        ends: one past the last token that each chunk covers.
        chunk_tokens: rows of the chunks' arrays; by default those of the longest range, as in a store.
        positions: integers `[tokens]` (`[3, tokens]` for M-RoPE), the position each key was rotated for when it was
            stored; by default a token's index.
        format: of one layer, by default KV_T2D (KV_MLA_TD for one plane).
        layers_per_array: layers that share an array.

    Returns:
        Chunks without data, all of whose rows are real.

    Raises:
        TypeError, ValueError: as `store_plan`.
    """
    token = np.zeros(max(ends, default=0), np.int32)  # where the tokens are does not matter, that they are does
    chosen = store_plan(spec, token, starts=starts, ends=ends, positions=positions, chunk_tokens=chunk_tokens).chosen
    fingerprint = Fingerprint.of(spec, as_format(spec, format, layers_per_array))
    rest = zip(chosen.num_tokens, chosen.positions, chosen.valid, strict=True)
    return tuple(Chunk((), held, positions, valid, fingerprint) for held, positions, valid in rest)


def store_layers(
    cache: PagedCache | CacheSpec,
    slots: Any,
    *,
    layers_per_array: int = 1,
    format: Any = None,
    ring: host.Ring | None = None,
    implementation: str | None = None,
    tuning: Tuning | None = None,
    **options: Any,
) -> Generator[tuple[LayerPart, ...], Any, tuple[Chunk, ...]]:
    """Stores tokens layer by layer: `num_layers + 1` yields.

    The answer to yield `i + 1` is layer i's pages, as the forward pass has just made them; `next` takes those of the
    cache. What leaves by that is yielded next: nothing at first, then the layer's `LayerPart`. Where layers share an
    array it is yielded with the last of them, and until then the pages of the others are held: they must not be
    donated before.

    Args:
        cache: the cache, or its spec where every layer's pages come by `send`.
        slots: as in `store`, or a `StorePlan`.
        layers_per_array: layers that share an array.
        format: as in `store_layer`.
        ring: as in `store_layer`.
        implementation: None for the best there is, "xla" or "ffi".
        tuning: sizes; see `Tuning`.
        **options: of `store_plan`: `starts`, `ends`, `positions`, `chunk_tokens`, `skip_prefix`, `out_of_range`.

    Returns:
        A generator that returns the chunks.

    Raises:
        TypeError, ValueError, RuntimeError: as `store_plan`. From a step, with nothing of the layer sent: its pages
            do not fit, or are missing.
    """
    if isinstance(layers_per_array, bool) or not isinstance(layers_per_array, int) or layers_per_array < 1:
        raise ValueError(f"layers_per_array: expected an int of at least 1, got {layers_per_array!r}")
    primitive.check_implementation(implementation)
    if not isinstance(slots, StorePlan):
        slots = store_plan(cache, slots, layers=layers_per_array, tuning=tuning, **options)
    elif options:
        raise TypeError(f"slots: a StorePlan has its options already, got {sorted(options)}")
    as_format(slots.spec, format, layers_per_array)  # a format that cannot be is found before the first step
    own = None
    if isinstance(cache, PagedCache):
        leaves = cache.pool.leaves
        own = [[leaves[i] for i in _leaves_of(cache.spec, layer)] for layer in range(cache.spec.num_layers)]
    how = {"format": format, "ring": ring, "implementation": implementation}
    return _store(slots, own, layers_per_array, how)


def _store(
    decided: StorePlan, own: Sequence[Any] | None, together: int, how: dict[str, Any]
) -> Generator[tuple[LayerPart, ...], Any, tuple[Chunk, ...]]:
    num_layers, slab = decided.spec.num_layers, decided.spec.pool_layout.has_axis("layer")
    sent: list[LayerPart] = []
    left: tuple[LayerPart, ...] = ()
    held: list[Any] = []
    for layer in range(num_layers):
        page = yield left
        left = ()
        if page is None:
            if own is None:
                raise ValueError(f"pages: layer {layer} of {num_layers} has none; send them where there is no cache")
            page = own[layer]
        held.append(page)
        if len(held) == together or layer == num_layers - 1:
            which = layer if together == 1 else range(layer + 1 - len(held), layer + 1)
            part = store_layer(held[-1] if slab or len(held) == 1 else tuple(held), decided, layer=which, **how)
            sent.append(part)
            left, held = (part,), []
    yield left
    return join_layers(sent)


def load_layers(
    cache: PagedCache | CacheSpec,
    chunks: Iterable[Chunk],
    slots: Any,
    *,
    starts: Sequence[int] | None = None,
    ends: Sequence[int] | None = None,
    ahead: int = 1,
    donate: bool = True,
    implementation: str | None = None,
    **options: Any,
) -> Generator[Any, Any, Loaded]:
    """Loads chunks layer by layer: `num_layers + 2` yields, the last two answered by plain `next`.

    The answer to yield `i + 1` is the list of layer i's parts, for each chunk its array (or arrays, where the format
    has several for a layer): it is sent to the device at once, and written into the pages when the next layer's is on
    its way (`ahead=1`), so that it is in what yield `i + 3` gives. A part that is None is a miss: its chunk and all
    later ones are no longer written, for this layer and the following ones, and count as missing in the mask.
    Where layers share an array it comes with the first of them, and the answers of the others bring no parts.

    Yielded is the cache as far as it is written. With a spec, the answers are `(pages, parts)`, and yielded are the
    pages of the layer last written, None before there are any. An array of all layers then needs `ahead=0`.

    Args:
        cache: the cache; or its spec, where every layer's pages come with its parts.
        chunks: what is to come; descriptions (see `describe`) are enough, and `data` is not used.
        slots: as in `load`.
        starts: as in `plan`.
        ends: as in `plan`.
        ahead: 1, or 0 to write a layer at once, so that the next yield gives it.
        donate: whether the pages are consumed, layer by layer as they are written: the cache to go on with is always
            the one yielded last, also if the load is closed or fails. If not, the given pages are copied once; where
            one array holds all layers, each yielded cache is still consumed by the next step.
        implementation: None for the best there is, "xla" or "ffi".
        **options: of `plan`: `positions`, `gaps`, `skip_prefix`, `out_of_range`, `unique_slots`, `num_pages`.

    Returns:
        A generator that returns a `Loaded`.

    Raises:
        TypeError, ValueError, RuntimeError: as `plan`. From a step, naming the layer and with nothing of it written:
            parts or pages that do not fit, are missing, or come when none are due.
    """
    if isinstance(ahead, bool) or not isinstance(ahead, (int, np.integer)) or ahead not in (0, 1):
        raise ValueError(f"ahead: expected 0 or 1, got {ahead!r}")
    if ahead and isinstance(cache, CacheSpec) and cache.pool_layout.has_axis("layer"):
        raise ValueError("ahead: 1, but an array of all layers that comes with each answer is written at once; pass 0")
    primitive.check_implementation(implementation)
    if isinstance(chunks, Chunk):
        raise TypeError("chunks: expected a sequence of chunks, got one Chunk; put it in a tuple")
    expected = [dataclasses.replace(chunk, data=()) if isinstance(chunk, Chunk) else chunk for chunk in chunks]
    # Read now: the caller may change its own arrays before the last step.
    slots = checks.slots_int32(slots, read=options.get("out_of_range", "raise") == "raise")
    if options.get("positions") is not None and not isinstance(options["positions"], jax.Array):
        options["positions"] = np.array(options["positions"])
    decided = plan(cache, expected, slots, starts=starts, ends=ends, data_later=True, **options)
    if isinstance(cache, PagedCache):
        if donate:
            check_distinct(cache.pool)
        options["num_pages"] = cache.num_pages
    if starts is None and not any(checks.is_traced(chunk.num_tokens) for chunk in expected):
        ends = list(itertools.accumulate(int(chunk.num_tokens) for chunk in expected))
        starts = [0, *ends[:-1]]
    first, last = (None if x is None else list(x) for x in (starts, ends))

    def only(count: int) -> Plan:
        """The load of the first chunks alone."""
        some = expected[:count]
        ranges = first and first[:count], last and last[:count]
        return plan(decided.spec, some, slots, starts=ranges[0], ends=ranges[1], data_later=True, **options)

    return _load(_Target(cache, donate, implementation), decided, only, _feed(decided, 0), ahead)


def _load(
    target: "_Target",
    decided: Plan,
    only: Callable[[int], Plan],
    feed: tuple[deque[Any], Iterator[Staged | None]],
    ahead: int,
) -> Generator[Any, Any, Loaded]:
    inbox, staged = feed
    spec, num_chunks, given = decided.spec, len(decided.chunks), sum(decided.counts)
    formats = [chunk.format for chunk in decided.chunks[:1]] or [as_format(spec, None, 1)]
    due = {layers.start for layers in formats[0].groups(spec.num_layers)}
    mask = _slot_of_token(decided) >= 0
    waiting: deque[tuple[int, Any, Staged | None]] = deque()
    for layer in range(spec.num_layers):
        page, parts = target.take(layer, (yield target.value), decided)
        if layer in due:
            entries = _entries(parts, layer, num_chunks)
            found = next((k for k, entry in enumerate(entries) if entry is None), num_chunks)
            if found < len(decided.chunks):
                # From here on a load of the chunks before alone. Of the layers before, rows of the others are there.
                rows = sum(chunk.num_rows for chunk in decided.chunks[:found])
                fewer = only(found)
                mask = mask & (decided.row_of_token < rows) if layer else _slot_of_token(fewer) >= 0
                decided = fewer
                inbox, staged = _feed(fewer, layer)
            whole = len(decided.chunks) == num_chunks
            inbox.append(parts if whole else entries[: len(decided.chunks)])
        elif parts is not None and len(parts):
            raise ValueError(f"parts: those of layer {layer} have come, in an array with the layers before; got more")
        waiting.append((layer, page, next(staged)))
        if len(waiting) > ahead:
            target.write(*waiting.popleft())
    for _ in range(2):
        if (yield target.value) is not None:
            raise ValueError(f"parts: those of all {spec.num_layers} layers have come, next is due; got more")
        while waiting:
            target.write(*waiting.popleft())
    lost = given - sum(decided.counts)
    counts = decided.counts._replace(skipped=decided.counts.skipped + lost)
    return Loaded(target.value if isinstance(target.value, PagedCache) else None, mask, counts)


def _feed(decided: Plan, layer: int) -> tuple[deque[Any], Iterator[Staged | None]]:
    """Where a layer's parts go in, and its staged form comes out; from a layer on."""
    inbox: deque[Any] = deque()
    if not decided.chunks:
        return inbox, itertools.repeat(None)
    return inbox, fetch_layers(decided, ahead=0, parts=iter(inbox.popleft, None), first_layer=layer)


def _entries(parts: Any, layer: int, num_chunks: int) -> Sequence[Any]:
    """The parts of each chunk, as many as there are chunks."""
    if parts is None:
        raise ValueError(
            f"parts: layer {layer} has none (was it next, for send?), those of {num_chunks} chunks are due"
        )
    entries = parts.data if isinstance(parts, LayerPart) else parts
    if not isinstance(entries, (list, tuple)):
        raise TypeError(
            f"parts: layer {layer}: expected a list with the parts of {num_chunks} chunks, got {type(parts).__name__}"
        )
    if len(entries) != num_chunks:
        raise ValueError(f"parts: layer {layer} has parts of {len(entries)} chunks, those of {num_chunks} are due")
    return entries


class _Target:
    """The pages that one load writes: a cache's, or those that come layer by layer."""

    def __init__(self, cache: PagedCache | CacheSpec, donate: bool, implementation: str | None) -> None:
        self._donate, self._implementation = donate, implementation
        self.value: Any = None  # what is yielded
        self._leaves: list[Any] = []
        if isinstance(cache, PagedCache):
            self.value = cache
            self._leaves, self._structure = jax.tree.flatten(cache.pages)
            self._made = [donate] * len(self._leaves)  # which arrays are no longer the caller's

    def take(self, layer: int, answer: Any, decided: Plan) -> tuple[Any, Any]:
        """The pages (None for the cache's) and the parts of an answer, the pages checked."""
        if self._leaves:
            return None, answer
        if not isinstance(answer, tuple) or len(answer) != 2:
            raise TypeError(
                f"pages: layer {layer}: there is no cache, expected (pages, parts), got {type(answer).__name__}"
            )
        page, parts = answer
        _check_page(page, layer, decided)
        return page, parts

    def write(self, layer: int, page: Any, staged: Staged | None) -> None:
        """Writes a layer, if there is anything to be written."""
        if page is not None:
            self.value = self._written(layer, page, staged, self._donate)
            return
        cache = self.value
        numbers = _leaves_of(cache.spec, layer)
        written = self._written(layer, [self._leaves[i] for i in numbers], staged, self._made[numbers[0]])
        for i, leaf in zip(numbers, written, strict=True):
            self._leaves[i], self._made[i] = leaf, True
        self.value = PagedCache(jax.tree.unflatten(self._structure, self._leaves), cache.spec)

    def _written(self, layer: int, page: Any, staged: Staged | None, donate: bool) -> Any:
        leaves = jax.tree.leaves(page)
        traced = checks.is_tracing()
        if not traced and any(leaf.is_deleted() for leaf in leaves):
            raise ValueError(f"pages: those of layer {layer} were deleted or donated to an earlier call")
        if staged is None or not any(run.slots.shape[0] for run in staged.runs):
            # Not the caller's own arrays: who keeps them may well donate the result.
            return page if donate or traced else jax.tree.map(jnp.copy, page)
        if traced or not donate:
            return write(page, staged, implementation=self._implementation)
        written = _write_in_place(page, staged, implementation=self._implementation)
        for leaf in leaves:
            leaf.delete()  # even where the backend made a copy
        return written


_write_in_place = jax.jit(write, static_argnames="implementation", donate_argnames="page")


def _leaves_of(spec: CacheSpec, layer: int) -> list[int]:
    """Which arrays of a cache, in the order of the layout's levels, hold a layer."""
    pool = spec.pool_layout
    count = pool.num_leaves(1)
    if pool.has_axis("layer"):
        return list(range(count))
    if pool.levels[0] == "kv":
        return [kv * spec.num_layers + layer for kv in range(count)]
    return [layer * count + kv for kv in range(count)]


def _check_page(page: Any, layer: int, decided: Plan) -> None:
    """Checks pages that came with an answer, and the slots against them."""
    spec, name = decided.spec, f"pages: layer {layer}"
    sizes = spec.sizes if spec.pool_layout.has_axis("layer") else spec.sizes._replace(layers=1)
    shapes = tuple(leaf.shape for leaf in pages_of(page, spec, 1, name).leaves)
    num_pages, _ = describe_pool(spec.pool_layout, sizes, shapes)
    for what, slots in (("slots", _slot_of_token(decided)), ("slots of gaps", decided.zero_slots)):
        if decided.out_of_range == "raise" and isinstance(slots, np.ndarray):
            checks.check_slots_in_pool(slots, num_pages * spec.page_size, name=f"{what}: layer {layer}")


def _slot_of_token(decided: Plan) -> Any:
    """The slot where each token's row is after the load, -1 for tokens that it does not bring."""
    rows, slots = decided.row_of_token, decided.slots
    xp: Any = np if isinstance(rows, np.ndarray) and isinstance(slots, np.ndarray) else jnp
    if slots.shape[0] == 0:
        return xp.full(rows.shape, -1, np.int32)
    # Of tokens that share a slot the last has it, and the slot of the others' rows is -1.
    return xp.where(xp.asarray(rows) >= 0, xp.asarray(slots)[xp.maximum(rows, 0)], xp.asarray(-1, np.int32))
