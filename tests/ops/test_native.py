import importlib.util
import subprocess
import sys
import textwrap

import jax
import pytest

from jaxkv.ops import native

HEADER = textwrap.dedent("""
    #ifndef XLA_FFI_API_C_API_H_
    #define XLA_FFI_API_MAJOR 0
    #define XLA_FFI_API_MINOR 3
    // Increment XLA_FFI_API_MINOR 9
""")


class Extension:
    """Stands in for `jaxkv._native`."""

    def __init__(self, version, registrations):
        self.version = version
        self._registrations = registrations

    def ffi_api_version(self):
        return self.version

    def registrations(self):
        return self._registrations

    def build_info(self):
        return {"cuda_status": "no nvcc that day"}


class Registry(list):
    """Stands in for `jax.ffi.register_ffi_target`."""

    def __call__(self, name, handler, *, platform):
        self.append((platform, name, handler))


BOTH = {"cpu": {"jaxkv_gather": "g", "jaxkv_scatter": "s"}, "CUDA": {"jaxkv_gather": "G"}}


def test_the_header_tells_the_version():
    assert native.parse_ffi_version(HEADER) == (0, 3)


@pytest.mark.parametrize("part", ["MAJOR", "MINOR"])
def test_a_header_without_the_version_tells_none(part):
    assert native.parse_ffi_version(HEADER.replace(f"XLA_FFI_API_{part}", "SOMETHING")) is None


def test_the_installed_jaxlib_tells_its_version():
    version = native.installed_ffi_version()
    assert version is not None
    assert version >= (0, 3)


def test_a_jaxlib_without_headers_tells_none(monkeypatch, tmp_path):
    monkeypatch.setattr(native.jaxlib, "__path__", [str(tmp_path)])
    assert native.installed_ffi_version() is None


@pytest.mark.parametrize(
    ("built", "installed"),
    [((0, 3), (0, 3)), ((0, 3), (0, 4)), ((0, 3), (0, 12)), ((1, 0), (1, 5))],
)
def test_the_same_or_an_older_extension_fits(built, installed):
    assert native.mismatch(built, installed) is None


@pytest.mark.parametrize(
    ("built", "installed"),
    [((0, 5), (0, 4)), ((0, 3), (1, 3)), ((1, 0), (0, 9)), ((0, 12), (0, 3))],
)
def test_a_newer_extension_or_another_major_does_not_fit(built, installed):
    reason = native.mismatch(built, installed)
    assert reason is not None
    assert f"{built[0]}.{built[1]}" in reason
    assert f"{installed[0]}.{installed[1]}" in reason
    assert "--no-build-isolation" in reason


def test_an_unknown_installed_version_does_not_fit():
    assert "c_api.h" in native.mismatch((0, 3), None)


def test_every_platform_is_registered():
    registry = Registry()
    assert native.register(Extension((0, 3), BOTH), (0, 4), registry) == {}
    assert registry == [
        ("cpu", "jaxkv_gather", "g"),
        ("cpu", "jaxkv_scatter", "s"),
        ("CUDA", "jaxkv_gather", "G"),
    ]


@pytest.mark.parametrize("installed", [(0, 4), None])
def test_what_does_not_fit_is_never_registered(installed):
    registry = Registry()
    reasons = native.register(Extension((0, 5), BOTH), installed, registry)
    assert registry == []
    assert set(reasons) == {"cpu", "cuda"}


def test_without_cuda_the_cpu_is_registered_and_the_reason_given():
    registry = Registry()
    reasons = native.register(Extension((0, 3), {"cpu": BOTH["cpu"]}), (0, 3), registry)
    assert [platform for platform, *_ in registry] == ["cpu", "cpu"]
    assert set(reasons) == {"cuda"}
    assert "no nvcc that day" in reasons["cuda"]
    assert "jaxkv.cuda=ON" in reasons["cuda"]


def test_a_refused_registration_is_a_reason_not_an_error():
    def register_target(name, handler, *, platform):
        if platform == "CUDA":
            raise RuntimeError("duplicate target")

    reasons = native.register(Extension((0, 3), BOTH), (0, 3), register_target)
    assert set(reasons) == {"cuda"}
    assert "duplicate target" in reasons["cuda"]


def test_available_and_why_not_agree():
    for platform in ("cpu", "cuda", "tpu"):
        assert native.available(platform) == (native.why_not(platform) is None)


def test_a_platform_without_handlers_runs_the_xla_form():
    assert not native.available("tpu")
    assert "XLA form" in native.why_not("tpu")


def test_build_info_is_there_when_the_extension_is():
    built = importlib.util.find_spec("jaxkv._native") is not None
    assert (native.build_info() is not None) == built
    if built:
        assert native.available("cuda") <= (native.build_info()["cuda"] is not None)
        assert native.available("cpu")


BROKEN = """
import sys, types

class Finder:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name == "jaxkv._native":
            raise {error}

sys.meta_path.insert(0, Finder)
from jaxkv.ops import native
assert not native.available("cpu") and not native.available("cuda")
assert native.build_info() is None
print(native.why_not("cpu"))
"""


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        ("ModuleNotFoundError(name='jaxkv._native')", "extension"),
        ("ImportError('undefined symbol: foo')", "undefined symbol: foo"),
        ("SystemError('bad module')", "bad module"),
    ],
)
def test_a_missing_or_broken_extension_does_not_stop_the_import(error, reason):
    run = subprocess.run(
        [sys.executable, "-c", BROKEN.format(error=error)],
        capture_output=True,
        text=True,
        check=True,
    )
    assert reason in run.stdout


def test_importing_starts_no_backend():
    code = "import jaxkv.ops.native, jax._src.xla_bridge as b; assert not b.backends_are_initialized()"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.gpu
def test_the_cuda_handlers_are_there():
    assert native.why_not("cuda") is None
    assert jax.devices("cuda")
