"""Sizes that trade speed against memory, as a value that the caller may pass."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Tuning:
    """How transfers are cut.

    Attributes:
        chunk_tokens: tokens of a chunk where the caller of `store` names no other number.
        staging: chunks that are on the device at once, on their way between pages and host. Two keep the link
            busy: one is filled while the other leaves. So many a load of the engine path sends ahead.
        chunks_per_call: chunks that one operation of the engine path takes at most, a power of two.
        first_bytes: what takes the link about as long as it takes to queue an operation: a long store or exchange of
            the engine path sets out with so much, and the rest is queued meanwhile.
        array_bytes: what makes an array worth its dispatch, layer by layer.
        direct_bytes: up to this size a call on a GPU lets the kernel reach into pinned memory.
    """

    chunk_tokens: int = 256
    staging: int = 2
    chunks_per_call: int = 32
    first_bytes: int = 48 << 20
    array_bytes: int = 32 << 20
    direct_bytes: int = 2 << 20

    def __post_init__(self) -> None:
        for name in ("chunk_tokens", "staging", "chunks_per_call", "first_bytes", "array_bytes", "direct_bytes"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"tuning: {name} must be an int of at least 1, got {value!r}")
        if self.chunks_per_call & (self.chunks_per_call - 1):
            raise ValueError(f"tuning: chunks_per_call must be a power of two, got {self.chunks_per_call}")


DEFAULT = Tuning()
"""What a call takes where the caller gives none."""


def check_tuning(tuning: Tuning | None) -> Tuning:
    """A call's tuning; TypeError where it is none."""
    if tuning is not None and not isinstance(tuning, Tuning):
        raise TypeError(f"tuning: expected a Tuning, got {tuning!r}")
    return DEFAULT if tuning is None else tuning
