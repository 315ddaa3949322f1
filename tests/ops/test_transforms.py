"""Inside the caller's own programs: in place under donation, in control flow, exported; vmap and grad refused."""

import functools

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import compilations

from jaxkv.layout import Sizes

from .moves import Move, assert_same, device, distinct_slots, host, implementations, shapes_of

SIZES = Sizes(layers=2, heads=2, dim=8, page_size=4)
CHUNK = "kv layer token (head dim)"
TAKE, PUT = distinct_slots(24, 9, 1), distinct_slots(24, 9, 2)
PER_LAYER, SLAB = "FLASH_ATTENTION", "CROSS_LAYER"


def pointers(tree):
    return [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(tree)]


def move_of(pool, dtype=jnp.bfloat16, **options):
    return Move(pool, CHUNK, SIZES, 6, dtype, **options)


# ---- In place


@pytest.mark.parametrize("layers", [None, range(1, 2)], ids=["all", "one"])
@pytest.mark.parametrize("pool", [PER_LAYER, SLAB, "VLLM_LHBNC", "SGLANG_MHA", "V_TRANSPOSED"])
def test_a_donated_pool_is_written_in_place(pool, layers, implementation):
    """R1, and the same bytes as without donation (R5); no view of the pool is held, which would forbid donation."""
    move = move_of(pool, layers=layers)
    call = jax.jit(functools.partial(move.scatter, implementation=implementation), donate_argnums=0)
    rows = move.rows(TAKE)
    chunk = device(move.packed(rows))
    target = device(move.target)
    before = pointers(target)
    got = call(target, chunk, PUT)
    assert pointers(got) == before
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(target)) or layers is not None
    assert_same(host(got), move.written(rows, PUT), "donated")


@pytest.mark.parametrize("layers", [None, range(1, 2)], ids=["all", "one"])
@pytest.mark.parametrize("pool", [PER_LAYER, SLAB, "VLLM_LHBNC", "PALLAS_PAGED"])
def test_no_program_holds_a_copy_of_the_pool(pool, layers, implementation):
    """The compiled program's temporary memory is that of the rows, far below the cache's size.

    Of integers: the XLA form sees floats as integers, and XLA makes a copy of an array for that.
    """
    sizes, pages, tokens = Sizes(2, 4, 64, 16), 1024, 32
    move = Move(pool, CHUNK, sizes, 1, jnp.int8, layers=layers)  # for its layouts alone
    shapes = [jax.ShapeDtypeStruct(shape, jnp.int8) for shape in shapes_of(move.pool, sizes, pages)]
    pool_type = jax.tree.unflatten(jax.tree.structure(move.source), shapes)
    slots = jax.ShapeDtypeStruct((tokens,), jnp.int32)
    chunk = jax.ShapeDtypeStruct((2, 2 if layers is None else 1, tokens, 256), jnp.int8)
    cache = sum(shape.size for shape in shapes)

    gather = jax.jit(functools.partial(move.gather, implementation=implementation)).lower(pool_type, slots).compile()
    assert gather.memory_analysis().temp_size_in_bytes < cache // 50
    call = jax.jit(functools.partial(move.scatter, implementation=implementation), donate_argnums=0)
    memory = call.lower(pool_type, chunk, slots).compile().memory_analysis()
    assert memory.temp_size_in_bytes < cache // 50
    assert memory.alias_size_in_bytes >= cache


def test_nothing_is_donated_by_itself(implementation):
    """R1: outside of jit the argument lives on, unchanged."""
    move = move_of(PER_LAYER)
    target, rows = device(move.target), move.rows(TAKE)
    got = move.scatter(target, device(move.packed(rows)), PUT, implementation=implementation)
    assert not set(pointers(got)) & set(pointers(target))
    assert_same(target, move.target, "the argument")


# ---- Control flow


