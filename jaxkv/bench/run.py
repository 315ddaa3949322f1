"""`jaxkv bench`: every figure in one run, the machine's ceilings first."""

import contextlib
import importlib
import importlib.util
import itertools
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax

from ..bulk import load, store
from ..exchanging import exchange
from ..ops import native
from ..planning import plan as make_plan
from ..spec import PagedCache
from ..store_plans import store_plan
from . import ceilings, kernels, overlap, transfers
from .calibrate import calibrate
from .rows import Row, save
from .shapes import LLAMA_8B, MORE, SMALL
from .timing import Timing, wall

MIB = 2**20


class Bench:
    """A run of the benchmark.

    Args:
        quick: small shapes and few repeats, to see that it works; the figures say little.
        show: what to do with each row as it is found.
    """

    def __init__(self, *, quick: bool, show: Callable[[Row], None]) -> None:
        self._quick, self._show = quick, show
        self._shape = SMALL if quick else LLAMA_8B
        self._cuda = native.platform_of(jax.devices()[0]) == "cuda"
        self.rows: list[Row] = []
        self._engine: dict[tuple[int, str], float] = {}

    def run(self) -> None:
        """Measures everything."""
        self._ceilings()
        self._kernels()
        self._bulk()
        self._layers()
        if self._cuda or self._quick:
            self._beside()

    def _add(self, *args: Any, **kwargs: Any) -> None:
        row = Row(*args, **kwargs)
        self.rows.append(row)
        self._show(row)

    def _ceilings(self) -> None:
        sizes = (1, 8) if self._quick else (1, 32, 256, 1024)
        for mib in sizes:
            seconds = self._copy(mib * MIB)
            self._add("ceilings", "device to device copy", f"{mib} MiB", 2 * mib * MIB / seconds / 1e12, "TB/s")
        if not self._cuda:
            return
        engine = ceilings.CopyEngine(max(sizes) * MIB)
        for mib, direction in itertools.product(sizes, ("d2h", "h2d", "both")):
            seconds = self._engine[mib * MIB, direction] = engine.seconds(mib * MIB, direction)
            moved = mib * MIB * (2 if direction == "both" else 1)
            self._add("ceilings", f"copy engine {direction}", f"{mib} MiB", moved / seconds / 1e9, "GB/s")
        engine.close()

    def _copy(self, nbytes: int) -> float:
        return ceilings.device_copy(nbytes) if self._cuda else ceilings.host_copy(nbytes)

    def _kernels(self) -> None:
        shapes = (self._shape,) if self._quick else (LLAMA_8B, *MORE)
        for shape in shapes:
            tokens = 1024 if self._quick else 65536 if "rows" in shape.name else 8192
            nbytes = kernels.rows_bytes(shape, tokens)
            copy = self._copy(nbytes)
            found = {"": kernels.measure(shape, tokens)}
            if shape is self._shape:
                found[", take and .at[].set"] = kernels.measure_plain(shape, tokens)
                found[", XLA form"] = kernels.measure(shape, tokens, implementation="xla", steps=8)
            for kind, seconds in found.items():
                for op, taken in seconds.items():
                    rate, case = 2 * nbytes / taken / 1e12, f"{shape.name}, {tokens} tokens"
                    self._add("kernels", f"{op}{kind}", case, rate, "TB/s", ratio=copy / taken)

    def _bulk(self) -> None:
        for tokens in (256, 1024) if self._quick else (256, 2048, 8192):
            nbytes = tokens * self._shape.spec.bytes_per_token
            for name, timing in (transfers.bulk(self._shape, tokens) | transfers.bulk_one_array(nbytes)).items():
                self._transfer("bulk", name, tokens, timing)
            if tokens == (256 if self._quick else 2048):
                for name, timing in transfers.bulk_plain(self._shape, tokens).items():
                    self._transfer("bulk", f"{name}, a device_put a page", tokens, timing)
        if self._cuda:
            self._in_flight()
        if self._cuda or self._quick:
            self._both_ways(1024 if self._quick else 8192)

    def _transfer(self, part: str, name: str, tokens: int, timing: Timing, moved: int | None = None) -> None:
        nbytes = tokens * self._shape.spec.bytes_per_token if moved is None else moved
        direction = "both" if "and" in name else "d2h" if "store" in name else "h2d"
        ceiling = self._engine.get((nbytes, direction)) if self._cuda else self._copy(nbytes)
        self._add(
            part,
            name,
            f"{tokens} tokens",
            timing.total * 1e3,
            "ms",
            ratio=None if ceiling is None else ceiling / timing.total,
            enqueue_ms=timing.enqueue * 1e3,
        )

    def _in_flight(self) -> None:
        """Many calls at once."""
        spec, calls, tokens = self._shape.spec, 32, 256
        cache = spec.empty(self._shape.num_pages)
        slots = [self._shape.slots(tokens, seed) for seed in range(calls)]
        plans = [store_plan(cache, s, layers=None) for s in slots]
        chunks = [jax.block_until_ready(store(cache, plan)) for plan in plans]
        ceiling = self._engine[1024 * MIB, "d2h"]

        def store_all() -> Any:
            nonlocal chunks
            chunks = [store(cache, plan, into=c) for plan, c in zip(plans, chunks, strict=True)]
            return chunks

        timing = wall(store_all)
        case = f"{calls} calls of {tokens} tokens"
        rate = timing.total * 1e3
        self._add("bulk", "store into, calls in flight", case, rate, "ms", ceiling / timing.total, timing.enqueue * 1e3)

    def _both_ways(self, tokens: int) -> None:
        """Half of the slots go out while the other half come in: in one call, and in two."""
        spec = self._shape.spec
        cache = spec.empty(self._shape.num_pages)
        slots = self._shape.slots(2 * tokens, seed=0)
        out = store_plan(cache, slots[:tokens], layers=None)
        plan = make_plan(cache, jax.block_until_ready(store(cache, slots[tokens:])), slots[tokens:])

        def both() -> tuple[Any, PagedCache]:
            nonlocal cache
            chunks, cache = exchange(cache, out, plan)
            return chunks, cache

        def one_then_the_other() -> tuple[Any, PagedCache]:
            nonlocal cache
            chunks = store(cache, out)
            cache = load(cache, plan)
            return chunks, cache

        self._transfer("bulk", "store and load at once", tokens, wall(both))
        self._transfer("bulk", "store and load, two calls", tokens, wall(one_then_the_other))

    def _layers(self) -> None:
        """Layer by layer with nothing beside it: in arrays of 32 MiB or all layers, whichever is less."""
        for tokens, group in ((64, 8),) if self._quick else ((256, 32), (256, 8), (2048, 4), (8192, 1), (8192, 4)):
            run = overlap.LayerByLayer(self._shape, tokens, group=group)
            plan, turned = run.plan(), run.plan(turn=True)
            self._layerwise("store", tokens, group, run.store)
            self._layerwise("load", tokens, group, partial(run.load, plan=plan))
            self._layerwise("load, keys turned", tokens, group, partial(run.load, plan=turned))
            self._transfer("layer by layer", f"plan of a load, {group}", tokens, wall(run.plan), moved=0)
        # With nothing beside it a store needs no copies of their own: several arrays leave in one program.
        for tokens, group in ((256, 32), (2048, 16), (8192, 4)) if self._cuda else ():
            run = overlap.LayerByLayer(self._shape, tokens, group=group)
            self._layerwise("store, engine", tokens, group, partial(run.store, path="engine"))

    def _layerwise(self, name: str, tokens: int, group: int, call: Callable[[], Any]) -> None:
        label = name if group == 1 else f"{name}, {group} layers an array"
        self._transfer("layer by layer", label, tokens, wall(call))

    def _beside(self) -> None:
        layers = self._shape.spec.num_layers
        forward = overlap.Forward(layers, *((64, 32) if self._quick else ()))
        sizes = {"rounds": 1, "repeats": 3, "warm": 1} if self._quick else {}
        for tokens, group in ((64, 1),) if self._quick else ((256, 1), (256, 8), (2048, 1), (2048, 4), (8192, 1)):
            run = overlap.LayerByLayer(self._shape, tokens, group=group)
            plan, turned = run.plan(), run.plan(turn=True)
            calls: dict[str, Callable[[], Any]] = {
                "store": partial(run.store, forward),
                "load, each layer waiting": partial(run.load, forward, plan=plan),
                "load, not waiting": partial(run.load, forward, plan=plan, waits=False),
                "load, keys turned": partial(run.load, forward, plan=turned),
            }
            if tokens == 8192:
                calls["store, a ring of 4"] = partial(run.store, forward, ring_size=4)
            for ahead in (8, 32) if tokens == 8192 else ():
                calls[f"load, {ahead} layers ahead"] = partial(run.load, forward, plan=plan, ahead=ahead)
            for name, call in calls.items():
                share, seen = overlap.beside(forward.run, call, **sizes)
                alone = seen.total / (1 + share.total)
                label = name if group == 1 else f"{name}, {group} layers an array"
                part, case, enqueue = "beside a forward pass", f"{tokens} tokens", seen.enqueue * 1e3
                self._add(part, f"{label}: last product", case, 100 * share.compute, "%")
                self._add(part, f"{label}: last byte", case, 100 * share.total, "%", enqueue_ms=enqueue)
        self._add("beside a forward pass", "the forward pass alone", f"{layers} layers", alone * 1e3, "ms")


