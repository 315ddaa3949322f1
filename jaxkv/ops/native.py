"""The compiled extension: loaded once, compared with the installed jaxlib, registered with JAX.

An FFI handler that was compiled with newer headers than the running jaxlib's makes *every* backend
of JAX fail to start, long after the import that registered it. So versions are compared first, and
what does not fit is never registered: the ops then have their XLA form only, and `why_not` tells.
"""

from __future__ import annotations

import importlib
import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import jax
import jaxlib
from jaxlib.version import __version__ as jaxlib_version

if TYPE_CHECKING:
    from jaxkv._native import BuildInfo

_logger = logging.getLogger(__name__)

Version = tuple[int, int]

# Our name of a platform -> the name under which XLA registers its handlers.
_XLA_PLATFORM = {"cpu": "cpu", "cuda": "CUDA"}

_REBUILD = "see `pip install -v .` in jaxkv's source tree for what the build says"


class Extension(Protocol):
    """What this module needs of `jaxkv._native`."""

    def registrations(self) -> dict[str, dict[str, Any]]:
        """Handlers to register: {XLA platform: {target name: capsule}}."""

    def ffi_api_version(self) -> Version:
        """(major, minor) of the FFI headers it was compiled with."""

    def build_info(self) -> BuildInfo:
        """What was compiled, and why not more."""


def parse_ffi_version(header: str) -> Version | None:
    """Reads (major, minor) out of the text of XLA's `c_api.h`; None if it is not there."""
    found = [re.search(rf"^#define XLA_FFI_API_{part} (\d+)", header, re.MULTILINE) for part in ("MAJOR", "MINOR")]
    major, minor = (int(m[1]) if m else None for m in found)
    return None if major is None or minor is None else (major, minor)


def installed_ffi_version() -> Version | None:
    """The FFI API version of the installed jaxlib, which tells it only in the headers it ships."""
    header = Path(next(iter(jaxlib.__path__)), "include", "xla", "ffi", "api", "c_api.h")
    try:
        return parse_ffi_version(header.read_text(encoding="utf-8"))
    except OSError:
        return None


def mismatch(built: Version, installed: Version | None) -> str | None:
    """Says why handlers of FFI version `built` may not run under `installed`; None if they may.

    XLA takes handlers of its own major version and of its own or an older minor version.
    """
    if installed is None:
        return (
            "the FFI API version of the installed jaxlib is unknown "
            "(jaxlib/include/xla/ffi/api/c_api.h is missing or unreadable); install jaxlib's wheel"
        )
    if built[0] == installed[0] and built[1] <= installed[1]:
        return None
    return (
        f"jaxkv's extension was built for XLA FFI API {built[0]}.{built[1]}, the installed jaxlib "
        f"({jaxlib_version}) has {installed[0]}.{installed[1]}: upgrade jaxlib, or reinstall jaxkv "
        "from source against the installed one (pip install --no-build-isolation .)"
    )


def register(
    extension: Extension,
    installed: Version | None,
    register_target: Callable[..., None],
) -> dict[str, str]:
    """Registers the handlers of every platform that fits.

    Args:
        extension: `jaxkv._native`.
        installed: FFI API version of the installed jaxlib, None if unknown.
        register_target: `jax.ffi.register_ffi_target`.

    Returns:
        For each platform that can't be used, the reason.
    """
    reason = mismatch(extension.ffi_api_version(), installed)
    if reason is not None:
        return dict.fromkeys(_XLA_PLATFORM, reason)
    built = extension.registrations()
    reasons = {}
    for platform, xla_platform in _XLA_PLATFORM.items():
        if xla_platform not in built:
            reasons[platform] = (
                f"jaxkv's extension has no CUDA handlers: {extension.build_info()['cuda_status']}; "
                "reinstall jaxkv from source with CUDA 12 or 13's nvcc on the PATH "
                "(pip install -C jaxkv.cuda=ON .)"
            )
            continue
        try:
            for name, handler in built[xla_platform].items():
                register_target(name, handler, platform=xla_platform)
        except Exception as error:  # whatever XLA has against it, the XLA forms still work
            reasons[platform] = f"JAX {jax.__version__} refused jaxkv's handlers: {error}"
    return reasons


def _load() -> tuple[Extension | None, dict[str, str]]:
    """Imports and registers the extension; returns it, and why for each platform that lacks it."""
    try:
        extension: Extension = importlib.import_module("jaxkv._native")
    except ModuleNotFoundError:
        root = Path(__file__).parents[2]
        if (root / "ffi" / "CMakeLists.txt").exists():
            reason = (
                f"jaxkv is imported from its source tree ({root}), where no extension is built: "
                "run from another directory, or install it editable (pip install -v -e .)"
            )
        else:
            reason = (
                "jaxkv's extension is not installed: it could not be built (no C++ compiler, or no "
                f"Python headers?) or was built for another Python; {_REBUILD}"
            )
    except Exception as error:  # a broken binary must not take the XLA forms with it
        reason = f"jaxkv's extension can't be loaded: {error}; {_REBUILD}"
    else:
        return extension, register(extension, installed_ffi_version(), jax.ffi.register_ffi_target)
    return None, dict.fromkeys(_XLA_PLATFORM, reason)


_extension, _reasons = _load()
for _platform, _reason in _reasons.items():
    _logger.info("no FFI handlers for %s: %s", _platform, _reason)


def available(platform: str) -> bool:
    """Whether FFI handlers for `platform` ("cpu" or "cuda") were built and are registered.

    It says nothing about devices: the CUDA handlers are registered on a machine without a GPU, too.
    """
    return why_not(platform) is None


def why_not(platform: str) -> str | None:
    """Why `platform` has no FFI handlers, and what to install or build; None if it has them."""
    if platform not in _XLA_PLATFORM:
        known = " and ".join(_XLA_PLATFORM)
        return f"jaxkv has FFI handlers for {known} only; {platform} runs the XLA form of its ops"
    return _reasons.get(platform)


def build_info() -> BuildInfo | None:
    """What the extension was compiled with; None if there is no extension."""
    return None if _extension is None else _extension.build_info()


def platform_of(device: jax.Device) -> str:
    """The platform of a device, under the name that handlers are built for: a "gpu" of NVIDIA is "cuda"."""
    if device.platform == "gpu":
        return "rocm" if "rocm" in device.client.platform_version.lower() else "cuda"
    return device.platform
