"""Plans of stores: which tokens leave their pages, worked out and checked before anything moves."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from . import host, ways
from .chunk import ChunkFormat, Fingerprint, as_format
from .ops import checks
from .ops.pinned import place_program
from .paths import Group, PreparedStore, groups_of
from .selection import Rows, Selection, check_chunk_tokens, check_ranges, select_rows
from .spec import CacheSpec, PagedCache, Pool
from .tuning import Tuning, check_tuning
from .values import fields_of, kept, kept_for


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class StorePlan:
    """A store, decided: a value of the host, and no argument of a jitted function.

    Attributes:
        rows: where the rows of the chunks come from.
        spec: of the cache.
        num_slots: slots of a pool that is known to have all of these; 0 where there is nothing to check.
        out_of_range: what was asked for slots past the pool, "raise" or "skip".
    """

    rows: Rows
    spec: CacheSpec
    num_slots: int
    out_of_range: str

    def __repr__(self) -> str:
        chunks, rows = self.rows.slots.shape
        return f"StorePlan({chunks} chunks of {rows} rows, {self.spec!r})"

    def __getstate__(self) -> dict[str, Any]:
        # Without what was sent, and with values in place of what is to work them out.
        return {**fields_of(self), "rows": Rows(self.rows.slots, functools.partial(_itself, self.chosen))}

    @property
    def slots(self) -> Any:
        """The slots of all rows, int32 `[chunks * rows]`."""
        return self.rows.slots.reshape(-1)

    @property
    def chosen(self) -> Selection:
        """The slots and positions, in rows of chunks."""
        if checks.is_tracing():
            return self.rows.described()  # what is traced belongs to one program
        return kept(self, "_chosen", lambda: _frozen(self.rows.described()))

    def check(self, num_slots: int, name: str = "slots") -> None:
        """Checks the slots against a pool, unless they are known to be in it or those past it are to be left out.

        Args:
            num_slots: slots of the pool.
            name: what to call the slots in errors.

        Raises:
            ValueError: a slot is past the pool.
        """
        if self.num_slots <= num_slots:
            return
        table = self.rows.slots
        for chunk, row in np.argwhere(table >= num_slots):
            raise ValueError(
                f"{name}: row {row} of chunk {chunk} has slot {table[chunk, row]}, but the pool has {num_slots} slots "
                f"(0 to {num_slots - 1}); pass out_of_range='skip' to leave such tokens out"
            )

    def chosen_from(self, num_slots: int) -> Selection:
        """`chosen`, from a pool of so many slots: the plan may have been made without it."""
        chosen = self.chosen
        if self.out_of_range != "skip":
            return chosen
        return chosen._replace(valid=chosen.valid & (chosen.slots < num_slots))  # a row past it is zero bytes

    def slots_beside(self, page: jax.Array) -> jax.Array:
        """The slots on the devices of some pages, sent to each of these once: int32 `[chunks * rows]`."""
        sent: dict[Any, jax.Array] = kept(self, "_sent", dict)
        where = page.sharding
        if where not in sent:
            (sent[where],) = host.send_beside([self.slots], where)
        return sent[where]


def _itself(chosen: Selection) -> Selection:
    return chosen


def _frozen(chosen: Selection) -> Selection:
    """The same, which the chunks of every store of a plan share."""
    for field in chosen:
        if isinstance(field, np.ndarray):
            field.flags.writeable = False
    return chosen


def store_plan(
    cache: PagedCache | CacheSpec,
    slots: Any,
    *,
    starts: Sequence[int] | None = None,
    ends: Sequence[int] | None = None,
    positions: Any = None,
    chunk_tokens: int | None = None,
    layers: int | None = 1,
    skip_prefix: Any = 0,
    out_of_range: str = "raise",
    tuning: Tuning | None = None,
) -> StorePlan:
    """Decides what `store` does, or `store_layer` for every layer: the checks are made here, ahead of the transfer.

    For `store` give `layers=None`. With a cache the slots are sent to its devices as well, as a `store` of default
    options or `store_layer` needs them.

    Args:
        cache: the cache or its spec; with a spec, slots are checked against the pages that come.
        slots: as in `store`.
        starts: as in `store`.
        ends: as in `store`.
        positions: as in `store`.
        chunk_tokens: rows of each chunk; by default for `store` the rows it takes itself (`tuning.chunk_tokens`), and
            for `store_layer` as many as make an array of `layers` layers about `tuning.array_bytes`, but no more than
            the tokens need.
        layers: for `store_layer`, the layers that share an array; None for `store`.
        skip_prefix: as in `store`.
        out_of_range: as in `store`; with "skip" a plan made from a cache leaves out what is past that cache.
        tuning: sizes; see `Tuning`.

    Returns:
        The plan, to be given to `store` or `store_layer` in place of slots.

    Raises:
        TypeError, ValueError, NotImplementedError: as `store`; or `layers` is neither None nor a positive integer.
    """
    tuning = check_tuning(tuning)
    spec = cache.spec if isinstance(cache, PagedCache) else cache
    if not isinstance(spec, CacheSpec):
        raise TypeError(f"cache: expected a PagedCache or a CacheSpec, got {type(cache).__name__}")
    if layers is not None and (isinstance(layers, bool) or not isinstance(layers, (int, np.integer)) or layers < 1):
        raise ValueError(f"layers: expected an int of at least 1, or None for store, got {layers!r}")
    pool = cache.pool if isinstance(cache, PagedCache) else None
    rows = tuning.chunk_tokens if chunk_tokens is None and layers is None else chunk_tokens
    if rows is None:
        assert layers is not None  # else it is known
        checks.check_out_of_range(out_of_range)
        slots = checks.slots_int32(slots, read=out_of_range == "raise")
        longest, count = 0, slots.shape[0]
        if starts is not None and ends is not None:
            longest = int(check_ranges(starts, ends, count).sizes.max(initial=0))
        rows = longest or layer_rows(spec, layers, count, tuning)
    made = decided(
        spec,
        slots,
        rows=check_chunk_tokens(rows),
        num_slots=checks.INT32_MAX if pool is None else pool.num_slots,
        starts=starts,
        ends=ends,
        positions=positions,
        skip_prefix=skip_prefix,
        out_of_range=out_of_range,
    )
    table = made.rows.slots
    if pool is None:
        return dataclasses.replace(made, num_slots=int(table.max(initial=-1)) + 1) if made.num_slots else made
    if table.size and not checks.is_tracing():
        if layers is None:
            prepared_store(made, pool, None, (), path=None, implementation=None, tuning=tuning)
        else:
            made.slots_beside(pool.leaves[0])
    return made


def prepared_store(
    plan: StorePlan,
    pool: Pool,
    format: ChunkFormat | None,
    hosts: tuple[Any, ...],
    *,
    path: str | None,
    implementation: str | None,
    tuning: Tuning,
    cut: int = 0,
    runs: tuple[range, ...] | None = None,
) -> PreparedStore:
    """What a store of a plan out of a pool does; kept with the plan for the next time.

    Args:
        plan: not traced, of one chunk or more.
        pool: the arrays.
        format: of the chunks; None for the cache's own.
        hosts: the different shardings of the arrays to write into.
        path: the caller's choice, or None.
        implementation: of the ops.
        tuning: sizes.
        cut: the number of first chunks that no operation takes together with later ones.
        runs: the chunks that one operation is to take each, where that is not to be worked out.

    Returns:
        The steps, with their tables on the pool's devices.

    Raises:
        ValueError: `path` is unknown.
        RuntimeError: `path` is not possible here.
    """
    checks.check_choice("path", path, ways.PATHS)  # it is compared below, and an array is not to be
    count, rows = plan.rows.slots.shape

    def make() -> PreparedStore:
        sizes: dict[str, Any] = {"nbytes": count * rows * plan.spec.bytes_per_token, "chunks": count}
        how: dict[str, Any] = {"traced": False, "implementation": implementation, "tuning": tuning}
        way = ways.choose(path, pool.leaves, hosts, **how, **sizes)
        taken = way.runs_apart(count, cut) if runs is None else runs
        wanted = as_format(plan.spec, format)
        groups, slots = groups_of(plan.spec, wanted), plan.rows.slots
        tables = host.send_beside([slots[run.start : run.stop].reshape(-1) for run in taken], pool.leaves[0].sharding)

        def program(run: range, table: jax.Array, group: Group) -> Any:
            sharding = hosts[0] if run.stop <= cut else None
            counts: dict[str, Any] = {"num_chunks": len(run), "staging": way.staging}
            return place_program(table, sharding, group.of(pool.leaves), transfer=group.transfer, **counts)

        programs: list[tuple[Any, ...]] = []
        if way.path != "overlapped":
            programs += [
                tuple(program(run, table, group) for group in groups) for run, table in zip(taken, tables, strict=True)
            ]
        alike = object() if cut in (0, count) and len(hosts) < 2 else None
        return PreparedStore(way, groups, Fingerprint.of(plan.spec, wanted), taken, tables, programs, alike)

    where = (pool.shardings, hosts, cut, runs)
    return kept_for(plan, "_prepared", (*where, format, path, implementation, tuning, ways.jit_is_disabled()), make)


def decided(
    spec: CacheSpec, slots: Any, *, num_slots: int, positions: Any, out_of_range: str, **options: Any
) -> StorePlan:
    """The plan of a store out of a pool; arguments and errors are those of `select_rows`."""
    rows = select_rows(spec, slots, num_slots=num_slots, positions=positions, out_of_range=out_of_range, **options)
    if isinstance(rows.slots, np.ndarray):
        rows.slots.flags.writeable = False  # what was checked, and sent to a device, stays as it is
    known = out_of_range == "raise" and isinstance(rows.slots, np.ndarray)
    made = StorePlan(rows, spec, num_slots if known else 0, out_of_range)
    if isinstance(positions, jax.Array) and not checks.is_tracing():
        made = dataclasses.replace(made, rows=Rows(rows.slots, functools.partial(_itself, made.chosen)))
    return made


def layer_rows(spec: CacheSpec, layers: int, num_tokens: int, tuning: Tuning) -> int:
    """Rows of a chunk that make an array of some layers worth its dispatch: a power of two, no more than needed."""
    bytes_per_row = max(spec.bytes_per_token * layers // spec.num_layers, 1)
    worth = max(tuning.array_bytes // bytes_per_row, 1)
    needed = 1 << max(num_tokens - 1, 15).bit_length()
    return min(max(1 << (worth.bit_length() - 1), tuning.chunk_tokens), needed)
