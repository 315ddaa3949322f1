"""What a position may be: an integer that the rope serves, read where it is concrete and masked where traced."""

from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

Positions: TypeAlias = NDArray[Any] | jax.Array


def as_positions(name: str, given: Any, *, components: int | None, where: str = "") -> Positions:
    """Positions as an array, of any integer dtype; a `jax.Array` stays one and is not read.

    Args:
        name: `"old"` or `"new"`, for messages.
        given: an array or list of integers, [tokens] or [components, tokens].
        components: of a position; None for plain ones.
        where: goes before the message.

    Raises:
        TypeError: for anything but integers.
        ValueError: for positions that are missing or of another shape.
    """
    if given is None:
        raise ValueError(f"{where}{name} positions are missing")
    positions: Positions = given if isinstance(given, jax.Array) else np.asarray(given)
    if not positions.size and not hasattr(given, "dtype"):
        positions = positions.astype(np.int32)  # NumPy takes an empty list for floats
    if not jnp.issubdtype(positions.dtype, np.integer):
        raise TypeError(f"{where}{name} positions must be integers, got {positions.dtype}")
    if components is None and positions.ndim != 1:
        raise ValueError(f"{where}{name} positions must be [tokens], got shape {positions.shape}")
    if components is not None and (positions.ndim != 2 or positions.shape[0] != components):
        raise ValueError(
            f"{where}{name} positions of an M-RoPE model must be [{components}, tokens] (time, height, width), "
            f"got shape {positions.shape}"
        )
    return positions


def check_values(name: str, positions: Positions, limit: int, where: str = "") -> None:
    """Checks that concrete positions are in [0, limit); traced ones are not looked at.

    Raises:
        ValueError: naming the first bad value, its token and the limit.
    """
    if isinstance(positions, jax.core.Tracer):
        return
    values = np.asarray(positions)
    bad = np.argwhere((values < 0) | (values >= limit))
    if len(bad):
        value, token = values[tuple(bad[0])], bad[0][-1]
        raise ValueError(
            f"{where}{name} position {value} of token {token} is outside [0, {limit}) that the rope serves"
        )


def within(positions: Positions, limit: int) -> tuple[Positions, Positions]:
    """Positions as int32 and whether each is in [0, limit); where it is not, it becomes 0.

    The bounds are compared in the positions' own dtype, so that none is judged after it wrapped.
    """
    if isinstance(positions, np.ndarray):
        ok = np.asarray((positions >= 0) & (positions < limit))
        return np.where(ok, positions, 0).astype(np.int32), ok
    if positions.dtype.itemsize < 4:
        positions = positions.astype(jnp.int32)  # a narrow dtype could not hold the limit
    served = (positions >= 0) & (positions < limit)
    return jnp.where(served, positions, 0).astype(jnp.int32), served


def on_host(positions: Any) -> Any:
    """A device array as NumPy (it is waited for); anything else, tracers too, as it is."""
    read = isinstance(positions, jax.Array) and not isinstance(positions, jax.core.Tracer)
    return np.asarray(positions) if read else positions
