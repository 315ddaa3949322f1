"""What goes each of the ways between chunks and pages (see `ways`): the steps of a store and of a load."""

import functools
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .chunk import ChunkFormat, Fingerprint
from .host import Arrays, Ring, fetch, place
from .ops.gather import gather_leaves
from .ops.pinned import fetch_leaves, send_ahead
from .ops.scatter import scatter_leaves
from .ops.sharding import Place, places_of
from .ops.transfer import Transfer, Turn
from .rope import Rope, stacked_deltas
from .spec import CacheSpec, Pool
from .ways import Way


class Group(NamedTuple):
    """Layers that share an array of a chunk.

    Attributes:
        transfer: between their pages and that array.
        leaves: numbers of the pool leaves it touches.
        turn: how their keys turn, None where they do not.
        ropes: whose delta tables that takes, in the order of the tables.
    """

    transfer: Transfer
    leaves: tuple[int, ...]
    turn: Turn | None = None
    ropes: tuple[Rope, ...] = ()

    def of(self, leaves: Arrays) -> Arrays:
        """Of a pool's leaves those it touches."""
        return leaves if len(leaves) == len(self.leaves) else tuple(leaves[i] for i in self.leaves)

    def deltas(self, positions: tuple[Any, Any] | None) -> Arrays:
        """The delta tables of rows that move from old to new positions."""
        return () if positions is None or self.turn is None else stacked_deltas(self.ropes, *positions)


@functools.lru_cache(maxsize=256)
def groups_of(spec: CacheSpec, format: ChunkFormat, turning: bool = False) -> tuple[Group, ...]:
    """The groups of a format, in the order of a chunk's arrays; `turning` where keys are to be moved."""
    groups = []
    for layers in format.groups(spec.num_layers):
        turn, ropes = (spec.turn(layers), spec.ropes(layers)) if turning else (None, ())
        groups.append(Group(*spec.transfer(format.array_layout, layers).narrowed(), turn, ropes))
    return tuple(groups)


def save_traced(pool: Pool, table: Any, groups: tuple[Group, ...], implementation: str | None) -> list[Arrays]:
    """The chunks of a store that is being traced; `table` is int32 `[chunks, rows]`."""
    return [place(_gather_groups(slots, pool.leaves, groups, implementation)) for slots in table]


class PreparedStore(NamedTuple):
    """What a store does.

    Attributes:
        way: how the chunks go.
        groups: of their format.
        fingerprint: of the chunks.
        runs: the chunks that one operation takes each.
        tables: the slots of each run, int32 `[chunks * rows]`, on the pool's devices.
        programs: for each run those of its groups (`place_program`); none on the overlapped path.
        alike: what the chunks are marked with, which differ in their bytes alone; None where they may differ.
    """

    way: Way
    groups: tuple[Group, ...]
    fingerprint: Fingerprint
    runs: tuple[range, ...]
    tables: Sequence[jax.Array]
    programs: Sequence[tuple[Any, ...]]
    alike: object


def save_overlapped(pool: Pool, steps: PreparedStore, implementation: str | None) -> list[Arrays]:
    """The chunks of a store, gathered into a ring of device buffers and copied from there."""
    groups, tables = steps.groups, steps.tables
    ring = Ring(min(steps.way.staging, len(tables)))
    places = chunk_places(groups, pool, tables[0].shape[0])
    chunks = []
    for slots in tables:
        # The ring's oldest buffers take the next chunk, once its own copy to the host has left them.
        staging = ring.take(places, pool.leaves[0].dtype)
        data = _gather_step(staging, slots, pool.leaves, groups=groups, implementation=implementation)
        ring.give(data)
        chunks.append(place(data))
    return chunks


