"""CacheBlend (arXiv 2405.16444): which tokens of reused KV to compute anew, and how to merge them; pure functions.

A passage that was cached behind another text has KV that lacks the attention to what now stands before it. CacheBlend
loads it all the same (keys moved to their new positions) and recomputes the few tokens whose KV deviates most from
what a full prefill gives. They are found on a check layer, an early one, whose KV is computed for all tokens, and
recomputed in all later layers, for tokens that deviate in one layer mostly do in the next. For a layer l of those:

    k, v, valid = staged.kv()                                                       # of fetch_layers, corrected
    if l == check:                                                                  # fresh K and V of all tokens
        chosen = blend.select_tokens((k, v), (fresh_k, fresh_v), valid=valid)
    k, v = blend.merge_rows((k, v), (fresh_k, fresh_v), chosen)                     # later layers: of `chosen` alone
    page = jaxkv.write(page, staged.replace(k, v))

`staged.replace` writes the tokens that the load brings; those it does not are the forward pass's own to write.
"""

import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .ops import checks, windows


def select_tokens(
    cached: Any,
    fresh: Any,
    *,
    ratio: float = 0.15,
    valid: Any = None,
    always: Any = None,
    count: int | None = None,
) -> jax.Array:
    """Chooses the tokens whose cached KV is furthest from what it should be, and those that have none.

    The deviation of token j on the check layer is the squared L2 norm of its difference (the paper's delta_kv),

        sum over heads h and dims d of (cached_k[j, h, d] - fresh_k[j, h, d])^2, and the same for V,

    in float32; a NaN counts as the largest. The `ceil(ratio * tokens)` tokens with the largest are chosen (of equal
    ones, the first). Tokens that must be computed in any case come before all others, and fill their share.

    Args:
        cached: K `[tokens, heads, dim]`, or `(K, V)` (V may be None, as `Staged.kv` gives it), at their new positions.
        fresh: the same as the model computes them.
        ratio: of all tokens, how many are chosen: between 0 and 1.
        valid: bool `[tokens]`, which tokens have cached KV at all; the others must be computed.
        always: bool `[tokens]`, further tokens that must be computed, such as those of the question.
        count: how many to choose, in place of `ratio`; also where `valid` or `always` are traced, since then the
            tokens that must be computed cannot be counted, and those beyond `count` are not chosen.

    Returns:
        The tokens, int32 `[k]`, each once, in ascending order. `k` is what `count` or `ratio` says, and depends on no
        device value; where more tokens must be computed, as far as `valid` and `always` are known (reading them
        waits for them where they are on a device), `k` is their number.

    Raises:
        TypeError: K or V is no array of floats, or a mask is not bool.
        ValueError: shapes differ, a ratio or count is out of range, or `count` is smaller than the number of tokens
            that are known to have to be computed.
    """
    pairs = list(_planes(cached, fresh))
    tokens = pairs[0][1].shape[0]
    if isinstance(ratio, bool) or not isinstance(ratio, (int, float)) or not 0 <= ratio <= 1:
        raise ValueError(f"ratio: expected a number between 0 and 1, got {ratio!r}")
    if count is not None and (isinstance(count, bool) or not isinstance(count, int) or not 0 <= count <= tokens):
        raise ValueError(f"count: expected an int between 0 and {tokens}, the number of tokens, got {count!r}")
    must: Any = np.zeros(tokens, bool)
    for name, mask, wanted in (("valid", valid, False), ("always", always, True)):
        if mask is not None:
            mask = _mask(name, mask, tokens)
            must = must | (mask if wanted else ~mask)
    # Rounded first: 0.07 of 100 tokens are 7, and not the 8 that binary fractions make of it.
    k = math.ceil(round(ratio * tokens, 6)) if count is None else count
    if isinstance(must, np.ndarray) and must.sum() > k:
        if count is not None:
            raise ValueError(f"count: {count} is less than the {must.sum()} tokens that must be computed")
        k = int(must.sum())

    deviation: Any = jnp.zeros(tokens, jnp.float32)
    for name, old, new in pairs:
        for side, plane in ((f"cached {name}", old), (f"fresh {name}", new)):
            if not jnp.issubdtype(plane.dtype, jnp.floating):
                raise TypeError(f"{side}: expected floats, got dtype {plane.dtype}; quantised KV must be scaled first")
        gap = old.astype(jnp.float32) - new.astype(jnp.float32)
        deviation = deviation + jnp.sum(gap * gap, axis=(1, 2), dtype=jnp.float32)
    # Everything that can be compared stays below the infinity of what must be computed.
    largest = jnp.finfo(jnp.float32).max
    deviation = jnp.where(jnp.isnan(deviation), largest, jnp.minimum(deviation, largest))
    _, indices = jax.lax.top_k(jnp.where(jnp.asarray(must), jnp.inf, deviation), k)
    return jnp.sort(indices.astype(jnp.int32))


