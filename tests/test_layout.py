"""Sentences: what they parse to, the addresses they mean, and what is refused with which words."""

import itertools
import random

import numpy as np
import pytest

from jaxkv.layout import AXES, Layout, Sizes
from jaxkv.testing import oracle

from .ops.moves import oracle_sizes

KV = Sizes(layers=3, heads=4, dim=64, page_size=16)
MLA = Sizes(layers=3, heads=1, dim=576, page_size=16, planes=1)


def addresses(layout, sizes, num_pages):
    """Flat address `[layer, kv, page, token, head, dim]` of every element, by the package's strides."""
    out = np.zeros((sizes.layers, sizes.planes, num_pages, sizes.page_size, sizes.heads, sizes.dim), np.int64)
    for layer, kv in itertools.product(range(sizes.layers), range(sizes.planes)):
        plane = layout.plane(sizes, num_pages, layer, kv)
        grid = np.indices(out.shape[2:])
        steps = np.array(plane.strides[2:]).reshape(4, 1, 1, 1, 1)
        out[layer, kv] = plane.offset + (grid * steps).sum(0)
    return out


# ---- Parsing


@pytest.mark.parametrize(
    ("sentence", "levels", "units"),
    [
        ("kv page token head dim", ("layer",), "kv page token head dim"),
        ("layer | kv page token head dim", ("layer",), "kv page token head dim"),
        ("page layer kv token head dim", (), "page layer kv token head dim"),
        ("kv layer | (page token) head dim", ("kv", "layer"), "page+token head dim"),
        ("layer kv | page token head dim", ("layer", "kv"), "page token head dim"),
        ("kv | layer page token head dim", ("kv",), "layer page token head dim"),
        ("  page\ttoken ( head kv )dim ", ("layer",), "page token head+kv dim"),
        ("(page token) 1 dim", ("layer",), "page+token  dim"),
    ],
)
def test_a_sentence_names_levels_and_axes(sentence, levels, units):
    layout = Layout(sentence)
    assert layout.levels == levels
    assert layout.arrays == (tuple(tuple(filter(None, unit.split("+"))) for unit in units.split(" ")),)


def test_a_pair_of_sentences_is_an_array_for_k_and_one_for_v():
    """A24."""
    layout = Layout(["page head token dim", "page head dim token"])
    assert layout.levels == ("layer", "kv")
    assert layout.planes == 2
    assert layout.shape(KV, 7) == (7, 4, 16, 64)
    assert layout.shape(KV, 7, kv=1) == (7, 4, 64, 16)
    assert layout == Layout(("page head token dim", "page head dim token"))
    assert Layout(("kv layer | page token dim", "page dim token")).levels == ("kv", "layer")


def test_layouts_are_values():
    assert Layout("page token dim", {"dim": 640}) == Layout("page token dim", (("dim", 640),))
    assert hash(Layout("page token dim", {"dim": 640})) == hash(Layout("page token dim", {"dim": 640}))
    assert Layout("page token dim") != Layout("page token dim", {"dim": 640})
    assert str(Layout("page token dim", {"dim": 640})) == "page token dim, dim padded to 640"


def test_the_written_shape_is_what_it_was():
    assert Layout("kv page token head dim").shape(KV, 7) == (2, 7, 16, 4, 64)
    assert Layout("page token (head kv) dim", {"dim": 128}).shape(KV, 7) == (7, 16, 8, 128)
    assert Layout("(page token) 1 dim").shape(MLA, 7) == (112, 1, 576)
    assert Layout("kv layer token (head dim)").shape(KV._replace(page_size=5), 1) == (2, 3, 5, 256)


# ---- Addresses


def test_a_thousand_random_orders_and_fusings_against_the_oracle():
    """A58: random sizes 1 to 5, `layer` and `kv` inside the array; every address of every element."""
    rng = random.Random(58)
    for _ in range(1000):
        order = rng.sample(AXES, 6)
        cuts = sorted(rng.sample(range(1, 6), rng.randrange(6)))
        units = [order[a:b] for a, b in itertools.pairwise([0, *cuts, 6])]
        sentence = " ".join(unit[0] if len(unit) == 1 else f"({' '.join(unit)})" for unit in units)
        sizes = Sizes(*(rng.randint(1, 5) for _ in range(4)))
        pages = rng.randint(1, 5)
        paddable = {"token": sizes.page_size, "head": sizes.heads, "dim": sizes.dim}
        pad = {axis: paddable[axis] + rng.randrange(3) for axis in rng.sample(sorted(paddable), rng.randrange(3))}
        layout = Layout(sentence, pad)
        shape = layout.shape(sizes, pages)
        want = oracle.index_map(shape, sentence, oracle_sizes(sizes, pages), pad)
        np.testing.assert_array_equal(addresses(layout, sizes, pages), want, err_msg=f"{sentence} {sizes} {pages}")
        assert layout.num_pages(shape, sizes) == pages


