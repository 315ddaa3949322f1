"""Layouts: the axes of a KV array, in order, as one sentence.

A sentence names the axes of an array from the slowest to the fastest, in the notation einops readers
know: ``"kv page token head dim"``. Parentheses fuse axes into one array axis (``"(page token) head dim"``),
``1`` is an axis of length one, and names before ``|`` are levels of the pytree that holds the arrays:
``"kv layer | page token head dim"`` is a list of K arrays and a list of V arrays. Where no ``layer`` is
named at all, a level of layers is meant: one array per layer.

Nothing is guessed from shapes. A shape is checked against the sentence; the only size an array decides is
its number of pages.
"""

import dataclasses
import functools
import itertools
import math
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from .values import hashed_once

AXES = ("layer", "page", "token", "head", "kv", "dim")
LEVELS = ("layer", "kv")

_TOKEN = re.compile(r"\s*(?:(?P<name>[A-Za-z_][\w.]*)|(?P<one>1(?!\w))|(?P<mark>[()|]))")

Unit = tuple[str, ...]
"""The axes that share one written array axis, outermost first; empty for ``1``."""


class Sizes(NamedTuple):
    """What a model says of its KV: everything but the number of pages.

    Attributes:
        layers: layers in the pool.
        heads: KV heads a layer (1 for MLA).
        dim: elements of one head in one plane.
        page_size: tokens a page.
        planes: 2 for K and V, 1 where both share one latent row (MLA).
    """

    layers: int
    heads: int
    dim: int
    page_size: int
    planes: int = 2

    @property
    def row(self) -> int:
        """Elements of one token in one layer, all planes."""
        return self.planes * self.heads * self.dim


class Strides(NamedTuple):
    """Distance in elements between neighbours along each axis (0 where the array has no such axis)."""

    layer: int
    kv: int
    page: int
    token: int
    head: int
    dim: int


class Plane(NamedTuple):
    """Where one (layer, kv) plane starts: the leaf's number in the pytree, elements into that leaf, and its strides."""

    leaf: int
    offset: int
    strides: Strides


