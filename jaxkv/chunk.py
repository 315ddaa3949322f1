"""Chunks: KV of a range of tokens in host memory, and the formats they come in."""

import dataclasses
import functools
import math
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import numpy as np

from .layout import Layout
from .ops import checks
from .rope import Rope
from .spec import CacheSpec
from .values import fields_of, hashed_once


@hashed_once
@dataclasses.dataclass(frozen=True)
class ChunkFormat:
    """How a chunk's arrays are laid out.

    Args:
        layout: of one array: a `Layout`, a sentence, or the name of one of LMCache's formats ("KV_2LTD",
            "KV_T2D", "KV_2TD", "KV_MLA").
        layers_per_array: layers that share one array; None for all of them where the layout has a `layer` axis,
            else one. A layout without a `layer` axis that is to hold several gets one as its outermost.

    Raises:
        ValueError: the layout does not parse or is padded, or `layers_per_array` is no positive integer.
    """

    layout: Layout | str
    layers_per_array: int | None = None

    def __post_init__(self) -> None:
        layout, count = self.layout, self.layers_per_array
        if isinstance(layout, str):
            layout = Layout(_SENTENCES.get(layout, layout))
        if not isinstance(layout, Layout):
            raise TypeError(f"format: expected a Layout or a sentence, got {layout!r}")
        if layout.pad:
            raise ValueError(f"format: rows of a chunk are not padded, got {str(layout)!r}")
        if len(layout.arrays) > 1:
            raise ValueError(f"format: a chunk has one sentence for K and V, got {str(layout)!r}")
        if count is not None and (isinstance(count, bool) or not isinstance(count, int) or count < 1):
            raise ValueError(f"layers_per_array: expected an int of at least 1, got {count!r}")
        if not layout.has_axis("layer"):
            if count is not None and count > 1:
                if layout.levels != ("layer",) or not isinstance(layout.sentence, str):
                    raise ValueError(
                        f"layers_per_array: {count} layers cannot share the arrays of {str(layout)!r}; name a "
                        f"'layer' axis in the sentence"
                    )
                layout = Layout("layer " + layout.sentence.split("|")[-1].strip())
            else:
                count = 1
        object.__setattr__(self, "layout", layout)
        object.__setattr__(self, "layers_per_array", count)

    @property
    def array_layout(self) -> Layout:
        """`layout`, parsed."""
        assert isinstance(self.layout, Layout)  # made so above
        return self.layout

    @property
    def axes(self) -> tuple[tuple[str, ...], ...]:
        """The axes of one array, each with the names fused in it."""
        return self.array_layout.arrays[0]

    def groups(self, num_layers: int) -> tuple[range, ...]:
        """The layers that each array (or pair of arrays) of a chunk holds, in order."""
        return _groups(self.layers_per_array or num_layers, num_layers)

    def shapes(self, spec: CacheSpec, num_tokens: int) -> tuple[tuple[int, ...], ...]:
        """Shapes of all arrays of a chunk of `num_tokens` rows."""
        return _shapes(self, spec, num_tokens)

    def shape(self, spec: CacheSpec, num_tokens: int) -> tuple[int, ...]:
        """Shape of a chunk's (first) array; LMCache's `get_shape`."""
        return self.shapes(spec, num_tokens)[0]


_SENTENCES = {
    "KV_2LTD": "kv layer token (head dim)",
    "KV_T2D": "token kv (head dim)",
    "KV_2TD": "kv token (head dim)",
    "KV_MLA": "1 layer token (head dim)",
    "KV_MLA_TD": "token (head dim)",
}
KV_2LTD = ChunkFormat("KV_2LTD")
"""All layers of K, then of V: LMCache's bulk format."""
KV_T2D = ChunkFormat("KV_T2D")
"""One layer, K and V of a token side by side: LMCache's layer-wise format."""
KV_2TD = ChunkFormat("KV_2TD")
"""One layer, K then V: LMCache's CacheBlend format."""
KV_MLA = ChunkFormat("KV_MLA")
"""All layers of one plane: LMCache's MLA format."""
KV_MLA_TD = ChunkFormat("KV_MLA_TD")
"""One layer of one plane."""


def default_format(spec: CacheSpec, layers_per_array: int | None = None) -> ChunkFormat:
    """The format of LMCache's bulk connector, or of its layer-wise one where layers are to be apart."""
    if layers_per_array is None:
        return KV_2LTD if spec.planes == 2 else KV_MLA
    return ChunkFormat("KV_T2D" if spec.planes == 2 else "KV_MLA_TD", layers_per_array)


def as_format(spec: CacheSpec, format: Any, layers_per_array: int | None = None) -> ChunkFormat:
    """A format from what a caller gives: None, a `ChunkFormat`, a `Layout`, a sentence or a name."""
    if format is None:
        return default_format(spec, layers_per_array)
    if isinstance(format, ChunkFormat):
        if layers_per_array in (None, format.layers_per_array):
            return format
        return ChunkFormat(format.layout, layers_per_array)
    return ChunkFormat(format, layers_per_array)


