"""The oldest Python and JAX that jaxkv works with, checked before anything else is imported."""

from __future__ import annotations

import re

OLDEST_PYTHON = (3, 11)
OLDEST_JAX = (0, 10)


def check(jax_version: str, python_version: tuple[int, ...]) -> None:
    """Refuses an unsupported Python or JAX.

    Args:
        jax_version: `jax.__version__`; development and candidate suffixes are fine.
        python_version: `sys.version_info`, or its first two numbers.

    Raises:
        ImportError: names the version found and the version needed.
    """
    if tuple(python_version[:2]) < OLDEST_PYTHON:
        raise ImportError(
            f"jaxkv needs Python >= {_dotted(OLDEST_PYTHON)}, this is Python "
            f"{_dotted(python_version[:3])}: make the environment with a newer Python"
        )
    found = re.match(r"(\d+)\.(\d+)", jax_version)
    if found is None or (int(found[1]), int(found[2])) < OLDEST_JAX:
        raise ImportError(
            f"jaxkv needs jax >= {_dotted(OLDEST_JAX)}, found jax {jax_version}: "
            f"pip install --upgrade 'jax>={_dotted(OLDEST_JAX)}'"
        )


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))
