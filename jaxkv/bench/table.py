"""Tables of a benchmark's JSON in Markdown; the README's are made by `python -m jaxkv.bench.table FILE`."""

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

Rows = dict[tuple[str, str, str], list[dict[str, Any]]]

_TOKENS = ("256 tokens", "2048 tokens", "8192 tokens")


def markdown(path: str | Path) -> str:
    """Three tables: kernels, transfers, and what a forward pass loses. Two runs are shown as first / second."""
    found = json.loads(Path(path).read_text(encoding="utf-8"))
    rows: Rows = {}
    for row in [*found["first_rows"], *found["rows"]]:
        rows.setdefault((row["part"], row["name"], row["case"]), []).append(row)
    return "\n\n".join((_kernels(rows), _transfers(rows), _beside(rows)))


def _table(head: Iterable[str], lines: Iterable[Iterable[str]]) -> str:
    head = list(head)
    return "\n".join("| " + " | ".join(line) + " |" for line in (head, ["---"] * len(head), *lines))


def _kernels(rows: Rows) -> str:
    lines = []
    for (part, name, case), runs in rows.items():
        if part != "kernels" or not name.startswith("gather"):
            continue
        pair = [runs, rows[part, name.replace("gather", "scatter"), case]]
        label = case + name.removeprefix("gather").replace(", take and .at[].set", ": `take` and `.at[].set`")
        cells = [f"{_values(r, 'value', 2)} ({_values(r, 'ratio', 2)})" for r in pair]
        lines.append([label, *cells])
    lmcache = [rows["lmcache", f"{op} of all layers", "8192 tokens"] for op in ("gather", "scatter")]
    lines.append(["LMCache's kernels, 8192 tokens", *(_values(r, "value", 2) for r in lmcache)])
    return _table(
        ["all layers in one launch, TB/s read + write (of a device copy of as many bytes)", "gather", "scatter"], lines
    )


def _transfers(rows: Rows) -> str:
    jobs = [
        ("bulk store, new pinned memory", "bulk", ("store",) * 3, "bulk store"),
        ("bulk store into older chunks", "bulk", ("store into older chunks",) * 3, "bulk store"),
        ("bulk load", "bulk", ("load",) * 3, "bulk load"),
        ("bulk store without a plan", "bulk", ("store, no plan",) * 3, "bulk store"),
        ("bulk load without a plan", "bulk", ("load, no plan",) * 3, "bulk load"),
        (
            "layer by layer: store, engine path",
            "layer by layer",
            _grouped("store, engine", 32, 16, 4),
            "layer-wise store",
        ),
        *(
            (f"layer by layer: {name}", "layer by layer", _grouped(name, 32, 4, 1), peer)
            for name, peer in (
                ("store", "layer-wise store"),
                ("load", "layer-wise load"),
                ("load, keys turned", "CacheBlend load"),
            )
        ),
    ]
    lines = []
    for label, part, names, peer in jobs:
        cells = []
        for tokens, name in zip(_TOKENS, names, strict=True):
            ours, theirs = rows[part, name, tokens], rows["lmcache", peer, tokens]
            cells.append(f"{_values(ours, 'value', 2)} ({_values(ours, 'ratio', 2)}); {_values(theirs, 'value', 2)}")
        lines.append([label, *cells])
    for way in ("store", "load"):
        names = (f"bulk {way}, until the device is done", f"{way}, until the device is done")
        one = (f"the same bytes in one array by `device_put`, {way}", f"{way}, one array by device_put")
        for label, name in (names, one):
            columns = [rows["bulk", name, tokens] for tokens in _TOKENS]
            lines.append(
                [label, *(f"{_values(found, 'value', 2)} ({_values(found, 'ratio', 2)})" for found in columns)]
            )
    for label, name, case in (
        ("bulk, both ways at once: `exchange`", "store and load at once", "8192 tokens"),
        ("bulk, both ways, `store` and `load`", "store and load, two calls", "8192 tokens"),
        ("bulk store, 32 calls of 256 tokens in flight", "store into, calls in flight", "32 calls of 256 tokens"),
    ):
        runs = rows["bulk", name, case]
        lines.append([label, "", "", f"{_values(runs, 'value', 2)} ({_values(runs, 'ratio', 2)})"])
    return _table(["ms, to completion (of the copy engine); LMCache", *_TOKENS], lines)


def _grouped(name: str, *groups: int) -> tuple[str, ...]:
    return tuple(name if group == 1 else f"{name}, {group} layers an array" for group in groups)


def _beside(rows: Rows) -> str:
    part = "beside a forward pass"
    jobs = [
        ("store, to the last byte (LMCache: async)", "store: last byte", "layer-wise store, async"),
        ("store, to the last product", "store: last product", None),
        ("load, each layer waiting for its own KV", "load, each layer waiting: last byte", None),
        ("load, no layer waiting (LMCache: sync)", "load, not waiting: last byte", "layer-wise load, not waiting"),
        (
            "the same, 8 and 4 layers an array",
            tuple(f"load, not waiting, {n} layers an array: last byte" for n in (8, 4)),
            None,
        ),
        ("load with keys turned, each layer waiting", "load, keys turned: last byte", "CacheBlend load"),
    ]
    lines = []
    for label, name, peer in jobs:
        names = (name,) * 3 if isinstance(name, str) else name
        cells = []
        for tokens, row in zip(_TOKENS, names, strict=False):
            ours = _values(rows[part, row, tokens], "value", 1)
            theirs = "-" if peer is None else _values(rows["lmcache", f"{peer}, {part}", tokens], "value", 1)
            cells.append(f"{ours}; {theirs}")
        lines.append([label, *cells, *[""] * (3 - len(cells))])
    ((_, alone),) = [(key, runs) for key, runs in rows.items() if key[:2] == (part, "the forward pass alone")]
    head = f"% that a forward pass of {_values(alone, 'value', 1)} ms takes longer; LMCache (of its own)"
    return _table([head, *_TOKENS], lines)


def _values(runs: list[dict[str, Any]], field: str, digits: int) -> str:
    return " / ".join(f"{run[field]:.{digits}f}" for run in runs)


if __name__ == "__main__":
    print(markdown(sys.argv[1]))
