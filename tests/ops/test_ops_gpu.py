"""gather and scatter on a CUDA device, in both forms: the essential tests again, and what only a GPU's memory holds."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxkv import ops
from jaxkv.layout import Sizes
from jaxkv.ops import native

from . import grid
from .layout_rows import EXPRESSIBLE, ROWS
from .moves import KV_CHUNKS, PLANE_CHUNKS, Move, assert_same, device, distinct_slots, host
from .test_grid import EACH, RANDOM, SEED

pytestmark = pytest.mark.gpu

ALL = ROWS | EXPRESSIBLE


@pytest.fixture(params=["xla", "ffi"])
def implementation(request):
    if request.param == "ffi" and (why := native.why_not("cuda")):
        pytest.skip(why)
    return request.param


@pytest.fixture(autouse=True)
def on_the_gpu():
    """Arrays and programs go to the first CUDA device, whatever JAX's default is."""
    with jax.default_device(jax.devices("cuda")[0]):
        yield


def check(move, implementation, count):
    """Of distinct slots, and said so: no program that looks for equal ones has to be compiled."""
    take, put = (distinct_slots(move.num_slots, count, seed) for seed in (1, 2))
    move.check(implementation, take, put, unique_slots=True)


# ---- The tests of the CPU again


def some(count, every=3):
    """Numbers of cells for both forms: all for FFI, and every third for XLA, which takes a second to compile each."""
    both = [("ffi", number) for number in range(count)] + [("xla", number) for number in range(0, count, every)]
    return pytest.mark.parametrize(("implementation", "number"), both, indirect=["implementation"])


@pytest.mark.parametrize("row", ALL.values(), ids=ALL)
def test_every_layout(row, implementation):
    """Group A."""
    forms = KV_CHUNKS if row.sizes.planes == 2 else PLANE_CHUNKS
    move = Move(row.layout, forms[0], row.sizes, row.num_pages, row.dtype, shapes=row.shapes)
    check(move, implementation, 42)


