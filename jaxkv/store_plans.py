"""Plans of stores: which tokens leave their pages, worked out and checked before anything moves."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from . import host, paths
from .chunk import ChunkFormat, as_format
from .ops import checks
from .paths import Saving, groups_of
from .selection import Rows, Selection, check_chunk_tokens, check_ranges, select_rows
from .spec import CacheSpec, PagedCache, Pool
from .tuning import DEFAULT, Tuning, check_tuning
from .values import fields_of, kept


@dataclasses.dataclass(frozen=True, eq=False)
class StorePlan:
    """A store, decided: a value of the host, and no argument of a jitted function.

    Attributes:
        rows: where the rows of the chunks come from.
        spec: of the cache.
        num_slots: slots of a pool that is known to have all of these.
        out_of_range: what was asked for slots past the pool, "raise" or "skip".
    """

    rows: Rows
    spec: CacheSpec
    num_slots: int
    out_of_range: str

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
        return kept(self, "_chosen", self.rows.described)

    def check(self, num_slots: int) -> None:
        """Raises ValueError where a slot is past a pool of so many; those were asked about, or are left out."""
        if self.num_slots > num_slots:
            checks.check_slots_in_pool(np.asarray(self.slots), num_slots)

    def chosen_from(self, num_slots: int) -> Selection:
        """`chosen`, from a pool of so many slots: the plan may have been made without it."""
        chosen = self.chosen
        if self.out_of_range != "skip":
            return chosen
        return chosen._replace(valid=chosen.valid & (chosen.slots < num_slots))  # a row past it is zero bytes

    def slots_beside(self, page: jax.Array, runs: Sequence[range] = ()) -> list[jax.Array]:
        """The slots on the devices of some pages, sent there once.

        Args:
            page: where they are to be.
            runs: of chunks; by default one of all of them.

        Returns:
            The slots of each run, int32 `[chunks of the run * rows]`.
        """
        sent: dict[Any, list[jax.Array]] = kept(self, "_sent", dict)
        key = (page.sharding, *runs)
        tables = sent.get(key)
        if tables is None or not checks.are_alive(tables):
            table = self.rows.slots
            cut = [table[run.start : run.stop].reshape(-1) for run in runs] or [self.slots]
            tables = sent[key] = host.send_beside(cut, page.sharding)
        return tables


def _itself(chosen: Selection) -> Selection:
    return chosen


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
    """Decides what `store` does, or `store_layer` for every layer: the checks are made here, ahead of the transfer.

    With a cache the slots are sent to its devices as well: as a `store` of default options needs them where `layers`
    are all of them, else for `store_layer`.

    Args:
        cache: the cache or its spec; with a spec, slots are checked against the pages that come.
        slots: as in `store`.
        starts: as in `store`.
        ends: as in `store`.
        positions: as in `store`.
        chunk_tokens: rows of each chunk; by default as many as make an array of `layers` layers about
            `tuning.array_bytes`, but no more than the tokens need. (`store` by itself takes `tuning.chunk_tokens`.)
        layers: layers that share an array.
        skip_prefix: as in `store`.
        out_of_range: as in `store`.
        tuning: sizes; see `Tuning`.

    Returns:
        The plan, to be given to `store` or `store_layer` in place of slots.

    Raises:
        TypeError: as `store`.
        ValueError: as `store`.
    """
    spec = cache.spec if isinstance(cache, PagedCache) else cache
    if not isinstance(spec, CacheSpec):
        raise TypeError(f"cache: expected a PagedCache or a CacheSpec, got {type(cache).__name__}")
    pool = cache.pool if isinstance(cache, PagedCache) else None
    rows = chunk_tokens
    if rows is None:
        checks.check_out_of_range(out_of_range)
        slots = checks.slots_int32(slots, read=out_of_range == "raise")
        longest, count = 0, slots.shape[0]
        if starts is not None and ends is not None:
            longest = int(check_ranges(starts, ends, count).sizes.max(initial=0))
        rows = longest or layer_rows(spec, layers, count, check_tuning(tuning))
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
        if layers == spec.num_layers:
            prepared(made, pool, as_format(spec, None), (), path=None, implementation=None, tuning=DEFAULT)
        else:
            made.slots_beside(pool.leaves[0])
    return made


def prepared(
    plan: StorePlan,
    pool: Pool,
    format: ChunkFormat,
    hosts: tuple[Any, ...],
    *,
    path: str | None,
    implementation: str | None,
    tuning: Tuning,
    held: int = 0,
) -> Saving:
    """What a store of a plan out of a pool does; kept with the plan for the next time.

    Args:
        plan: not traced, of one chunk or more.
        pool: the arrays.
        format: of the chunks.
        hosts: shardings of the arrays to write into.
        path: the caller's choice, or None.
        implementation: of the ops.
        tuning: sizes.
        held: the first chunks, which no operation takes together with later ones.

    Raises:
        ValueError: `path` is unknown.
        RuntimeError: `path` is not possible here.
    """
    where = (pool.leaves[0].sharding, hosts, held)
    key = (*where, format, path, implementation, tuning, paths.jit_is_disabled())
    before = plan.__dict__.get("_prepared")
    if before is not None and before[0] == key:
        found: Saving = before[1]
        return found
    count, rows = plan.rows.slots.shape
    sizes: dict[str, Any] = {"nbytes": count * rows * plan.spec.bytes_per_token, "chunks": count, "tuning": tuning}
    way = paths.choose(path, pool.leaves, hosts, traced=False, implementation=implementation, **sizes)
    runs = (*way.runs(held), *way.runs(count - held, start=held))
    found = Saving(way, groups_of(plan.spec, format), runs, plan.slots_beside(pool.leaves[0], runs))
    object.__setattr__(plan, "_prepared", (key, found))
    return found


def decided(spec: CacheSpec, slots: Any, *, num_slots: int, out_of_range: str, **options: Any) -> StorePlan:
    """The plan of a store out of a pool; arguments and errors are those of `select_rows`."""
    rows = select_rows(spec, slots, num_slots=num_slots, out_of_range=out_of_range, **options)
    known = out_of_range == "raise" and isinstance(rows.slots, np.ndarray)
    return StorePlan(rows, spec, num_slots if known else 0, out_of_range)


def layer_rows(spec: CacheSpec, layers: int, num_tokens: int, tuning: Tuning) -> int:
    """Rows of a chunk that make an array of some layers worth its dispatch: a power of two, no more than needed."""
    bytes_per_row = max(spec.bytes_per_token * layers // spec.num_layers, 1)
    worth = max(tuning.array_bytes // bytes_per_row, 1)
    needed = 1 << max(num_tokens - 1, 15).bit_length()
    return min(max(1 << (worth.bit_length() - 1), tuning.chunk_tokens), needed)
