"""The acceptance grid (CASES.md N) over the bulk path: five checks a cell, on every way the data can take.

Unmarked: cells that together hold every value of every axis, and random ones (their seed is in the test's id).
`-m grid`: cells that hold every pair of values of two axes that can exist together on a machine of some memory.
"""

import dataclasses
import functools
import itertools
import random
from typing import Any

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import CHUNKS, DTYPES, POOLS, WAYS, Model
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import jaxkv

SEED = 20261129
RANDOM_CELLS = 200

# Row bytes (of one head in one plane) are `dim` elements of one byte; 999 and 4088 are rows of no power of two.
AXES: dict[str, list[Any]] = {
    "dtype": list(DTYPES),
    "heads": [1, 2, 3, 4, 8, 16, 32, 33, 128],
    "dim": [1, 2, 3, 6, 12, 64, 68, 72, 80, 96, 112, 128, 132, 192, 256, 512, 576, 656, 999, 1000, 1024, 4088, 8192],
    "page_size": [1, 2, 5, 8, 16, 24, 32, 48, 64, 128, 256],
    "tokens": [0, 1, 15, 16, 17, 42, 100, 255, 256, 257, 1000, 2048, 2144, 4096, 8192],
    "pages": [2, 4, 64, 1024, 10000],
    "layers": [1, 2, 3, 16, 32, 61, 80],
    "pool": list(POOLS),
    "chunk": list(CHUNKS),
    "layers_per_array": [None, 1, 2],
    "slots": ["sorted", "reversed", "random", "stride 2", "runs of 2", "runs of 16", "runs of 128", "equal"],
    "slot_type": ["int32", "int64", "list", "device"],
    "bad": ["none", "-1 in front", "-1 at 3 and 71", "-1 everywhere", "negative", "S and beyond"],
    "chunks": ["adjoining", "gaps of 1", "gaps of 255", "gaps of 256", "unsorted", "overlapping", "one empty", "one"],
    "chunk_tokens": [1, 16, 250, 256],
    "skip_prefix": ["0", "1", "chunk - 1", "chunk", "chunk + 1", "all"],
    "gaps": ["keep", "zero"],
    "way": list(WAYS),
    "sharding": [1, 2, 4, 8],
    "again": ["second call", "jit", "donated jit", "loop", "busy device"],
}

Cell = dict[str, Any]


