"""The command line."""

import json
import subprocess
import sys

import jax
import pytest

import jaxkv
from jaxkv import __main__, info
from jaxkv.ops import native


def test_info_says_what_there_is(capsys):
    assert __main__.main(["info", "--json"]) == 0
    lines = capsys.readouterr().out.splitlines()
    found = json.loads(lines[-1])
    assert found["jax"] == jax.__version__
    assert found["implementations"]["xla"] == "available"
    assert found["implementation"] == info.implementation_of(found["platform"])
    assert len(found["devices"]) == len(jax.devices())
    assert "pinned_host" in found["memory_kinds"]
    assert "pinned_limit_gb" in found and "extension" in found


def test_info_says_why_not(monkeypatch, capsys):
    monkeypatch.setattr(native, "available", lambda platform: False)
    monkeypatch.setattr(native, "why_not", lambda platform: f"no compiler for {platform}")
    assert __main__.main(["info"]) == 0
    out = capsys.readouterr().out
    assert "ffi (cpu): no compiler for cpu" in out and "implementation: xla" in out


def test_info_of_a_gpu_has_the_limit_of_pinned_memory(monkeypatch):
    monkeypatch.setattr(native, "platform_of", lambda device: "cuda")
    assert isinstance(info.collect()["pinned_limit_gb"], float)


@pytest.mark.parametrize("arguments", [[], ["unknown"], ["info", "--nothing"]])
def test_what_is_no_command_is_refused(arguments, capsys):
    with pytest.raises(SystemExit) as refusal:
        __main__.main(arguments)
    assert refusal.value.code == 2
    assert "usage: jaxkv" in capsys.readouterr().err


def test_runs_as_a_module():
    done = subprocess.run([sys.executable, "-m", "jaxkv", "--help"], capture_output=True, text=True, check=True)
    assert "demo" in done.stdout and "info" in done.stdout


def test_the_version_is_that_of_the_package():
    assert jaxkv.__version__.count(".") == 2