def merge_rows(cached: Any, fresh: Any, indices: Any) -> Any:
    """Puts recomputed rows in the place of cached ones; all bits of both stay as they are.

    Args:
        cached: K `[tokens, heads, dim]`, or `(K, V)` (V may be None).
        fresh: the same as recomputed: `[k, heads, dim]` of the chosen tokens in the order of `indices`, or of all
            tokens (where the two are of one size, ascending indices mean the same either way).
        indices: integers `[k]`, the chosen tokens, each once; negative for rows to leave out.

    Returns:
        `cached` with the fresh rows of the chosen tokens.

    Raises:
        TypeError: indices are no integers, or dtypes differ.
        ValueError: shapes differ, or an index (a NumPy one or one of a list) is past the tokens.
    """
    indices = checks.slots_int32(indices, name="indices", read=False)
    merged: list[Any] = []
    for name, old, new in _planes(cached, fresh, indices.shape[0]):
        if old.dtype != new.dtype:
            raise TypeError(f"fresh: {name} has dtype {new.dtype}, the cached one {old.dtype}")
        if isinstance(indices, np.ndarray) and indices.size and indices.max() >= old.shape[0]:
            raise ValueError(f"indices: {indices.max()} is past the {old.shape[0]} tokens of {name}")
        # JAX counts negative indices from the end: what is left out goes past it, where nothing is written.
        at = jnp.where(indices >= 0, indices, jnp.int32(old.shape[0]))
        rows = windows.as_bits(new)
        if new.shape[0] != indices.shape[0]:
            rows = rows.at[at].get(mode="fill", fill_value=0)
        merged.append(windows.from_bits(windows.as_bits(old).at[at].set(rows, mode="drop"), old.dtype))
    if not isinstance(cached, (list, tuple)):
        return merged[0]
    return (*merged, *[None] * (len(cached) - len(merged)))


def chosen_mask(indices: Any, num_tokens: int) -> jax.Array:
    """Which tokens were chosen, bool `[num_tokens]`, from integers `[k]`; negative ones choose nothing."""
    indices = checks.slots_int32(indices, name="indices", read=False)
    at = jnp.where(indices >= 0, indices, jnp.int32(num_tokens))
    return jnp.zeros(num_tokens, bool).at[at].set(True, mode="drop")


def _planes(cached: Any, fresh: Any, chosen: int | None = None) -> Iterator[tuple[str, jax.Array, jax.Array]]:
    """K, and V where there is one, of both sides; fresh ones of all tokens, or of as many as were chosen."""
    sides = [tuple(side) if isinstance(side, (list, tuple)) else (side,) for side in (cached, fresh)]
    found = [[plane is not None for plane in (*side, None)][:2] for side in sides]
    if found[0] != found[1] or not found[0][0] or max(map(len, sides)) > 2:
        raise ValueError(
            f"fresh: got {len(sides[1])} planes (None for none: {found[1]}) for {len(sides[0])} cached ones"
        )
    for kind, old, new in zip("kv", *sides, strict=False):
        if old is None:
            continue
        for side, plane in (("cached", old), ("fresh", new)):
            if not isinstance(plane, (jax.Array, np.ndarray)):
                raise TypeError(f"{side}: expected an array for {kind}, got {type(plane).__name__}")
        if old.ndim != 3:
            raise ValueError(f"cached: {kind} has shape {old.shape}, expected [tokens, heads, dim]")
        fits = {old.shape} if chosen is None else {old.shape, (chosen, *old.shape[1:])}
        if new.shape not in fits:
            raise ValueError(f"fresh: {kind} has shape {new.shape}, expected {' or '.join(map(str, sorted(fits)))}")
        yield kind, jnp.asarray(old), jnp.asarray(new)


def _mask(name: str, mask: Any, tokens: int) -> Any:
    """A mask, on the host where its values are known."""
    mask = mask if checks.is_traced(mask) else np.asarray(mask)
    if mask.dtype != bool:
        raise TypeError(f"{name}: expected bool, got dtype {mask.dtype}")
    if mask.shape != (tokens,):
        raise ValueError(f"{name}: got shape {mask.shape}, expected {(tokens,)}")
    return mask
