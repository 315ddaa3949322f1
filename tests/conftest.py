"""The strict setting in which every test runs.

Nothing may be promoted silently, warnings are errors (pyproject.toml), and the CPU backend has
eight devices, so that sharding is tested without an accelerator. All of it is set before the first
backend starts.
"""

import functools

import hypothesis
import jax
import pytest

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

# No deadline: the first example of a shape compiles. Derandomized: what fails in CI fails at home.
hypothesis.settings.register_profile("jaxkv", deadline=None, derandomize=True, print_blob=True, database=None)
hypothesis.settings.load_profile("jaxkv")


@functools.cache
def _cuda_missing() -> str | None:
    try:
        jax.devices("cuda")
    except RuntimeError as error:
        return str(error)
    return None


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skips what needs a GPU where there is none."""
    if item.get_closest_marker("gpu") and (reason := _cuda_missing()):
        pytest.skip(f"needs a CUDA device: {reason}")


def pytest_report_header() -> list[str]:
    """Says which jaxkv is tested: the installed one, or a source tree without its extension."""
    import jaxkv
    from jaxkv.ops import native

    handlers = {platform: native.why_not(platform) or "yes" for platform in ("cpu", "cuda")}
    return [
        f"jax {jax.__version__}, jaxkv from {jaxkv.__path__[0]}",
        *(f"FFI handlers for {platform}: {state}" for platform, state in handlers.items()),
    ]