def test_offsets_are_not_cut_to_32_bits():
    """B21 to B23: pools above 2^31 elements and a slab with a big page stride."""
    sizes = Sizes(80, 8, 128, 16)
    layout = Layout("page layer kv token head dim")
    strides = layout.strides(sizes, 10_000)
    assert strides.page == 80 * 2 * 16 * 8 * 128
    assert 9_999 * strides.page > 2**33
    assert Layout("layer kv page token head dim").plane(sizes, 10_000, 79, 1).offset > 2**34


def test_fused_head_and_kv_are_not_fused_kv_and_head():
    """A50: the same array, two different right addresses."""
    inner = Layout("page token (head kv) dim").strides(KV, 7)
    outer = Layout("page token (kv head) dim").strides(KV, 7)
    assert (inner.head, inner.kv) == (128, 64)
    assert (outer.head, outer.kv) == (64, 256)


def test_one_head_is_the_same_in_nhd_and_hnd():
    """A49."""
    sizes = KV._replace(heads=1)
    nhd, hnd = (Layout(f"page kv {axes} dim") for axes in ("token head", "head token"))
    np.testing.assert_array_equal(addresses(nhd, sizes, 7), addresses(hnd, sizes, 7))


# ---- Arrays against sentences


@pytest.mark.parametrize(
    ("sentence", "shape"),
    [
        ("page token (head kv) dim", (7, 16, 4, 2, 64)),
        ("page token (head kv) dim", (7, 16, 8, 1, 64)),
        ("page token (head kv) dim", (7, 16, 512)),
        ("page token (head kv) dim", (7, 4, 4, 8, 64)),
        ("kv page token head dim", (2, 7, 16, 256)),
        ("kv page token head dim", (2, 7, 1, 16, 4, 64)),
        ("(page token) (kv head dim)", (112, 512)),
        ("(page token) (kv head dim)", (7, 16, 512)),
        ("(kv page) token head dim", (14, 16, 4, 64)),
    ],
)
def test_adjacent_axes_may_be_split_and_merged(sentence, shape):
    """A57: two descriptions of the same memory."""
    assert Layout(sentence).num_pages(shape, KV) == 7


@pytest.mark.parametrize(
    ("sentence", "shape"),
    [
        ("kv page token head dim", (7, 2, 16, 4, 64)),
        ("page kv token head dim", (2, 7, 16, 4, 64)),
        ("page token head dim", (7, 4, 16, 64)),
        ("kv page token head dim", (2, 7, 4, 16, 64)),
        ("page kv token head dim", (7, 2, 16, 4, 63)),
        ("page kv token head dim", (7, 2, 16, 4)),
        ("page kv token head dim", (0, 2, 16, 4, 64)),
        ("page kv token head dim", (7, 2, 16, 64, 4)),
        ("kv page token head dim", (14, 16, 4, 64)),
        ("kv page token head dim", (2, 112, 4, 64)),
        ("page kv head token dim", (7, 2, 4, 32, 64)),  # pages of 32 tokens, twice as many heads
        ("page kv head token dim", (7, 2, 8, 16, 64)),
        ("kv page head token dim", (2, 7, 4, 32, 64)),
        ("page head token dim", (7, 4, 32, 64)),
        ("head page token dim", (4, 7, 2, 16, 64)),
    ],
)
def test_a_shape_that_does_not_fit_is_no_guess(sentence, shape):
    """A47, A62, M4, M5: the sentence, the sizes and the shape are shown; nothing is tried instead."""
    sizes = KV if "kv" in sentence else KV._replace(planes=1)
    with pytest.raises(ValueError) as error:
        Layout(sentence).num_pages(shape, sizes)
    for text in (repr(sentence), str(shape), "heads=4"):
        assert text in str(error.value)


