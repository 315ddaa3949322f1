"""Wrong arguments: the exception of group M that each gives, before anything is written (R9), and what it names."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv import ops
from jaxkv.layout import Sizes
from jaxkv.ops import native

from .moves import Move, assert_same, device, implementations

SIZES = Sizes(layers=3, heads=2, dim=8, page_size=4)
CHUNK = "kv layer token (head dim)"


@pytest.fixture(scope="module")
def move():
    return Move("FLASH_ATTENTION", CHUNK, SIZES, 6, jnp.bfloat16)


@pytest.fixture
def pages(move):
    return device(move.target)


@pytest.fixture
def rows(move):
    return device(move.packed(move.rows([1, 2, 3])))


def refused(call, kind, *texts):
    with pytest.raises(kind) as error:
        call()
    for text in texts:
        assert re.search(text, str(error.value)), str(error.value)


# ---- Layouts (M1, M4 to M6, M8 to M10)


def test_sentences_are_checked_where_they_are_given(move, pages, rows):
    """M1, M2: in the pool's and in the chunk's."""
    refused(
        lambda: ops.gather(pages, [1], pool="page tok", chunk=CHUNK, sizes=SIZES), ValueError, "'tok'", "'page tok'"
    )
    refused(lambda: ops.gather(pages, [1], pool=move.pool, chunk="kv dim", sizes=SIZES), ValueError, "'token'")
    refused(lambda: ops.gather(pages, [1], pool="token dim", chunk=CHUNK, sizes=SIZES), ValueError, "'page' is missing")
    refused(lambda: ops.gather(pages, [1], pool="NO_SUCH", chunk=CHUNK, sizes=SIZES), ValueError, "'NO_SUCH'")
    refused(lambda: ops.gather(pages, [1], pool=None, chunk=CHUNK, sizes=SIZES), TypeError, "layout")


def test_arrays_that_do_not_fit_show_sentence_and_shape(pages, rows):
    """M4, M5."""
    for op in (
        lambda: ops.gather(pages, [1], pool="page kv token head dim", chunk=CHUNK, sizes=SIZES),
        lambda: ops.scatter(pages, rows, [1, 2, 3], pool="page kv token head dim", chunk=CHUNK, sizes=SIZES),
    ):
        refused(op, ValueError, r"\(2, 6, 4, 2, 8\)", "page kv token head dim")
    refused(
        lambda: ops.gather(pages, [1], pool="kv page token head dim", chunk=CHUNK, sizes=SIZES._replace(dim=7)),
        ValueError,
        "multiple",
        "dim=7",
    )


def test_arrays_that_disagree_are_named(move, pages):
    """M6: the axis, both sizes, which arrays."""
    other = (*pages[:2], jnp.zeros((2, 5, 4, 2, 8), jnp.bfloat16))
    refused(lambda: move.gather(other, [1]), ValueError, "arrays 0 and 2", "'page'", "6 and 5 pages")


@pytest.mark.parametrize("layers", [2, 4])
def test_the_number_of_layers_is_checked(move, pages, layers):
    """M8."""
    given = (*pages, pages[0])[:layers]
    refused(lambda: move.gather(given, [1]), ValueError, f"{layers} entries", r"3 \(layer\)")


def test_entries_of_the_wrong_depth_are_no_layers():
    """M8: six arrays, but not two for each of three layers."""
    move = Move("KV_PAIRS", CHUNK, SIZES, 6, jnp.bfloat16)
    (a, b), (c, d), (e, f) = device(move.source)
    for tree in (((a, b), (c, d, e), (f,)), ((a, b, c), (d, e, f)), (a, b, c, d, e, f)):
        refused(lambda tree=tree: move.gather(tree, [1]), ValueError, "6 arrays", r"3 \(layer\) of 2 \(kv\)")


def test_a_pool_without_layers_is_refused(move):
    """M9."""
    refused(lambda: move.gather((), [1]), ValueError, "pages", "no arrays")
    refused(
        lambda: ops.gather((), [1], pool=move.pool, chunk=CHUNK, sizes=SIZES._replace(layers=0)), ValueError, "0 layers"
    )


@pytest.mark.parametrize("layers", [range(3, 3), range(2, 5), range(-1, 2), range(2, 1)])
def test_layers_are_within_the_pool(pages, layers):
    refused(
        lambda: ops.gather(pages, [1], pool="FLASH_ATTENTION", chunk=CHUNK, sizes=SIZES, layers=layers),
        ValueError,
        "layers",
        "3 layers",
    )


@pytest.mark.parametrize("layers", [range(0, 3, 2), [0, 1], slice(0, 2), 1])
def test_layers_are_neighbours(pages, layers):
    """Layers 0 and 2 are not silently taken for 0 to 2."""
    refused(
        lambda: ops.gather(pages, [1], pool="FLASH_ATTENTION", chunk=CHUNK, sizes=SIZES, layers=layers),
        ValueError,
        re.escape(repr(layers)),
    )


@pytest.mark.parametrize("leaf", [np.zeros((2, 6, 4, 2, 8), np.float32), "page", 3.0])
def test_a_leaf_that_is_no_array_is_named(move, pages, rows, leaf):
    """M10: its path and its type; nothing is converted."""
    refused(lambda: move.gather((*pages[:2], leaf), [1]), TypeError, r"pages\[2\]", type(leaf).__name__)
    refused(lambda: move.scatter(pages, leaf, [1]), TypeError, "rows", type(leaf).__name__)


# ---- Slots (M11 to M13, M44)


@pytest.mark.parametrize("slots", [[1.0, 2.0], np.array([True]), [True, False], np.float32([1]), jnp.ones(2), "ab"])
def test_slots_are_integers(move, pages, slots):
    """M11."""
    refused(lambda: move.gather(pages, slots), TypeError, "slots", "dtype|float|bool|str")


def test_slots_that_no_integer_array_holds(move, pages):
    """B9: no inner OverflowError."""
    for slots in ([2**70], [[1], [2, 3]], [None], object()):
        refused(lambda slots=slots: move.gather(pages, slots), (TypeError, ValueError), "slots")


@pytest.mark.parametrize("slots", [3, np.zeros((2, 2), np.int32), jnp.zeros((1, 3), jnp.int32)])
def test_slots_have_one_dimension(move, pages, slots):
    """M12."""
    refused(lambda: move.gather(pages, slots), ValueError, "slots", re.escape(str(np.shape(slots))))


@pytest.mark.parametrize("count", [2, 4, 0])
def test_a_slot_for_each_row(move, pages, rows, count):
    """M13: neither longer nor shorter; both numbers."""
    refused(lambda: move.scatter(pages, rows, list(range(count))), ValueError, f"for {count} slots", r"3, 16\)")


@pytest.mark.parametrize("value", [24, 25, 2**31 - 1, 2**31, 2**40, 2**63])
def test_a_slot_past_the_pool_is_named(move, pages, rows, value):
    """M44, B4, B5, B7: index, true value, S, and how to skip instead; nothing written."""
    slots = np.array([5, 1, value], np.uint64 if value >= 2**63 else np.int64)
    for call in (lambda: move.gather(pages, slots), lambda: move.scatter(pages, rows, slots)):
        refused(call, ValueError, "index 2", rf"slot {value}\b", "24 slots", "out_of_range='skip'")
    if value < 2**31:
        refused(lambda: move.gather(pages, jnp.asarray(slots, jnp.int32)), ValueError, "index 2", f"slot {value}")
    assert_same(pages, move.target, "the pages")


def test_concrete_slots_are_checked_while_tracing(move, pages):
    """M41: static is what was given as values."""
    refused(lambda: jax.jit(lambda p: move.gather(p, [1, 99]))(pages), ValueError, "index 1", "slot 99")


def test_out_of_range_is_a_known_word(move, pages):
    refused(lambda: move.gather(pages, [1], out_of_range="clip"), ValueError, "out_of_range", "'clip'", "'skip'")


def test_a_pool_of_more_slots_than_int32_numbers_is_refused():
    """B25: traced by shape alone, for nobody has the memory."""
    pool = (jax.ShapeDtypeStruct((2**31, 1), jnp.uint8),)
    sizes = Sizes(1, 1, 1, 1, 1)
    call = jax.jit(lambda p: ops.gather(p, jnp.zeros(1, jnp.int32), pool="MLA", chunk="token dim", sizes=sizes))
    refused(lambda: call.lower(pool), ValueError, "2147483648 pages", "int32")


# ---- Rows, dtypes (M17)


def test_dtypes_are_never_cast(move, pages, rows):
    """M17, C11: both dtypes; between layers too; a view is the caller's to make."""
    refused(lambda: move.scatter(pages, rows.view(jnp.uint16), [1, 2, 3]), TypeError, "rows", "uint16", "bfloat16")
    refused(lambda: move.scatter(pages, rows.astype(jnp.float32), [1, 2, 3]), TypeError, "float32", "bfloat16")
    mixed = (*pages[:2], pages[2].view(jnp.float16))
    refused(lambda: move.gather(mixed, [1]), TypeError, "pages", "array 2", "float16", "bfloat16")


