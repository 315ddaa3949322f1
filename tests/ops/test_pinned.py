"""place, fetch and exchange: that the programs of a GPU can be made, on a machine that has none."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from helpers import Model

from jaxkv.chunk import as_format
from jaxkv.ops import exchange, native, pinned
from jaxkv.paths import groups_of

pytestmark = pytest.mark.skipif(not native.available("cuda"), reason="the CUDA handlers are not built")

ROWS = 8


class World:
    """A pool and pinned chunks."""

    def __init__(self) -> None:
        model = Model("A2", pages=30)
        pool = model.poisoned().pool
        (group,) = groups_of(model.spec, as_format(model.spec, None))
        self.pages, self.transfer = pool.leaves, group.transfer
        self.sharding = self.pages[0].sharding
        self.pinned = self.sharding.with_memory_kind("pinned_host")
        (shape,) = self.transfer.chunk_shapes(ROWS)
        self.host = [jax.device_put(jnp.zeros(shape, model.spec.dtype), self.pinned) for _ in range(4)]

    @staticmethod
    def slots(chunks: int) -> jax.Array:
        return jnp.zeros(ROWS * chunks, jnp.int32)


@pytest.fixture(scope="module")
def world():
    return World()


def lowered(program: Any, *operands: Any) -> str:
    return program.trace(*operands).lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize("arrived", [0, 2])
def test_fetch(world, arrived):
    program = pinned._fetch_program(world.sharding, True, world.transfer, 4, ROWS, 2, arrived, None)
    text = lowered(program, list(world.pages), world.slots(4), (), world.host)
    assert "jaxkv_fetch" in text and f"arrived = {arrived}" in text


@pytest.mark.parametrize("makes_new", [True, False])
def test_place(world, makes_new):
    sizes = {"transfer": world.transfer, "num_chunks": 4, "staging": 2}
    program = pinned.place_program(world.slots(4), None if makes_new else world.pinned, world.pages, **sizes)
    if makes_new:
        # Where new arrays come from is decided by the pages' device, here a CPU.
        assert "jaxkv_gather" in lowered(program, None, world.slots(4), world.pages)
    else:
        assert "jaxkv_place" in lowered(program, world.host, world.slots(4), world.pages)


@pytest.mark.parametrize("makes_new", [True, False])
def test_exchange(world, makes_new):
    side = exchange.Side(world.transfer, 2, ROWS)
    program = exchange._program(world.sharding, (world.sharding,) * 2, side, side, 2, None, makes_new)
    older = () if makes_new else world.host[:2]
    text = lowered(program, world.pages, older, world.slots(2), world.slots(2), (), world.host[2:])
    assert "jaxkv_exchange" in text and "jaxkv_settle" in text
