"""Compiled handlers of jaxkv's ops, for jax.ffi."""

from typing import TypedDict

class BuildInfo(TypedDict):
    jaxlib_headers: str
    compiler: str
    cuda: str | None
    cuda_architectures: str | None
    cuda_status: str

def registrations() -> dict[str, dict[str, object]]:
    """Handlers to register: {XLA platform: {target name: capsule}}."""

def ffi_api_version() -> tuple[int, int]:
    """(major, minor) of the XLA FFI headers this was compiled with."""

def build_info() -> BuildInfo:
    """What was compiled, with what, and why not more."""
