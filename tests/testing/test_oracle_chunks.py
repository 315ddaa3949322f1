"""The oracle's chunks against transposes written by hand."""

from typing import Any

import numpy as np
import pytest

from jaxkv.testing import oracle

L, H, D = 3, 4, 64  # layers, heads, dim


def leaves(arrays: Any) -> list[Any]:
    if isinstance(arrays, list | tuple):
        return [leaf for entry in arrays for leaf in leaves(entry)]
    return [arrays]


def raw(array: Any) -> bytes:
    return np.ascontiguousarray(array).tobytes()


# (sentence, rows -> what the hand makes of them)
CHUNKS = {
    "kv layer token (head dim)": lambda r: r.transpose(1, 0, 2, 3, 4).reshape(2, L, 32, H * D),
    "layer kv token head dim": lambda r: r,
    "page layer kv token head dim": lambda r: r.reshape(L, 2, 4, 8, H, D).transpose(2, 0, 1, 3, 4, 5),
    "page head layer kv token dim": lambda r: r.reshape(L, 2, 4, 8, H, D).transpose(2, 4, 0, 1, 3, 5),
    "layer token head (kv dim)": lambda r: r.transpose(0, 2, 3, 1, 4).reshape(L, 32, H, 2 * D),
    "layer token (head kv) dim": lambda r: r.transpose(0, 2, 3, 1, 4).reshape(L, 32, 2 * H, D),
    "layer | kv token head dim": lambda r: tuple(r),
    "kv layer | token head dim": lambda r: tuple(tuple(r[:, k]) for k in range(2)),
}


@pytest.mark.parametrize("sentence", CHUNKS)
def test_chunks(sentence: str) -> None:
    rows = np.random.default_rng(6).integers(0, 256, (L, 2, 32, H, D), dtype=np.uint8)
    chunk = oracle.pack(rows, sentence, {"token": 8})
    want = CHUNKS[sentence](rows)
    assert [leaf.shape for leaf in leaves(chunk)] == [leaf.shape for leaf in leaves(want)]
    assert [raw(leaf) for leaf in leaves(chunk)] == [raw(leaf) for leaf in leaves(want)]
    sizes = {"layer": L, "kv": 2, "head": H, "dim": D} | ({"token": 8} if "page" in sentence else {})
    assert raw(oracle.unpack(chunk, sentence, sizes)) == raw(rows)


@pytest.mark.parametrize(
    ("sentence", "shape", "rows_shape"),
    [
        ("token kv (head dim)", (5, 2, H * D), (1, 2, 5, H, D)),
        ("kv token (head dim)", (2, 5, H * D), (1, 2, 5, H, D)),
        ("token dim", (5, 576), (1, 1, 5, 1, 576)),
        ("1 layer token dim", (1, L, 5, 576), (L, 1, 5, 1, 576)),
        ("token kv head dim", (0, 2, H, D), (1, 2, 0, H, D)),
    ],
)
def test_chunk_shapes(sentence: str, shape: tuple[int, ...], rows_shape: tuple[int, ...]) -> None:
    size = int(np.prod(rows_shape))
    rows = np.arange(size, dtype=np.uint32).reshape(rows_shape)
    chunk = oracle.pack(rows, sentence)
    assert chunk.shape == shape
    layers, planes, _, heads, dim = rows_shape
    sizes = {"layer": layers, "kv": planes, "head": heads, "dim": dim}
    back = oracle.unpack(chunk, sentence, sizes)
    assert back.shape == rows_shape
    assert raw(back) == raw(rows)


def test_a_chunk_without_layers_is_one_layer_or_a_tuple_of_them() -> None:
    rows = np.arange(L * 2 * 5 * 3, dtype=np.uint8).reshape(L, 2, 5, 1, 3)
    assert oracle.pack(rows[:1], "token kv dim").shape == (5, 2, 3)
    layers = oracle.pack(rows, "token kv dim")
    assert [layer.shape for layer in layers] == [(5, 2, 3)] * L
    assert raw(oracle.unpack(layers, "token kv dim", {"layer": L, "dim": 3})) == raw(rows)


def test_the_tail_of_a_last_page_is_zero() -> None:
    rows = np.full((1, 1, 5, 1, 2), 7, np.uint8)
    chunk = oracle.pack(rows, "page token dim", {"token": 4})
    assert chunk[..., 0].tolist() == [[7, 7, 7, 7], [7, 0, 0, 0]]


def test_a_chunk_that_names_too_little_is_refused() -> None:
    with pytest.raises(ValueError, match="names no kv"):
        oracle.pack(np.zeros((1, 2, 5, 1, 3), np.uint8), "token dim")
