"""Layer by layer, woven into the forward pass: each layer's KV leaves behind it, and comes back ahead of it."""

from typing import Any

import numpy as np

from ..layerwise import fetch_layers, join_layers, store_layer
from ..planning import plan
from ..store_plans import store_plan
from .model import STEPS, Model, padded, page_sets

QUESTION = 64
"""The last tokens of the text, which are computed over KV that was away."""
CHUNK_TOKENS = 256
"""Fewer than the default gives so small a model, so that there is more than one chunk."""


def layer_by_layer(model: Model) -> dict[str, Any]:
    """A conversation goes on after its KV was away, compared with one whose KV never left.

    All of the text but a question is prefilled and stored layer by layer. Then the question is computed twice: over
    the pages as they are, and over other, poisoned pages into which each layer's KV comes just before the layer.
    """
    count, layers = len(model.tokens), model.spec.num_layers
    known = count - QUESTION
    num_pages, slots = page_sets(count + STEPS, 2)
    home, elsewhere = slots
    at_home, at_elsewhere = (padded(s[:count], -1) for s in (home, elsewhere))

    pages = list(model.empty(num_pages).pages)
    hidden, positions = model.embed(padded(model.tokens[:known], 0)), padded(np.arange(known), -1)
    storing, sent = store_plan(model.spec, home[:known], chunk_tokens=CHUNK_TOKENS), []
    for i in range(layers):
        hidden, pages[i] = model.layer(i, hidden, pages[i], at_home, positions)
        sent.append(store_layer(pages[i], storing, layer=i))
    chunks = join_layers(sent)

    asked, at = model.tokens[known:], np.arange(known, count, dtype=np.int32)
    hidden, stayed = model.forward(asked, at, pages, at_home)
    expected = model.logits(hidden, np.array([QUESTION - 1]))[0]
    expected_tokens, expected_logits = model.go_on(expected, stayed, home)

    pages = list(model.empty(num_pages).pages)
    hidden = model.embed(asked)
    for i, staged in enumerate(fetch_layers(plan(model.spec, chunks, elsewhere[:known]))):
        hidden, pages[i] = model.layer(i, hidden, pages[i], at_elsewhere, at, staged)
    logits = model.logits(hidden, np.array([QUESTION - 1]))[0]
    tokens, scores = model.go_on(logits, tuple(pages), elsewhere)

    same = np.asarray(logits).tobytes() == np.asarray(expected).tobytes()
    same = same and scores.tobytes() == expected_logits.tobytes()
    return {
        "layerwise_match": bool(same and (tokens == expected_tokens).all()),
        "layerwise_tokens": known,
        "layerwise_chunks": len(chunks),
        "layerwise_arrays": sum(len(chunk.data) for chunk in chunks),
    }
