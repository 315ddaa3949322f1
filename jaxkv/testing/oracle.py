"""What gather, scatter, store and load must do, said in NumPy by the simplest method there is.

Nothing here shares code with the package: a mistake in the package's parser or address arithmetic
cannot hide by being made twice. Every address comes from one construction (`index_map`): number the
elements of an array, shape the numbers as the sentence says, transpose, cut the padding. Payloads
are moved as unsigned integers and never cast.

Words used throughout:

* *sentence*: the axes of an array in row-major order, names out of `layer page token head kv dim`,
  `1` for an axis of length one, parentheses around fused axes, `levels | axes` when the arrays are
  nested in lists or tuples. A pair `(K sentence, V sentence)` is an array for K and one for V.
  `layer` may be left out: it is the outermost level.
* *sizes*: a dict with the logical size of `layer kv page token head dim`. In a pool `token` is the
  page size. What a sentence does not name has size one. `page` (in a chunk without pages, `token`)
  may be left out and is inferred.
* *pad*: a dict with the physical size of the padded axes, for instance `{"dim": 128}`.
* *rows*: `[layer, kv, n, head, dim]`, the KV of `n` tokens in the one order that everything is
  compared in.
"""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from jaxkv.testing.oracle_load import gap_tokens, plan_rows, rotate, zero_slots

__all__ = [
    "AXES",
    "gap_tokens",
    "index_map",
    "pack",
    "plan_rows",
    "read_rows",
    "rotate",
    "unpack",
    "write_rows",
    "zero_slots",
]

AXES: tuple[str, ...] = ("layer", "kv", "page", "token", "head", "dim")

Sentence = str | tuple[str, str]
Sizes = Mapping[str, int]
Array = npt.NDArray[Any]


# ---- Sentences


def _parse(sentence: str) -> tuple[list[str], list[list[str]]]:
    """Splits a sentence into its levels and its array axes, each axis a list of fused names."""
    levels, _, body = sentence.rpartition("|")
    groups = [(fused or single).split() for fused, single in re.findall(r"\(([^)]*)\)|(\S+)", body)]
    unknown = set(sum(groups, levels.split())) - {*AXES, "1"}
    if unknown:
        raise ValueError(f"{sentence!r}: not an axis: {sorted(unknown)}")
    return levels.split(), groups


def _names(sentence: str) -> list[str]:
    """The axis names of one array, outermost first, without the ones."""
    return [name for group in _parse(sentence)[1] for name in group if name != "1"]


def _levels(sentence: Sentence) -> list[str]:
    """The names of the nesting levels, the implied ones included."""
    if isinstance(sentence, tuple):
        written = _parse(sentence[0])[0] or _parse(sentence[1])[0]
        inner = _names(sentence[0])
        implied = ["kv"]
    else:
        written = _parse(sentence)[0]
        inner = _names(sentence)
        implied = []
    levels = written or implied
    return levels if "layer" in levels + inner else ["layer", *levels]


def _plane_sentence(sentence: Sentence, plane: int) -> str:
    return sentence[plane] if isinstance(sentence, tuple) else sentence


# ---- Arrays and their nesting


def _bits(array: Array) -> Array:
    """A view of `array` as unsigned integers (raw bytes where none has the width)."""
    width = array.dtype.itemsize
    return array.view(f"u{width}" if width in (1, 2, 4, 8) else f"V{width}")


def _is_nest(arrays: Any) -> bool:
    return isinstance(arrays, list | tuple)


def _leaf(arrays: Any, levels: Sequence[str], where: Mapping[str, int]) -> Array:
    """The array of a given layer and plane; a bare array stands for a level of one entry."""
    for name in levels:
        if _is_nest(arrays):
            arrays = arrays[where[name]]
    leaf: Array = arrays
    return leaf


def _to_numpy(arrays: Any) -> Any:
    """The same nesting with every leaf a fresh, contiguous NumPy array."""
    if _is_nest(arrays):
        return type(arrays)([_to_numpy(a) for a in arrays])
    return np.array(arrays, order="C", copy=True)


def _leaves(arrays: Any) -> Iterable[Array]:
    if _is_nest(arrays):
        for a in arrays:
            yield from _leaves(a)
    else:
        yield arrays


def _nest_lengths(arrays: Any, levels: Sequence[str]) -> dict[str, int]:
    """The number of entries at each level of the nesting."""
    lengths = {}
    for name in levels:
        lengths[name] = len(arrays) if _is_nest(arrays) else 1
        arrays = arrays[0] if _is_nest(arrays) else arrays
    return lengths


def _planes(arrays: Any, sentence: Sentence, sizes: Sizes) -> tuple[int, int]:
    """The number of layers and of planes (K and V): from the nesting, else from `sizes`."""
    levels = _levels(sentence)
    lengths = _nest_lengths(arrays, levels)
    layers = lengths.get("layer", sizes.get("layer", 1))
    in_array = "kv" in _names(_plane_sentence(sentence, 0))
    planes = lengths.get("kv", sizes.get("kv", 2) if in_array else 1)
    for name, found in (("layer", layers), ("kv", planes)):
        if sizes.get(name, found) != found:
            raise ValueError(f"{sentence!r}: {name} is {found} in the arrays, {sizes[name]} in the sizes")
    return layers, planes