@hashed_once
@dataclasses.dataclass(frozen=True)
class Fingerprint:
    """What makes the bytes of one chunk incompatible with a cache; page layout, page size and sharding do not.

    Attributes:
        format: of the chunk's arrays.
        page_size: tokens a page of the chunk, None where its format has no pages.
        num_layers, num_kv_heads, head_dim, planes, dtype: the KV itself.
        rope, rope_offset: how its keys are rotated.
        model: the spec's own word for weights and adapters.
    """

    format: ChunkFormat
    page_size: int | None
    num_layers: int
    num_kv_heads: int
    head_dim: int
    planes: int
    dtype: str
    rope: Rope | tuple[Rope | None, ...] | None
    rope_offset: int
    model: str

    @classmethod
    def of(cls, spec: CacheSpec, format: ChunkFormat) -> "Fingerprint":
        """The fingerprint of chunks stored from a cache."""
        return _fingerprint(spec, format)

    def difference(self, spec: CacheSpec) -> str | None:
        """The first part in which a cache differs, with both values; None where chunks of this kind load into it."""
        return _difference(self, spec)


@functools.lru_cache(maxsize=1024)
def _groups(step: int, num_layers: int) -> tuple[range, ...]:
    return tuple(range(first, min(first + step, num_layers)) for first in range(0, num_layers, step))


@functools.lru_cache(maxsize=1024)
def _shapes(format: ChunkFormat, spec: CacheSpec, num_tokens: int) -> tuple[tuple[int, ...], ...]:
    return tuple(
        shape
        for layers in format.groups(spec.num_layers)
        for shape in spec.transfer(format.array_layout, layers).chunk_shapes(num_tokens)
    )


@functools.lru_cache(maxsize=1024)
def _fingerprint(spec: CacheSpec, format: ChunkFormat) -> Fingerprint:
    return Fingerprint(
        format,
        spec.page_size if format.array_layout.has_axis("page") else None,
        spec.num_layers,
        spec.num_kv_heads,
        spec.head_dim,
        spec.planes,
        str(np.dtype(spec.dtype)),
        spec.rope,
        spec.rope_offset,
        spec.model,
    )


