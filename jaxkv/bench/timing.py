"""How time is taken: medians, both ends blocked, warm-up and enqueue apart."""

import contextlib
import gc
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax


class Timing(NamedTuple):
    """Seconds of one call: to its completion, and until it returned to the caller."""

    total: float
    enqueue: float


@contextlib.contextmanager
def without_collector() -> Iterator[None]:
    """Keeps Python from looking for garbage meanwhile, which takes it longer than some of what is timed (as timeit)."""
    was_enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@without_collector()
def wall(
    call: Callable[[], Any], *, repeats: int = 7, warm: int = 2, until: Callable[[], None] | None = None
) -> Timing:
    """Median wall time of a call, waited for, starting from an idle device.

    Args:
        call: what is measured.
        repeats: the median is over this many.
        warm: calls before them.
        until: another way to wait, after which the clock is read; by default JAX's word that the result is there.
    """
    for _ in range(warm):
        jax.block_until_ready(call())
    totals, enqueues = [], []
    for _ in range(repeats):
        start = time.perf_counter()
        result = call()
        enqueues.append(time.perf_counter() - start)
        if until is None:
            jax.block_until_ready(result)
        else:
            until()
        totals.append(time.perf_counter() - start)
        jax.block_until_ready(result)
        del result
    return Timing(statistics.median(totals), statistics.median(enqueues))


def device_time(step: Callable[[Any, jax.Array], Any], carry: Any, *, steps: int = 24, repeats: int = 5) -> float:
    """Seconds of one step on the device: of a long loop inside one program, less a short one.

    Args:
        step: from the carried value and the step's number to the next carried value; it must depend on the
            number, or XLA moves it out of the loop.
        carry: the first value; it is donated.
        steps: of the longer loop; the shorter has an eighth of them.
        repeats: medians are over this many.
    """

    def loop(count: int) -> Callable[[Any], Any]:
        # A count that is known when compiling: else the host decides after every step whether there is another.
        body = lambda carry: jax.lax.fori_loop(0, count, lambda i, value: step(value, i), carry)  # noqa: E731
        return jax.jit(body, donate_argnums=0)

    counts = (max(steps // 8, 1), steps)
    loops = [loop(count) for count in counts]
    times: list[list[float]] = [[], []]
    for repeat in range(repeats + 1):
        for run, seen in zip(loops, times, strict=True):
            start = time.perf_counter()
            carry = jax.block_until_ready(run(carry))
            if repeat:  # the first one compiles
                seen.append(time.perf_counter() - start)
    short, long = map(statistics.median, times)
    return (long - short) / (counts[1] - counts[0])
