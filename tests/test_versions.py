import importlib.metadata
import re
import sys

import jax
import pytest

from jaxkv import _versions


@pytest.mark.parametrize("jax_version", ["0.10.0", "0.10.2", "0.11.2", "0.12.0.1", "1.0", "0.10.1.dev7"])
@pytest.mark.parametrize("python_version", [(3, 11), (3, 13, 0, "final", 0), (4, 0, 0)])
def test_supported_versions_pass(jax_version, python_version):
    _versions.check(jax_version, python_version)


def test_the_running_versions_pass():
    _versions.check(jax.__version__, sys.version_info)


@pytest.mark.parametrize("jax_version", ["0.9.9", "0.9.2.dev20260101", "0.4.38", "unknown"])
def test_old_jax_is_refused_with_both_versions(jax_version):
    with pytest.raises(ImportError, match=re.escape(jax_version)) as caught:
        _versions.check(jax_version, (3, 12, 1))
    assert "jax >= 0.10" in str(caught.value)


@pytest.mark.parametrize("python_version", [(3, 10, 13), (3, 9), (2, 7, 18)])
def test_old_python_is_refused_with_both_versions(python_version):
    found = ".".join(map(str, python_version))
    with pytest.raises(ImportError, match=rf"Python >= 3\.11, this is Python {re.escape(found)}:"):
        _versions.check("0.12.0", python_version)


def test_versions_agree_with_the_package_metadata():
    metadata = importlib.metadata.metadata("jaxkv")
    assert metadata["Requires-Python"] == ">=" + ".".join(map(str, _versions.OLDEST_PYTHON))
    assert "jax>=" + ".".join(map(str, _versions.OLDEST_JAX)) in metadata.get_all("Requires-Dist")
