"""jaxkv: the KV cache of chosen tokens between paged JAX arrays and chunks in pinned host memory."""

import sys

import jax

from ._versions import check as _check_versions

_check_versions(jax.__version__, sys.version_info[:3])

from . import blend, host, layouts, lmcache, ops  # noqa: E402  (versions are checked before anything else is imported)
from .bulk import load, store  # noqa: E402
from .chunk import (  # noqa: E402
    KV_2LTD,
    KV_2TD,
    KV_MLA,
    KV_MLA_TD,
    KV_T2D,
    Chunk,
    ChunkFormat,
    Fingerprint,
)
from .exchanging import exchange  # noqa: E402
from .layerwise import LayerPart, Staged, fetch_layers, join_layers, store_layer, write  # noqa: E402
from .layout import Layout, Sizes  # noqa: E402
from .planning import plan  # noqa: E402
from .plans import Counts, Plan  # noqa: E402
from .precompiling import precompile  # noqa: E402
from .rope import Rope  # noqa: E402
from .selection import slot_mapping  # noqa: E402
from .spec import CacheSpec, PagedCache  # noqa: E402
from .store_plans import StorePlan, store_plan  # noqa: E402
from .tuning import Tuning  # noqa: E402

__version__ = "0.1.0"

__all__ = [
    "KV_2LTD",
    "KV_2TD",
    "KV_MLA",
    "KV_MLA_TD",
    "KV_T2D",
    "CacheSpec",
    "Chunk",
    "ChunkFormat",
    "Counts",
    "Fingerprint",
    "LayerPart",
    "Layout",
    "PagedCache",
    "Plan",
    "Rope",
    "Sizes",
    "Staged",
    "StorePlan",
    "Tuning",
    "blend",
    "exchange",
    "fetch_layers",
    "host",
    "join_layers",
    "layouts",
    "lmcache",
    "load",
    "ops",
    "plan",
    "precompile",
    "slot_mapping",
    "store",
    "store_layer",
    "store_plan",
    "write",
]