def main(*, quick: bool, json_file: str | None, peer: str | None, calibrating: bool = False) -> int:
    """Runs the benchmark twice (once if quick), shows and saves the second run; returns the exit status."""
    if calibrating:
        print(calibrate(SMALL, sizes=(32, 64), tokens=256) if quick else calibrate(LLAMA_8B))
        return 0
    command = " ".join(["jaxkv", *sys.argv[1:]])
    rows = list(_peer_rows(peer)) if peer else []
    for row in rows:
        print(row.line(), flush=True)
    if quick:
        print("small shapes, measured briefly: this shows that it works, not how fast it is", flush=True)
    first: list[Row] = []
    with _progress() as step:
        if not quick:
            print("a first run, for the noise", flush=True)
            warm = Bench(quick=False, show=lambda row: step(row.part))
            warm.run()
            first = warm.rows

        def show(row: Row) -> None:
            step(row.part)
            print(row.line(), flush=True)

        bench = Bench(quick=quick, show=show)
        bench.run()
    noise = _noise(first, bench.rows)
    for part, largest in noise.items():
        print(f"{part}: the same row twice differs by {100 * largest:.1f} % (median of rows)")
    if json_file:
        save([*rows, *bench.rows], first, json_file, command, noise)
        print(f"wrote {json_file}")
    return 0