def save_pinned(pool: Pool, steps: PreparedStore, hosts: Sequence[Arrays] = ()) -> list[Arrays]:
    """The chunks of a store, written into pinned arrays.

    Args:
        pool: the pages.
        steps: what is to be done.
        hosts: the arrays that the first chunks are written into, a tuple of them a chunk, which are consumed; the
            others go into new ones. No run has chunks of both.
    """
    placed = []  # by each operation: all are queued before anything is made of their results
    for run, slots, programs in zip(steps.runs, steps.tables, steps.programs, strict=True):
        first = 0
        for group, program in zip(steps.groups, programs, strict=True):
            last = first + len(group.transfer.chunk_kinds)
            recycled = [leaf for k in run for leaf in hosts[k][first:last]] if run.stop <= len(hosts) else None
            placed.append(program(recycled, slots, group.of(pool.leaves)))
            first = last
    chunks: list[Arrays] = []
    for at, run in enumerate(steps.runs):
        of_run = placed[at * len(steps.groups) : (at + 1) * len(steps.groups)]
        each = [len(leaves) // len(run) for leaves in of_run]
        chunks += [
            tuple(leaf for leaves, n in zip(of_run, each, strict=True) for leaf in leaves[k * n : (k + 1) * n])
            for k in range(len(run))
        ]
    return chunks


class Part(NamedTuple):
    """One chunk of a load.

    Attributes:
        slots: int32 `[rows]`, the slot of each row, -1 for none.
        data: its arrays; none to write zero bytes.
        groups: of its format.
        positions: None, or the old and new positions of its rows, int32 `[rows]` (`[3, rows]` for M-RoPE).
    """

    slots: Any
    data: Arrays
    groups: tuple[Group, ...]
    positions: tuple[Any, Any] | None = None


class Stretch(NamedTuple):
    """Chunks of a load that one operation takes: of one shape, in pinned memory.

    Attributes:
        slots: int32 `[chunks * rows]`, the slot of each row, -1 for none.
        hosts: for each group the arrays of the chunks, those of the first chunk first.
        rows: of each chunk.
        groups: of their format.
        positions: None, or the old and new positions of the rows, as in `Part`.
        ahead: the first chunks, as many as this, are sent to the device before the operation is queued.
    """

    slots: Any
    hosts: tuple[list[jax.Array], ...]
    rows: int
    groups: tuple[Group, ...]
    positions: tuple[Any, Any] | None = None
    ahead: int = 0

    @property
    def num_chunks(self) -> int:
        """Chunks that move."""
        return int(self.slots.shape[0]) // self.rows

    def deltas(self, group: int = 0) -> Arrays:
        """The delta tables of a group of layers."""
        return () if self.groups[group].turn is None else _deltas(self.positions, group=self.groups[group])


class Restore:
    """A load on its way: the leaves as they are, chunk after chunk.

    Attributes:
        leaves: the pool's arrays with everything written so far.
    """

    def __init__(self, pool: Pool, *, donate: bool, traced: bool, implementation: str | None) -> None:
        self.leaves = list(pool.leaves)
        self._donate, self._traced, self._implementation = donate, traced, implementation

    def scatter(self, part: Part, data: Arrays) -> None:
        """Scatters one chunk whose `data` is on the device, or zero bytes where that is empty."""
        step = _scatter_groups if self._traced else (_scatter_in_place if self._donate else _scatter_into_copy)
        options: dict[str, Any] = {"groups": part.groups, "implementation": self._implementation}
        self.leaves = step(self.leaves, part.slots, data, part.positions, **options)
        self._donate = True  # what a step made is ours to write into

    def overlapped(self, parts: Sequence[Part], shardings: Any, staging: int) -> None:
        """Fetches chunks a few ahead of their scatters.

        Args:
            parts: the chunks.
            shardings: where each chunk's arrays go; None for each while tracing.
            staging: chunks that are on their way at once.
        """
        staged = deque(fetch(part.data, where) for part, where in zip(parts[:staging], shardings, strict=False))
        for at, part in enumerate(parts):
            data = staged.popleft()
            self.scatter(part, data)
            if at + staging < len(parts):
                if not self._traced:
                    jax.block_until_ready(data)  # or the copies of all chunks would claim device memory at once
                staged.append(fetch(parts[at + staging].data, shardings[at + staging]))

    def from_pinned(self, stretch: Stretch, way: Way) -> None:
        """Scatters chunks straight from pinned memory, in one operation for each group of layers."""
        donate, self._donate = self._donate, True
        for number, (group, hosts) in enumerate(zip(stretch.groups, stretch.hosts, strict=True)):
            arrived = stretch.ahead if number == 0 else 0
            if arrived:
                sent = arrived * len(group.transfer.chunk_kinds)
                hosts = [*send_ahead(hosts[:sent]), *hosts[sent:]]
            written = fetch_leaves(
                stretch.slots,
                hosts,
                [self.leaves[i] for i in group.leaves],
                transfer=group.transfer,
                num_chunks=stretch.num_chunks,
                rows=stretch.rows,
                staging=way.staging,
                donate=donate,
                arrived=arrived,
                turn=group.turn,
                deltas=stretch.deltas(number),
            )
            for i, leaf in zip(group.leaves, written, strict=True):
                self.leaves[i] = leaf


@functools.partial(jax.jit, static_argnames="group")
def _deltas(positions: Any, *, group: Group) -> Arrays:
    return group.deltas(positions)


def shardings_on_device(part: Part, pool: Pool) -> list[Any]:
    """Where the arrays of a chunk go on the device, on their way into a pool."""
    return [sharding for _, sharding in chunk_places(part.groups, pool, part.slots.shape[0])]


def chunk_places(groups: tuple[Group, ...], pool: Pool, rows: int) -> list[Place]:
    """Where each array of a chunk of this pool is to be on the device."""
    return [
        place for group in groups for place in places_of(group.transfer, [pool.leaves[i] for i in group.leaves], rows)
    ]


def _gather_groups(
    slots: Any, leaves: Sequence[jax.Array], groups: tuple[Group, ...], implementation: str | None
) -> Arrays:
    options: dict[str, Any] = {"num_chunks": 1, "implementation": implementation}
    return tuple(
        part
        for transfer, numbers, *_ in groups
        for part in gather_leaves(jnp.asarray(slots), [leaves[i] for i in numbers], transfer=transfer, **options)
    )


@functools.partial(jax.jit, static_argnames=("groups", "implementation"), donate_argnames="staging", keep_unused=True)
def _gather_step(
    staging: Arrays, slots: Any, leaves: Sequence[jax.Array], *, groups: tuple[Group, ...], implementation: str | None
) -> Arrays:
    """Gathers one chunk into the buffers of an earlier one: they are donated, and of the results' shapes."""
    del staging
    return _gather_groups(slots, leaves, groups, implementation)


def _scatter_groups(
    leaves: Sequence[jax.Array],
    slots: Any,
    data: Arrays,
    positions: tuple[Any, Any] | None,
    *,
    groups: tuple[Group, ...],
    implementation: str | None,
) -> list[jax.Array]:
    """Scatters one chunk, or zero bytes where `data` is empty."""
    out, parts, slots = list(leaves), list(data), jnp.asarray(slots)
    for group in groups:
        held = len(group.transfer.chunk_kinds) if data else 0
        written = scatter_leaves(
            slots,
            parts[:held],
            [out[i] for i in group.leaves],
            transfer=group.transfer,
            num_chunks=1 if data else 0,
            rows=slots.shape[0] if data else 0,
            implementation=implementation,
            turn=group.turn,
            deltas=group.deltas(positions),
        )
        parts = parts[held:]
        for i, leaf in zip(group.leaves, written, strict=True):
            out[i] = leaf
    return out


_STEP = ("groups", "implementation")
_scatter_in_place = jax.jit(_scatter_groups, static_argnames=_STEP, donate_argnames="leaves")
_scatter_into_copy = jax.jit(_scatter_groups, static_argnames=_STEP)
