"""What a load of a plan does, worked out once: the way it goes, and its steps with their tables on the device.

A load that follows a wait finds the processor's caches cold, and every look at a chunk or a table costs several times
as much as it does in a loop: what is the same for each load of a plan is kept with it.
"""

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from . import host, ways
from .chunk import Chunk, as_format, check_chunks, known
from .ops import checks
from .paths import Group, Part, Stretch, groups_of
from .plans import Plan
from .spec import CacheSpec, Pool
from .tuning import Tuning
from .values import kept_for
from .ways import Way


class PreparedLoad(NamedTuple):
    """What a load does.

    Attributes:
        way: how the chunks go.
        parts: on the overlapped path, the chunks one by one.
        stretches: on the other paths, those that one operation takes each.
        zeroing: what fills slots with zero bytes, None where none is to be.
    """

    way: Way
    parts: Sequence[Part]
    stretches: Sequence[Stretch]
    zeroing: Part | None


def prepared_load(
    plan: Plan,
    spec: CacheSpec,
    pool: Pool,
    *,
    path: str | None,
    implementation: str | None,
    tuning: Tuning,
    cut: int | None = None,
) -> PreparedLoad:
    """What a load of a plan into a pool does, checked; kept with the plan for the next time.

    Args:
        plan: of `plan`.
        spec: of the cache.
        pool: its arrays.
        path: the caller's choice, or None.
        implementation: of the ops.
        tuning: sizes.
        cut: of a load beside a store, the number of first chunks that no operation takes together with later ones;
            None for one alone, whose first chunks are sent ahead of the operation that takes them.

    Returns:
        The steps, with their tables on the pool's devices unless a function is being traced.

    Raises:
        TypeError: a chunk is of another dtype.
        ValueError: the plan does not fit the cache, a chunk was deleted, or `path` is unknown.
        RuntimeError: `path` is not possible here.
    """
    checks.check_choice("path", path, ways.PATHS)  # it is compared below, and an array is not to be
    if plan.as_made or plan.spec is spec:
        plan.check()
    if checks.is_tracing() or not plan.as_made:
        _check(plan, spec, pool)
        return _steps(plan, spec, pool, path, implementation, tuning, cut)

    def make() -> PreparedLoad:
        _check(plan, spec, pool)
        return _steps(plan, spec, pool, path, implementation, tuning, cut)

    where = (pool.shardings, pool.num_slots)
    key = (spec, *where, path, implementation, tuning, cut, ways.jit_is_disabled())
    return kept_for(plan, "_prepared" if cut is None else "_prepared_beside", key, make)


def _steps(
    plan: Plan,
    spec: CacheSpec,
    pool: Pool,
    path: str | None,
    implementation: str | None,
    tuning: Tuning,
    cut: int | None,
) -> PreparedLoad:
    traced, moving, chunks = checks.is_tracing(), plan.moving(), plan.chunks
    hosts = [] if traced else [array for k in moving for array in chunks[k].data]
    way = ways.choose(
        path,
        pool.leaves,
        ways.shardings_of(hosts),
        traced=traced,
        nbytes=spec.bytes_per_token * sum(chunks[k].num_rows for k in moving),
        chunks=len(moving),
        implementation=implementation,
        tuning=tuning,
    )
    runs: list[list[int]] = []
    for _, members in itertools.groupby(moving, key=lambda k: (chunks[k].fingerprint, chunks[k].num_rows)):
        alike = list(members)
        taken = way.loads(len(alike)) if cut is None else way.runs_apart(len(alike), cut)
        runs += [[alike[i] for i in run] for run in taken]
    tables = [(_cut(plan.slots, plan, run), _positions(plan, run)) for run in runs]
    if not traced:
        tables = _sent(tables, pool)
    parts: list[Part] = []
    stretches: list[Stretch] = []
    for run, (slots, positions) in zip(runs, tables, strict=True):
        chunk = chunks[run[0]]
        groups = groups_of(spec, chunk.format, positions is not None)
        if way.path == "overlapped":
            parts.append(Part(slots, chunk.data, groups, positions))
        else:
            data = _by_group(groups, [chunks[k] for k in run])
            ahead = way.ahead(len(run)) if cut is None and not stretches else 0
            stretches.append(Stretch(slots, data, chunk.num_rows, groups, positions, ahead))
    return PreparedLoad(way, parts, stretches, _zeroing(plan, spec, None if traced else pool))


