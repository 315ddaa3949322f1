"""The demo: what it reports, what it fails on; and the README, which is its text and whose examples must run."""

import contextlib
import importlib.metadata
import io
import json
import re
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxkv import __main__, demo
from jaxkv.demo.model import MAX_TOKENS, MIN_TOKENS, Model

README = Path(__file__).parents[1] / "README.md"

FIELDS = {
    "match": True,
    "layerwise_match": True,
    "reuse_match": True,
    "tokens": MAX_TOKENS,
    "layers": 4,
    "bytes": MAX_TOKENS * 4 * 2 * 2 * 32 * 2,
    "chunks": 4,
    "jax": jax.__version__,
    "platform": "cuda" if jax.default_backend() == "gpu" else jax.default_backend(),
}


@pytest.fixture(scope="module")
def shown():
    """Exit status and lines of one run."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        status = __main__.main(["demo", "--text", str(README), "--json"])
    return status, out.getvalue().splitlines()


@pytest.fixture(scope="module")
def result(shown):
    return json.loads(shown[1][-1])


def test_all_parts_match(shown, result):
    assert shown[0] == 0
    assert {name: result[name] for name in FIELDS} == FIELDS


def test_rates_are_those_of_the_bytes_and_times(result):
    for name in ("store", "load"):
        assert result[f"{name}_gb_per_s"] == pytest.approx(
            result["bytes"] / result[f"{name}_ms"] / 1e6, rel=0.05, abs=1e-3
        )


def test_what_is_corrected_is_nearer_to_a_recompute(result):
    """Keys to within rounding; what other tokens stand before a passage, no rotation can know."""
    assert result["key_error_corrected"] < 5e-3 < 0.1 < result["key_error_uncorrected"]
    errors = [result[f"logit_error_{name}"] for name in ("blended", "corrected", "uncorrected")]
    assert errors == sorted(errors)
    assert result["recomputed_tokens"] == pytest.approx(0.15 * result["reuse_tokens"], abs=1)


def test_the_table_is_short_and_says_the_same(shown, result):
    table = shown[1][:-1]
    assert len(table) <= 12
    assert sum("bit-equal to" in line for line in table) == 2
    assert any(f"{result['tokens']} tokens" in line for line in table)


RESULT = {
    **FIELDS,
    **dict.fromkeys(("store_ms", "load_ms", "store_gb_per_s", "load_gb_per_s"), 1.0),
    **dict.fromkeys(("layerwise_tokens", "layerwise_arrays", "reuse_tokens", "recomputed_tokens"), 1),
    **dict.fromkeys(("key_error_uncorrected", "key_error_corrected"), 0.0),
    **dict.fromkeys(("logit_error_uncorrected", "logit_error_corrected", "logit_error_blended"), 0.0),
}


@pytest.mark.parametrize("wrong", ["match", "layerwise_match", "reuse_match", None])
def test_any_mismatch_is_a_failure(monkeypatch, capsys, wrong):
    monkeypatch.setattr(demo, "round_trip", lambda model: RESULT | ({} if wrong is None else {wrong: False}))
    monkeypatch.setattr(demo, "layer_by_layer", lambda model: {})
    monkeypatch.setattr(demo, "reuse", lambda model: {})
    assert demo.run(str(README), as_json=False) == (0 if wrong is None else 1)
    assert ("DIFFERENT" in capsys.readouterr().out) == (wrong in ("match", "layerwise_match"))


def test_a_short_text_is_read_again_and_a_long_one_cut():
    assert len(Model.reading("brief").tokens) == MIN_TOKENS
    np.testing.assert_array_equal(Model.reading("abc").tokens[:8], [256, 97, 98, 99, 256, 97, 98, 99])
    assert len(Model.reading("long " * 1000).tokens) == MAX_TOKENS


def test_without_a_readme_the_demo_asks_for_a_text(monkeypatch):
    monkeypatch.setattr(importlib.metadata, "metadata", lambda name: type("Metadata", (), {"json": {}}))
    with pytest.raises(SystemExit, match="--text FILE"):
        demo.run(None, as_json=False)


def test_the_installed_readme_is_the_default_text():
    assert demo.read_text(None).strip()


def test_the_examples_of_the_readme_run(capsys):
    """In order, each going on where the last one ended, as they stand on the page."""
    source = "\n".join(re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL))
    names: dict = {}
    exec(compile(source, str(README), "exec"), names)
    assert names["cache"].num_pages == 64 and len(names["chunks"]) == 2
    assert "moved=" in capsys.readouterr().out
