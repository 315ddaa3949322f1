"""Values that are compared and hashed on every call."""

import dataclasses
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


def hashed_once(cls: type[T]) -> type[T]:
    """Makes a frozen dataclass keep its hash, and be equal to itself without a look at its fields.

    Such values are static arguments of jitted functions and keys of caches: a layer-wise step looks a dozen of them
    up, and hashing nested dataclasses field by field took longer than the step's dispatch.
    """
    hash_fields, equal_fields = cls.__hash__, cls.__eq__

    def __hash__(self: Any) -> int:
        kept = self.__dict__.get("_hash")
        if kept is None:
            kept = hash_fields(self)
            object.__setattr__(self, "_hash", kept)
        return int(kept)

    def __eq__(self: Any, other: Any) -> Any:
        return True if self is other else equal_fields(self, other)

    def __getstate__(self: Any) -> dict[str, Any]:
        # Hashes of strings differ from process to process.
        return {name: value for name, value in self.__dict__.items() if name != "_hash"}

    cls.__hash__, cls.__eq__ = __hash__, __eq__  # type: ignore[method-assign]
    cls.__getstate__ = __getstate__  # type: ignore[method-assign]
    return cls


def kept(value: Any, name: str, make: Callable[[], T]) -> T:
    """What follows from a frozen value, made when it is first asked for and kept with it, outside of its fields.

    What comes out of a program does not have it; nor do copies and pickles, where `__getstate__` is `fields_of`.
    """
    found = value.__dict__.get(name, _NOTHING)
    if found is _NOTHING:
        found = make()
        object.__setattr__(value, name, found)
    return found


def kept_for(value: Any, name: str, key: Any, make: Callable[[], T]) -> T:
    """As `kept`, but made again where it is asked for under another key than the last time."""
    found = value.__dict__.get(name)
    if found is None or found[0] != key:
        found = (key, make())
        object.__setattr__(value, name, found)
    return found[1]


_NOTHING = object()


def fields_of(value: Any) -> dict[str, Any]:
    """The fields of a dataclass, without what is kept beside them."""
    return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
