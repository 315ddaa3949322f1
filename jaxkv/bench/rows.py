"""What a benchmark found: rows, the machine they are of, and how they are shown."""

import dataclasses
import json
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax

from ..info import collect


@dataclasses.dataclass(frozen=True)
class Row:
    """One figure.

    Attributes:
        part: of the benchmark: "ceilings", "kernels", "bulk", "layer by layer", "beside a forward pass", "lmcache".
        name: what was measured.
        case: on what: a shape, a number of tokens.
        value: the figure.
        unit: of it.
        ratio: to the ceiling that bounds it, 1 being the ceiling; None where there is none.
        enqueue_ms: milliseconds until the call returned, where that is something else.
    """

    part: str
    name: str
    case: str
    value: float
    unit: str
    ratio: float | None = None
    enqueue_ms: float | None = None

    def line(self) -> str:
        """The row for a reader."""
        ratio = "" if self.ratio is None else f"{self.ratio:6.3f} of the ceiling"
        enqueue = "" if self.enqueue_ms is None else f"  enqueued in {self.enqueue_ms:.2f} ms"
        what = f"{self.part:22s} {self.name:42s} {self.case:34s}"
        return f"{what} {self.value:10.3f} {self.unit:6s} {ratio}{enqueue}".rstrip()


def save(rows: Iterable[Row], first_rows: Iterable[Row], path: str, command: str, noise: dict[str, float]) -> None:
    """Writes rows and the machine they were measured on as JSON.

    Args:
        rows: the figures.
        first_rows: those of a run before, of the same things.
        path: of the file.
        command: that made them.
        noise: for each part, the median relative difference between two runs of the same row.
    """
    machine = collect()
    machine["driver"] = _driver()
    found: dict[str, Any] = {"command": command, "machine": machine, "noise": noise}
    found["rows"] = [dataclasses.asdict(row) for row in rows]
    found["first_rows"] = [dataclasses.asdict(row) for row in first_rows]
    Path(path).write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def _driver() -> str:
    """The accelerator's driver: nvidia-smi's word where there is one, and the runtime as JAX names it."""
    runtime = str(jax.devices()[0].client.platform_version).replace("\n", " ")
    asked = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        version = subprocess.run(asked, capture_output=True, text=True, check=True).stdout.split()[0]
    except (OSError, subprocess.CalledProcessError, IndexError):
        return runtime
    return f"{version}, {runtime}"