@some(4 * len(KV_CHUNKS), every=4)
def test_every_form_of_a_chunk(number, implementation):
    pool = ("FLASHINFER_HND", "SGLANG_MHA", "CROSS_LAYER", "V_TRANSPOSED")[number % 4]
    move = Move(pool, KV_CHUNKS[number // 4], Sizes(2, 2, 8, 4), 6, jnp.bfloat16)
    check(move, implementation, 12)


@some(len(EACH))
def test_each_value_of_each_axis(number, implementation):
    grid.run(EACH[number], implementation, seed=number)


@some(len(RANDOM))
def test_random_cells(number, implementation):
    grid.run(RANDOM[number], implementation, seed=SEED + number, patterns=5)


@some(len(grid.ROW_BYTES))
def test_each_width_of_row(number, implementation):
    """C1, C2: rows of 6, 132, 656 and 999 bytes among them."""
    row_bytes = grid.ROW_BYTES[number]
    move = Move("layer page token dim", "1 layer token dim", Sizes(2, 1, row_bytes, 5, 1), 3, jnp.uint8, seed=row_bytes)
    check(move, implementation, 6)


@pytest.mark.parametrize(
    "dtype", [jnp.bfloat16, jnp.float16, jnp.uint8, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2]
)
def test_every_bit_pattern(dtype, implementation):
    """C7, C8."""
    size = np.dtype(dtype).itemsize
    patterns = np.arange(2 ** (8 * size), dtype=f"u{size}").reshape(-1, 16)
    move = Move("page token dim", "token dim", Sizes(1, 1, 16, 4, 1), len(patterns) // 4, dtype)
    move.source = (patterns.view(np.dtype(dtype)).reshape(-1, 4, 16),)
    move.check(implementation, distinct_slots(move.num_slots, move.num_slots), np.arange(move.num_slots)[::-1])


# ---- Words and launches


@pytest.mark.parametrize("start", [0, 1, 2, 4, 8, 16])
@pytest.mark.parametrize("word", [16, 8, 4, 2, 1])
def test_every_width_of_words(word, start):
    """C5: rows of `word` times an odd number of bytes, that start at any offset; the words are chosen by both."""
    if why := native.why_not("cuda"):
        pytest.skip(why)
    layout = grid.layouts.padded(grid.layouts.KEYS_ONLY, dim=3 * word + start)
    move = Move(layout, "1 layer token (head dim)", Sizes(2, 3, 3 * word, 5, 1), 4, jnp.uint8)
    check(move, "ffi", 11)


@pytest.mark.parametrize("pool", ["MLA", "layer page token dim", "FLASH_ATTENTION", "SGLANG_MHA"])
@pytest.mark.parametrize("layers", [61, 80, 129, 300])
def test_more_planes_than_one_launch_holds(pool, layers):
    """C13: 128 planes fit; the last of one launch and the first of the next are among those compared."""
    if why := native.why_not("cuda"):
        pytest.skip(why)
    planes = 2 if pool.isupper() and pool != "MLA" else 1
    chunk = KV_CHUNKS[0] if planes == 2 else "1 layer token (head dim)"
    move = Move(pool, chunk, Sizes(layers, 1, 6, 4, planes), 3, jnp.uint8)
    check(move, "ffi", 7)


def test_a_hundred_thousand_tiny_rows(implementation):
    """C12."""
    move = Move("page token dim", "token dim", Sizes(1, 1, 3, 1, 1), 120_000, jnp.uint8)
    check(move, implementation, 100_000)


def test_the_last_wins_a_hundred_times(implementation):
    """B11, R4."""
    move = Move("FLASH_ATTENTION", KV_CHUNKS[0], Sizes(2, 8, 128, 16), 4, jnp.bfloat16)
    slots = np.random.default_rng(0).integers(0, 4, 64).astype(np.int32)
    rows = move.rows(range(64))
    want, chunk, pages = move.written(rows, slots), device(move.packed(rows)), device(move.target)
    for _ in range(100):
        assert_same(move.scatter(pages, chunk, slots, implementation=implementation), want, "again")


# ---- In place


@pytest.mark.parametrize("pool", ["FLASH_ATTENTION", "CROSS_LAYER", "SGLANG_MHA", "V_TRANSPOSED"])
def test_a_donated_pool_is_written_in_place(pool, implementation):
    move = Move(pool, KV_CHUNKS[0], Sizes(2, 2, 8, 4), 6, jnp.bfloat16)
    call = jax.jit(functools.partial(move.scatter, implementation=implementation), donate_argnums=0)
    take, put = distinct_slots(24, 9, 1), distinct_slots(24, 9, 2)
    rows = move.rows(take)
    chunk, target = device(move.packed(rows)), device(move.target)
    before = [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(target)]
    got = call(target, chunk, put)
    assert [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(got)] == before
    assert_same(host(got), move.written(rows, put), "donated")


@pytest.mark.parametrize("pool", ["FLASH_ATTENTION", "CROSS_LAYER"])
def test_no_program_holds_a_copy_of_the_pool(pool):
    """Temporary memory of the compiled FFI program: that of looking for equal slots, far below the cache's size."""
    if why := native.why_not("cuda"):
        pytest.skip(why)
    move = Move(pool, KV_CHUNKS[0], Sizes(2, 4, 64, 16), 1024, jnp.bfloat16)
    source, rows, slots = device(move.source), jnp.zeros((2, 2, 32, 256), jnp.bfloat16), jnp.zeros(32, jnp.int32)
    cache = sum(leaf.nbytes for leaf in jax.tree.leaves(source))
    gather = jax.jit(functools.partial(move.gather, implementation="ffi")).lower(source, slots)
    scatter = jax.jit(functools.partial(move.scatter, implementation="ffi"), donate_argnums=0).lower(
        source, rows, slots
    )
    for lowered in (gather, scatter):
        assert lowered.compile().memory_analysis().temp_size_in_bytes < cache // 50


# ---- Pools that no index of 32 bits reaches


def _filled(shape, dtype):
    """Made on the device: each element is a hash of its address, so that no two rows are alike."""

    def element(i):
        i = (i ^ (i >> 15)) * jnp.uint32(2654435761)
        return (i ^ (i >> 13)).astype(f"uint{8 * jnp.dtype(dtype).itemsize}")

    @jax.jit
    def fill():
        rows = int(np.prod(shape[:-2]))
        row = jax.lax.broadcasted_iota(jnp.uint32, (rows, *shape[-2:]), 0) * jnp.uint32(40503)
        inner = jax.lax.broadcasted_iota(jnp.uint32, (rows, *shape[-2:]), 1) * jnp.uint32(shape[-1])
        inner = inner + jax.lax.broadcasted_iota(jnp.uint32, (rows, *shape[-2:]), 2)
        values = element(row * jnp.uint32(65537) + inner).reshape(shape)
        return jax.lax.bitcast_convert_type(values, dtype)

    return fill()


@pytest.mark.parametrize(
    ("name", "shape", "sizes", "dtype"),
    [
        # One plane, 4.4 GiB of bytes: byte and element offsets pass 2^31 and 2^32.
        ("page token head dim", (72_000, 16, 32, 128), Sizes(1, 32, 128, 16, 1), jnp.uint8),
        # 2.3 G elements, 4.6 GiB.
        ("page kv token head dim", (70_000, 2, 16, 8, 128), Sizes(1, 8, 128, 16), jnp.bfloat16),
        # A slab with a big page stride: page id times stride passes 2^32 bytes.
        ("page layer kv token head dim", (550, 16, 2, 16, 64, 128), Sizes(16, 64, 128, 16), jnp.bfloat16),
        # K and V more than 2^31 elements apart, heads outside of tokens.
        ("kv page head token dim", (2, 70_000, 8, 16, 128), Sizes(1, 8, 128, 16), jnp.bfloat16),
    ],
    ids=["bytes", "page outside", "slab", "kv outside"],
)
def test_pools_beyond_32_bits(name, shape, sizes, dtype, implementation):
    """B21 to B23: slots on both sides of the limits, read and written; the rest is compared on the device.

    Both forms by rows taken with plain indexing, whose own addresses JAX computes.
    """
    pages = _filled(shape, dtype)
    num_pages = shape[0] if name.startswith("page") else shape[1]
    ids = sorted({0, 1, num_pages // 2 - 1, num_pages // 2, num_pages // 4, num_pages - 2, num_pages - 1})
    slots = np.array([page * sizes.page_size + token for page in ids for token in (0, 7, 15)], np.int32)
    axis = 0 if name.startswith("page") else 1
    whole_pages = host(jax.jit(_taken, static_argnums=2)(pages, jnp.asarray(ids), axis))  # a few, as a small pool
    small = Move(
        name, "layer token kv head dim" if sizes.planes == 2 else "layer token head dim", sizes, len(ids), dtype
    )
    small.source = whole_pages if "layer" in name else (whole_pages,)
    small_slots = np.array([i * sizes.page_size + token for i in range(len(ids)) for token in (0, 7, 15)])
    rows = small.rows(small_slots)

    tree = pages if "layer" in name else (pages,)
    got = small.gather(tree, slots, implementation=implementation)
    assert_same(got, small.packed(rows), "gather")

    # The rows go to each other's slots, in place: the pool is too big to have twice next to XLA's own copies.
    before = jax.jit(_checksums)(pages)
    put = np.roll(slots, 5)
    scatter = jax.jit(functools.partial(small.scatter, implementation=implementation), donate_argnums=0)
    tree = scatter(tree, got, put)
    again = small.gather(tree, put, implementation=implementation)
    assert_same(again, small.packed(rows), "scatter")
    tree = scatter(tree, got, slots)  # what was moved goes back: now every byte is as it was
    pages = tree if "layer" in name else tree[0]
    np.testing.assert_array_equal(jax.jit(_checksums)(pages), before)


def _unsigned(x):
    return jax.lax.bitcast_convert_type(x, f"uint{8 * x.dtype.itemsize}")


def _taken(pages, ids, axis):
    return jax.lax.bitcast_convert_type(jnp.take(_unsigned(pages), ids, axis=axis), pages.dtype)


def _checksums(pages):
    """Sums over the outermost axes, which tell where a byte changed that must not have."""
    values = _unsigned(pages).astype(jnp.uint32)
    axes = tuple(range(values.ndim))
    return values.sum(axes[2:], dtype=jnp.uint32)


def test_a_chunk_beyond_32_bits(implementation):
    """B24: layers times tokens times row above 2^31 bytes, the V half included."""
    sizes = Sizes(16, 8, 128, 16)
    shape = (640, 16, 2, 16, 8, 128)
    pages = _filled(shape, jnp.bfloat16)
    num_slots = 640 * 16
    slots = jnp.asarray(np.concatenate([np.arange(num_slots)[::-1]] * 4), jnp.int32)
    options = {"pool": "page layer kv token head dim", "chunk": "kv layer token (head dim)", "sizes": sizes}
    chunk = ops.gather(pages, slots, implementation=implementation, **options)
    assert chunk.nbytes > 2**31
    chunk_bits = _unsigned(chunk)
    by_token = host(_unsigned(pages)).transpose(2, 1, 0, 3, 4, 5).reshape(2, 16, num_slots, 1024)
    for kv, layer, token in ((0, 0, 0), (0, 15, num_slots - 1), (1, 0, 5), (1, 15, 4 * num_slots - 1), (1, 15, 20_000)):
        want = by_token[kv, layer, num_slots - 1 - token % num_slots]
        np.testing.assert_array_equal(chunk_bits[kv, layer, token], want)
    written = ops.scatter(jnp.zeros_like(pages), chunk, slots, implementation=implementation, **options)
    assert bool((_unsigned(written) == _unsigned(pages)).all())
