"""How time is taken: medians, both ends blocked, warm-up and enqueue apart."""

import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp


class Timing(NamedTuple):
    """Seconds of one call: to its completion, and until it returned to the caller."""

    total: float
    enqueue: float


def wall(call: Callable[[], Any], *, repeats: int = 7, warm: int = 2) -> Timing:
    """Median wall time of a call, waited for, starting from an idle device."""
    for _ in range(warm):
        jax.block_until_ready(call())
    totals, enqueues = [], []
    for _ in range(repeats):
        start = time.perf_counter()
        result = call()
        enqueues.append(time.perf_counter() - start)
        jax.block_until_ready(result)
        totals.append(time.perf_counter() - start)
        del result
    return Timing(statistics.median(totals), statistics.median(enqueues))


def device_time(step: Callable[[Any, jax.Array], Any], carry: Any, *, steps: int = 20, repeats: int = 5) -> float:
    """Seconds of one step on the device: of a loop inside one program, less an eighth of it.

    Args:
        step: from the carried value and the step's number to the next carried value; it must depend on the
            number, or XLA moves it out of the loop.
        carry: the first value; it is donated.
        steps: of the longer loop.
        repeats: medians are over this many.
    """
    loop = jax.jit(
        lambda carry, count: jax.lax.fori_loop(0, count, lambda i, value: step(value, i), carry), donate_argnums=0
    )
    times: dict[int, list[float]] = {max(steps // 8, 1): [], steps: []}
    for repeat in range(repeats + 1):
        for count, seen in times.items():
            start = time.perf_counter()
            carry = jax.block_until_ready(loop(carry, jnp.int32(count)))
            if repeat:  # the first one compiles
                seen.append(time.perf_counter() - start)
    (few, short), (many, long) = ((count, statistics.median(seen)) for count, seen in times.items())
    return (long - short) / (many - few)
