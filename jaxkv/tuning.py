"""Sizes that trade speed against memory, as a value that the caller may pass."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Tuning:
    """How transfers are cut.

    Attributes:
        chunk_tokens: tokens of a chunk where the caller of `store` names no other number.
        staging: chunks that are on the device at once, on their way between pages and host. Two keep the link
            busy: one is filled while the other leaves.
    """

    chunk_tokens: int = 256
    staging: int = 2

    def __post_init__(self) -> None:
        for name in ("chunk_tokens", "staging"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"tuning: {name} must be an int of at least 1, got {value!r}")
