"""The three ways between chunks in pinned host memory and the pages: which one a call goes, and how it is cut.

*Overlapped*: one gather into device memory and one `device_put` a chunk (a load the other way round), through a
ring of device buffers; the copies ride streams of their own, so this is the way beside a computation, and the only
one inside `jit`, on a sharded pool and without handlers. *Engine*: one operation for many chunks, in which the
copy engine moves one chunk while a kernel fills the next buffer; soonest done where nothing computes beside it,
since it holds the computation's stream until the last copy. *Direct*: a kernel reads or writes pinned memory itself,
and holds the stream as well; least overhead for little data, and on a CPU always the best, since there it is one
copy instead of two.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax

from .host import PINNED
from .ops import checks, native
from .tuning import Tuning

PATHS = (None, "overlapped", "engine", "direct")

_CONFIG: Any = jax.config  # some versions' types do not have its options


class Way(NamedTuple):
    """How a call moves its data.

    Attributes:
        path: "overlapped", "engine" or "direct".
        staging: device buffers of one chunk each.
        batch: chunks that one operation takes at most.
        first: chunks of an operation that goes before one of four times as many or more; 0 for none.
    """

    path: str
    staging: int
    batch: int
    first: int = 0

    def runs(self, count: int, start: int = 0) -> Iterator[range]:
        """Cuts `count` chunks, numbered from `start`, into the runs that one operation takes each.

        They are powers of two, so that few programs serve all numbers, the shortest first: it is queued soonest. The
        first of them sets out with a few chunks where it is long, and the rest of it is queued while those move. (A
        load that goes alone has `loads`.)
        """
        done = 0
        while done < count:
            left = count - done
            size = min(left & -left, self.batch)
            if done == 0 and 0 < 4 * self.first <= size:
                yield range(start, start + self.first)
                done = self.first
                size -= self.first
            yield range(start + done, start + done + size)
            done += size

    def runs_apart(self, count: int, cut: int) -> tuple[range, ...]:
        """The runs of `count` chunks of which no operation takes some of the first `cut` together with later ones."""
        first = cut if cut < count else 0
        return (*self.runs(first), *self.runs(count - first, start=first))

    def loads(self, count: int) -> list[range]:
        """Cuts the chunks of a load that goes alone, on the engine path the longest run first.

        It is queued while its first chunks move, which are sent `ahead` of it, and the others are while it moves.
        """
        runs = list(self._replace(first=0).runs(count))
        return runs[::-1] if self.path == "engine" else runs

    def ahead(self, count: int) -> int:
        """Of the `count` chunks of the first of these runs, those that are sent ahead: as many as there are buffers."""
        return min(self.staging, count) if self.path == "engine" else 0


def choose(
    path: str | None,
    leaves: Sequence[jax.Array],
    hosts: Sequence[Any],
    *,
    traced: bool,
    nbytes: int,
    chunks: int = 1,
    implementation: str | None,
    tuning: Tuning,
) -> Way:
    """Picks the way of a call from its size, or takes the one that is named.

    Args:
        path: the caller's choice, or None.
        leaves: the pool's arrays.
        hosts: shardings of the arrays to read from, or to write into (`shardings_of`).
        traced: whether the call is being traced.
        nbytes: bytes to move.
        chunks: in how many chunks.
        implementation: of the ops; "xla" leaves the overlapped way alone.
        tuning: sizes.

    Raises:
        ValueError: the name is unknown.
        RuntimeError: the named path is not possible here; the message says why.
    """
    checks.check_choice("path", path, PATHS)
    device = None if traced else next(iter(leaves[0].devices()))
    platform = None if device is None else native.platform_of(device)
    why_not = None
    if traced:
        why_not = "inside jit, copies are part of the program"
    elif jit_is_disabled():
        why_not = "jit is disabled, and it is a program"
    elif implementation == "xla":
        why_not = "it has no XLA form"
    elif len(leaves[0].devices()) > 1:
        why_not = "the pool is on several devices"
    elif not native.available(platform or ""):
        why_not = f"no handlers for {platform}"
    elif any(s.memory_kind != PINNED or s.device_set != leaves[0].devices() for s in hosts):
        why_not = "a chunk is not in pinned memory beside the pool's device"
    if path == "engine" and why_not is None and platform != "cuda":
        why_not = f"there is no copy engine on {platform}"
    if path in ("engine", "direct") and why_not is not None:
        raise RuntimeError(f"path: {path!r} is not possible here: {why_not}")
    if path is None:
        path = "overlapped"
        if why_not is None:
            path = "direct" if platform == "cpu" or nbytes <= tuning.direct_bytes else "engine"
    # A CPU gains nothing from several chunks in a program, and compiles one alone.
    batch = 1 if path == "overlapped" or platform == "cpu" else tuning.chunks_per_call
    if path != "engine":
        return Way(path, 0 if path == "direct" else tuning.staging, batch)
    alone = max(-(-tuning.first_bytes * chunks // max(nbytes, 1)), 1)  # chunks that take as long as it takes to queue
    return Way(path, tuning.staging, batch, 1 << (alone - 1).bit_length())


def jit_is_disabled() -> bool:
    """Whether functions run op by op, as in a debugger."""
    return bool(_CONFIG.jax_disable_jit)


def shardings_of(arrays: Sequence[jax.Array]) -> tuple[Any, ...]:
    """The different shardings of some arrays, of which there may be many with one."""
    return tuple({id(sharding): sharding for sharding in [array.sharding for array in arrays]}.values())