def test_a_shape_that_fits_two_sentences_is_read_as_the_given_one():
    """A47, A48: sizes of two everywhere."""
    sizes = Sizes(2, 2, 2, 2)
    for order in itertools.permutations(("kv", "page", "token", "head", "dim")):
        layout = Layout(" ".join(order))
        assert layout.num_pages((2,) * 5, sizes) == 2
        strides = layout.strides(sizes, 2)
        assert [getattr(strides, axis) for axis in order] == [16, 8, 4, 2, 1]


# ---- Bad sentences


@pytest.mark.parametrize(
    ("sentence", "fault"),
    [
        ("page token heads dim", r"unknown axis 'heads'.*known: layer, page, token, head, kv, dim.* at position 11"),
        ("page token head.lo", "unknown axis 'head.lo'"),
        ("slot | page token dim", "unknown axis 'slot'"),
        ("page token token dim", "'token' is named twice"),
        ("kv | page kv token dim", "'kv' is named twice"),
        ("page head dim", "'token' is missing"),
        ("", "'token' is missing"),
        ("layer |", "'token' is missing"),
        ("page (token head dim", r"a '\(' without its '\)' at position 20"),
        ("page token) dim", r"a '\)' without its '\(' at position 10"),
        ("page () token", "empty parentheses at position 6"),
        ("page ((token head)) dim", r"a '\(' inside parentheses at position 6"),
        ("page token, dim", "stray symbol ',' at position 10"),
        ("page token 2 dim", "stray symbol '2' at position 11"),
        ("page token 16 dim", "stray symbol '1' at position 11"),
        ("page token dim=64", "stray symbol '=' at position 14"),
        ("page -> token", "stray symbol '-' at position 5"),
        ("layer | kv | page token", r"a stray '\|' at position 11"),
        ("| page token dim", r"a stray '\|' at position 0"),
        ("1 | page token dim", r"a stray '\|' at position 2"),
        ("(layer kv) | page token dim", r"a stray '\|' at position 11"),
        ("layer (kv | page) token", r"a stray '\|' at position 10"),
        ("page | token dim", "'page' cannot be a level"),
    ],
)
def test_a_sentence_that_does_not_parse_shows_its_fault(sentence, fault):
    """M1 to M3: the axis or position, and the whole string."""
    with pytest.raises(ValueError, match=fault) as error:
        Layout(sentence)
    assert repr(sentence) in str(error.value)


@pytest.mark.parametrize("sentence", [None, 7, ("page token", "page token", "page token"), ("page token", 3), {"a"}])
def test_only_sentences_are_layouts(sentence):
    with pytest.raises(TypeError, match="expected a sentence or a pair"):
        Layout(sentence)


def test_pairs_that_contradict_themselves_are_refused():
    with pytest.raises(ValueError, match="different levels"):
        Layout(("kv layer | page token dim", "layer kv | page token dim"))
    with pytest.raises(ValueError, match="can only be levels"):
        Layout(("page kv token dim", "page token dim"))


def test_padding_is_checked():
    """M7: axis and both sizes; and what cannot be padded at all."""
    with pytest.raises(ValueError, match=r"'dim' has size 64, more than the 48 it is padded to"):
        Layout("kv page token head dim", {"dim": 48}).shape(KV)
    with pytest.raises(ValueError, match="'token' has size 16, more than the 8"):
        Layout("kv page token head dim", {"token": 8}).num_pages((2, 7, 16, 4, 64), KV)
    with pytest.raises(ValueError, match="has no axis 'head'"):
        Layout("page token dim", {"head": 8})
    with pytest.raises(ValueError, match="'page' cannot be padded"):
        Layout("page token dim", {"page": 8})
    for size in ("8", 8.0, True):
        with pytest.raises(TypeError, match="must be an int"):
            Layout("page token dim", {"dim": size})


def test_sizes_that_the_sentence_has_no_axis_for_are_refused():
    """M5: heads, planes and dims are never dropped."""
    for sentence, sizes, fault in (
        ("page token dim", MLA._replace(heads=4), "no axis 'head', but its size is 4"),
        ("page token head", MLA._replace(heads=4), "no axis 'dim', but its size is 576"),
        ("page token dim", MLA._replace(planes=2), r"has 1 plane\(s\), the model has 2"),
        ("page token kv dim", MLA, r"has 2 plane\(s\), the model has 1"),
    ):
        with pytest.raises(ValueError, match=fault):
            Layout(sentence).shape(sizes)