@contextlib.contextmanager
def _progress() -> Iterator[Callable[[str], None]]:
    """Counts rows on the terminal, where there is one and tqdm is installed (the extra `bench`)."""
    if not sys.stderr.isatty() or importlib.util.find_spec("tqdm") is None:
        yield lambda part: None
        return
    with importlib.import_module("tqdm").tqdm(unit=" rows", leave=False) as bar:

        def step(part: str) -> None:
            bar.set_description(part, refresh=False)
            bar.update()

        yield step


def _noise(first: Sequence[Row], second: Sequence[Row]) -> dict[str, float]:
    """For each part, the median relative difference between two runs of a row that is no percentage."""
    before = {(row.part, row.name, row.case): row.value for row in first if row.unit != "%"}
    differences: dict[str, list[float]] = {}
    for row in second:
        value = before.get((row.part, row.name, row.case))
        if value:
            differences.setdefault(row.part, []).append(abs(row.value / value - 1))
    return {part: sorted(found)[len(found) // 2] for part, found in differences.items()}


def _peer_rows(peer: str) -> Iterator[Row]:
    """Rows of a peer, measured in a process of its own before this one claims the device's memory."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "peer.json")
        done = subprocess.run([sys.executable, "-m", f"jaxkv.bench.peer_{peer}", str(out)], check=False)
        if done.returncode or not out.exists():
            print(f"{peer} could not be measured (exit status {done.returncode}); the rest goes on", flush=True)
            return
        for row in json.loads(out.read_text(encoding="utf-8")):
            yield Row(**row)