@hashed_once
@dataclasses.dataclass(frozen=True)
class Layout:
    """The axes of KV arrays, parsed once and checked against every array.

    Args:
        sentence: the axes in order, or a pair of sentences where K and V are laid out differently.
        pad: sizes of padded axes, ``{"dim": 128}``: the array's size where it exceeds the model's.

    Raises:
        ValueError: the sentence has an unknown, doubled or missing axis, or does not parse (the message shows
            the sentence and the fault).
        TypeError: the sentence is no string (or pair of strings), or a padded size is no integer.

    Examples:
        >>> Layout("kv page token head dim").shape(Sizes(2, 4, 64, 16), num_pages=7)
        (2, 7, 16, 4, 64)
    """

    sentence: str | tuple[str, str]
    pad: Mapping[str, int] | tuple[tuple[str, int], ...] = ()

    def __post_init__(self) -> None:
        sentence = self.sentence
        if isinstance(sentence, list):
            sentence = tuple(sentence)
        pair = isinstance(sentence, tuple)
        if not isinstance(sentence, str) and not (
            pair and len(sentence) == 2 and all(isinstance(s, str) for s in sentence)
        ):
            raise TypeError(f"layout: expected a sentence or a pair of them (K, V), got {self.sentence!r}")
        pad = tuple(sorted(dict(self.pad).items()))
        for axis, size in pad:
            if not isinstance(size, int) or isinstance(size, bool):
                raise TypeError(f"layout pad: the size of axis {axis!r} must be an int, got {size!r}")
            if axis not in ("token", "head", "dim"):
                raise ValueError(
                    f"layout pad: axis {axis!r} cannot be padded; 'token', 'head' and 'dim' can ({sentence!r})"
                )
        object.__setattr__(self, "sentence", sentence)
        object.__setattr__(self, "pad", pad)
        _parse(sentence)  # raises here, where the sentence was written, and not at its first use
        for axis, _ in pad:
            if not any(axis in unit for units in self.arrays for unit in units):
                raise ValueError(f"layout pad: {sentence!r} has no axis {axis!r}")

    def __str__(self) -> str:
        text = self.sentence if isinstance(self.sentence, str) else f"K {self.sentence[0]!r}, V {self.sentence[1]!r}"
        return text + "".join(f", {axis} padded to {size}" for axis, size in self.padding.items())

    @property
    def padding(self) -> dict[str, int]:
        """Sizes of the padded axes in the array."""
        return dict(self.pad)

    @property
    def levels(self) -> tuple[str, ...]:
        """Pytree levels above the arrays, outermost first."""
        return _parse(self.sentence).levels

    @property
    def arrays(self) -> tuple[tuple[Unit, ...], ...]:
        """The units of each kind of array: one entry, or two (K, V) for a pair of sentences."""
        return _parse(self.sentence).arrays

    @property
    def planes(self) -> int:
        """2 where the layout has K and V, 1 where it has one plane."""
        return 2 if "kv" in self.levels or self.has_axis("kv") else 1

    def has_axis(self, axis: str) -> bool:
        """Whether the arrays themselves (not the levels) have this axis."""
        return any(axis in unit for unit in self.arrays[0])

    def num_leaves(self, layers: int) -> int:
        """Arrays that hold `layers` layers."""
        return math.prod(self._level_sizes(layers))

    def shape(self, sizes: Sizes, num_pages: int = 1, *, kv: int = 0) -> tuple[int, ...]:
        """Shape of one array as the sentence writes it.

        Args:
            sizes: the model's sizes; `layers` counts the layers this array holds.
            num_pages: pages in the array. A chunk without a page axis holds `num_pages * page_size` tokens.
            kv: 0 for the K array, 1 for the V array of a pair of sentences.

        Raises:
            ValueError: a padded size is smaller than the model's, or the model has heads, planes or dims for
                which the sentence has no axis.
        """
        return tuple(map(math.prod, self._units(sizes, num_pages, kv)))

    def atoms(self, sizes: Sizes, num_pages: int = 1, *, kv: int = 0) -> tuple[tuple[str, int], ...]:
        """Names and array sizes (padding included) of the single axes, outermost first."""
        names = [axis for unit in self._kind(kv) for axis in unit]
        flat = itertools.chain.from_iterable(self._units(sizes, num_pages, kv))
        return tuple(zip(names, flat, strict=True))

    def strides(self, sizes: Sizes, num_pages: int = 1, *, kv: int = 0) -> Strides:
        """Strides in elements of one array; without a page axis, a page is `page_size` tokens."""
        strides = dict.fromkeys(AXES, 0)
        step = 1
        for axis, size in reversed(self.atoms(sizes, num_pages, kv=kv)):
            strides[axis] = step
            step *= size
        if not self.has_axis("page"):
            strides["page"] = strides["token"] * sizes.page_size
        return Strides(**strides)

    def plane(self, sizes: Sizes, num_pages: int, layer: int, kv: int) -> Plane:
        """Where the K (`kv` 0) or V (`kv` 1) rows of a layer are."""
        leaf = 0
        for level, size in zip(self.levels, self._level_sizes(sizes.layers), strict=True):
            leaf = leaf * size + (layer if level == "layer" else kv)
        kind = kv if len(self.arrays) == 2 else 0
        strides = self.strides(sizes, num_pages, kv=kind)
        return Plane(leaf, layer * strides.layer + kv * strides.kv, strides)

    def num_pages(self, shape: Sequence[int], sizes: Sizes, *, kv: int = 0) -> int:
        """Checks the shape of one array against the sentence and returns the pages it holds.

        Adjacent axes may be split or merged in the array as long as the row-major order stands. But `page`, whose size
        only the array knows, is not split, and an axis is merged with it only where the sentence says so.

        Raises:
            ValueError: the shape does not fit; the message shows the sentence, the sizes and the shape.
        """
        return _num_pages(self, tuple(shape), sizes, kv)

    def _level_sizes(self, layers: int) -> tuple[int, ...]:
        return tuple(layers if level == "layer" else 2 for level in self.levels)

    def _kind(self, kv: int) -> tuple[Unit, ...]:
        return self.arrays[kv if len(self.arrays) == 2 else 0]

    def _units(self, sizes: Sizes, num_pages: int, kv: int) -> tuple[tuple[int, ...], ...]:
        """Sizes of each unit's axes, padding applied."""
        tokens = sizes.page_size if self.has_axis("page") else sizes.page_size * num_pages
        known = {
            "layer": sizes.layers,
            "page": num_pages,
            "token": tokens,
            "head": sizes.heads,
            "kv": 2,
            "dim": sizes.dim,
        }
        if sizes.planes != self.planes:
            raise ValueError(f"layout: {str(self)!r} has {self.planes} plane(s), the model has {sizes.planes}")
        for axis, size in (("head", sizes.heads), ("dim", sizes.dim)):
            if size != 1 and not self.has_axis(axis):
                raise ValueError(f"layout: {str(self)!r} has no axis {axis!r}, but its size is {size}")
        for axis, size in self.padding.items():
            if known[axis] > size:
                raise ValueError(
                    f"layout pad: axis {axis!r} has size {known[axis]}, more than the {size} it is padded to "
                    f"({str(self)!r})"
                )
            known[axis] = size
        return tuple(tuple(known[axis] for axis in unit) for unit in self._kind(kv))


class _Parsed(NamedTuple):
    levels: tuple[str, ...]
    arrays: tuple[tuple[Unit, ...], ...]


