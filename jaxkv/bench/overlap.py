"""Layer by layer: alone, and beside a forward pass.

The forward pass is 32 matrix products of 4096 x 8192 by 8192 x 8192 in bfloat16, each followed by tanh, as the peers
were timed beside it. Its slow-down is told twice: to its own last product, and to the last byte of KV.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .. import chunk, host, layerwise
from ..planning import plan as make_plan
from ..plans import Plan
from ..rope import Rope
from ..spec import CacheSpec
from ..store_plans import store_plan
from .shapes import Shape
from .timing import without_collector


class Overlap(NamedTuple):
    """Seconds of a run: to its last product, to its last byte, and until it was queued."""

    compute: float
    total: float
    enqueue: float


def _layer(hidden: jax.Array, weights: jax.Array) -> jax.Array:
    return jnp.tanh(hidden @ weights)


def _writing_layer(hidden: jax.Array, weights: jax.Array, page: Any, staged: layerwise.Staged) -> tuple[jax.Array, Any]:
    page = layerwise.write(page, staged)
    return _layer(hidden, weights), page


class Forward:
    """The forward pass, layer after layer.

    Args:
        layers: how many.
        width: columns of the activations; 8192 for the headline figures.
        rows: rows of the activations.
    """

    def __init__(self, layers: int, width: int = 8192, rows: int = 4096) -> None:
        keys = jax.random.split(jax.random.key(0), 3)
        self._weights = [jax.random.normal(key, (width, width), jnp.bfloat16) for key in keys[:2]]
        self._input = jax.random.normal(keys[2], (rows, width), jnp.bfloat16)
        self._layer = jax.jit(_layer)
        self._writing_layer = jax.jit(_writing_layer, donate_argnums=2)
        self.layers = layers

    def start(self) -> jax.Array:
        """The input."""
        return self._input

    def layer(self, hidden: jax.Array, i: int) -> jax.Array:
        """The output of layer i."""
        return self._layer(hidden, self._weights[i % 2])

    def writing_layer(self, hidden: jax.Array, i: int, page: Any, staged: layerwise.Staged) -> tuple[jax.Array, Any]:
        """The output of layer i, and its pages with what was loaded, in one program: it waits for its own KV."""
        return self._writing_layer(hidden, self._weights[i % 2], page, staged)

    def run(self) -> tuple[jax.Array, Any]:
        """All layers, and nothing beside them."""
        hidden = self.start()
        for i in range(self.layers):
            hidden = self.layer(hidden, i)
        return hidden, None


def measure(run: Callable[[], tuple[Any, Any]], *, repeats: int, warm: int) -> Overlap:
    """Medians of a run that returns the last activations and whatever else it started.

    What is waited for is asked for at once, and the last product in runs of its own: asking for a few dozen arrays one
    after the other takes as long as some of what is to be seen.
    """
    waited: tuple[list[float], list[float]] = ([], [])
    queued = []
    for repeat in range(warm + 2 * repeats):
        start = time.perf_counter()
        hidden, rest = run()
        enqueue = time.perf_counter() - start
        jax.block_until_ready((hidden, rest) if repeat % 2 else hidden)
        if repeat >= warm:
            queued.append(enqueue)
            waited[repeat % 2].append(time.perf_counter() - start)
        jax.block_until_ready(rest)
        del hidden, rest
    return Overlap(statistics.median(waited[0]), statistics.median(waited[1]), statistics.median(queued))


@without_collector()
def beside(
    alone: Callable[[], tuple[Any, Any]],
    run: Callable[[], tuple[Any, Any]],
    *,
    rounds: int = 3,
    repeats: int = 5,
    warm: int = 3,
) -> tuple[Overlap, Overlap]:
    """How much longer a computation takes with something beside it.

    The device's clocks follow the power that was drawn in the last tenths of a second, and drift, by more than what is
    to be measured. So each is repeated until it sees the clocks that it would see if it went on for ever, and its
    runs are compared with those of the computation alone before and after them, a few times over.

    Args:
        alone: the computation.
        run: the same with something beside it.
        rounds: blocks of each.
        repeats: runs of a block, for its medians.
        warm: runs before them.

    Returns:
        What is added to the last product and to the last byte, and the time of queueing, as shares of the computation
        alone; and the seconds of the run. Medians over the rounds.
    """
    without, seen = [measure(alone, repeats=repeats, warm=warm)], []
    for _ in range(rounds):
        seen.append(measure(run, repeats=repeats, warm=warm))
        without.append(measure(alone, repeats=repeats, warm=warm))
    shares = []
    for found, before, after in zip(seen, without, without[1:], strict=False):
        base = (before.total + after.total) / 2
        shares.append(Overlap(found.compute / base - 1, found.total / base - 1, found.enqueue / base))
    return _median_of(shares), _median_of(seen)


def _median_of(found: Sequence[Overlap]) -> Overlap:
    return Overlap(*(statistics.median(column) for column in zip(*found, strict=True)))


class LayerByLayer:
    """A cache, its pages layer by layer, and the stores and loads that are measured on it.

    Args:
        shape: of the cache, one array a layer.
        tokens: to move.
        group: layers that share an array.
        chunk_tokens: rows of each chunk; by default jaxkv's own choice.
    """

    def __init__(self, shape: Shape, tokens: int, *, group: int = 1, chunk_tokens: int | None = None) -> None:
        inv_freq = (10000.0 ** -(np.arange(0, shape.spec.head_dim, 2) / shape.spec.head_dim)).astype(np.float32)
        rope = Rope.from_inv_freq(inv_freq, pairing="half")
        self.spec = _with_rope(shape.spec, rope)
        self.pages = list(self.spec.empty(shape.num_pages).pages)
        self._slots, self._group = shape.slots(tokens, seed=0), group
        self._plan = store_plan(self.spec, self._slots, layers=group, chunk_tokens=chunk_tokens)
        self._write = jax.jit(layerwise.write, donate_argnums=0)
        self.chunks = jax.block_until_ready(self._stored())
        self._positions = np.arange(tokens) + 77

    def _stored(self) -> tuple[chunk.Chunk, ...]:
        return layerwise.join_layers(self._store(first) for first in range(0, self.spec.num_layers, self._group))

    def _store(self, first: int, **options: Any) -> layerwise.LayerPart:
        if self._group == 1:
            return layerwise.store_layer(self.pages[first], self._plan, layer=first, **options)
        layers = range(first, min(first + self._group, self.spec.num_layers))
        pages = tuple(self.pages[layer] for layer in layers)
        return layerwise.store_layer(pages, self._plan, layer=layers, **options)

    def plan(self, *, turn: bool = False) -> Plan:
        """The plan of a load; `turn` where keys move to other positions."""
        return make_plan(self.spec, self.chunks, self._slots, positions=self._positions if turn else None)

    def store(
        self, forward: Forward | None = None, *, ring_size: int | None = None, path: str | None = None
    ) -> tuple[Any, Any]:
        """Every layer stored, each after its own computation where there is one."""
        sent: list[layerwise.LayerPart] = []
        hidden: Any = forward.start() if forward else None
        ring = None if ring_size is None else host.Ring(ring_size)
        for i in range(self.spec.num_layers):
            if forward is not None:
                hidden = forward.layer(hidden, i)
            if (i + 1) % self._group == 0 or i + 1 == self.spec.num_layers:
                sent.append(self._store(i - i % self._group, ring=ring, path=path))
        return hidden, sent

    def load(
        self, forward: Forward | None = None, *, plan: Plan | None = None, ahead: int = 2, waits: bool = True
    ) -> tuple[Any, Any]:
        """Every layer loaded, each before its own computation where there is one.

        Args:
            forward: the computation beside it.
            plan: of `plan`, made beforehand, as an engine makes it while the step before computes; by default made
                here.
            ahead: of `fetch_layers`.
            waits: whether a layer's write is part of its own computation, which then waits for it, or comes after.
        """
        plan = self.plan() if plan is None else plan
        hidden: Any = forward.start() if forward else None
        first = 0
        for staged in layerwise.fetch_layers(plan, ahead=ahead, grouped=self._group > 1):
            layers = range(first, first + staged.num_layers)
            first = layers.stop
            pages, rest = self._pages_of(layers), layers
            if forward is not None:
                if waits:
                    hidden, pages = forward.writing_layer(hidden, layers.start, pages, staged)
                    rest = layers[1:]
                for layer in rest:
                    hidden = forward.layer(hidden, layer)
            if forward is None or not waits:
                pages = self._write(pages, staged)
            self.pages[layers.start : layers.stop] = pages if len(layers) > 1 else [pages]
        return hidden, list(self.pages)

    def _pages_of(self, layers: range) -> Any:
        pages = self.pages[layers.start : layers.stop]
        return tuple(pages) if len(layers) > 1 else pages[0]


def _with_rope(spec: CacheSpec, rope: Rope) -> CacheSpec:
    return CacheSpec(
        spec.layout, spec.num_layers, spec.num_kv_heads, spec.head_dim, spec.page_size, spec.dtype, rope=rope
    )