def test_in_scan_cond_and_fori_loop(implementation):
    """R5, N5: the pool as a carry and as an operand, donated, with other work between."""
    move = move_of(SLAB)
    gather = functools.partial(move.gather, implementation=implementation)
    scatter = functools.partial(move.scatter, implementation=implementation)

    def program(pages, slots, flag):
        def step(pages, pair):
            return scatter(pages, gather(pages, pair[0]), pair[1]), jnp.sum(pair)

        pages, _ = jax.lax.scan(step, pages, slots)
        pages = jax.lax.fori_loop(0, 3, lambda i, p: scatter(p, gather(p, slots[0, 0] + i), slots[0, 1]), pages)
        return jax.lax.cond(flag, lambda p: scatter(p, gather(p, slots[1, 0]), slots[1, 1]), lambda p: p, pages)

    def expected(pages, slots, flag):
        def copy(pages, take, put):
            return move.written(move.rows(take, pages), put, pages)

        for take, put in slots:
            pages = copy(pages, take, put)
        for i in range(3):
            pages = copy(pages, slots[0, 0] + i, slots[0, 1])
        return copy(pages, *slots[1]) if flag else pages

    call = jax.jit(program, donate_argnums=0)
    slots = np.stack([np.stack([TAKE, PUT]), np.stack([PUT, TAKE[::-1]])])
    for flag in (True, False):
        pages = device(move.source)
        before = pointers(pages)
        got = call(pages, slots, flag)
        assert pointers(got) == before
        assert_same(host(got), expected(move.source, slots, flag), f"flag {flag}")


def test_the_result_is_in_the_memory_of_the_pool():
    """A pinned pool as the carry of a loop, donated: written in place by the handlers, which take any address.

    XLA indexes no host memory, so its form is refused where it is traced, and says so.
    """
    move = move_of(PER_LAYER)
    pinned = jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")

    def program(implementation):
        def body(_, pages):
            rows = move.gather(pages, TAKE, implementation=implementation)
            return move.scatter(pages, rows, PUT, implementation=implementation)

        return jax.jit(lambda pages: jax.lax.fori_loop(0, 2, body, pages), donate_argnums=0, out_shardings=pinned)

    pages = jax.device_put(device(move.source), pinned)
    with pytest.raises(ValueError, match="memory_space"):
        program("xla")(pages)
    if "ffi" in implementations():
        pages = jax.device_put(device(move.source), pinned)
        before = pointers(pages)
        got = program("ffi")(pages)
        assert pointers(got) == before
        assert {leaf.sharding.memory_kind for leaf in got} == {"pinned_host"}
        once = move.written(move.rows(TAKE), PUT, move.source)
        assert_same(got, move.written(move.rows(TAKE, once), PUT, once), "pinned")


def test_other_slots_compile_nothing_new(implementation):
    """B30, B28: values are data, not types."""
    move = move_of(PER_LAYER)
    call = jax.jit(functools.partial(move.scatter, implementation=implementation))
    target, rows = device(move.target), move.rows(TAKE)
    chunk = device(move.packed(rows))
    call(target, chunk, PUT)
    move.scatter(target, chunk, PUT, implementation=implementation)
    others = [np.full(9, -1, np.int32), PUT[::-1].copy(), np.arange(9, dtype=np.int32)]
    with compilations() as compiled:
        for slots in others:
            call(target, chunk, slots)
            move.scatter(target, chunk, slots, implementation=implementation)
    assert not compiled


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_with_64_bit_types_on(dtype, implementation):
    """B8, B7, R5: int64 slots traced, beyond int32 too; int32 and int64 mixed between source and destination."""
    move = move_of(SLAB)
    take = TAKE.astype(dtype)
    put = PUT.astype(np.int64)
    put[[1, 2, 3]] = [2**32 + 5, -(2**32) + 5, 2**31]
    with jax.enable_x64(True):
        call = jax.jit(
            lambda s, t, take, put: (
                rows := move.gather(s, take, implementation=implementation),
                move.scatter(t, rows, put, implementation=implementation),
            )
        )
        got = call(device(move.source), device(move.target), jnp.asarray(take), jnp.asarray(put))
        assert_same(got, (move.packed(move.rows(take)), move.written(move.rows(take), put)), "x64")
        eager = move.gather(device(move.source), jnp.asarray(take), implementation=implementation)
        assert_same(eager, move.packed(move.rows(take)), "x64 eager")


@pytest.mark.parametrize("dtype", [np.float64, np.int64, np.uint64])
def test_eight_byte_payloads(dtype, implementation):
    """C10: exact where 64-bit types are on."""
    with jax.enable_x64(True):
        Move("MLA", "token dim", Sizes(1, 1, 3, 4, 1), 6, dtype).check(implementation, TAKE, PUT)


# ---- Export, names