# ---- Addresses


def index_map(
    shape: Sequence[int],
    sentence: str,
    sizes: Sizes,
    pad: Mapping[str, int] | None = None,
) -> npt.NDArray[np.int64]:
    """Where each element of the KV lies in one flat array.

    Args:
      shape: Shape of the array. Only its number of elements counts: adjacent axes may be split or
        merged.
      sentence: The array's sentence; levels are ignored.
      sizes: Logical sizes.
      pad: Physical sizes of padded axes.

    Returns:
      int64 `[layer, kv, page, token, head, dim]`, flat element indices. Axes that the sentence does
      not name (levels among them) have length 1.

    Raises:
      ValueError: The sizes do not make up the shape.
    """
    pad = pad or {}
    names = _names(sentence)
    total = math.prod(shape)
    padded = {**sizes, **pad}
    physical = {name: padded[name] for name in names if name in padded}
    unknown = [name for name in names if name not in padded]
    known = math.prod(physical.values())
    if len(unknown) > 1 or (known == 0 and unknown):
        raise ValueError(f"{sentence!r} with sizes {dict(sizes)}: cannot infer {unknown}")
    for name in unknown:
        physical[name] = total // known
    product = math.prod(physical.values())
    if product != total:
        raise ValueError(f"{sentence!r} with sizes {physical} needs {product} elements, the shape is {shape}")

    for name in names:
        if sizes.get(name, 0) > physical[name]:
            raise ValueError(f"{sentence!r}: {name} is {sizes[name]}, padded to {physical[name]}")

    numbers = np.arange(total, dtype=np.int64).reshape([physical[name] for name in names])
    present = [name for name in AXES if name in names]
    numbers = numbers.transpose([names.index(name) for name in present])
    numbers = numbers[tuple(slice(sizes.get(name)) for name in present)]
    return np.expand_dims(numbers, tuple(i for i, name in enumerate(AXES) if name not in names))


def _slot_maps(
    arrays: Any, sentence: Sentence, sizes: Sizes, pad: Mapping[str, int] | None
) -> list[list[tuple[Array, npt.NDArray[np.int64]]]]:
    """For each layer and plane: its array's flat bits, and the indices `[slot, head, dim]`."""
    layers, planes = _planes(arrays, sentence, sizes)
    levels = _levels(sentence)
    maps: dict[tuple[str, int], npt.NDArray[np.int64]] = {}
    table = []
    for layer in range(layers):
        row = []
        for plane in range(planes):
            leaf = _leaf(arrays, levels, {"layer": layer, "kv": plane})
            words = _plane_sentence(sentence, plane)
            key = (words, leaf.size)
            if key not in maps:
                maps[key] = index_map(leaf.shape, words, {"layer": layers, "kv": planes, **sizes}, pad)
            index = maps[key]
            index = index[layer if index.shape[0] > 1 else 0, plane if index.shape[1] > 1 else 0]
            pages, tokens, heads, dim = index.shape
            row.append((_bits(leaf).reshape(-1), index.reshape(pages * tokens, heads, dim)))
        table.append(row)
    return table


def _winners(slots: Iterable[Any], num_slots: int) -> tuple[list[int], list[int]]:
    """The slots that exist and, for each, the last token that names it."""
    last = {int(slot): n for n, slot in enumerate(slots) if 0 <= int(slot) < num_slots}
    return list(last.keys()), list(last.values())


# ---- Pools


def read_rows(
    arrays: Any,
    sentence: Sentence,
    sizes: Sizes,
    slots: Iterable[Any],
    pad: Mapping[str, int] | None = None,
) -> Array:
    """The KV of some slots of a pool.

    Args:
      arrays: Arrays nested in lists or tuples in level order, or one bare array.
      sentence: The pool's sentence, or a pair of them for K and V.
      sizes: Logical sizes; `token` is the page size.
      slots: `[n]` integers, `page * page_size + offset`.
      pad: Physical sizes of padded axes.

    Returns:
      `[layer, kv, n, head, dim]` of the pool's dtype; zero bytes where a slot is negative or past
      the last one.
    """
    arrays = _to_numpy(arrays)
    table = _slot_maps(arrays, sentence, sizes, pad)
    num_slots, heads, dim = table[0][0][1].shape
    wanted = [int(slot) for slot in slots]
    tokens = [n for n, slot in enumerate(wanted) if 0 <= slot < num_slots]
    there = [wanted[n] for n in tokens]

    dtype = next(iter(_leaves(arrays))).dtype
    rows = np.zeros((len(table), len(table[0]), len(wanted), heads, dim), dtype)
    bits = _bits(rows)
    for layer, planes in enumerate(table):
        for plane, (flat, index) in enumerate(planes):
            bits[layer, plane, tokens] = flat[index[there]]
    return rows