def test_rows_are_of_the_chunk_layout(move, pages, rows):
    refused(
        lambda: move.scatter(pages, rows.reshape(2, 3, 3, 2, 8), [1, 2, 3]), ValueError, r"\(2, 3, 3, 2, 8\)", CHUNK[:8]
    )
    refused(lambda: move.scatter(pages, (rows, rows), [1, 2, 3]), ValueError, "rows", "2 arrays", "one array")
    paged = Move("FLASH_ATTENTION", "page layer kv token head dim", SIZES, 6, jnp.bfloat16)
    refused(lambda: paged.gather(pages, [1, 2, 3]), ValueError, "3 tokens", "page size 4")


# ---- Arrays and implementations (M31 to M34)


def test_deleted_arrays_are_named(move, pages, rows):
    """M31, I11."""
    gone = device(move.target)
    gone[1].delete()
    refused(lambda: move.gather(gone, [1]), (ValueError, RuntimeError), r"pages\[1\]", "deleted")
    slots = jnp.asarray([1, 2, 3], jnp.int32)
    slots.delete()
    refused(lambda: move.gather(pages, slots), (ValueError, RuntimeError), "slots", "deleted")
    rows.delete()
    refused(lambda: move.scatter(pages, rows, [1, 2, 3]), (ValueError, RuntimeError), "rows", "deleted")


