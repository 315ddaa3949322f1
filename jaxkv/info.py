"""`jaxkv info`: what is installed, and what of it can be used."""

import importlib.metadata
import json
import os
import platform
from typing import Any

import jax
from jaxlib.version import __version__ as jaxlib_version

from .ops import native

# The runtime reads its limit on pinned memory once, when the first client starts; so it is read once here.
_PINNED_LIMIT_GB = float(os.environ.get("XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB", 64))


def collect() -> dict[str, Any]:
    """Versions, devices, memory kinds, implementations and the pinned-memory limit."""
    devices = jax.devices()
    backend = native.platform_of(devices[0])
    implementations: dict[str, Any] = {"xla": "available"}
    for name in ("cpu", "cuda"):
        implementations[f"ffi ({name})"] = "available" if native.available(name) else native.why_not(name)
    return {
        "jaxkv": importlib.metadata.version("jaxkv"),
        "jax": jax.__version__,
        "jaxlib": jaxlib_version,
        "python": platform.python_version(),
        "platform": backend,
        "devices": [f"{device.id}: {device.device_kind}" for device in devices],
        "memory_kinds": sorted(memory.kind for memory in devices[0].addressable_memories()),
        "implementation": implementation_of(backend),
        "implementations": implementations,
        "extension": native.build_info(),
        "pinned_limit_gb": _pinned_limit(backend),
    }


def implementation_of(platform_name: str) -> str:
    """The implementation that `implementation=None` takes on a platform."""
    return "ffi" if platform_name in ("cpu", "cuda") and native.available(platform_name) else "xla"


def run(*, as_json: bool) -> int:
    """Prints what `collect` finds."""
    found = collect()
    for name, value in found.items():
        if isinstance(value, dict):
            print(f"{name}:")
            for key, entry in value.items():
                print(f"  {key}: {entry}")
        else:
            print(f"{name}: {', '.join(map(str, value)) if isinstance(value, list) else value}")
    if as_json:
        print(json.dumps(found))
    return 0


def _pinned_limit(platform_name: str) -> str | float:
    """The runtime's limit on pinned host memory, as it was set when this process started."""
    if platform_name != "cuda":
        return "none (host memory is not pinned on this platform)"
    return _PINNED_LIMIT_GB
