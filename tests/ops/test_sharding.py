"""Pools sharded over heads: the unsharded result, the pool's own sharding, and no collective in the program."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import compilations
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxkv.layout import Sizes

from .moves import Move, assert_same, device, distinct_slots

SIZES = Sizes(layers=2, heads=4, dim=8, page_size=4)
CHUNK = "kv layer token (head dim)"
COLLECTIVES = r"all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter"

# Layout -> the array's shape where it is not the written one, and where the heads are in it.
POOLS = {
    "FLASH_ATTENTION": (None, P(None, None, None, "model")),
    "CROSS_LAYER_HND": (None, P(None, None, None, "model")),
    "SGLANG_MHA": (None, P(None, "model")),
    "TPU_RAGGED": (None, P(None, None, "model")),
    "TPU_RAGGED packed": ((6, 4, 4, 2, 8), P(None, None, "model")),
    "VLLM_LHBNC": (None, P(None, "model")),
    "V_TRANSPOSED": (None, P(None, "model")),
}

pytestmark = pytest.mark.skipif(len(jax.devices()) < 4, reason="needs four devices")


def mesh_of(kind, shape=(2,), names=("model",)):
    return jax.make_mesh(shape, names, axis_types=(kind,) * len(names), devices=jax.devices()[: int(np.prod(shape))])


def move_of(pool, chunk=CHUNK, dtype=jnp.bfloat16):
    shape, spec = POOLS[pool]
    shapes = None if shape is None else [shape] * SIZES.layers
    return Move(pool.split()[0], chunk, SIZES, 6, dtype, shapes=shapes), spec


def put(tree, mesh, spec):
    return jax.tree.map(lambda x: jax.device_put(jnp.array(x, copy=True), NamedSharding(mesh, spec)), tree)


def assert_sharded_alike(got, want, what):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert a.sharding.is_equivalent_to(b.sharding, a.ndim), f"{what}: {a.sharding}, expected {b.sharding}"


TAKE, PUT = distinct_slots(24, 9, 1), distinct_slots(24, 9, 2)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
@pytest.mark.parametrize("pool", POOLS)
def test_heads_sharded_pools_under_jit(pool, kind, implementation):
    """K1, K12, K13: result, sharding, donation in place on every device, no collective, one compilation."""
    move, spec = move_of(pool)
    mesh = mesh_of(kind)
    with jax.set_mesh(mesh):
        gather = jax.jit(functools.partial(move.gather, implementation=implementation))
        scatter = jax.jit(functools.partial(move.scatter, implementation=implementation), donate_argnums=0)
        source, target = put(move.source, mesh, spec), put(move.target, mesh, spec)
        slots = jax.device_put(TAKE, NamedSharding(mesh, P())), jax.device_put(PUT, NamedSharding(mesh, P()))
        rows = move.rows(TAKE)

        with compilations() as compiled:
            chunk = gather(source, slots[0])
        assert compiled  # so that none below means none
        assert_same(chunk, move.packed(rows), "gather")
        chunk_sharding = NamedSharding(mesh, P(None, None, None, "model"))
        assert chunk.sharding.is_equivalent_to(chunk_sharding, 4), chunk.sharding
        assert not re.search(COLLECTIVES, gather.lower(source, slots[0]).compile().as_text())

        text = scatter.lower(target, chunk, slots[1]).compile().as_text()
        assert not re.search(COLLECTIVES, text)
        pointers = [
            shard.data.unsafe_buffer_pointer() for x in jax.tree.leaves(target) for shard in x.addressable_shards
        ]
        written = scatter(target, chunk, slots[1])
        after = [shard.data.unsafe_buffer_pointer() for x in jax.tree.leaves(written) for shard in x.addressable_shards]
        assert after == pointers
        assert_sharded_alike(written, source, "scatter")
        with compilations() as compiled:
            again = scatter(written, chunk, slots[1])
        assert not compiled
        assert_sharded_alike(again, source, "second step")
        assert_same(again, move.written(rows, PUT), "scatter")


@pytest.mark.parametrize("pool", ["FLASH_ATTENTION", "TPU_RAGGED packed", "CROSS_LAYER_HND"])
def test_inside_shard_map(pool, implementation):
    """K12: each device sees its own heads, and moves them."""
    move, spec = move_of(pool)
    mesh = mesh_of(AxisType.Auto)
    shape = POOLS[pool][0]
    local_shapes = None if shape is None else [(*shape[:2], shape[2] // 2, *shape[3:])] * SIZES.layers
    local = Move(pool.split()[0], CHUNK, SIZES._replace(heads=2), 6, jnp.bfloat16, shapes=local_shapes)

    def step(source, target, take, to):
        rows = local.gather(source, take, implementation=implementation)
        return rows, local.scatter(target, rows, to, implementation=implementation)

    specs = jax.tree.map(lambda _: spec, move.source)
    over_heads = P(None, None, None, "model")
    call = jax.jit(
        jax.shard_map(step, mesh=mesh, in_specs=(specs, specs, P(), P()), out_specs=(over_heads, specs)),
        donate_argnums=1,
    )
    arguments = put(move.source, mesh, spec), put(move.target, mesh, spec), TAKE, PUT
    assert not re.search(COLLECTIVES, call.lower(*arguments).compile().as_text())
    rows = move.rows(TAKE)
    assert_same(call(*arguments), (move.packed(rows), move.written(rows, PUT)), "shard_map")


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_in_a_loop_with_a_sharded_carry(kind, implementation):
    """K12, K13: a scan whose carry is the sharded pool."""
    move, spec = move_of("CROSS_LAYER_HND")
    mesh = mesh_of(kind)
    with jax.set_mesh(mesh):

        def body(pages, slots):
            rows = move.gather(pages, slots[0], implementation=implementation)
            return move.scatter(pages, rows, slots[1], implementation=implementation), None

        call = jax.jit(lambda pages, slots: jax.lax.scan(body, pages, slots)[0], donate_argnums=0)
        slots = np.stack([np.stack([TAKE, PUT]), np.stack([PUT, TAKE])])
        pages = put(move.source, mesh, spec)
        assert not re.search(COLLECTIVES, call.lower(pages, slots).compile().as_text())
        once = move.written(move.rows(TAKE), PUT, move.source)
        want = move.written(move.rows(PUT, once), TAKE, once)
        got = call(pages, slots)
        assert_same(got, want, "scan")
        assert_sharded_alike(got, put(move.source, mesh, spec), "scan")


def test_one_axis_of_a_mesh_of_two(implementation):
    """K1: heads over `model`, nothing over `data`; and heads over both."""
    mesh = mesh_of(AxisType.Auto, (2, 2), ("data", "model"))
    move, _ = move_of("FLASH_ATTENTION")
    for axes in ("model", ("data", "model")):
        spec = P(None, None, None, axes)
        source, target = put(move.source, mesh, spec), put(move.target, mesh, spec)
        call = jax.jit(
            lambda s, t: (
                rows := move.gather(s, TAKE, implementation=implementation),
                move.scatter(t, rows, PUT, implementation=implementation),
            )
        )
        assert not re.search(COLLECTIVES, call.lower(source, target).compile().as_text())
        rows = move.rows(TAKE)
        got = call(source, target)
        assert_same(got, (move.packed(rows), move.written(rows, PUT)), str(axes))
        assert_sharded_alike(got[1], source, str(axes))


@pytest.mark.parametrize("spec", [P("model"), P(None, None, "model"), P(None, None, None, None, "model")], ids=str)
def test_other_shardings_are_right_if_not_fast(spec, implementation):
    """K8 at the level of the ops: sharded over kv, token or dim, the result is that of the unsharded run.

    Of integers: the collectives by which XLA gathers such a pool change NaNs of bf16 on the CPU of JAX 0.10.
    """
    mesh = mesh_of(AxisType.Auto)
    move, _ = move_of("FLASH_ATTENTION", dtype=jnp.int8)
    call = jax.jit(
        lambda s, t: (
            rows := move.gather(s, TAKE, implementation=implementation),
            move.scatter(t, rows, PUT, implementation=implementation),
        )
    )
    rows = move.rows(TAKE)
    got = call(put(move.source, mesh, spec), put(move.target, mesh, spec))
    assert_same(got, (move.packed(rows), move.written(rows, PUT)), str(spec))


def test_heads_that_do_not_divide_are_right_if_not_fast(implementation):
    """Four heads of the pool on two devices, and a chunk in which heads lie inside: the pool is gathered first."""
    mesh = mesh_of(AxisType.Auto)
    move, spec = move_of("FLASH_ATTENTION", chunk="layer token (kv head) dim", dtype=jnp.int8)
    call = jax.jit(functools.partial(move.gather, implementation=implementation))
    assert_same(call(put(move.source, mesh, spec), TAKE), move.packed(move.rows(TAKE)), "gather")


def test_eager_calls_on_sharded_pools(implementation):
    """K1 outside of jit, and rows that are not sharded at all."""
    mesh = mesh_of(AxisType.Auto)
    move, spec = move_of("FLASH_ATTENTION")
    rows = move.rows(TAKE)
    source, target = put(move.source, mesh, spec), put(move.target, mesh, spec)
    assert_same(move.gather(source, TAKE, implementation=implementation), move.packed(rows), "gather")
    got = move.scatter(target, device(move.packed(rows)), PUT, implementation=implementation)
    assert_same(got, move.written(rows, PUT), "scatter")
    assert_sharded_alike(got, source, "scatter")