def _check(plan: Plan, spec: CacheSpec, pool: Pool) -> None:
    """A plan may have been made for another cache, or for none: it is checked against this one."""
    if plan.spec is not spec:
        check_chunks(spec, plan.chunks)
    if plan.spec.page_size != spec.page_size:
        raise ValueError(
            f"plan: made for pages of {plan.spec.page_size} tokens, the cache has pages of {spec.page_size}: a slot is "
            f"another token there"
        )
    if plan.out_of_range != "raise" or checks.is_traced(plan.slots) or plan.slots_fit(pool.num_slots):
        return
    if not any((known(slots, read=True) >= pool.num_slots).any() for slots in (plan.slots, plan.zero_slots)):
        return
    parts = {f"row {{}} of chunk {k}": slots for k, slots in enumerate(plan.slots_by_chunk())}
    for name, slots in {**parts, "gap slot {}": plan.zero_slots}.items():
        slots = known(slots, read=True)
        for row in np.flatnonzero(slots >= pool.num_slots):
            raise ValueError(
                f"plan: {name.format(row)} has slot {slots[row]}, but the pool has {pool.num_slots} slots; plan with "
                f"out_of_range='skip' to leave such tokens out"
            )


def _cut(table: Any, plan: Plan, run: Sequence[int]) -> Any:
    """A table's rows of some chunks."""
    spans = plan.spans()
    if run[-1] - run[0] + 1 == len(run):
        return table[..., spans[run[0]][0] : spans[run[-1]][1]]
    xp = np if isinstance(table, np.ndarray) else jnp
    return xp.concatenate([table[..., slice(*spans[k])] for k in run], axis=-1)


def _positions(plan: Plan, run: Sequence[int]) -> tuple[Any, Any] | None:
    return None if plan.positions is None else (_cut(plan.positions[0], plan, run), _cut(plan.positions[1], plan, run))


def _sent(tables: Sequence[tuple[Any, tuple[Any, Any] | None]], pool: Pool) -> list[tuple[Any, Any]]:
    """The tables on the pool's devices, sent there in one call."""
    flat = [table for slots, positions in tables for table in (slots, *(positions or ()))]
    on_device = iter(host.send_beside(flat, pool.leaves[0].sharding))
    return [
        (next(on_device), None if positions is None else (next(on_device), next(on_device))) for _, positions in tables
    ]


def _by_group(groups: tuple[Group, ...], chunks: Sequence[Chunk]) -> tuple[list[Any], ...]:
    """For each group the arrays of some chunks."""
    by_group, first = [], 0
    for group in groups:
        last = first + len(group.transfer.chunk_kinds)
        by_group.append([array for chunk in chunks for array in chunk.data[first:last]])
        first = last
    return tuple(by_group)


def _zeroing(plan: Plan, spec: CacheSpec, pool: Pool | None) -> Part | None:
    """What fills slots with zero bytes; slots whose values are not known may be such."""
    slots = plan.zero_slots
    if not (bool((slots >= 0).any()) if isinstance(slots, np.ndarray) else slots.shape[0] > 0):
        return None
    # Padded to a power of two, so that few programs serve all lengths.
    size = 1 << (slots.shape[0] - 1).bit_length()
    xp = np if isinstance(slots, np.ndarray) else jnp
    padded = xp.pad(slots, (0, size - slots.shape[0]), constant_values=-1)
    if pool is not None:
        (padded,) = host.send_beside([padded], pool.leaves[0].sharding)
    return Part(padded, (), groups_of(spec, as_format(spec, None)))
