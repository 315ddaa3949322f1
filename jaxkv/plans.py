"""Plans of loads, as values: which row of which chunk goes to which slot."""

import dataclasses
import itertools
from typing import Any, NamedTuple

import jax
import numpy as np

from .chunk import Chunk, check_alive, check_chunks
from .ops import checks
from .spec import CacheSpec
from .values import fields_of, kept


class Counts(NamedTuple):
    """What became of the tokens of a call.

    The four add up to the tokens that chunks cover and, with `gaps="zero"`, those between the chunks.

    Attributes:
        moved: tokens whose rows move (of equal slots, all count), or whose slots are zeroed.
        skipped: negative slots, the skipped prefix, and rows that are not real.
        out_of_range: slots past the pool.
        bad_position: positions that cannot be served.
    """

    moved: Any
    skipped: Any
    out_of_range: Any
    bad_position: Any = 0


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Plan:
    """A load, decided: a value that can be loaded as often as you like.

    Attributes:
        chunks: what is loaded.
        slots: int32 `[rows of all chunks]`, the slot of each row; -1 where a row stays behind.
        zero_slots: int32 `[n]`, slots to fill with zero bytes (`gaps="zero"`), -1 for none.
        zeroed: bool `[tokens]`, the gap tokens: covered by no chunk, between the first and the last.
        row_of_token: int32 `[tokens]`, the row that holds each token (the last one that does), -1 for none.
        positions: None, or old and new positions of the rows, int32 `[rows of all chunks]` (`[3, ...]` for M-RoPE):
            keys are moved from the one to the other.
        counts: what becomes of the tokens.
        spec: the cache it was made for.
        num_slots: slots of the pool it was checked against, or None where that is left to `load`.
        out_of_range: what was asked for slots past the pool, "raise" or "skip".
    """

    chunks: tuple[Chunk, ...]
    slots: Any
    zero_slots: Any
    zeroed: Any
    row_of_token: Any
    positions: tuple[Any, Any] | None
    counts: Counts
    spec: CacheSpec = dataclasses.field(metadata={"static": True})
    num_slots: int | None = dataclasses.field(metadata={"static": True})
    out_of_range: str = dataclasses.field(metadata={"static": True})

    def __repr__(self) -> str:
        # Not the tables: a log wants to know what it is.
        turning = "" if self.positions is None else ", keys turned"
        return f"Plan({len(self.chunks)} chunks of {self.slots.shape[0]} rows in all{turning}, {self.spec!r})"

    def __getstate__(self) -> dict[str, Any]:
        # Without what is kept beside the fields: tables on a device do not pickle, and a copy is checked anew.
        return fields_of(self)

    @property
    def as_made(self) -> bool:
        """Whether this is what `plan` returned: not altered, not from a program, and its tables do not change."""
        return self.__dict__.get("_as_made", False)

    def check(self, *, data_later: bool = False) -> None:
        """Checks the chunks again: all about them where this is not a plan as `plan` made it, else what may change.

        Args:
            data_later: whether chunks may be without data.

        Raises:
            TypeError, ValueError: as `plan`; of what `plan` made, a ValueError where an array was deleted since.
        """
        if self.as_made:
            # All that can change about chunks that were checked. (A traced array is not asked.)
            arrays = kept(self, "_arrays", lambda: [array for chunk in self.chunks for array in chunk.data])
            if checks.is_tracing() or any([array.is_deleted() for array in arrays]):
                check_alive(self.chunks)
        else:
            check_chunks(self.spec, self.chunks, data_later=data_later)

    def slots_fit(self, num_slots: int) -> bool:
        """Whether it is known, without a look at the slots, that a pool of that many has them all."""
        return self.as_made and self.num_slots is not None and self.num_slots <= num_slots

    def slots_by_chunk(self) -> list[Any]:
        """The slots of each chunk's rows, int32 `[rows]`."""
        return [self.slots[first:last] for first, last in self.spans()]

    def moving(self) -> list[int]:
        """The chunks of which a row may move; where slots are not known, all that have rows."""
        spans = self.spans()
        if not isinstance(self.slots, np.ndarray) or self.slots.min(initial=0) >= 0:
            return [k for k, (first, last) in enumerate(spans) if last > first]
        moved = np.concatenate([[0], np.cumsum(self.slots >= 0)])
        return [k for k, (first, last) in enumerate(spans) if moved[last] > moved[first]]

    def spans(self) -> list[tuple[int, int]]:
        """The first row of each chunk, and one past its last."""
        ends = itertools.accumulate(chunk.num_rows for chunk in self.chunks)
        return kept(self, "_spans", lambda: list(itertools.pairwise([0, *ends])))
