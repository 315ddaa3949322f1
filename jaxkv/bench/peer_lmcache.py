"""LMCache's own GPU connectors and kernels on the shapes of this benchmark; run as a script, with LMCache installed.

Each figure is the median wall time of a whole call, the device synchronised at both ends. The objects that the
connectors are handed are pinned tensors with the metadata fields they read.
"""

import dataclasses
import functools
import importlib
import json
import os
import statistics
import sys
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .rows import Row
from .timing import without_collector

LAYERS, HEADS, DIM, PAGE, PAGES, CHUNK = 32, 8, 128, 16, 4096, 256
WIDTH = HEADS * DIM
ROW_BYTES = LAYERS * 2 * WIDTH * 2


class Peer:
    """The connectors on one GPU."""

    def __init__(self) -> None:
        # Dynamic imports: neither package is one of ours.
        self.torch: Any = importlib.import_module("torch")
        connectors = importlib.import_module("lmcache.v1.gpu_connector.gpu_connectors")
        self._formats = importlib.import_module("lmcache.v1.memory_management").MemoryFormat
        self._ops = importlib.import_module("lmcache.c_ops")
        self._device = self.torch.device("cuda:0")
        self._bf16 = self.torch.bfloat16
        shape = (2, PAGES, PAGE, HEADS, DIM)
        self._caches = [self.torch.randn(*shape, dtype=self._bf16, device=self._device) for _ in range(LAYERS)]
        options = {"dtype": self._bf16, "device": self._device, "layout_hints": {"kv_layout": "NHD"}}
        self._bulk = connectors.VLLMPagedMemGPUConnectorV2(WIDTH, LAYERS, use_gpu=True, chunk_size=CHUNK, **options)
        self._layered = connectors.VLLMPagedMemLayerwiseGPUConnector(
            WIDTH, LAYERS, use_gpu=True, chunk_size=CHUNK, **options
        )
        self._blend = connectors.VLLMBufferLayerwiseGPUConnector(WIDTH, LAYERS, use_gpu=True, **options)
        self._blend.fused_rotary_emb = self._rope()
        weights = [self.torch.randn(8192, 8192, dtype=self._bf16, device=self._device) for _ in range(2)]
        start = self.torch.randn(4096, 8192, dtype=self._bf16, device=self._device)
        self._layer = lambda hidden, i: self.torch.tanh(hidden @ weights[i % 2])
        self._start = start
        self.rows: list[Row] = []

    def run(self) -> None:
        """Measures everything."""
        self._kernels()
        alone = self._timed(self._forward, 9)
        self._add("the forward pass alone", f"{LAYERS} layers", alone * 1e3, "ms")
        for tokens in (256, 2048, 8192):
            self._transfers(tokens, alone)

    def _transfers(self, tokens: int, alone: float) -> None:
        starts = list(range(0, tokens, CHUNK))
        ends = [start + CHUNK for start in starts]
        where = {"kvcaches": self._caches, "slot_mapping": self._slots(tokens)}
        objects = [self._object((2, LAYERS, CHUNK, WIDTH), "KV_2LTD") for _ in starts]
        self._call("bulk store", tokens, lambda: self._bulk.batched_from_gpu(objects, starts, ends, **where))
        self._call("bulk load", tokens, lambda: self._bulk.batched_to_gpu(objects, starts, ends, **where))
        objects.clear()
        layers = [[self._object((CHUNK, 2, WIDTH), "KV_T2D") for _ in starts] for _ in range(LAYERS)]
        positions = [self.torch.arange(start, start + CHUNK, device=self._device) for start in starts]
        blended = [[self._object((2, CHUNK, WIDTH), "KV_2TD", p) for p in positions] for _ in range(LAYERS)]

        def store(hidden: Any = None, sync: bool = True) -> None:
            steps = self._layered.batched_from_gpu(layers, starts, ends, sync=sync, **where)
            for i in range(LAYERS):
                hidden = hidden if hidden is None else self._layer(hidden, i)
                next(steps)
            for _ in steps:
                pass

        def load(hidden: Any = None, sync: bool = True, blend: bool = False) -> None:
            connector, parts = (self._blend, blended) if blend else (self._layered, layers)
            options = {} if blend else {"sync": sync}
            steps = connector.batched_to_gpu(starts, ends, **options, **where)
            next(steps)
            steps.send(parts[0])
            for i in range(LAYERS):
                if i + 1 < LAYERS:
                    steps.send(parts[i + 1])
                hidden = hidden if hidden is None else self._layer(hidden, i)
            for _ in steps:
                pass

        self._call("layer-wise store", tokens, store)
        self._call("layer-wise load", tokens, load)
        self._call("CacheBlend load", tokens, lambda: load(blend=True))
        beside: dict[str, Callable[[], None]] = {
            "layer-wise store": lambda: store(self._start),
            "layer-wise store, async": lambda: store(self._start, sync=False),
            "layer-wise load, not waiting": lambda: load(self._start),
            "layer-wise load, not waiting, async": lambda: load(self._start, sync=False),
            "CacheBlend load": lambda: load(self._start, blend=True),
        }
        for name, call in beside.items():
            slower = 100 * (self._timed(call, 7) / alone - 1)
            self._add(f"{name}, beside a forward pass", f"{tokens} tokens", slower, "%")

    def _kernels(self) -> None:
        tokens = 8192
        buffer = self.torch.empty(2, LAYERS, tokens, WIDTH, dtype=self._bf16, device=self._device)
        addresses = [cache.data_ptr() for cache in self._caches]
        pointers = self.torch.tensor(addresses, dtype=self.torch.int64, device=self._device)
        form = self._ops.EngineKVFormat.NL_X_TWO_NB_BS_NH_HS
        for name, direction in (("gather", "D2H"), ("scatter", "H2D")):
            way, slots = getattr(self._ops.TransferDirection, direction), self._slots(tokens)
            where = (buffer, pointers, slots, self._device, PAGES * PAGE, way, form)
            move = functools.partial(self._ops.multi_layer_kv_transfer, *where, block_size=PAGE, head_size=DIM)
            seconds = self._timed(move)
            self._add(f"{name} of all layers", f"{tokens} tokens", 2 * tokens * ROW_BYTES / seconds / 1e12, "TB/s")

    def _forward(self) -> None:
        hidden = self._start
        for i in range(LAYERS):
            hidden = self._layer(hidden, i)

    def _rope(self) -> Callable[..., Any]:
        torch = self.torch
        inv_freq = 1.0 / (10000.0 ** (torch.arange(0, DIM, 2, device=self._device).float() / DIM))
        angles = torch.outer(torch.arange(40000, device=self._device).float(), inv_freq)
        tables = torch.cat((angles.cos(), angles.sin()), -1).to(self._bf16)

        def turn(old: Any, new: Any, keys: Any) -> Any:
            keys = keys.view(keys.shape[0], -1, DIM)
            self._ops.rotary_embedding_k_fused(old, new, keys, DIM, tables, True)
            return keys.view(keys.shape[0], -1)

        return turn

    def _slots(self, tokens: int) -> Any:
        torch = self.torch
        pages = torch.randperm(PAGES, generator=torch.Generator().manual_seed(0))[: tokens // PAGE]
        return (pages[:, None] * PAGE + torch.arange(PAGE)).reshape(-1).to(self._device, torch.int64)

    def _object(self, shape: tuple[int, ...], form: str, positions: Any = None) -> Any:
        tensor = self.torch.empty(shape, dtype=self._bf16, pin_memory=True).uniform_()
        metadata = types.SimpleNamespace(fmt=getattr(self._formats, form), cached_positions=positions)
        return types.SimpleNamespace(tensor=tensor, metadata=metadata, ref_count_down=lambda: None)

    @without_collector()
    def _timed(self, call: Callable[[], Any], repeats: int = 5) -> float:
        seconds = []
        for repeat in range(repeats + 2):
            self.torch.cuda.synchronize()
            start = time.perf_counter()
            call()
            self.torch.cuda.synchronize()
            if repeat > 1:
                seconds.append(time.perf_counter() - start)
        return statistics.median(seconds)

    def _call(self, name: str, tokens: int, call: Callable[[], Any]) -> None:
        self._add(name, f"{tokens} tokens", self._timed(call) * 1e3, "ms")

    def _add(self, name: str, case: str, value: float, unit: str) -> None:
        self.rows.append(Row("lmcache", name, case, value, unit))


if __name__ == "__main__":
    os.environ.setdefault("LMCACHE_TRACK_USAGE", "false")
    os.environ.setdefault("LMCACHE_LOG_LEVEL", "ERROR")
    peer = Peer()
    peer.run()
    Path(sys.argv[1]).write_text(json.dumps([dataclasses.asdict(row) for row in peer.rows]), encoding="utf-8")