def possible(cell: Cell, limit: int) -> bool:
    """Whether the values of a cell (all of them, or some) can be together, in so many bytes of pool and chunks."""
    get = cell.get
    pool = POOLS[get("pool", "A2")]
    sentence = str(pool.sentence)
    if "chunk" in cell and "pool" in cell and helpers.one_plane(cell["chunk"]) != (pool.planes == 1):
        return False
    if "pool" in cell and "head" not in sentence and get("heads", 1) > 1:
        return False
    if "pool" in cell and "dim" not in sentence and get("dim", 1) > 1:
        return False
    if "MLA" in get("chunk", "") and get("heads", 1) > 1 and get("chunk") == "A42 MLA":
        return False
    if get("chunk") == "A42 MLA" and get("pool") == "A19" and get("heads", 1) > 1:
        return False
    if get("layers_per_array") is not None and "layer" not in CHUNKS[get("chunk", "A42")] and get("layers", 1) > 80:
        return False
    if "page" in CHUNKS[get("chunk", "A42")] and get("chunk_tokens", 256) % get("page_size", 1):
        return False
    if get("sharding", 1) > 1 and (
        get("heads", 8) % get("sharding") or get("pool", "A2") not in SPLITS or get("way") == "direct"
    ):
        return False
    row = get("heads", 1) * get("dim", 1) * np.dtype(DTYPES[get("dtype", "int8")]).itemsize * pool.planes
    slots = get("pages", 2) * get("page_size", 1)
    number = get("chunk_tokens", 256)
    # A jitted load holds a scatter for each chunk, and in XLA's form one for each array of it.
    steps = -(-get("tokens", 0) // number) * get("layers", 1)
    if get("again") in ("jit", "donated jit", "loop") and steps > 16:
        return False
    if get("tokens", 0) / number > 130:  # as many chunks as CASES.md D1 asks for, and some
        return False
    return row * get("layers", 1) * (slots + 3 * min(get("tokens", 0), 4 * slots) + number) <= limit


SPLITS = {
    "A2": PartitionSpec(None, None, None, "tp"),
    "A5": PartitionSpec(None, "tp"),
    "A13": PartitionSpec(None, "tp"),
}


def complete(given: Cell, rng: random.Random, limit: int, fresh: dict[str, set]) -> Cell | None:
    """Fills a cell with values that fit, those not seen yet first; None where many tries find none."""
    for attempt in range(60):
        cell = dict(given)
        names = [name for name in AXES if name not in cell]
        rng.shuffle(names)
        # Sizes take what memory is left, those last that other axes ask nothing of.
        names.sort(key=lambda name: name in ("tokens", "pages", "layers", "dim"))
        for name in names:
            values = AXES[name][:]
            rng.shuffle(values)
            if attempt < 30:
                values.sort(key=lambda value: value not in fresh[name])
            found = next((value for value in values if possible({**cell, name: value}, limit)), None)
            if found is None and None not in values:
                break
            cell[name] = found
        else:
            return cell
    return None


def every_value(limit: int) -> list[Cell]:
    """Cells in which every value of every axis occurs."""
    rng = random.Random(SEED)
    fresh = {name: set(values) for name, values in AXES.items()}
    cells = []
    while any(fresh.values()):
        name = max(fresh, key=lambda name: len(fresh[name]))
        value = min(fresh[name], key=AXES[name].index)
        cell = complete({name: value}, rng, limit, fresh)
        assert cell is not None, (name, value)
        cells.append(cell)
        for axis, used in cell.items():
            fresh[axis].discard(used)
    return cells


def every_pair(limit: int) -> list[Cell]:
    """Cells in which every pair of values of two axes occurs that can."""
    rng = random.Random(SEED)
    nothing = {name: set() for name in AXES}
    pairs = {
        ((a, x), (b, y))
        for a, b in itertools.combinations(AXES, 2)
        for x in AXES[a]
        for y in AXES[b]
        if possible({a: x, b: y}, limit)
    }
    left, cells = set(pairs), []
    for pair in sorted(pairs, key=repr):
        if pair not in left:
            continue
        tries = [complete(dict(pair), rng, limit, nothing) for _ in range(5)]
        found = [set(itertools.combinations(((name, cell[name]) for name in AXES), 2)) for cell in tries if cell]
        if found:  # some pairs fit beside no value of a third axis
            best = max(found, key=lambda held: len(held & left))
            cells.append({name: value for held in best for name, value in held})
            left -= best
    return cells


def random_cells(limit: int) -> list[Cell]:
    nothing = {name: set() for name in AXES}
    cells = [complete({}, random.Random(SEED + i), limit, nothing) for i in range(RANDOM_CELLS)]
    assert None not in cells
    return cells


@dataclasses.dataclass
class Job:
    """A cell made concrete: model, slots, ranges and prefix."""

    cell: Cell

    def __post_init__(self) -> None:
        cell = self.cell
        self.rng = np.random.default_rng(SEED)
        sizes = {name: cell[name] for name in ("layers", "heads", "dim", "page_size", "pages", "dtype")}
        self.model = Model(cell["pool"], **sizes)
        self.starts, self.ends, self.tokens = self.ranges()
        number = cell["chunk_tokens"]
        self.prefix = {"0": 0, "1": 1, "chunk - 1": number - 1, "chunk": number, "chunk + 1": number + 1}.get(
            cell["skip_prefix"], self.tokens
        )
        format = jaxkv.ChunkFormat(CHUNKS[cell["chunk"]])
        shared = cell["layers_per_array"]
        if shared is not None and format.layout.has_axis("layer"):
            format = jaxkv.ChunkFormat(format.layout, shared)
        self.format = format

    def ranges(self) -> tuple[list[int], list[int], int]:
        """Ranges that hold the cell's tokens in all, and how many slots they need."""
        number, kind, tokens = self.cell["chunk_tokens"], self.cell["chunks"], self.cell["tokens"]
        if kind == "one":
            return [0], [min(tokens, number)], min(tokens, number)
        starts = list(range(0, tokens, number))
        ends = [min(start + number, tokens) for start in starts]
        if kind.startswith("gaps"):
            gap = int(kind.split()[-1])
            starts, ends = ([x + k * gap for k, x in enumerate(xs)] for xs in (starts, ends))
        elif kind == "unsorted":
            order = self.rng.permutation(len(starts))
            starts, ends = [starts[k] for k in order], [ends[k] for k in order]
        elif kind == "overlapping" and tokens:
            starts, ends = [*starts, tokens // 3], [*ends, min(tokens // 3 + number, tokens)]
        elif kind == "one empty":
            starts, ends = [*starts[:1], tokens // 2, *starts[1:]], [*ends[:1], tokens // 2, *ends[1:]]
        return starts, ends, max([tokens, *ends])

    def slots(self) -> np.ndarray:
        """int64 slots of the tokens, as the cell's pattern has them (fewer slots than tokens make equal ones)."""
        count, num_slots, kind = self.tokens, self.model.num_slots, self.cell["slots"]
        if kind.startswith("runs"):
            run = int(kind.split()[-1])
            firsts = self.rng.permutation(-(-num_slots // run)) * run
            order = (firsts[:, None] + np.arange(run)).reshape(-1)
            order = order[order < num_slots]
        else:
            order = {
                "sorted": np.arange(num_slots),
                "reversed": np.arange(num_slots)[::-1],
                "random": self.rng.permutation(num_slots),
                "stride 2": np.concatenate([np.arange(0, num_slots, 2), np.arange(1, num_slots, 2)]),
                "equal": self.rng.integers(0, min(num_slots, 5), num_slots),
            }[kind]
        slots = np.resize(order, count).astype(np.int64)
        bad = self.cell["bad"]
        if bad == "-1 in front":
            slots[:1] = -1
        elif bad == "-1 at 3 and 71":
            slots[[i for i in (3, 71) if i < count]] = -1
        elif bad == "-1 everywhere":
            slots[:] = -1
        else:
            some = {
                "none": [],
                "negative": [-2, -num_slots, -(2**31), -(2**63)],
                "S and beyond": [num_slots, num_slots + 1, 2**31 - 1, 2**31, 2**40],
            }[bad]
            at = self.rng.permutation(count)[: len(some)]
            slots[at] = some[: len(at)]
        return slots

    def as_given(self, slots: np.ndarray) -> Any:
        """The slots as the caller holds them; what the type cannot hold becomes its nearest."""
        narrow = np.clip(slots, -(2**31), 2**31 - 1).astype(np.int32)
        kind = self.cell["slot_type"]
        return {"int32": narrow, "int64": slots, "list": slots.tolist()}.get(kind, jnp.asarray(narrow))


def run(cell: Cell) -> None:
    """Stores and loads as a cell says, and makes the five checks N1 to N5."""
    job = Job(cell)
    model, starts, ends = job.model, job.starts, job.ends
    source, target = job.slots(), job.slots()
    arrays, poison = model.arrays(1), model.arrays()
    way = dict(WAYS[cell["way"]])
    implementation = way["implementation"]
    sharding = None
    if cell["sharding"] > 1:
        devices = jax.devices()[: cell["sharding"]]
        mesh = jax.make_mesh((len(devices),), ("tp",), axis_types=(AxisType.Auto,), devices=devices)
        sharding = NamedSharding(mesh, SPLITS[cell["pool"]])
        way["path"] = None
    skip = "skip" if cell["bad"] == "S and beyond" else "raise"
    ranges = dict(starts=starts, ends=ends, skip_prefix=job.prefix, out_of_range=skip)
    options = dict(ranges, chunk_tokens=cell["chunk_tokens"], format=job.format, implementation=implementation)

    cache = model.cache(arrays, sharding)
    chunks = jaxkv.store(cache, job.as_given(source), **options, path=way.get("path"))
    if way.get("path") == "direct":  # the old chunks' memory is that of the new ones
        chunks = jaxkv.store(model.cache(arrays), job.as_given(source), **options, into=chunks, path="direct")
    helpers.stored(model, arrays, chunks, source, starts, ends, job.prefix)
    helpers.assert_same(cache.pages, arrays, "N3: the pool that was stored from")
    del cache

    rows = [model.rows(arrays, source[s:e]) for s, e in zip(starts, ends, strict=True)]
    valid = [np.asarray(c.valid)[: e - s].tolist() for c, s, e in zip(chunks, starts, ends, strict=True)]
    zero = cell["gaps"] == "zero"
    want, counts = helpers.loaded(
        model, poison, rows, target, starts, ends, skip_prefix=job.prefix, valid=valid, zero=zero
    )
    slots = job.as_given(target)
    plan = jaxkv.plan(model.spec, chunks, slots, num_pages=cell["pages"], gaps=cell["gaps"], **ranges)
    assert helpers.counts_of(plan) == counts, "N4"
    assert sum(counts.values()) == sum(np.subtract(ends, starts)) + np.asarray(plan.zeroed).sum(), "N4"
    load = functools.partial(jaxkv.load, **way)
    after = load(model.cache(poison, sharding), plan)
    helpers.assert_same(after.pages, want, "N1, N2")

    again = cell["again"]
    if again == "second call":
        after = load(after, plan)
        after = load(after, chunks, slots, gaps=cell["gaps"], **ranges)
    elif again == "busy device":
        work = jax.jit(lambda x: jax.lax.fori_loop(0, 20, lambda _, x: x @ x, x))(jnp.eye(128))
        after = load(model.cache(poison, sharding), plan)
        work.block_until_ready()
    elif plan.chunks:
        inside = functools.partial(jaxkv.load, implementation=implementation)
        if again == "loop":
            program = jax.jit(lambda c, p: jax.lax.fori_loop(0, 2, lambda _, c: inside(c, p), c))
        else:
            program = jax.jit(inside, donate_argnums=0 if again == "donated jit" else ())
        after = program(model.cache(poison, sharding), plan)
    helpers.assert_same(after.pages, want, "N5")
    helpers.stored(model, arrays, chunks, source, starts, ends, job.prefix)


def name_of(cell: Cell) -> str:
    return "-".join(str(cell[name]).replace(" ", "_") for name in AXES)


SAMPLE = every_value(8 << 20)


def test_the_sample_holds_every_value():
    for name, values in AXES.items():
        assert {cell[name] for cell in SAMPLE} == set(values), name


@pytest.mark.parametrize("cell", SAMPLE, ids=[f"{i}-{name_of(cell)}" for i, cell in enumerate(SAMPLE)])
def test_every_value(cell):
    run(cell)


@pytest.mark.parametrize("seed", range(RANDOM_CELLS))
def test_random_cell(seed):
    cell = random_cells_cached()[seed]
    print(f"seed {SEED + seed}: {cell}")
    run(cell)


@functools.cache
def random_cells_cached() -> list[Cell]:
    return random_cells(256 << 10)


PARTS = 32


@pytest.mark.grid
@pytest.mark.parametrize("part", range(PARTS))
def test_every_pair(part):
    """Every pair of values that fits in 64 MiB; what a failing part prints last is its cell."""
    for cell in every_pair_cached()[part::PARTS]:
        print(cell)
        run(cell)


@functools.cache
def every_pair_cached() -> list[Cell]:
    cells = every_pair(64 << 20)
    assert len(cells) > len(AXES["pool"]) * len(AXES["dim"])
    return cells
