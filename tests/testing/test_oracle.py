"""The oracle against answers written by hand, and against itself."""

from collections.abc import Callable
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import pytest

from jaxkv.testing import oracle

L, P, T, H, D = 3, 7, 16, 4, 64  # layers, pages, tokens a page, heads, dim
SIZES = {"layer": L, "kv": 2, "page": P, "token": T, "head": H, "dim": D}
MLA = {"layer": L, "kv": 1, "page": P, "token": T, "head": 1, "dim": 576}


class Row(NamedTuple):
    """A layout: its sentence, its arrays' shapes, and where the hand finds one token of it."""

    sentence: oracle.Sentence
    shapes: Any  # nested as the arrays; ("layer", x) is a list of L times x
    at: Callable[..., Any]  # (arrays, layer, plane, page, offset) -> [head, dim]
    sizes: dict[str, int] = SIZES
    pad: dict[str, int] | None = None


def each(shape: Any) -> list[Any]:
    return [shape] * L


# Keys are the numbers of the project's layout cases. `at` is ordinary indexing, written from the
# shape alone.
ROWS = {
    "A1": Row("page layer kv token head dim", (P, L, 2, T, H, D), lambda a, i, k, p, t: a[p, i, k, t]),
    "A2": Row(
        "layer | kv page token head dim",
        each((2, P, T, H, D)),
        lambda a, i, k, p, t: a[i][k, p, t],
    ),
    "A3": Row(
        "layer | page kv token head dim",
        each((P, 2, T, H, D)),
        lambda a, i, k, p, t: a[i][p, k, t],
    ),
    "A4": Row("layer | page token dim", each((P, T, 576)), lambda a, i, k, p, t: a[i][p, t][None], MLA),
    "A5": Row(
        "kv layer | (page token) head dim",
        (each((P * T, H, D)), each((P * T, H, D))),
        lambda a, i, k, p, t: a[k][i][p * T + t],
    ),
    "A6": Row(
        "layer | (page token) 1 dim",
        each((P * T, 1, 576)),
        lambda a, i, k, p, t: a[i][p * T + t],
        MLA,
    ),
    "A7": Row(
        "layer | kv page head token dim",
        each((2, P, H, T, D)),
        lambda a, i, k, p, t: a[i][k, p, :, t],
    ),
    "A8": Row(
        "layer | page kv head token dim",
        each((P, 2, H, T, D)),
        lambda a, i, k, p, t: a[i][p, k, :, t],
    ),
    "A9": Row("page layer kv head token dim", (P, L, 2, H, T, D), lambda a, i, k, p, t: a[p, i, k, :, t]),
    "A9 flat": Row(
        "page layer kv (head token dim)",
        (P, L, 2, H * T * D),
        lambda a, i, k, p, t: a[p, i, k].reshape(H, T, D)[:, t],
    ),
    "A10": Row(
        "kv layer | page token head dim",
        (each((P, T, H, D)), each((P, T, H, D))),
        lambda a, i, k, p, t: a[k][i][p, t],
    ),
    "A11": Row(
        "layer | page head token kv dim",
        each((P, H, T, 2, D)),
        lambda a, i, k, p, t: a[i][p, :, t, k],
    ),
    "A12": Row(
        "layer | page token head kv dim",
        each((P, T, H, 2, D)),
        lambda a, i, k, p, t: a[i][p, t, :, k],
    ),
    "A13": Row(
        "layer | page head token (kv dim)",
        each((P, H, T, 2 * D)),
        lambda a, i, k, p, t: a[i][p, :, t, k * D : (k + 1) * D],
    ),
    "A14": Row(
        "layer | page token head (kv dim)",
        each((P, T, H, 2 * D)),
        lambda a, i, k, p, t: a[i][p, t, :, k * D : (k + 1) * D],
    ),
    "A16": Row(
        "layer | kv page head 1 token dim",
        each((2, P, H, 1, T, D)),
        lambda a, i, k, p, t: a[i][k, p, :, 0, t],
    ),
    "A17": Row(
        "layer kv | page token head dim",
        each(((P, T, H, D), (P, T, H, D))),
        lambda a, i, k, p, t: a[i][k][p, t],
    ),
    "A19": Row(
        "layer | page token head dim",
        each((P, T, H, D)),
        lambda a, i, k, p, t: a[i][p, t],
        {**SIZES, "kv": 1},
    ),
    "A20": Row(
        "page layer head token (kv dim)",
        (P, L, H, T, 2 * D),
        lambda a, i, k, p, t: a[p, i, :, t, k * D : (k + 1) * D],
    ),
    "A21": Row(
        "layer page token head (kv dim)",
        (L, P, T, H, 2 * D),
        lambda a, i, k, p, t: a[i, p, t, :, k * D : (k + 1) * D],
    ),
    "A22": Row(
        "layer head page token (kv dim)",
        (L, H, P, T, 2 * D),
        lambda a, i, k, p, t: a[i, :, p, t, k * D : (k + 1) * D],
    ),
    "A22 page first": Row(
        "page head layer token (kv dim)",
        (P, H, L, T, 2 * D),
        lambda a, i, k, p, t: a[p, :, i, t, k * D : (k + 1) * D],
    ),
    "A24": Row(
        ("page head token dim", "page head dim token"),
        each(((P, H, T, D), (P, H, D, T))),
        lambda a, i, k, p, t: a[i][1][p, :, :, t] if k else a[i][0][p, :, t],
    ),
    "A24 kv first": Row(
        ("kv layer | page head token dim", "page head dim token"),
        (each((P, H, T, D)), each((P, H, D, T))),
        lambda a, i, k, p, t: a[1][i][p, :, :, t] if k else a[0][i][p, :, t],
    ),
    "A26": Row(
        "page token (head kv) dim",
        each((P, T, H, 2, 128)),
        lambda a, i, k, p, t: a[i][p, t, :, k, :D],
        pad={"dim": 128},
    ),
    "A27": Row(
        "page token (head kv) dim",
        each((P, T, H // 2, 4, 128)),
        lambda a, i, k, p, t: a[i][p, t].reshape(H, 2, 128)[:, k, :D],
        pad={"dim": 128},
    ),
    "A29": Row(
        "page token head (kv dim)",
        each((P, T, H // 2, 2, 2 * D)),
        lambda a, i, k, p, t: a[i][p, t].reshape(H, 2, D)[:, k],
    ),
    "A31": Row(
        "page token (head kv) dim",
        each((P + 1, T, H, 2, D)),
        lambda a, i, k, p, t: a[i][p, t, :, k],
        {**SIZES, "page": P + 1},
    ),
    "A32": Row(
        "kv layer | head page token dim",
        (each((H, P, T, D)), each((H, P, T, D))),
        lambda a, i, k, p, t: a[k][i][:, p, t],
    ),
    "A33": Row(
        "kv layer | head page token",
        (each((H, P, T)), each((H, P, T))),
        lambda a, i, k, p, t: a[k][i][:, p, t, None],
        {**SIZES, "dim": 1},
    ),
    "A34": Row(
        "page token (head kv) dim",
        each((P, T, 2 * H, D)),
        lambda a, i, k, p, t: a[i][p, t, k::2],
    ),
    "A35": Row(
        "layer kv | page head token dim",
        each(((P, H, T, D), (P, H, T, D))),
        lambda a, i, k, p, t: a[i][k][p, :, t],
    ),
    "A36": Row(
        "page token dim",
        each((P, T // 2, 2, 640)),
        lambda a, i, k, p, t: a[i][p, t // 2, t % 2, None, :576],
        MLA,
        {"dim": 640},
    ),
    "heads, tokens and pages padded": Row(
        "page token (kv head) dim",
        each((P + 2, T + 3, 2, H + 1, D)),
        lambda a, i, k, p, t: a[i][p, t, k, :H],
        pad={"page": P + 2, "token": T + 3, "head": H + 1},
    ),
}


def build(shapes: Any, make: Callable[[tuple[int, ...]], Any]) -> Any:
    if isinstance(shapes[0], int):
        return make(shapes)
    return type(shapes)([build(s, make) for s in shapes])


def leaves(arrays: Any) -> list[Any]:
    if isinstance(arrays, list | tuple):
        return [leaf for entry in arrays for leaf in leaves(entry)]
    return [arrays]


def random_pool(row: Row, dtype: Any, seed: int) -> Any:
    rng = np.random.default_rng(seed)
    width = np.dtype(dtype).itemsize

    def make(shape: tuple[int, ...]) -> Any:
        flat = rng.integers(0, 256, int(np.prod(shape)) * width, dtype=np.uint8)
        return flat.view(dtype).reshape(shape)

    return build(row.shapes, make)


def raw(array: Any) -> bytes:
    return np.ascontiguousarray(array).tobytes()


def test_index_map_by_hand() -> None:
    # [page=2, token=2, dim=3 padded to 4]: one row of four numbers a token, the last unused
    index = oracle.index_map((2, 2, 4), "page token dim", {"token": 2, "dim": 3}, {"dim": 4})
    assert index.shape == (1, 1, 2, 2, 1, 3)
    assert index[0, 0, :, :, 0].tolist() == [[[0, 1, 2], [4, 5, 6]], [[8, 9, 10], [12, 13, 14]]]


def test_index_map_of_fused_axes_by_hand() -> None:
    sizes = {"kv": 2, "token": 1, "head": 2, "dim": 1}
    heads_outside = oracle.index_map((1, 1, 4), "page token (head kv) dim", sizes)
    planes_outside = oracle.index_map((1, 1, 4), "page token (kv head) dim", sizes)
    assert heads_outside[0, :, 0, 0, :, 0].tolist() == [[0, 2], [1, 3]]
    assert planes_outside[0, :, 0, 0, :, 0].tolist() == [[0, 1], [2, 3]]


def test_index_map_takes_pages_from_the_shape() -> None:
    sizes = {"layer": 2, "kv": 2, "token": 4, "head": 3, "dim": 5}
    index = oracle.index_map((9, 2, 2, 4, 15), "page layer kv token (head dim)", sizes)
    assert index.shape == (2, 2, 9, 4, 3, 5)
    assert sorted(index.reshape(-1).tolist()) == list(range(9 * 2 * 2 * 4 * 15))


@pytest.mark.parametrize(
    ("shape", "sentence", "sizes", "pad"),
    [
        ((3, 5), "page token dim", {"token": 2, "dim": 5}, None),
        ((3, 5), "page token dim", {"token": 1}, None),
        ((3, 4), "page dim", {"page": 3, "dim": 5}, {"dim": 4}),
        ((3, 4), "page dims", {"page": 3}, None),
    ],
)
def test_index_map_refuses_what_does_not_fit(
    shape: tuple[int, ...], sentence: str, sizes: dict[str, int], pad: dict[str, int] | None
) -> None:
    with pytest.raises(ValueError, match=r"page (token )?dim"):
        oracle.index_map(shape, sentence, sizes, pad)


@pytest.mark.parametrize("name", ROWS)
def test_read_finds_what_indexing_finds(name: str) -> None:
    row = ROWS[name]
    pool = random_pool(row, ml_dtypes.bfloat16, seed=1)
    num_slots = row.sizes["page"] * T
    slots = np.random.default_rng(2).permutation(num_slots)
    rows = oracle.read_rows(pool, row.sentence, row.sizes, slots, row.pad)
    planes = row.sizes["kv"]
    assert rows.shape == (L, planes, num_slots, row.sizes["head"], row.sizes["dim"])
    assert rows.dtype == ml_dtypes.bfloat16
    for n in range(0, num_slots, 5):
        page, offset = divmod(int(slots[n]), T)
        for layer in range(L):
            for plane in range(planes):
                there = row.at(pool, layer, plane, page, offset)
                assert raw(rows[layer, plane, n]) == raw(there)


@pytest.mark.parametrize("name", ROWS)
def test_write_then_read_and_nothing_else_changes(name: str) -> None:
    row = ROWS[name]
    source = random_pool(row, np.uint8, seed=3)
    target = build(row.shapes, lambda shape: np.full(shape, 0xDE, np.uint8))
    slots = np.random.default_rng(4).permutation(row.sizes["page"] * T)[:40]
    rows = oracle.read_rows(source, row.sentence, row.sizes, slots, row.pad)
    written = oracle.write_rows(target, row.sentence, row.sizes, rows, slots, row.pad)

    again = oracle.read_rows(written, row.sentence, row.sizes, slots, row.pad)
    assert raw(again) == raw(rows)
    assert all((leaf == 0xDE).all() for leaf in leaves(target))
    # Erasing the same rows by ordinary indexing leaves only what must not have been touched.
    for slot in slots.tolist():
        page, offset = divmod(slot, T)
        for layer in range(L):
            for plane in range(row.sizes["kv"]):
                row.at(written, layer, plane, page, offset)[...] = 0xDE
    assert all((leaf == 0xDE).all() for leaf in leaves(written))


def test_same_rows_through_any_layout() -> None:
    rng = np.random.default_rng(5)
    rows = rng.integers(0, 2**16, (L, 2, 50, H, D), dtype=np.uint16)
    slots = rng.permutation(P * T)[:50]
    for name, row in ROWS.items():
        if row.sizes["kv"] == 2 and row.sizes["dim"] == D:
            pool = build(row.shapes, lambda shape: np.zeros(shape, np.uint16))
            pool = oracle.write_rows(pool, row.sentence, row.sizes, rows, slots, row.pad)
            back = oracle.read_rows(pool, row.sentence, row.sizes, slots, row.pad)
            assert raw(back) == raw(rows), name


def test_slots_that_name_nothing() -> None:
    pool = np.arange(1, 9, dtype=np.uint8).reshape(4, 2)  # four slots of two bytes
    sizes = {"layer": 1, "token": 2, "dim": 2}
    slots = [-1, 3, 4, -(2**63), 2**40, 0]
    rows = oracle.read_rows(pool, "(page token) dim", sizes, slots)
    assert rows[0, 0, :, 0].tolist() == [[0, 0], [7, 8], [0, 0], [0, 0], [0, 0], [1, 2]]
    new = np.full((1, 1, 6, 1, 2), 0x55, np.uint8)
    written = oracle.write_rows(pool, "(page token) dim", sizes, new, slots)
    assert written.tolist() == [[0x55, 0x55], [3, 4], [5, 6], [0x55, 0x55]]


def test_of_equal_slots_the_last_wins() -> None:
    pool = np.zeros((1, 4, 1), np.uint8)
    rows = np.array([1, 2, 3, 4], np.uint8).reshape(1, 1, 4, 1, 1)
    sizes = {"layer": 1, "token": 4, "dim": 1}
    written = oracle.write_rows(pool, "page token dim", sizes, rows, [2, 0, 2, -1])
    assert written.reshape(-1).tolist() == [2, 0, 3, 0]


def test_every_bit_pattern_passes() -> None:
    patterns = np.arange(2**16, dtype=np.uint16)
    for dtype in (ml_dtypes.bfloat16, np.float16):
        rows = patterns.view(dtype).reshape(1, 1, 256, 1, 256)
        pool = np.zeros((256, 1, 256), dtype)
        sizes = {"layer": 1, "token": 1, "dim": 256}
        written = oracle.write_rows(pool, "page token dim", sizes, rows, range(256))
        back = oracle.read_rows(written, "page token dim", sizes, range(256))
        assert raw(back) == patterns.tobytes()


def test_sizes_that_contradict_the_nesting_are_refused() -> None:
    pool = [np.zeros((2, 4, 3), np.uint8)] * 2
    with pytest.raises(ValueError, match="layer is 2"):
        oracle.read_rows(pool, "page token dim", {"layer": 3, "token": 4, "dim": 3}, [0])
    with pytest.raises(ValueError, match="kv is 1"):
        oracle.read_rows(pool, "page token dim", {"kv": 2, "token": 4, "dim": 3}, [0])
