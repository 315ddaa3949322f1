"""The small Llama: against itself, and with its pages moved by the oracle."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv import ops
from jaxkv.layout import Layout
from jaxkv.testing import llama, oracle

PAGE_SIZE = 8
NUM_PAGES = 40
TEXT = "Keys are cached after their rotation; attention reads nothing but pages. " * 3
TOKENS = llama.encode(TEXT)[:200]

LAYOUTS = {
    "flash attention": Layout("kv page token head dim"),
    "flashinfer": Layout("page kv head token dim"),
    "sglang": Layout("kv layer | (page token) head dim"),
    "pairs": Layout("layer kv | page token head dim"),
    "cross-layer": Layout("page layer kv token head dim"),
    "stacked": Layout("layer page token head (kv dim)"),
    "values transposed": Layout(("page head token dim", "page head dim token")),
    "padded": Layout("page token (head kv) dim", pad={"dim": 24}),
}


def config(dtype: Any = jnp.float32, **changed: Any) -> llama.LlamaConfig:
    small: dict[str, Any] = {"hidden": 64, "layers": 3, "heads": 4, "head_dim": 16, "ffn": 128}
    return llama.LlamaConfig(**{**small, **changed}, dtype=dtype)


@functools.cache
def weights(cfg: llama.LlamaConfig) -> llama.Params:
    return llama.init(cfg, seed=1)


def poisoned(cfg: llama.LlamaConfig, pool: Layout) -> Any:
    """Pages of NaN: whatever is read before it is written shows."""
    sizes = cfg.sizes(PAGE_SIZE)

    def nest(levels: tuple[str, ...], kv: int) -> Any:
        if levels and levels[0] == "layer":
            return tuple(nest(levels[1:], kv) for _ in range(cfg.layers))
        if levels:
            return tuple(nest(levels[1:], k) for k in range(2))
        return jnp.full(pool.shape(sizes, NUM_PAGES, kv=kv), jnp.nan, cfg.dtype)

    return nest(pool.levels, 0)


def slots_of(seed: int, n: int = 256) -> Any:
    return np.random.default_rng(seed).permutation(NUM_PAGES * PAGE_SIZE)[:n]


def oracle_sizes(cfg: llama.LlamaConfig) -> dict[str, int]:
    return {
        "layer": cfg.layers,
        "kv": 2,
        "page": NUM_PAGES,
        "token": PAGE_SIZE,
        "head": cfg.kv_heads,
        "dim": cfg.head_dim,
    }


def moved(pages: Any, cfg: llama.LlamaConfig, pool: Layout, old: Any, new: Any) -> Any:
    """The rows of the old slots in the new ones, of pages that hold NaN elsewhere."""
    pad = dict(pool.pad)
    rows = oracle.read_rows(pages, pool.sentence, oracle_sizes(cfg), old, pad)
    target = oracle.write_rows(poisoned(cfg, pool), pool.sentence, oracle_sizes(cfg), rows, new, pad)
    return jax.tree.map(jnp.asarray, target)


def test_text_to_tokens_and_back() -> None:
    tokens = llama.encode("über")
    assert tokens.tolist() == [llama.BOS, 0xC3, 0xBC, ord("b"), ord("e"), ord("r")]
    assert llama.decode(tokens) == "über"


def test_weights_come_from_the_seed() -> None:
    cfg = config(jnp.bfloat16)
    one, same, other = llama.init(cfg, 1), llama.init(cfg, 1), llama.init(cfg, 2)
    assert all(jax.tree.leaves(jax.tree.map(lambda a, b: bool((a == b).all()), one, same)))
    assert not bool((one["layers"][2]["wo"] == other["layers"][2]["wo"]).any(axis=0).all())
    assert {leaf.dtype for leaf in jax.tree.leaves(one)} == {jnp.dtype(jnp.bfloat16)}
    assert len(one["layers"]) == cfg.layers


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_prefill_then_decode_is_a_longer_prefill(dtype: Any) -> None:
    cfg, pool, slots = config(dtype), LAYOUTS["flash attention"], slots_of(1)
    where = {"pool": pool, "page_size": PAGE_SIZE}
    whole, _ = llama.prefill(weights(cfg), cfg, TOKENS, poisoned(cfg, pool), slots, **where)
    step, pages = llama.prefill(weights(cfg), cfg, TOKENS[:195], poisoned(cfg, pool), slots, **where)
    for position in range(195, 200):
        step, pages = llama.decode_step(weights(cfg), cfg, int(TOKENS[position]), position, pages, slots, **where)
    assert whole.shape == (cfg.vocab_size,)
    assert whole.dtype == jnp.float32
    assert float(whole.std()) > 0.3
    np.testing.assert_allclose(step, whole, atol=1e-5 if dtype == jnp.float32 else 0.1)


def test_prefill_on_a_cached_prefix_is_a_longer_prefill() -> None:
    cfg, pool, slots = config(), LAYOUTS["flashinfer"], slots_of(2)
    where = {"pool": pool, "page_size": PAGE_SIZE}
    whole, _ = llama.prefill(weights(cfg), cfg, TOKENS, poisoned(cfg, pool), slots, **where)
    _, pages = llama.prefill(weights(cfg), cfg, TOKENS[:77], poisoned(cfg, pool), slots, **where)
    rest, _ = llama.prefill(weights(cfg), cfg, TOKENS[77:], pages, slots, start=77, **where)
    np.testing.assert_allclose(rest, whole, atol=1e-5)


@pytest.mark.parametrize("name", LAYOUTS)
def test_decoding_goes_on_from_moved_pages(name: str) -> None:
    cfg, pool = config(jnp.bfloat16), LAYOUTS[name]
    old, new = slots_of(3), slots_of(4)
    where = {"pool": pool, "page_size": PAGE_SIZE}
    n = len(TOKENS)
    first, pages = llama.prefill(weights(cfg), cfg, TOKENS, poisoned(cfg, pool), old, **where)
    there = moved(pages, cfg, pool, old[:n], new[:n])
    assert jax.tree.structure(there) == jax.tree.structure(pages)

    on = {"start": n, "steps": 6, **where}
    tokens, after, pages = llama.generate(weights(cfg), cfg, first, pages, old, **on)
    tokens_there, after_there, there = llama.generate(weights(cfg), cfg, first, there, new, **on)
    assert np.isfinite(after).all()
    assert tokens.shape == (6,)
    assert tokens_there.tolist() == tokens.tolist()
    assert after_there.tobytes() == after.tobytes()
    pad, sizes = dict(pool.pad), oracle_sizes(cfg)
    rows = oracle.read_rows(pages, pool.sentence, sizes, old[: n + 6], pad)
    rows_there = oracle.read_rows(there, pool.sentence, sizes, new[: n + 6], pad)
    assert rows_there.tobytes() == rows.tobytes()


def test_every_layout_holds_the_same_rows() -> None:
    cfg, slots = config(jnp.bfloat16), slots_of(5)
    found = {}
    for name, pool in LAYOUTS.items():
        _, pages = llama.prefill(weights(cfg), cfg, TOKENS, poisoned(cfg, pool), slots, pool=pool, page_size=PAGE_SIZE)
        rows = oracle.read_rows(pages, pool.sentence, oracle_sizes(cfg), slots[: len(TOKENS)], dict(pool.pad))
        # The first layer's rows do not depend on how a compiler orders a sum over what it has read.
        found[name] = rows[0].tobytes()
    assert len(set(found.values())) == 1


@pytest.mark.parametrize("plane", [0, 1])
@pytest.mark.parametrize("layer", [0, 2])
def test_a_wrong_row_changes_the_logits(layer: int, plane: int) -> None:
    cfg, pool, slots = config(), LAYOUTS["flash attention"], slots_of(6)
    where = {"pool": pool, "page_size": PAGE_SIZE}
    n = len(TOKENS)
    first, pages = llama.prefill(weights(cfg), cfg, TOKENS, poisoned(cfg, pool), slots, **where)
    rows = oracle.read_rows(pages, pool.sentence, oracle_sizes(cfg), slots[40:41])
    rows[layer, plane] = -rows[layer, plane]
    wrong = oracle.write_rows(pages, pool.sentence, oracle_sizes(cfg), rows, slots[40:41])
    token = int(jnp.argmax(first))
    right, _ = llama.decode_step(weights(cfg), cfg, token, n, pages, slots, **where)
    changed, _ = llama.decode_step(weights(cfg), cfg, token, n, jax.tree.map(jnp.asarray, wrong), slots, **where)
    assert bool((right != changed).any())


def test_keys_are_cached_after_their_rotation() -> None:
    # One token over and over: before the rotation every key of the first layer is the same.
    cfg, pool, slots = config(), LAYOUTS["flash attention"], slots_of(7)
    _, pages = llama.prefill(weights(cfg), cfg, [65] * 50, poisoned(cfg, pool), slots, pool=pool, page_size=PAGE_SIZE)
    keys = oracle.read_rows(pages, pool.sentence, oracle_sizes(cfg), slots[:50])[0, 0]
    positions = np.arange(50)
    again = oracle.rotate(np.repeat(keys[:1], 50, axis=0), cfg.inv_freq(), np.zeros(50, int), positions)
    np.testing.assert_allclose(keys, again, atol=1e-5)
    assert abs(keys[1] - keys[0]).max() > 0.1


def test_slots_beyond_the_sequence_are_left_alone() -> None:
    cfg, pool, slots = config(), LAYOUTS["stacked"], slots_of(8)
    _, pages = llama.prefill(weights(cfg), cfg, TOKENS[:30], poisoned(cfg, pool), slots, pool=pool, page_size=PAGE_SIZE)
    rows = oracle.read_rows(pages, pool.sentence, oracle_sizes(cfg), np.arange(NUM_PAGES * PAGE_SIZE))
    written = ~np.isnan(rows).any(axis=(0, 1, 3, 4))
    assert sorted(np.flatnonzero(written)) == sorted(slots[:30])


@pytest.mark.parametrize("name", ["flash attention", "sglang", "cross-layer"])
def test_layer_by_layer_in_the_callers_own_jit(name: str) -> None:
    cfg, pool, slots = config(), LAYOUTS[name], slots_of(9).astype(np.int32)
    whole, pages = llama.prefill(weights(cfg), cfg, TOKENS, poisoned(cfg, pool), slots, pool=pool, page_size=PAGE_SIZE)

    @functools.partial(jax.jit, static_argnames="layer")
    def step(layer: int, params: Any, hidden: Any, page: Any) -> Any:
        return llama.decoder_layer(
            params,
            cfg,
            hidden,
            page,
            jnp.asarray(slots),
            jnp.arange(len(TOKENS), dtype=jnp.int32),
            pool=pool,
            page_size=PAGE_SIZE,
            layer=layer,
        )

    by_layer = poisoned(cfg, pool)
    hidden = llama.embed(weights(cfg), jnp.asarray(TOKENS))
    for i, params in enumerate(weights(cfg)["layers"]):
        hidden, page = step(i, params, hidden, llama.layer_pages(by_layer, pool, i))
        by_layer = llama.with_layer_pages(by_layer, pool, i, page)
    assert jax.tree.structure(by_layer) == jax.tree.structure(pages)
    last = llama.logits(weights(cfg), hidden, len(TOKENS) - 1)
    np.testing.assert_allclose(last, whole, atol=1e-5)


def test_a_caller_may_write_the_page_before_attention_reads_it() -> None:
    cfg, pool, slots = config(layers=1), LAYOUTS["flash attention"], slots_of(10).astype(np.int32)
    params = weights(cfg)
    n = len(TOKENS)
    where = {"pool": pool, "page_size": PAGE_SIZE}
    whole, pages = llama.prefill(params, cfg, TOKENS, poisoned(cfg, pool), slots, **where)
    move = {"pool": pool, "chunk": "layer token kv head dim", "sizes": cfg.sizes(PAGE_SIZE)}
    prefix = ops.gather(pages, slots[:150], **move)

    def write(page: Any) -> Any:
        return ops.scatter((page,), prefix, slots[:150], **move)[0]

    @jax.jit
    def last_fifty(page: Any) -> Any:
        return llama.decoder_layer(
            params["layers"][0],
            cfg,
            llama.embed(params, jnp.asarray(TOKENS[150:])),
            page,
            jnp.asarray(slots),
            jnp.arange(150, n, dtype=jnp.int32),
            before_attention=write,
            **where,
        )

    hidden, page = last_fifty(poisoned(cfg, pool)[0])
    np.testing.assert_allclose(llama.logits(params, hidden, -1), whole, atol=1e-5)
    sizes = oracle_sizes(cfg)
    written = oracle.read_rows((page,), pool.sentence, sizes, slots[:n])
    assert not np.isnan(written).any()


def test_other_lengths_compile_nothing_new() -> None:
    cfg, pool, slots = config(), LAYOUTS["flash attention"], slots_of(11)
    where = {"pool": pool, "page_size": PAGE_SIZE}
    _, pages = llama.prefill(weights(cfg), cfg, TOKENS[:90], poisoned(cfg, pool), slots, **where)
    before = llama._forward._cache_size()
    for n in (2, 150, 200):
        llama.prefill(weights(cfg), cfg, TOKENS[:n], pages, slots, **where)
        llama.prefill(weights(cfg), cfg, TOKENS[:n], pages, slots[: n + 5], start=5, **where)
    assert llama._forward._cache_size() == before


@pytest.mark.parametrize(("tokens", "slots", "start"), [([], [1], 0), ([1, 2], [1], 0), ([1], [1], 1)])
def test_fewer_slots_than_tokens_are_refused(tokens: Any, slots: Any, start: int) -> None:
    cfg, pool = config(), LAYOUTS["flash attention"]
    with pytest.raises(ValueError, match="slots"):
        llama.prefill(
            weights(cfg),
            cfg,
            tokens,
            poisoned(cfg, pool),
            slots,
            start=start,
            pool=pool,
            page_size=PAGE_SIZE,
        )
