"""The acceptance grid (CASES.md, group N) as far as gather and scatter have its axes: its cells, and how one is run.

Every cell is compared with the oracle, over poison and with a page of guard bytes at both ends of the pool:
mapped bytes exact (N1), all others unchanged (N2), the source unchanged (N3), the same on a second call, eager,
under `jit`, with donation and in a loop, with the device busy (N5). Counts (N4) are a plan's, not an op's.
"""

import dataclasses
import itertools
import random
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv import layouts
from jaxkv.layout import Layout, Sizes

from .moves import KV_CHUNKS, PLANE_CHUNKS, Move, assert_same, device, host

NAMES = [name for name, value in vars(layouts).items() if isinstance(value, Layout)]
ROW_BYTES = [1, 2, 3, 6, 8, 12, 16, 64, 68, 72, 128, 132, 256, 512, 576, 656, 999, 1000, 1024, 1152, 2048, 4088]
ROW_BYTES += [4096, 8191, 8192, 2**20]

# For each axis its values, the first one the plainest. `alignment`: elements of padding behind every head's dim, so
# that rows start at any offset; `slots`: the pattern of slots that are written to.
AXES: dict[str, list[Any]] = {
    "layout": ["FLASH_ATTENTION", *(n for n in NAMES if n != "FLASH_ATTENTION"), "page (head kv) dim token"],
    "chunk": list(range(len(KV_CHUNKS))),
    "dtype": ["bfloat16", "float16", "float32", "int8", "uint8", "float8_e4m3fn", "float8_e5m2"],
    "heads": [1, 2, 3, 4, 8, 16, 32, 33, 128],
    "dim": [1, 64, 72, 80, 96, 112, 128, 192, 256, 512, 576],
    "page_size": [1, 2, 5, 8, 16, 24, 32, 48, 64, 128, 256],
    "tokens": [1, 0, 15, 16, 17, 42, 100, 255, 256, 257, 1000, 2048, 2144, 4096, 8192],
    "pages": [4, 2, 64, 1024, 10000],
    "layers": [1, 2, 3, 16, 32, 61, 80],
    "slots": [
        *("random", "sorted", "reversed", "stride 2", "runs of 2", "runs of 16", "runs of 128", "duplicates"),
        *("-1 at front", "-1 at 3 and 71", "-1 everywhere", "-2", "S", "S+1", "2^31-1", "2^31", "2^40"),
    ],
    "slot_dtype": ["int32", "int64"],
    "alignment": [0, 1, 2, 4, 8, 16],
    "variant": ["jit", "eager", "donated", "loop"],
}


@dataclasses.dataclass(frozen=True)
class Cell:
    """One value for each axis."""

    layout: str
    chunk: int
    dtype: str
    heads: int
    dim: int
    page_size: int
    tokens: int
    pages: int
    layers: int
    slots: str
    slot_dtype: str
    alignment: int
    variant: str

    def __str__(self) -> str:
        return ", ".join(f"{name} {value}" for name, value in dataclasses.asdict(self).items())

    @property
    def pool(self) -> Layout:
        """The layout with its padding."""
        layout = layouts.named(self.layout)
        return layouts.padded(layout, dim=self.dim + self.alignment) if self.alignment else layout

    @property
    def sizes(self) -> Sizes:
        """The model's sizes."""
        return Sizes(self.layers, self.heads, self.dim, self.page_size, layouts.named(self.layout).planes)

    @property
    def chunk_layout(self) -> str:
        """The sentence of the chunk: `chunk` counts the forms of K and V, or of one plane."""
        forms = KV_CHUNKS if self.sizes.planes == 2 else PLANE_CHUNKS
        return forms[self.chunk % len(forms)]

    @property
    def valid(self) -> bool:
        """Whether there can be such a cell."""
        layout = layouts.named(self.layout)
        return (
            (self.heads == 1 or layout.has_axis("head"))
            and (layout.has_axis("dim") or (self.dim == 1 and not self.alignment))
            and ("page" not in self.chunk_layout or self.tokens % self.page_size == 0)
            and (self.variant == "eager" or (self.slot_dtype == "int32" and self.slots not in ("2^31", "2^40")))
        )

    @property
    def cost(self) -> int:
        """Elements of pool and rows, and what many arrays cost the compiler."""
        row = self.layers * self.heads * (self.dim + self.alignment) * self.sizes.planes
        return row * (self.pages * self.page_size + self.tokens) + 50_000 * self.pool.num_leaves(self.layers)

    def move(self, seed: int) -> Move:
        """Random bytes for it."""
        return Move(self.pool, self.chunk_layout, self.sizes, self.pages, jnp.dtype(self.dtype), seed=seed)