@functools.lru_cache(maxsize=1024)
def _difference(found: Fingerprint, spec: CacheSpec) -> str | None:
    wanted = Fingerprint.of(spec, found.format)
    for field in dataclasses.fields(found):
        mine, other = getattr(found, field.name), getattr(wanted, field.name)
        if mine != other:
            return f"{field.name} is {mine!r} in the chunk and {other!r} in the cache"
    return None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Chunk:
    """KV of a range of tokens: what moves at once. A pytree and a value; nothing writes into it.

    Attributes:
        data: arrays of `fingerprint.format` in pinned host memory, each with the same number of rows; rows past
            `num_tokens` are zero bytes.
        num_tokens: tokens held, int32 scalar.
        positions: int32 `[rows]`, the position each key is rotated for.
        valid: bool `[rows]`, which rows are real; the others were skipped when they were stored.
        fingerprint: what the bytes are.
    """

    data: tuple[jax.Array, ...]
    num_tokens: Any
    positions: Any
    valid: Any
    fingerprint: Fingerprint = dataclasses.field(metadata={"static": True})

    def __getstate__(self) -> dict[str, Any]:
        return fields_of(self)  # without its mark, which is of this process

    def __repr__(self) -> str:
        # Not the values: a log wants to know what it is, and a recycled chunk has none.
        shapes = [getattr(array, "shape", array) for array in self.data]
        return (
            f"Chunk({self.num_tokens} tokens, arrays {shapes}, {str(self.format.layout)!r}, {self.fingerprint.dtype})"
        )

    @property
    def format(self) -> ChunkFormat:
        """The format of `data`."""
        return self.fingerprint.format

    @property
    def alike(self) -> object:
        """What a store marked it with: chunks that have one mark differ in their bytes alone. Else the chunk itself."""
        return self.__dict__.get("_alike", self)

    @property
    def num_rows(self) -> int:
        """Rows of the arrays: the bucket `num_tokens` was rounded up to."""
        return int(self.valid.shape[0])

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays, rows past `num_tokens` included."""
        return sum(math.prod(array.shape) * array.dtype.itemsize for array in self.data)

    def is_ready(self) -> bool:
        """Whether all bytes have arrived; never waits."""
        return all(array.is_ready() for array in self.data)  # type: ignore[attr-defined]

    def block_until_ready(self) -> "Chunk":
        """Waits for all bytes, and returns the chunk."""
        jax.block_until_ready(self.data)
        return self

    def rows(self) -> tuple[np.ndarray, ...]:
        """The tokens' rows as NumPy arrays of `format`, one per array; waits for them, and copies.

        A copy, since a NumPy view would keep the pinned buffer from being donated and reused.

        Raises:
            ValueError: the format's tokens are not one axis (it has pages).
        """
        units = self.format.axes
        axis = next(i for i, unit in enumerate(units) if "token" in unit)
        if units[axis] != ("token",) or ("page",) in units:
            raise ValueError(f"rows: the tokens of {str(self.format.layout)!r} are not one axis; read `data` itself")
        return tuple(_view(array).take(range(int(self.num_tokens)), axis=axis) for array in self.data)


def _view(array: jax.Array) -> np.ndarray:
    """The array as NumPy, through a `jax.Array` of its own: the one that is asked keeps the view as long as it lives.

    (`addressable_data` gives the same one every time, which would keep it too.)
    """
    if len(array.devices()) > 1:
        return np.asarray(array)
    return np.asarray(jax.make_array_from_single_device_arrays(array.shape, array.sharding, [array]))


def check_chunks(spec: CacheSpec, chunks: Iterable[Chunk], *, data_later: bool = False) -> list[Chunk]:
    """Checks that chunks can be loaded into a cache.

    Args:
        spec: of the cache.
        chunks: to be loaded.
        data_later: whether a chunk may be a mere description, its data to come layer by layer.

    Raises:
        TypeError: an entry is no chunk, or its dtype is not the cache's.
        ValueError: an entry is missing, of other KV than the cache's, or its arrays have other shapes or were
            deleted.
    """
    if isinstance(chunks, Chunk):
        raise TypeError("chunks: expected a sequence of chunks, got one Chunk; put it in a tuple")
    if not isinstance(chunks, Iterable):
        raise TypeError(f"chunks: expected a sequence of chunks, got {type(chunks).__name__}")
    parts = list(chunks)
    fitting: dict[tuple[int, int], tuple[tuple[int, ...], ...]] = {}  # the chunks of one store differ in data alone
    last: Any = None
    for i, chunk in enumerate(parts):
        if chunk is None:
            raise ValueError(f"chunks: entry {i} is missing (None)")
        if not isinstance(chunk, Chunk):
            raise TypeError(f"chunks: entry {i} is no Chunk but {type(chunk).__name__}")
        if getattr(chunk.valid, "dtype", None) != np.bool_ or chunk.valid.ndim != 1:
            raise TypeError(f"chunks: chunk {i} has valid={chunk.valid!r}, expected a bool array [rows]")
        kind = (id(chunk.fingerprint), chunk.num_rows)
        if kind not in fitting:
            dtype = chunk.fingerprint.dtype
            if dtype != str(np.dtype(spec.dtype)):
                raise TypeError(f"chunks: chunk {i} has dtype {dtype}, layer 0 of the cache has {np.dtype(spec.dtype)}")
            different = chunk.fingerprint.difference(spec)
            if different:
                raise ValueError(f"chunks: chunk {i} was stored from another cache: {different}")
            fitting[kind] = chunk.format.shapes(spec, chunk.num_rows)
        shapes, data = fitting[kind], chunk.data
        if not isinstance(data, (tuple, list)):
            raise TypeError(f"chunks: chunk {i} holds a {type(data).__name__}, expected a tuple of jax.Arrays")
        if not data and data_later:
            continue
        for array in data:
            if not isinstance(array, jax.Array):
                raise TypeError(f"chunks: chunk {i} holds a {type(array).__name__}, expected a jax.Array")
        if tuple([array.shape for array in data]) != shapes:
            raise ValueError(
                f"chunks: chunk {i} has arrays of shapes {[array.shape for array in data]}, expected "
                f"{list(shapes)} for {chunk.num_rows} rows in format {str(chunk.format.layout)!r}"
            )
        for array in data:
            if array.dtype != spec.dtype:
                raise TypeError(f"chunks: chunk {i} holds {array.dtype}, the cache {np.dtype(spec.dtype)}")
            sharding = None if checks.is_traced(array) else array.sharding
            if sharding is not last and sharding is not None and sharding.memory_kind == "unpinned_host":
                raise ValueError(
                    f"chunks: chunk {i} is in memory kind 'unpinned_host', expected 'pinned_host' (or 'device')"
                )
            last = sharding
    check_alive(parts)
    return parts


def check_alive(chunks: Sequence[Chunk]) -> None:
    """Raises ValueError where an array of a chunk was deleted: all that can change about chunks that were checked."""
    if checks.are_alive([array for chunk in chunks for array in chunk.data]):
        return
    for i, chunk in enumerate(chunks):
        if not checks.are_alive(chunk.data):
            raise ValueError(f"chunks: an array of chunk {i} was deleted or donated to an earlier call")


def known(values: Any, read: bool) -> Any:
    """Values as NumPy where they are known and may be read (which waits for a device array), else as they are."""
    if isinstance(values, jax.Array) and (checks.is_traced(values) or not read):
        return values
    return np.asarray(values)
