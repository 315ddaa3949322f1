"""Pinned memory: whole arrays there and back, and rings of device buffers."""

import helpers
import jax
import numpy as np
import pytest
from helpers import Model

from jaxkv import host


def test_there_and_back():
    """I13, I14: bytes, memory kind and device kept; nothing is donated with a change of memory kind."""
    model = Model("A2")
    for device in (jax.devices()[0], jax.devices()[2]):
        arrays = [helpers.owned(x, device) for x in model.arrays(0)]
        placed = host.place(arrays)
        assert {x.sharding.memory_kind for x in placed} == {"pinned_host"}
        back = host.fetch(placed, [x.sharding for x in arrays])
        assert {x.sharding.memory_kind for x in back} == {"device"}
        for tree in (arrays, placed, back):
            helpers.assert_same(tree, model.arrays(0))
            assert all(x.devices() == {device} for x in tree)


def test_there_and_back_inside_jit():
    arrays = [helpers.owned(x) for x in Model("A2").arrays(1)]
    placed = jax.jit(host.place)(arrays)
    assert {x.sharding.memory_kind for x in placed} == {"pinned_host"}
    back = jax.jit(lambda x: host.fetch(x, None))(placed)
    assert {x.sharding.memory_kind for x in back} == {"device"}
    helpers.assert_same(back, arrays)


def test_a_ring_hands_out_its_oldest_buffers():
    """New ones while it is not full; then the oldest, unless it is of another kind or gone."""
    where = jax.sharding.SingleDeviceSharding(jax.devices()[1])
    places = [((2, 3), where), ((4,), where)]
    ring, given = host.Ring(2), []
    for _ in range(5):
        given.append(ring.take(places, np.float32))
        assert [(x.shape, x.devices()) for x in given[-1]] == [((2, 3), {jax.devices()[1]}), ((4,), {jax.devices()[1]})]
        ring.give(given[-1])
    assert given[0] is not given[1]
    assert [given[k] is given[k - 2] for k in (2, 3, 4)] == [True] * 3
    assert ring.take(places, np.int32)[0].dtype == np.int32
    given[4][0].delete()
    ring.give(given[3])
    assert not ring.take(places, np.float32)[0].is_deleted()
    for size in (0, True, 1.0):
        with pytest.raises(ValueError, match=f"size: .*{size!r}"):
            host.Ring(size)
