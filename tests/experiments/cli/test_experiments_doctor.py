"""`espalier doctor`: what it finds on this machine, and what it says of what is missing."""

import importlib.metadata
import json
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import pytest
from hybrids import write_hybrid_verifier

from espalier.experiments.cli.operating import doctor
from espalier.experiments.cli.operating.doctor import Finding
from espalier.search.run.settings import RuntimeSettings


@pytest.fixture
def without(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], None]:
    """Makes a package appear in another version, or with "" in none."""

    def hide(name: str, seen: str) -> None:
        def version(asked: str) -> str:
            if asked == name and not seen:
                raise PackageNotFoundError(asked)
            return seen if asked == name else real(asked)

        real = importlib.metadata.version
        monkeypatch.setattr(doctor, "version", version)

    return hide


def find(name: str) -> Finding:
    (finding,) = (finding for finding in doctor.examine() if finding.name == name)
    return finding


def test_this_machine_can_search(espalier: Callable[..., Any]) -> None:
    ran = espalier("doctor")
    assert ran.code == 0, ran
    for name in ("python", "torch", "numba", "math-verify", "processor", "memory", "demo-generator", "demo-verifier"):
        assert f"✓ {name} " in ran.out
    assert ran.err == ""


def test_json_holds_every_finding(espalier: Callable[..., Any]) -> None:
    report = json.loads(espalier("doctor", "--json").out)
    assert report["ok"] is True
    by_name = {finding["name"]: finding for finding in report["findings"]}
    assert by_name["torch"]["value"]
    assert {"threads", "vector units", "compiled kernels", "kept int8 weights", "torchao"} <= set(by_name)


def test_a_missing_optional_package_gets_advice_and_is_no_failure(
    espalier: Callable[..., Any], without: Callable[[str, str], None]
) -> None:
    without("torchao", "")
    ran = espalier("doctor")
    assert ran.code == 0
    assert "– torchao" in ran.out
    assert "pip install 'espalier-search[quantization]'" in ran.out


def test_a_missing_required_package_fails_and_is_named(
    espalier: Callable[..., Any], without: Callable[[str, str], None]
) -> None:
    without("pebble", "")
    ran = espalier("doctor")
    assert ran.code == 1
    assert "✗ pebble" in ran.out
    assert ran.err.startswith("error: pebble: ")
    assert "pip install 'pebble" in ran.err


def test_a_required_package_of_the_wrong_version_fails(without: Callable[[str, str], None]) -> None:
    without("transformers", "4.57.0")
    finding = find("transformers")
    assert finding.fatal
    assert finding.value == "4.57.0"
    assert "another version is needed" in finding.advice


def test_a_check_that_breaks_is_a_finding_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def _gpus() -> list[Finding]:
        raise RuntimeError("driver too old")

    monkeypatch.setattr(doctor, "_gpus", _gpus)
    finding = find("gpus")
    assert finding.fatal
    assert "driver too old" in finding.advice
    assert find("demo-generator").value


def test_a_missing_bundled_model_fails(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("espalier.engine.models.hub.locate", lambda name: tmp_path)
    finding = find("demo-verifier")
    assert finding.fatal
    assert "model.safetensors" in finding.advice


def test_a_place_for_kernels_that_cannot_be_written_gets_advice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from espalier.kernels.cpu import compiled

    monkeypatch.setattr(compiled, "place", None)
    assert "NUMBA_CACHE_DIR" in find("compiled kernels").advice


def test_a_model_with_recurrent_layers_is_shown_with_what_it_keeps_of_a_path(tmp_path: Path) -> None:
    folder = write_hybrid_verifier(tmp_path)
    (found,) = (each for each in doctor._models(RuntimeSettings(generator=str(folder))) if each.name == str(folder))
    assert "run by transformers code, 0.04 MiB of recurrent state a path" in found.value