@functools.lru_cache(maxsize=1024)
def _parse(sentence: str | tuple[str, str]) -> _Parsed:
    if isinstance(sentence, str):
        levels, units = _parse_one(sentence)
        arrays: tuple[tuple[Unit, ...], ...] = (units,)
    else:
        (levels, key_units), (value_levels, value_units) = map(_parse_one, sentence)
        if value_levels and value_levels != levels:
            raise ValueError(f"layout: the sentences of K and V name different levels: {sentence!r}")
        arrays = (key_units, value_units)
        for units in arrays:
            if any(axis in unit for unit in units for axis in LEVELS):
                raise ValueError(
                    f"layout: with a sentence each for K and V, 'kv' and 'layer' can only be levels: {sentence!r}"
                )
        if "kv" not in levels:
            levels = (*levels, "kv")
    if "layer" not in levels and not any("layer" in unit for unit in arrays[0]):
        levels = ("layer", *levels)
    return _Parsed(levels, arrays)


def _parse_one(sentence: str) -> tuple[tuple[str, ...], tuple[Unit, ...]]:
    """Levels and units of one sentence, each axis known, named once, and `token` among them."""

    def fault(what: str, at: int | None = None) -> ValueError:
        where = "" if at is None else f" at position {at}"
        return ValueError(f"layout: {what}{where} in {sentence!r}")

    levels: tuple[str, ...] = ()
    units: list[Unit] = []
    group: list[str] | None = None
    seen_bar = False
    at = 0
    while sentence[at:].strip():
        match = _TOKEN.match(sentence, at)
        if match is None:
            at += len(sentence[at:]) - len(sentence[at:].lstrip())
            raise fault(f"stray symbol {sentence[at]!r}", at)
        at, mark = match.end(), match["mark"]
        start = match.start(match.lastgroup or 0)
        if mark == "(":
            if group is not None:
                raise fault("a '(' inside parentheses", start)
            group = []
        elif mark == ")":
            if not group:
                raise fault("empty parentheses" if group == [] else "a ')' without its '('", start)
            units.append(tuple(group))
            group = None
        elif mark == "|":
            if group is not None or seen_bar or not units or any(len(unit) != 1 for unit in units):
                raise fault("a stray '|'", start)
            levels, units, seen_bar = tuple(axis for unit in units for axis in unit), [], True
            for level in levels:
                if level not in LEVELS:
                    raise fault(f"{level!r} cannot be a level before '|', only {' and '.join(map(repr, LEVELS))} can")
        elif match["one"]:
            if group is None:
                units.append(())
        else:
            name = match["name"]
            if name not in AXES:
                raise fault(f"unknown axis {name!r} (known: {', '.join(AXES)})", start)
            if group is None:
                units.append((name,))
            else:
                group.append(name)
    if group is not None:
        raise fault("a '(' without its ')'", len(sentence))
    named = [*levels, *(axis for unit in units for axis in unit)]
    for axis in named:
        if named.count(axis) > 1:
            raise fault(f"axis {axis!r} is named twice")
    if "token" not in named:
        raise fault("axis 'token' is missing")
    return levels, tuple(units)


@functools.lru_cache(maxsize=4096)
def _num_pages(layout: Layout, shape: tuple[int, ...], sizes: Sizes, kv: int) -> int:
    one_page = [math.prod(unit) for unit in layout._units(sizes, 1, kv)]
    names = layout._kind(kv)
    at = next(i for i, unit in enumerate(names) if "page" in unit)

    def fault(why: str) -> ValueError:
        expected = [
            ("pages" if size == 1 else f"pages * {size}") if i == at else str(size) for i, size in enumerate(one_page)
        ]
        return ValueError(
            f"layout: an array of shape {shape} does not fit {str(layout)!r}, which is ({', '.join(expected)}) "
            f"for {sizes}: {why}"
        )

    total, rest = math.prod(shape), math.prod(one_page)
    if total == 0:
        raise fault("the array is empty")
    if total % rest:
        raise fault(f"{total} elements are no multiple of the {rest} of one page")
    pages = total // rest
    units = [size * pages if i == at else size for i, size in enumerate(one_page)]
    # Walk both factorisations to their common boundaries. Between two of them, either one written axis is split
    # into several array axes or several are merged into one; anything else would be another order of the axes.
    dims = [size for size in shape if size != 1]
    written = [(size, i) for i, size in enumerate(units) if size != 1]
    i = j = 0
    while i < len(written):
        first_i, first_j, a, b = i, j, written[i][0], dims[j]
        while a != b:
            if a < b:
                i += 1
                a *= written[i][0]
            else:
                j += 1
                b *= dims[j]
        i, j = i + 1, j + 1
        merged = [k for _, k in written[first_i:i]]
        if len(merged) > 1 and j - first_j > 1:
            raise fault("its axes are in another order or of other sizes")
        if len(merged) > 1 and at in merged:
            raise fault("it merges 'page' with another axis, which the sentence must say with parentheses")
        if merged == [at] and names[at] == ("page",) and j - first_j > 1:
            # Pages of twice as many tokens, read as twice as many pages: the axes behind would be other ones.
            raise fault(f"its pages would be {dims[first_j:j]}, two axes for one: its other sizes are not those")
    return pages
