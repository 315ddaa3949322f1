"""What the tests of exchange share, on a CPU and on a GPU."""

import jax
import numpy as np
from helpers import Model, Scene, assert_same, follow, stored

import jaxkv


def check(scene: Scene, going, *, model=None, format=None, older=(), rows=8, **way):
    """Exchanges `going` for the scene's chunks in a pool of random bytes, and compares with the oracle."""
    model = scene.model if model is None else model
    arrays, cache = model.random(7)
    out = jaxkv.store_plan(cache, going, layers=None, chunk_tokens=rows)
    plan = jaxkv.plan(cache, scene.chunks, scene.slots)
    chunks, after = jaxkv.exchange(cache, out, plan, into=older, format=format, **way)
    stored(model, arrays, chunks, going, *follow(len(going), rows))
    want = arrays
    if scene.chunks:
        want = model.written(arrays, np.concatenate(scene.rows, axis=2), scene.slots)
    assert_same(after.pages, want)
    if scene.chunks:
        assert all(leaf.is_deleted() for leaf in jax.tree.leaves(cache.pages))
    return chunks, after


def scene_of(model: Model, tokens: int, first: int = 0, **options) -> Scene:
    """Chunks that come into slots from `first` on."""
    scene = Scene(model, tokens, **options)
    scene.slots = first + np.random.default_rng(1).permutation(tokens)
    return scene
