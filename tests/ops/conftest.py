"""Both implementations of an op, for every test that asks for one."""

import pytest

from .moves import skip_without_handlers


@pytest.fixture(params=["xla", "ffi"])
def implementation(request: pytest.FixtureRequest) -> str:
    """The name of an implementation that the default device has."""
    skip_without_handlers(request.param)
    return request.param
