"""A model's own cos and sin tables as a value: checked, and compared by content."""

import dataclasses
import hashlib

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from numpy.typing import NDArray

from ..rotation import per_frequency
from .positions import Positions, on_host


@dataclasses.dataclass(frozen=True)
class RopeTables:
    """A model's own cos and sin, one row per position from 0 on.

    Attributes:
        cos: float32 [positions, rotary_dim / 2], read-only.
        sin: the same.
        digest: SHA-256 of the shape and the bytes of both; what equality and hash look at.
    """

    cos: NDArray[np.float32] = dataclasses.field(compare=False, repr=False)
    sin: NDArray[np.float32] = dataclasses.field(compare=False, repr=False)
    digest: str = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        digest = hashlib.sha256(repr(self.cos.shape).encode())
        for name in ("cos", "sin"):
            table = np.array(getattr(self, name), np.float32, order="C")
            table.flags.writeable = False
            object.__setattr__(self, name, table)
            digest.update(table.tobytes())
        object.__setattr__(self, "digest", digest.hexdigest())

    def rows(self, positions: Positions, axes: tuple[int, ...] | None) -> tuple[Positions, Positions]:
        """The rows at some positions, all of which the tables have to cover.

        Args:
            positions: int32 [tokens], or [3, tokens] where `axes` is given. Concrete ones are read (a
                device array is waited for): the table of a whole context is tens of MiB, a few rows are
                not. For traced ones the tables become constants of the program.
            axes: for each column the position component that drives it.

        Returns:
            cos and sin, float32 [tokens, rotary_dim / 2].
        """
        at = on_host(positions)
        if axes is not None:
            at = per_frequency(at, axes), np.arange(len(axes))[None, :]
        traced = isinstance(positions, jax.core.Tracer)
        cos, sin = (jnp.asarray(table) if traced else table for table in (self.cos, self.sin))
        return cos[at], sin[at]


def read_tables(
    cos: ArrayLike, sin: ArrayLike, *, rotary_dim: int | None, attention_scaling: float | None
) -> tuple[RopeTables, float]:
    """Tables in the form that `Rope` keeps, and the factor that they carry.

    Args:
        cos: [positions, rotary_dim / 2], or [positions, rotary_dim] with each value twice (then
            `rotary_dim` has to say so).
        sin: the same.
        rotary_dim: channels that turn; twice the tables' width if None.
        attention_scaling: the factor on the tables, to be checked; None reads it off them.

    Returns:
        The tables, factor included, and the factor.

    Raises:
        ValueError: if the tables disagree in shape, do not have the width, or are not cosines and sines
            times one factor.
    """
    raw = np.asarray(cos), np.asarray(sin)
    if raw[0].ndim != 2 or raw[0].shape != raw[1].shape or not raw[0].size:
        raise ValueError(f"cos and sin must be [positions, width], got {raw[0].shape} and {raw[1].shape}")
    c, s = (table.astype(np.float32) for table in raw)
    rows, columns = c.shape
    once_c, once_s = _once(c), _once(s)
    if once_c is not None and once_s is not None:
        if rotary_dim == columns:
            c, s = once_c, once_s
        elif rotary_dim is None and rows > 1:
            raise ValueError(f"the tables hold each value twice: say rotary_dim={columns} if that is the width")
    check_width(c.shape[1], rotary_dim, "table columns")
    # Coarser tables are cos and sin only to their own few bits.
    coarse = jnp.issubdtype(raw[0].dtype, np.floating) and jnp.finfo(raw[0].dtype).bits < 32
    return RopeTables(c, s), _scaling(c, s, attention_scaling, 2e-2 if coarse else 1e-4)


def check_width(count: int, rotary_dim: int | None, what: str) -> None:
    """Checks that there is one frequency (or column) for each pair of channels.

    Raises:
        ValueError: naming width and count.
    """
    if rotary_dim is None:
        return
    if rotary_dim % 2 or rotary_dim <= 0:
        raise ValueError(f"rotary width {rotary_dim} must be even and positive")
    if 2 * count != rotary_dim:
        raise ValueError(f"{count} {what} for a rotary width of {rotary_dim}, which takes {rotary_dim // 2}")


def _once(table: NDArray[np.float32]) -> NDArray[np.float32] | None:
    """One of each value, where a table holds each twice: as two halves or side by side."""
    half = table.shape[1] // 2
    if table.shape[1] % 2 == 0:
        if np.array_equal(table[:, :half], table[:, half:]):
            return table[:, :half]
        if np.array_equal(table[:, ::2], table[:, 1::2]):
            return table[:, ::2]
    return None


def _scaling(cos: NDArray[np.float32], sin: NDArray[np.float32], given: float | None, tolerance: float) -> float:
    squares = np.square(cos, dtype=np.float64) + np.square(sin, dtype=np.float64)
    found = float(np.sqrt(squares.mean()))
    if not (found > 0 and np.abs(squares / found**2 - 1).max() <= tolerance):
        raise ValueError("cos and sin are not cosines and sines times one factor")
    if given is None:
        # What rounding leaves of a factor of one is no factor of the model's.
        return 1.0 if abs(found - 1) < tolerance / 10 else found
    if abs(found / given - 1) > tolerance:
        raise ValueError(f"attention_scaling={given} but the tables carry {found:.6g}")
    return float(given)
