"""Text cached at one position and used at another: keys are turned on their way in, and some tokens recomputed."""

from typing import Any

import jax
import numpy as np

from .. import ops
from ..blend import merge_rows, select_tokens
from ..bulk import load, store
from ..chunk import Chunk
from ..layerwise import Staged, fetch_layers
from ..planning import plan
from ..plans import Plan
from ..spec import PagedCache
from .model import STEPS, Model, padded, page_sets

QUESTION = 64
RATIO = 0.15
"""Share of the reused tokens that are recomputed, as in the CacheBlend paper."""
CHECK_LAYER = 1
"""Where the tokens are chosen: the first layer whose KV depends on what stands before a token."""
KEY_ERROR_LIMIT = 5e-3
"""Three roundings to bfloat16 (as cached, after the rotation, and the recompute's own) come to 2.9e-3."""


def reuse(model: Model) -> dict[str, Any]:
    """Two passages, cached apart from position 0 on, are glued in the other order before a question.

    The logits after each token of the question are compared with those of a full recompute.
    """
    passage = (len(model.tokens) - QUESTION) // 2
    first, second, question = np.split(model.tokens, [passage, 2 * passage])
    prompt = np.concatenate([second, first, question])
    known, count = 2 * passage, len(prompt)
    num_pages, sets = page_sets(len(model.tokens) + STEPS, 2)  # a pool of the other parts' size, for their programs
    slots = next(sets)[:count]

    chunks = _cached(model, second, num_pages, slots) + _cached(model, first, num_pages, slots)
    empty, at = model.empty(num_pages).pages, padded(slots, -1)
    hidden, pages = model.forward(padded(prompt, 0), padded(np.arange(count), -1), empty, at)
    exact_logits, exact_keys = model.logits(hidden, np.arange(known, count)), _rows(model, pages[0], slots[:known])[0]

    found = {}
    for name, positions in (("uncorrected", None), ("corrected", np.arange(known))):
        cache = load(model.empty(num_pages), chunks, slots[:known], positions=positions)
        hidden, pages = model.forward(question, np.arange(known, count, dtype=np.int32), cache.pages, at)
        found[f"key_error_{name}"] = _error(_rows(model, pages[0], slots[:known])[0], exact_keys)
        found[f"logit_error_{name}"] = _error(model.logits(hidden, np.arange(len(question))), exact_logits)

    blending = plan(model.spec, chunks, slots[:known], positions=np.arange(known))
    logits, chosen = _blended(model, prompt, blending, num_pages, slots)
    found["logit_error_blended"] = _error(logits, exact_logits)
    return {
        "reuse_tokens": known,
        "recomputed_tokens": chosen,
        **{name: float(f"{error:.3g}") for name, error in found.items()},
        "reuse_match": found["key_error_corrected"] < KEY_ERROR_LIMIT,
    }


def _cached(model: Model, passage: np.ndarray, num_pages: int, slots: np.ndarray) -> tuple[Chunk, ...]:
    """The chunks of a passage that was prefilled alone, at positions from 0 on."""
    tokens, positions = padded(passage, 0), padded(np.arange(len(passage)), -1)
    _, pages = model.forward(tokens, positions, model.empty(num_pages).pages, padded(slots[: len(passage)], -1))
    return store(PagedCache(pages, model.spec), slots[: len(passage)])


def _blended(
    model: Model, prompt: np.ndarray, blending: Plan, num_pages: int, slots: np.ndarray
) -> tuple[jax.Array, int]:
    """Logits after each token of the question where the tokens that need it most are recomputed, and their number.

    The first layers are computed for all tokens. At the check layer the tokens whose KV deviates most from the
    loaded one are chosen; from there on only they and the question are computed, over loaded KV for all others.
    """
    known, count, at = blending.zeroed.shape[0], len(prompt), padded(slots, -1)
    pages = list(model.empty(num_pages).pages)
    hidden, positions = model.embed(padded(prompt, 0)), padded(np.arange(count), -1)
    chosen = np.arange(0)
    for i, staged in enumerate(fetch_layers(blending)):
        if i == CHECK_LAYER:
            _, page = model.layer(i, hidden, jax.numpy.copy(pages[i]), at, positions)
            staged, indices = _merged(staged, _rows(model, page, slots[:known]))
            chosen = np.asarray(indices)
            computed = np.concatenate([chosen, np.arange(known, count)])
            hidden, positions = hidden[computed], computed.astype(np.int32)
        hidden, pages[i] = model.layer(i, hidden, pages[i], at, positions, staged if i >= CHECK_LAYER else None)
    return model.logits(hidden, np.arange(len(chosen), len(positions))), len(chosen)


@jax.jit
def _merged(staged: Staged, fresh: jax.Array) -> tuple[Staged, jax.Array]:
    """A staged layer with the rows that deviate most from `fresh` in their place, and which they are."""
    k, v, _ = staged.kv()
    chosen = select_tokens((k, v), tuple(fresh), ratio=RATIO)
    return staged.replace(*merge_rows((k, v), tuple(fresh[:, chosen]), chosen)), chosen


def _rows(model: Model, page: Any, slots: np.ndarray) -> Any:
    """K and V of some slots of one layer, `[2, tokens, heads, dim]`."""
    sizes = model.spec.sizes._replace(layers=1)
    (rows,) = ops.gather((page,), slots, pool=model.spec.pool_layout, chunk="kv token head dim", sizes=sizes)
    return rows


def _error(got: Any, want: Any) -> float:
    """Relative L2 error."""
    got, want = np.asarray(got, np.float32), np.asarray(want, np.float32)
    return float(np.linalg.norm(got - want) / np.linalg.norm(want))
