"""The benchmark: that it runs, what it writes, and that the README's tables are those of the committed figures."""

import gc
import json
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv.bench import calibrate, kernels, overlap, rows, run, shapes, table, timing
from jaxkv.tuning import Tuning

QUICK_SHAPE = shapes.shape("test", layers=4, heads=2, dim=8, num_slots=512)


def test_a_quick_run_has_every_part():
    """Ceilings first, then kernels, bulk, layer by layer and beside a forward pass; every figure is a number."""
    found: list[rows.Row] = []
    run.Bench(quick=True, show=found.append).run()
    parts = list(dict.fromkeys(row.part for row in found))
    assert parts == ["ceilings", "kernels", "bulk", "layer by layer", "beside a forward pass"]
    assert all(row.value == row.value and row.line() for row in found)
    assert len({(row.part, row.name, row.case) for row in found}) == len(found)


def test_device_time_depends_on_the_work():
    """A step of more work takes longer; what a loop costs itself is subtracted."""
    step = lambda value, i: jnp.sin(value + i.astype(jnp.float32))  # noqa: E731
    small, large = (timing.device_time(step, jnp.zeros(size), steps=16) for size in (1 << 12, 1 << 20))
    assert large > small


def test_wall_tells_enqueue_from_completion():
    """The call returns before it is done."""
    found = timing.wall(lambda: jnp.ones(8) + 1, repeats=3)
    assert 0 < found.enqueue <= found.total


def test_wall_waits_as_it_is_told():
    """Another way to wait is asked after every call but those that warm up, and the clock is read after it."""
    asked: list[int] = []
    found = timing.wall(lambda: jnp.ones(8), repeats=3, warm=2, until=lambda: time.sleep(0.01) or asked.append(1))
    assert len(asked) == 3 and found.total >= 0.01 > found.enqueue


@pytest.mark.parametrize("was_enabled", [True, False])
def test_the_collector_is_off_while_something_is_timed(was_enabled):
    """And afterwards as it was before, also where what is timed fails."""
    seen: list[bool] = []
    before = gc.isenabled()
    (gc.enable if was_enabled else gc.disable)()
    try:
        timing.wall(lambda: seen.append(gc.isenabled()), repeats=1)
        with pytest.raises(ZeroDivisionError):
            timing.wall(lambda: 1 / 0)
        assert not any(seen) and gc.isenabled() == was_enabled
    finally:
        (gc.enable if before else gc.disable)()


@pytest.mark.parametrize("group", [1, 3])
def test_layer_by_layer_moves_what_it_says(group):
    """A store and a load of the benchmark are a round trip, also where layers share an array."""
    moved = overlap.LayerByLayer(QUICK_SHAPE, 40, group=group)
    fill = [jnp.full(page.shape, i + 1, page.dtype) for i, page in enumerate(moved.pages)]
    moved.pages = list(fill)
    _, sent = moved.store(ring_size=2)
    assert sum(part.layers[1] - part.layers[0] for part in sent) == 4
    forward = overlap.Forward(4, width=16, rows=4)
    hidden, pages = moved.load(forward, waits=group == 1)
    assert hidden.shape == (4, 16) and len(pages) == 4
    assert (pages[0].reshape(2, 512, -1)[:, QUICK_SHAPE.slots(40, 0)] == 0).all()  # the chunks are of the empty pages


def test_plain_forms_move_the_same_rows():
    """What the kernels are compared with is the same move."""
    assert kernels.rows_bytes(QUICK_SHAPE, 10) == 10 * QUICK_SHAPE.spec.bytes_per_token
    assert set(kernels.measure_plain(QUICK_SHAPE, 16, steps=8)) == {"gather", "scatter"}


def test_saved_figures_name_the_machine(tmp_path):
    """Chip, driver, versions and command are in the file."""
    row = rows.Row("bulk", "store", "1 tokens", 1.0, "ms", ratio=0.5)
    rows.save([row], [row], str(tmp_path / "out.json"), "jaxkv bench", {"bulk": 0.01})
    found = json.loads((tmp_path / "out.json").read_text())
    assert found["command"] == "jaxkv bench" and found["machine"]["jax"] == jax.__version__
    assert found["machine"]["driver"] and found["rows"] == found["first_rows"]


def test_the_readme_has_the_committed_tables(pytestconfig):
    """The tables are made from the figures, not written by hand."""
    figures = pytestconfig.rootpath / "notebooks" / "results" / "h200_bench.json"
    made = table.markdown(figures)
    assert made in (pytestconfig.rootpath / "README.md").read_text(encoding="utf-8")


def test_calibration_gives_a_tuning():
    """It is one that the calls take; on a CPU the sizes of the engine path keep their defaults."""
    found = calibrate.calibrate(QUICK_SHAPE, sizes=(16,), tokens=32)
    assert isinstance(found, Tuning) and found.array_bytes > 0
    if jax.default_backend() == "cpu":
        assert (found.direct_bytes, found.chunks_per_call) == (Tuning().direct_bytes, Tuning().chunks_per_call)


@pytest.mark.parametrize("order", ["random", "sorted", "contiguous"])
def test_slots_of_a_shape(order):
    """Distinct, whole pages in the order that was asked for, others for another seed."""
    made = shapes.shape("test", layers=1, heads=1, dim=8, num_slots=512, order=order)
    tables = [made.slots(40, seed) for seed in range(3)]
    for slots in tables:
        assert len(set(slots.tolist())) == 40 and slots.max() < 512
        pages = slots[::16] // 16
        steps = set(np.diff(pages).tolist())
        assert {"random": True, "sorted": min(steps) > 0, "contiguous": steps == {1}}[order]
    assert len({slots.tobytes() for slots in tables}) > 1