def slot_pattern(pattern: str, tokens: int, page_size: int, pages: int, rng: np.random.Generator) -> np.ndarray:
    """Int64 slots; none on the first and last page where there are more than two. More tokens than slots: again."""
    first, num_slots = (page_size, pages * page_size) if pages > 2 else (0, pages * page_size)
    inside = np.arange(first, num_slots - first)
    run = int(pattern.removeprefix("runs of ")) if pattern.startswith("runs") else 1
    if pattern == "duplicates":
        inside = inside[: max(1, min(inside.size, tokens) // 2)]
    elif pattern == "stride 2":
        inside = np.concatenate([inside[::2], inside[1::2]])
    elif pattern == "reversed":
        inside = inside[::-1]
    elif pattern != "sorted":
        runs = np.array_split(inside, range(run, inside.size, run))
        inside = np.concatenate([runs[i] for i in rng.permutation(len(runs))])
    slots = np.resize(inside, tokens).astype(np.int64)
    special = {"-2": -2, "S": num_slots, "S+1": num_slots + 1, "2^31-1": 2**31 - 1, "2^31": 2**31, "2^40": 2**40}
    if pattern == "-1 at front":
        slots[: tokens // 2 + 1] = -1
    elif pattern == "-1 everywhere":
        slots[:] = -1
    elif pattern == "-1 at 3 and 71":
        slots[[i for i in (3, 71) if i < tokens]] = -1
    elif pattern in special:
        slots[rng.permutation(tokens)[: tokens // 3 + 1]] = special[pattern]
    return slots


def run(cell: Cell, implementation: str | None, seed: int, patterns: int = 1) -> None:
    """Runs a cell twice, and as often with other patterns of slots, which compiles nothing new.

    Raises:
        AssertionError: bytes differ from the oracle's; the message has the cell and the seed.
    """
    move, rng = cell.move(seed), np.random.default_rng(seed)
    source = device(move.source)
    program = _program(cell.variant, move, implementation)
    names = [cell.slots, *rng.choice(AXES["slots"], patterns - 1)]
    for pattern in map(str, names):
        if not dataclasses.replace(cell, slots=pattern).valid:
            continue
        take, put = (
            slot_pattern(name, cell.tokens, cell.page_size, cell.pages, rng).astype(
                np.int64 if cell.variant == "eager" and pattern in ("2^31", "2^40") else cell.slot_dtype
            )
            for name in ("random", pattern)
        )
        rows = move.rows(take)
        want = move.packed(rows), move.written(rows, put)
        for again in range(2):
            _keep_busy()
            got = program(source, device(move.target), take, put)
            assert_same(got, want, f"{implementation}, slots {pattern}, call {again}, seed {seed}: {cell}")
    assert_same(host(source), move.source, f"source, seed {seed}: {cell}")


def _program(variant: str, move: Move, implementation: str | None) -> Callable[..., Any]:
    def once(source: Any, target: Any, take: Any, put: Any, **options: Any) -> Any:
        rows = move.gather(source, take, implementation=implementation, **options)
        return rows, move.scatter(target, rows, put, implementation=implementation, **options)

    def loop(source: Any, target: Any, take: Any, put: Any) -> Any:
        def body(_: Any, carry: Any) -> Any:
            return once(source, carry[1], take, put)

        return jax.lax.fori_loop(0, 2, body, once(source, target, take, put))

    if variant == "eager":
        return lambda *arguments: once(*arguments, out_of_range="skip")
    return jax.jit(loop if variant == "loop" else once, donate_argnums=1 if variant in ("donated", "loop") else ())


@jax.jit
def _work(x: jax.Array) -> jax.Array:
    return x @ x


def _keep_busy() -> None:
    """Other work on the device, dispatched and not waited for."""
    _work(np.ones((256, 256), np.float32))


# ---- Which cells


PLAIN = {axis: values[0] for axis, values in AXES.items()}


def each_value(limit: int) -> list[Cell]:
    """Cells in which every value of every axis occurs: as many new ones in each as its cost allows, the rest random."""
    rng = random.Random(0)
    todo = {axis: list(values) for axis, values in AXES.items()}
    cells: list[Cell] = []
    for variant in itertools.cycle(AXES["variant"]):
        if not any(todo.values()):
            return cells
        cell = Cell(**{**PLAIN, "variant": variant})
        new = set()
        for axis in sorted(todo, key=lambda axis: len(todo[axis]) < 10):
            for value in todo[axis]:
                tried = dataclasses.replace(cell, **{axis: value})
                if tried.valid and tried.cost <= limit:
                    todo[axis].remove(value)
                    cell = tried
                    new.add(axis)
                    break
        for axis in sorted(AXES.keys() - new):
            tried = dataclasses.replace(cell, **{axis: rng.choice(AXES[axis])})
            if tried.valid and tried.cost <= limit // 4:
                cell = tried
        if new:
            cells.append(cell)
        elif variant == "eager":
            raise AssertionError(f"no cell of cost {limit} has these values: {todo}")
    return cells


def random_cells(count: int, seed: int, limit: int) -> list[Cell]:
    """Cells drawn at random, those of too great a cost left out."""
    rng = random.Random(seed)
    cells: list[Cell] = []
    while len(cells) < count:
        cell = Cell(**{axis: rng.choice(values) for axis, values in AXES.items()})
        if cell.valid and cell.cost <= limit:
            cells.append(cell)
    return cells


def each_pair(seed: int, limit: int) -> list[Cell]:
    """Cells in which every two values of two axes occur together, if there can be a cell with both within the limit."""
    rng = random.Random(seed)
    left = set(itertools.chain.from_iterable(_pairs_of_axes()))
    cells = []
    while left:
        pair = min(left, key=str)
        cell = _with(pair, limit)
        if cell is None:
            left.remove(pair)
            continue
        fixed = {axis for axis, _ in pair}
        for axis in rng.sample(sorted(AXES), len(AXES)):
            if axis in fixed:
                continue
            others = [dataclasses.replace(cell, **{axis: value}) for value in rng.sample(AXES[axis], len(AXES[axis]))]
            possible = [other for other in others if other.valid and other.cost <= limit]
            cell = max(possible, key=lambda other: len(left & _pairs(other)), default=cell)
        left -= _pairs(cell)
        cells.append(cell)
    return cells


Pair = frozenset[tuple[str, Any]]


def _pairs_of_axes() -> Iterator[Iterator[Pair]]:
    for a, b in itertools.combinations(AXES, 2):
        yield (frozenset({(a, x), (b, y)}) for x in AXES[a] for y in AXES[b])


def _pairs(cell: Cell) -> set[Pair]:
    return {frozenset(two) for two in itertools.combinations(dataclasses.asdict(cell).items(), 2)}


def _with(pair: Pair, limit: int) -> Cell | None:
    """The plainest cell with two values; eager, and of as many tokens as fill a page, where it must be."""
    for variant, tokens in itertools.product(("jit", "eager"), ("one", "page")):
        cell = Cell(**{**PLAIN, "variant": variant, **dict(pair)})
        if tokens == "page" and "tokens" not in dict(pair):
            cell = dataclasses.replace(cell, tokens=next((n for n in AXES["tokens"][2:] if n % cell.page_size == 0), 0))
        if cell.valid and cell.cost <= limit:
            return cell
    return None