def test_one_array_for_two_donated_layers_is_no_crash(move):
    """I11: an error or a right result, never an abort."""
    pages = device(move.target)
    twice = (pages[0], pages[0], pages[2])
    chunk = device(move.packed(move.rows([1, 2, 3])))
    call = jax.jit(lambda p, r: move.scatter(p, r, [1, 2, 3]), donate_argnums=0)
    with pytest.raises((ValueError, RuntimeError), match="donate"):
        call(twice, chunk)


@pytest.mark.parametrize("name", ["cuda", "XLA", "", 1, ["ffi"]])
def test_an_unknown_implementation_is_refused(move, pages, name):
    """M32: the name, the accepted names."""
    refused(lambda: move.gather(pages, [1], implementation=name), ValueError, re.escape(repr(name)), "'xla'", "'ffi'")


def test_ffi_without_handlers_says_what_to_install(monkeypatch, move, pages, rows):
    """M33: eager and traced; None falls back to XLA (R14)."""
    monkeypatch.setattr(native, "_reasons", {"cpu": "no compiler that day", "cuda": "nor that"})
    platform = {"gpu": "cuda"}.get(jax.default_backend(), jax.default_backend())
    reason = native.why_not(platform)
    for call in (
        lambda: move.gather(pages, [1], implementation="ffi"),
        lambda: move.scatter(pages, rows, [1, 2, 3], implementation="ffi"),
        lambda: jax.jit(lambda p: move.gather(p, [1], implementation="ffi"))(pages),
    ):
        refused(call, RuntimeError, f"platform '{platform}'", reason)
    fresh = Move("FLASH_ATTENTION", CHUNK, SIZES, 11, jnp.bfloat16)  # of a shape that nothing has compiled
    assert_same(fresh.gather(device(fresh.source), [1, 43]), fresh.packed(fresh.rows([1, 43])), "fallback")


def test_ffi_built_for_another_platform_is_refused_when_lowered(monkeypatch, move):
    """M33: handlers of cuda are of no use to a program for the cpu."""
    monkeypatch.setattr(native, "_reasons", {"cpu": "no compiler that day"})
    fresh = Move("FLASH_ATTENTION", CHUNK, SIZES, 13, jnp.bfloat16)
    call = jax.jit(lambda p: fresh.gather(p, [1], implementation="ffi"))
    with pytest.raises(RuntimeError, match="platform 'cpu': no compiler that day"):
        call.trace(device(fresh.source)).lower(lowering_platforms=("cpu",))


def test_arrays_on_several_devices_are_refused(move, pages):
    """M34, K6."""
    if len(jax.devices()) < 2:
        pytest.skip("needs two devices")
    first, second = jax.devices()[:2]
    apart = (jax.device_put(pages[0], first), jax.device_put(pages[1], second), pages[2])
    refused(lambda: move.gather(apart, [1]), ValueError, "incompatible devices")


def test_errors_leave_everything_usable(move, pages, rows):
    """M42."""
    for bad in ([1, 2, 99], [1.0], [[1]]):
        with pytest.raises((ValueError, TypeError)):
            move.scatter(pages, rows, bad)
    assert_same(pages, move.target, "the pages")
    for implementation in implementations():
        got = move.scatter(pages, rows, [1, 2, 3], implementation=implementation)
        assert_same(got, move.written(move.rows([1, 2, 3]), [1, 2, 3]), implementation)