@pytest.mark.parametrize("platforms", [("cpu",), ("cpu", "cuda", "tpu", "rocm"), ("tpu",), ("rocm",)], ids="-".join)
def test_export(platforms):
    """The program for each platform is written here; the one for the platform at hand runs after a round trip."""
    pytest.importorskip("flatbuffers")
    move = move_of(PER_LAYER)

    def program(source, target, take, put):
        rows = move.gather(source, take)
        return rows, move.scatter(target, rows, put)

    arguments = device(move.source), device(move.target), jnp.asarray(TAKE), jnp.asarray(PUT)
    safe = [jax.export.DisabledSafetyCheck.custom_call(f"jaxkv_{op}") for op in ("gather", "scatter")]
    exported = jax.export.export(jax.jit(program), platforms=platforms, disabled_checks=safe)(*arguments)
    assert exported.platforms == platforms
    again = jax.export.deserialize(exported.serialize())
    if jax.default_backend() in platforms:
        rows = move.rows(TAKE)
        assert_same(again.call(*arguments), (move.packed(rows), move.written(rows, PUT)), "exported")


def test_the_xla_form_is_exported_without_a_custom_call():
    """No handlers are needed where "xla" is named, and none are found where FFI has none."""
    move = move_of(PER_LAYER)
    call = jax.jit(functools.partial(move.gather, implementation="xla"))
    text = jax.export.export(call, platforms=("cpu", "tpu"))(device(move.source), jnp.asarray(TAKE)).mlir_module()
    assert "@jaxkv_gather(" not in text


def test_each_platform_gets_its_own_form():
    """Without a name: FFI where there is a handler, XLA elsewhere."""
    if "ffi" not in implementations() or jax.default_backend() != "cpu":
        pytest.skip("needs the handlers for the cpu")
    move = move_of(PER_LAYER)
    traced = jax.jit(move.gather).trace(device(move.source), jnp.asarray(TAKE))
    assert "@jaxkv_gather(" in traced.lower(lowering_platforms=("cpu",)).as_text()
    assert "@jaxkv_gather(" not in traced.lower(lowering_platforms=("tpu",)).as_text()


def test_programs_name_their_ops(implementation):
    """Profiles show whose time it is."""
    move = move_of(PER_LAYER)
    rows = device(move.packed(move.rows(TAKE)))
    gather = jax.jit(functools.partial(move.gather, implementation=implementation))
    scatter = jax.jit(functools.partial(move.scatter, implementation=implementation))
    pages, slots = device(move.source), jnp.asarray(TAKE)
    assert "jaxkv.gather" in gather.lower(pages, slots).as_text(debug_info=True)
    assert "jaxkv.scatter" in scatter.lower(pages, rows, slots).as_text(debug_info=True)


# ---- What is refused


def test_vmap_is_refused(implementation):
    """M36: over slots, pages or rows; the message names the op and what to do."""
    move = move_of(SLAB)
    pages, rows, slots = device(move.source), device(move.packed(move.rows(TAKE))), jnp.stack([TAKE, PUT])
    gather = functools.partial(move.gather, implementation=implementation)
    scatter = functools.partial(move.scatter, implementation=implementation)
    two = jnp.stack([rows, rows])
    with pytest.raises(NotImplementedError, match="jaxkv gather cannot be vmapped: give it all slots at once"):
        jax.vmap(gather, (None, 0))(pages, slots)
    with pytest.raises(NotImplementedError, match="jaxkv gather cannot be vmapped"):
        jax.jit(jax.vmap(gather, (0, None)))(jnp.stack([pages, pages]), slots[0])
    for axes, arguments in (((None, 0, None), (pages, two, slots[0])), ((None, None, 0), (pages, rows, slots))):
        with pytest.raises(NotImplementedError, match="jaxkv scatter cannot be vmapped: give it all rows and slots"):
            jax.vmap(scatter, axes)(*arguments)


def test_differentiation_is_refused(implementation):
    """M36: forward and reverse; through stop_gradient it passes."""
    move = move_of(SLAB, dtype=jnp.float32)
    move.source = np.zeros_like(move.source)
    pages, rows = device(move.source), device(move.packed(move.rows(TAKE)))

    def read(pages):
        return move.gather(pages, TAKE, implementation=implementation).sum()

    def written(rows):
        return move.scatter(pages, rows, PUT, implementation=implementation).sum()

    for name, call in (
        ("gather", lambda: jax.grad(read)(pages)),
        ("gather", lambda: jax.jvp(read, (pages,), (pages,))),
        ("scatter", lambda: jax.grad(written)(rows)),
        ("scatter", lambda: jax.jit(jax.grad(written))(rows)),
    ):
        with pytest.raises(NotImplementedError, match=rf"jaxkv {name} cannot be differentiated.*stop_gradient"):
            call()
    assert not jax.grad(lambda x: read(jax.lax.stop_gradient(x)) + x.sum() * 0)(pages).any()
    assert jax.grad(lambda x: read(pages) + x)(1.0) == 1.0
