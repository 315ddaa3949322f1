"""Staged: one layer's KV on the device, on its way into the pages."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from ..layout import Layout
from ..ops import checks, primitive, windows
from ..ops.scatter import scatter_leaves
from ..ops.sharding import describe_pool
from ..ops.transfer import Transfer, Turn
from ..spec import CacheSpec
from .pages import pages_of, transfer_of

_BY_TOKEN = Layout("kv token head dim"), Layout("token head dim")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Run:
    """Chunks of one shape, one layer of each.

    Attributes:
        data: the leaves of each chunk, in `layout`, on the device.
        slots: int32 `[rows of all chunks + zeroed]`: the slot of each row, then slots to fill with zero bytes.
        deltas: delta tables of the rows (see `scatter_leaves`), or nothing where keys stay as they are.
        layout: of one layer of a chunk.
        rows: of each chunk.
        num_chunks: chunks.
    """

    data: tuple[jax.Array, ...]
    slots: Any
    deltas: tuple[jax.Array, ...]
    layout: Layout = dataclasses.field(metadata={"static": True})
    rows: int = dataclasses.field(metadata={"static": True})
    num_chunks: int = dataclasses.field(metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Staged:
    """One layer of a load, or a group of them, on the device: a value for the caller's own `jit`.

    All layers are of one type, so that what is jitted compiles once for all of them. It compiles again for a plan of
    another number of tokens, since `row_of_token` and what `kv` gives have that length: pad the plan's slots with -1 to
    a few lengths where requests differ.

    Attributes:
        runs: the rows, in the order in which they are written.
        row_of_token: int32 `[tokens]`, the row (over all runs) that holds each token, -1 for none.
        spec: of the cache.
        turn: how keys turn on their way in, None where they do not.
        layer: the (first) layer, where the cache holds all layers in one array; else None, for all layers are alike.
        num_layers: layers in it: 1, or those of a group that shares an array.
        num_slots: slots of the pool that its slots were checked against; None where they were not.
    """

    runs: tuple[Run, ...]
    row_of_token: Any
    spec: CacheSpec = dataclasses.field(metadata={"static": True})
    turn: Turn | None = dataclasses.field(metadata={"static": True})
    layer: int | None = dataclasses.field(metadata={"static": True})
    num_layers: int = dataclasses.field(default=1, metadata={"static": True})
    num_slots: int | None = dataclasses.field(default=None, metadata={"static": True})

    def kv(self) -> tuple[jax.Array, jax.Array | None, jax.Array]:
        """The layer's K and V as they are to be written, keys turned.

        Returns:
            k `[tokens, heads, dim]`, v of the same shape (None where the cache has one plane), and valid, bool
            `[tokens]`: which tokens this load brings; the others are zero.

        Raises:
            ValueError: it is a group of several layers.
        """
        self._check_single("kv")
        parts = []
        for run in self.runs:
            transfer, leaves = self._transfer(run), len(run.data) // max(run.num_chunks, 1)
            bits = [windows.as_bits(leaf) for leaf in run.data]
            chunks = [
                windows.unpack(transfer, bits[c * leaves : (c + 1) * leaves], run.rows) for c in range(run.num_chunks)
            ]
            if chunks:
                rows = jnp.concatenate(chunks, axis=2)
                dtype = self.spec.dtype
                parts.append(rows if self.turn is None else windows.turn_keys(rows, self.turn, run.deltas, dtype))
        rows_of = jnp.asarray(self.row_of_token)
        valid = rows_of >= 0
        sizes = self.spec.sizes
        if not parts:
            shape = (sizes.planes, rows_of.shape[0], sizes.heads, sizes.dim)
            planes = jnp.zeros(shape, windows.bits_dtype(self.spec.dtype))
        else:
            every = jnp.concatenate(parts, axis=2)[0]
            # A negative index counts from the end: no token takes a row past it, where the fill value is.
            at = jnp.where(valid, rows_of, jnp.int32(every.shape[1]))
            planes = every.at[:, at].get(mode="fill", fill_value=0)
        # Taken apart as integers: XLA's slices of floats may change the payload of a NaN.
        values = [windows.from_bits(plane, self.spec.dtype) for plane in planes]
        return values[0], (values[1] if sizes.planes == 2 else None), valid

    def replace(self, k: jax.Array, v: jax.Array | None = None) -> "Staged":
        """The same layer with other K and V, written as they are to the tokens that `kv` calls valid.

        Args:
            k: `[tokens, heads, dim]`, of the cache's dtype.
            v: of the same shape; None where the cache has one plane.

        Raises:
            TypeError: another dtype than the cache's.
            ValueError: another shape than `kv` gives, V missing or given where there is none, or a group of several
                layers.
        """
        self._check_single("replace")
        sizes, tokens = self.spec.sizes, self.row_of_token.shape[0]
        planes = [k] if v is None else [k, v]
        if len(planes) != sizes.planes:
            raise ValueError(f"v: the cache has {sizes.planes} plane(s), got {len(planes)}")
        for name, plane in zip("kv", planes, strict=False):
            if plane.shape != (tokens, sizes.heads, sizes.dim):
                raise ValueError(f"{name}: got shape {plane.shape}, expected {(tokens, sizes.heads, sizes.dim)}")
            if plane.dtype != self.spec.dtype:
                raise TypeError(f"{name}: got dtype {plane.dtype}, the cache has {self.spec.dtype}")
        slots = jnp.concatenate([jnp.asarray(run.slots)[: run.rows * run.num_chunks] for run in self.runs])
        zeroed = [jnp.asarray(run.slots)[run.rows * run.num_chunks :] for run in self.runs]
        rows = jnp.asarray(self.row_of_token)
        at = jnp.where(rows >= 0, rows, jnp.int32(slots.shape[0]))
        of_token = slots.at[at].get(mode="fill", fill_value=-1)
        data = windows.from_bits(jnp.stack([windows.as_bits(plane) for plane in planes]), self.spec.dtype)
        data = data if sizes.planes == 2 else data[0]
        run = Run((data,), jnp.concatenate([of_token, *zeroed]), (), _BY_TOKEN[2 - sizes.planes], tokens, 1)
        return dataclasses.replace(
            self, runs=(run,), row_of_token=jnp.where(rows >= 0, jnp.arange(tokens, dtype=jnp.int32), -1), turn=None
        )

    def _check_single(self, name: str) -> None:
        if self.num_layers != 1:
            raise ValueError(f"{name}: {self.num_layers} layers were staged as one; fetch them with grouped=False")

    def _transfer(self, run: Run) -> Transfer:
        """Between the pages that `write` gets and these layers of a chunk."""
        return transfer_of(self.spec, run.layout, self.layer, self.num_layers)


def write(page: Any, staged: Staged, *, implementation: str | None = None) -> Any:
    """Writes a staged layer into its pages: scatter, rotation and zeroing of gaps in one pass over memory.

    Pure, for use inside the caller's own `jit`, where it is in place if `page` is donated. It is where the layer
    waits for its own KV, and nothing before it does.

    Args:
        page: the pages of this layer: one array, or the (K, V) arrays of a layout that has them apart; the array
            of all layers where the layout has a `layer` axis. For a group of layers, a tuple of their pages.
        staged: of `fetch_layers`.
        implementation: None for the best there is, "xla" or "ffi".

    Returns:
        The pages, written.

    Raises:
        TypeError: a page is no array or of another dtype than the cache's.
        ValueError: a page does not fit the cache's layout, or the implementation is unknown.
        RuntimeError: `implementation="ffi"` where no handlers were built.
    """
    if implementation is not None:
        primitive.check_implementation(implementation)
    if not isinstance(staged, Staged):
        raise TypeError(f"staged: expected what fetch_layers yields, got {type(staged).__name__}")
    pages = pages_of(page, staged.spec, staged.num_layers, "page")
    leaves = pages.leaves
    transfer = staged._transfer(staged.runs[0])
    num_pages, _ = describe_pool(transfer.pool, transfer.sizes, tuple(leaf.shape for leaf in leaves))
    if staged.num_slots is not None and num_pages * staged.spec.page_size < staged.num_slots:
        raise ValueError(
            f"page: has {num_pages * staged.spec.page_size} slots, the load was planned for {staged.num_slots}"
        )
    scatter = scatter_leaves if checks.is_tracing() else _scatter_jit
    for run in staged.runs:
        if run.slots.shape[0] == 0:
            continue
        leaves = scatter(
            jnp.asarray(run.slots),
            run.data,
            leaves,
            transfer=staged._transfer(run),
            num_chunks=run.num_chunks,
            rows=run.rows,
            implementation=implementation,
            turn=staged.turn if run.num_chunks else None,
            deltas=run.deltas if run.num_chunks else (),
        )
    return pages.rebuilt(leaves)


_scatter_jit = jax.jit(scatter_leaves, static_argnames=("transfer", "num_chunks", "rows", "implementation", "turn"))