def write_rows(
    arrays: Any,
    sentence: Sentence,
    sizes: Sizes,
    rows: Array,
    slots: Iterable[Any],
    pad: Mapping[str, int] | None = None,
) -> Any:
    """A copy of a pool with some slots replaced.

    Args:
      arrays: Arrays nested in lists or tuples in level order, or one bare array.
      sentence: The pool's sentence, or a pair of them for K and V.
      sizes: Logical sizes; `token` is the page size.
      rows: `[layer, kv, n, head, dim]` of the pool's dtype.
      slots: `[n]` integers. Negative ones and those past the last slot are skipped; of equal ones
        the last wins.
      pad: Physical sizes of padded axes.

    Returns:
      New NumPy arrays, nested as `arrays`.
    """
    arrays = _to_numpy(arrays)
    rows = np.ascontiguousarray(rows)
    wanted = [int(slot) for slot in slots]
    table = _slot_maps(arrays, sentence, sizes, pad)
    num_slots, heads, dim = table[0][0][1].shape
    dtype = next(iter(_leaves(arrays))).dtype
    shape = (len(table), len(table[0]), len(wanted), heads, dim)
    if (rows.shape, rows.dtype) != (shape, dtype):
        raise ValueError(f"rows are {rows.dtype}{rows.shape}, pool and slots make {dtype}{shape}")

    there, tokens = _winners(wanted, num_slots)
    bits = _bits(rows)
    for layer, planes in enumerate(table):
        for plane, (flat, index) in enumerate(planes):
            flat[index[there]] = bits[layer, plane, tokens]
    return arrays


# ---- Chunks


def pack(rows: Array, sentence: str, sizes: Sizes | None = None, pad: Mapping[str, int] | None = None) -> Any:
    """Rows in the shape of a chunk.

    Args:
      rows: `[layer, kv, n, head, dim]`.
      sentence: The chunk's sentence, for instance `"kv layer token (head dim)"`. A sentence without
        `page` has all tokens on one axis. One without `layer` describes one layer.
      sizes: Needed only for a sentence with `page`: `token` is the chunk's own page size.
      pad: Physical sizes of padded axes.

    Returns:
      One array, shaped as the sentence groups its axes, or nested tuples of them in level order. A
      level that was not written and has one layer is no level. Padding and the tail of a last page
      are zero bytes.
    """
    rows = np.ascontiguousarray(rows)
    layers, planes, n, heads, dim = rows.shape
    named = _names(sentence)
    tokens = (sizes or {})["token"] if "page" in named else n
    pages = -(-n // tokens) if "page" in named else 1
    logical = dict(zip(AXES, (layers, planes, pages, tokens, heads, dim), strict=True))
    levels = _levels(sentence)
    for name, size in logical.items():
        if name not in named + levels and size != 1:
            raise ValueError(f"{sentence!r} names no {name}, the rows have {size}")

    physical = {**logical, **(pad or {}), "1": 1}
    shape = [math.prod(physical[name] for name in group) for group in _parse(sentence)[1]]

    def nest(remaining: Sequence[str]) -> Any:
        if not remaining:
            return np.zeros(shape, rows.dtype)
        return tuple(nest(remaining[1:]) for _ in range(logical[remaining[0]]))

    implied = not _parse(sentence)[0]
    empty = nest([] if implied and layers == 1 else levels)
    if n == 0:
        return empty
    return write_rows(empty, sentence, logical, rows, range(n), pad)


def unpack(chunk: Any, sentence: str, sizes: Sizes, pad: Mapping[str, int] | None = None) -> Array:
    """The rows of a chunk: what `pack` undoes.

    Args:
      chunk: One array or nested lists or tuples of them.
      sentence: The chunk's sentence.
      sizes: Logical sizes. Without `page` in the sentence `token` is the number of tokens, and may
        be left out.
      pad: Physical sizes of padded axes.

    Returns:
      `[layer, kv, n, head, dim]`, `n` being every token that the chunk has room for.
    """
    leaf = next(iter(_leaves(chunk)))
    named = _names(sentence)
    inner = {name: sizes[name] for name in named if name in sizes}
    if "kv" in named:
        inner.setdefault("kv", 2)
    if leaf.size == 0 and "token" in named:
        inner.setdefault("page" if "page" in named else "token", 0)
    index = index_map(leaf.shape, sentence, inner, pad)
    tokens = index.shape[2] * index.shape[3]
    in_array = dict(zip(AXES, index.shape, strict=True))
    full = in_array | _nest_lengths(chunk, _levels(sentence))
    if tokens == 0:
        return np.zeros((full["layer"], full["kv"], 0, *index.shape[4:]), leaf.dtype)
    return read_rows(chunk, sentence, full, range(tokens), pad)
