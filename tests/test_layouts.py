"""Every row of group A has a name, its shape, and moves to the byte; rows to come are refused by name."""

import jax.numpy as jnp
import pytest

from jaxkv import layouts
from jaxkv.layout import Layout
from jaxkv.layouts import named, padded

from .ops.layout_rows import EXPRESSIBLE, KV, REFUSED, ROWS
from .ops.moves import KV_CHUNKS, PLANE_CHUNKS, Move, distinct_slots, skip_without_handlers

NAMED = {name: value for name, value in vars(layouts).items() if isinstance(value, Layout)}
ALL = ROWS | EXPRESSIBLE


@pytest.fixture(params=["xla", "ffi"])
def implementation(request):
    skip_without_handlers(request.param)
    return request.param


@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)
def test_every_layout_has_a_name(row):
    assert any(row.layout.sentence == value.sentence for value in NAMED.values())


def test_every_name_has_a_row():
    assert {value.sentence for value in NAMED.values()} == {row.layout.sentence for row in ROWS.values()}


@pytest.mark.parametrize("row", ALL.values(), ids=ALL)
def test_a_layout_knows_the_shape_of_its_arrays(row):
    """The shape that the sentence writes has as many elements as the engine's array, and both are accepted."""
    pair = len(row.layout.arrays) == 2
    assert row.layout.num_leaves(3) == len(row.shapes)
    for i, shape in enumerate(row.shapes):
        kv = i % 2 if pair else 0
        written = row.layout.shape(row.sizes, row.num_pages, kv=kv)
        assert jnp.zeros(shape, jnp.int8).size == jnp.zeros(written, jnp.int8).size
        assert row.layout.num_pages(shape, row.sizes, kv=kv) == row.num_pages
        assert row.layout.num_pages(written, row.sizes, kv=kv) == row.num_pages


@pytest.mark.parametrize("row", ALL.values(), ids=ALL)
def test_random_bytes_go_out_and_into_poison(row, implementation):
    """Three chunks' worth of tokens leave and come back at other slots; all else stays poison (A1 to A38)."""
    forms = KV_CHUNKS if row.sizes.planes == 2 else PLANE_CHUNKS
    move = Move(row.layout, forms[0], row.sizes, row.num_pages, row.dtype, shapes=row.shapes)
    take, put = (distinct_slots(move.num_slots, 42, seed) for seed in (1, 2))
    move.check(implementation, take, put, unique_slots=True)


@pytest.mark.parametrize(("sentence", "name"), REFUSED.values(), ids=REFUSED)
def test_rows_to_come_are_refused_by_name(sentence, name):
    """M1: the name, the whole string, the known names."""
    with pytest.raises(ValueError) as error:
        Layout(sentence)
    for text in (repr(name), repr(sentence), "layer, page, token, head, kv, dim"):
        assert text in str(error.value)


@pytest.mark.parametrize("sentence", ["page token dim/2", "page (token value + token scale)"])
def test_spans_and_segments_are_refused_by_symbol(sentence):
    with pytest.raises(ValueError, match=r"stray symbol '/' at position 14|unknown axis 'value'"):
        Layout(sentence)


@pytest.mark.parametrize("axis", ["(token dim)", "(head kv)", "page", "layer", "kv"])
def test_padding_of_a_fused_group_is_refused(axis):
    """A23 and A28 as written: only single axes are padded."""
    with pytest.raises(ValueError, match="cannot be padded") as error:
        Layout("page layer (token dim)", {axis: 1056})
    assert repr(axis) in str(error.value)


def test_named_takes_a_layout_a_sentence_and_a_name():
    assert named("MLA") is layouts.MLA
    assert named(layouts.MLA) is layouts.MLA
    assert named("page token dim") == layouts.MLA
    assert named(("page head token dim", "page head dim token")) == layouts.V_TRANSPOSED
    with pytest.raises(ValueError, match=r"none of the name 'FLASH'.*FLASH_ATTENTION"):
        named("FLASH")


def test_padded_adds_to_what_is_padded():
    layout = padded(padded(layouts.TPU_RAGGED, dim=128), head=8)
    assert layout.padding == {"dim": 128, "head": 8}
    assert layout.shape(KV, 7) == (7, 16, 16, 128)
