"""The options of the models, what they do to how models are loaded, and the bar that shows it."""

import io
import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from gguf.constants import GGMLQuantizationType
from gguf_files import write_gguf
from rich.console import Console
from weight_formats import FORMATS, rewrite

from espalier.engine.errors import CheckpointError
from espalier.engine.models import decoder
from espalier.engine.models.checkpoint import Checkpoint
from espalier.engine.models.hub import locate
from espalier.engine.models.options import LoadFormat, Quantization
from espalier.experiments.cli.progress import bytes_progress
from espalier.kernels.cpu import HAS_VNNI
from espalier.search.run.load import load_orchestrator, with_quantizations
from espalier.search.run.settings import RuntimeSettings, model_names

SOLVE = ("solve", "Tom has 38 coins. (a) He finds 47 more. (b) He loses 12. How many coins does he have now?", "--json")


@pytest.fixture
def pair(tmp_path: Path) -> Callable[[str], tuple[str, ...]]:
    """Options that name a copy of the demo pair, its weights in a given format."""

    def copy(form: str) -> tuple[str, ...]:
        options: list[str] = []
        for role in ("generator", "verifier"):
            folder = Path(shutil.copytree(locate(f"demo-{role}"), tmp_path / form / role))
            rewrite(folder, form)
            options += [f"--{role}", str(folder)]
        return tuple(options)

    return copy


def what_was_found(printed: str) -> dict:
    result = json.loads(printed)
    return {name: result[name] for name in ("answer", "score", "nodes")}


def test_the_demo_pair_answers_the_same_from_files_of_every_format(espalier, pair):
    plain = what_was_found(espalier(*SOLVE).out)
    for form in FORMATS:
        assert what_was_found(espalier(*SOLVE, *pair(form)).out) == plain, form


VERIFIER_SPEC = """
name = "demo"

[prompt]
kind = "chat"

[step]
tag = "\\n\\n"

[head]
layers = ["score"]
"""


def test_the_demo_pair_answers_the_same_from_gguf_files(espalier, tmp_path):
    spec = tmp_path / "demo.toml"
    spec.write_text(VERIFIER_SPEC)
    options: list[object] = ["--verifier-family", spec, "--system-prompt", ""]
    for role in ("generator", "verifier"):
        file = write_gguf(locate(f"demo-{role}"), tmp_path / f"{role}.gguf", GGMLQuantizationType.BF16)
        options += [f"--{role}", file]
    plain = what_was_found(espalier(*SOLVE).out)
    ran = espalier(*SOLVE, *options)
    assert ran.code == 0, ran.err
    assert what_was_found(ran.out) == plain
    seen = espalier("models", "inspect", options[5])
    assert "Qwen2ForCausalLM" in seen.out
    assert "all tensors checked" in seen.out


def test_every_option_lands_in_its_own_field(espalier, monkeypatch):
    seen: list[RuntimeSettings] = []

    def remember(settings, on_bytes):
        seen.append(settings)
        raise CheckpointError("seen")

    monkeypatch.setattr("espalier.search.run.load.load_orchestrator", remember)
    options = (
        *("--generator", "g/g@1", "--verifier", "v/v", "--device", "cuda:1", "--dtype", "float16"),
        *("--generator-quantization", "int8", "--verifier-quantization", "int4"),
        *("--load-format", "bin", "--offline", "--cache-dir", "there", "--load-cache", "none"),
        *("--kv-memory", "3M"),
        *(
            "--launch-ahead",
            "--reserved-share",
            0.5,
            "--system-prompt",
            "be brief",
            "--answer-equivalence",
            "exact-match",
            "--threads",
            3,
        ),
    )
    espalier(*SOLVE, *options)
    espalier("eval", *options, "--in-flight", 7)
    espalier("sweep", *options, "--in-flight", 7)
    expected = {
        "generator": "g/g@1",
        "verifier": "v/v",
        "device": "cuda:1",
        "dtype": "float16",
        "load_format": LoadFormat.BIN,
        "offline": True,
        "cache_dir": Path("there"),
        "load_cache": "none",
        "kv_memory": 3 * 2**20,
        "reserved_share": 0.5,
        "launch_ahead": True,
        "system_prompt": "be brief",
        "answer_equivalence": "exact-match",
        "threads": 3,
    }
    for settings, in_flight in zip(seen, (64, 7, 7), strict=True):
        given = {**expected, "max_running": in_flight}
        assert {name: getattr(settings, name) for name in given} == given


def test_dummy_weights_run_a_whole_search_without_weight_files(espalier, pair):
    options = pair("safetensors")
    for folder in options[1::2]:
        (Path(folder) / "model.safetensors").unlink()
    ran = espalier(*SOLVE, *options, "--load-format", "dummy", "--max-steps", 2)
    assert ran.code == 0, ran.err
    assert json.loads(ran.out)["nodes"]


def test_the_bytes_of_both_models_are_counted_together():
    seen: list[tuple[int, int]] = []
    load_orchestrator(RuntimeSettings(kv_memory=2**22), lambda done, total: seen.append((done, total))).close()
    sizes = [(locate(name) / "model.safetensors").stat().st_size for name in ("demo-generator", "demo-verifier")]
    assert {total for _, total in seen} == {total := seen[-1][0]}
    assert [done for done, _ in seen] == sorted({done for done, _ in seen})
    assert 0 <= sum(sizes) - total < 30_000  # headers


@pytest.mark.parametrize(("role", "message"), [("generator", "cut short"), ("verifier", "cut short")])
def test_a_damaged_file_of_either_model_is_said_before_anything_is_loaded(role: str, message: str, pair):
    options: dict[str, Any] = dict(zip(("generator", "verifier"), pair("safetensors")[1::2], strict=True))
    file = Path(options[role]) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    seen: list[int] = []
    with pytest.raises(CheckpointError, match=message):
        load_orchestrator(RuntimeSettings(**options), lambda *_: seen.append(1))
    assert not seen


def test_names_of_models_are_those_given_without_folders(tmp_path):
    (tmp_path / "talker").mkdir()
    named = RuntimeSettings(generator=str(tmp_path / "talker"), verifier="org/judge@v1")
    assert model_names(named) == {"generator": "talker", "verifier": "org/judge@v1"}
    assert model_names(RuntimeSettings(verifier="")) == {"generator": "demo-generator"}


GIB = 2**30


def shown(console: Console, total: int) -> str:
    with bytes_progress(console) as on_bytes:
        on_bytes(total // 4, total)
        on_bytes(total // 2, total)
    return console.file.getvalue()  # pyright: ignore[reportAttributeAccessIssue]


def test_the_bar_shows_bytes_on_a_terminal():
    text = shown(Console(file=io.StringIO(), force_terminal=True, width=100), 4 * GIB)
    assert "loading weights" in text
    assert "2.0/4.0 GiB" in text


def test_nothing_is_shown_where_nobody_watches_or_little_is_loaded():
    assert shown(Console(file=io.StringIO(), force_terminal=False), 4 * GIB) == ""
    assert shown(Console(file=io.StringIO(), force_terminal=True), 2**20) == ""


# --- auto as a kind of weights --------------------------------------------------------------------------------


@pytest.fixture
def small_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has the bundled generator, of some million weights in its layers, count as large."""
    monkeypatch.setattr(decoder, "MIN_INT8_WEIGHTS", 1_000_000)


def test_the_bundled_pair_is_not_large(caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO, "espalier")
    chosen = with_quantizations(RuntimeSettings())
    assert (chosen.generator_quantization, chosen.verifier_quantization) == (Quantization.NONE, Quantization.NONE)
    auto, none = (
        load_orchestrator(RuntimeSettings(verifier="", generator_quantization=how, kv_memory=2**26))
        for how in (Quantization.AUTO, Quantization.NONE)
    )
    assert auto.describe_models() == none.describe_models()
    assert "int8" not in caplog.text


@pytest.mark.skipif(not HAS_VNNI, reason="this processor has no AVX-512 VNNI")
def test_a_large_model_is_in_int8_on_a_cpu_and_results_say_so(
    espalier, tmp_path, small_is_large: None, caplog: pytest.LogCaptureFixture
):
    caplog.set_level(logging.INFO, "espalier")
    runs = {}
    for how in ("auto", "int8"):
        out = tmp_path / how
        options = ("--generator-quantization", how, "--verifier-quantization", "none", "--load-cache", "none")
        ran = espalier("eval", "-a", "greedy", "--limit", 1, "--out", out, *options)
        assert ran.code == 0, ran.err
        runs[how] = json.loads((out / "config.json").read_text())
        logged = [r.getMessage() for r in caplog.records if "int8 weights" in r.getMessage()]
        assert len(logged) == 1, "auto says once what it has chosen, int8 nothing"
    assert runs["auto"]["commands"][0]["models"]["generator"]["quantization"] == "int8"
    assert runs["auto"]["generator"] == runs["int8"]["generator"], "the digest is that of int8"
    refused = espalier(
        "eval",
        "-a",
        "greedy",
        "--limit",
        1,
        "--out",
        tmp_path / "auto",
        *options[2:],
        "--generator-quantization",
        "none",
    )
    assert '--generator-quantization is "int8" there, "none" now' in " ".join(refused.err.split())


@pytest.mark.skipif(not HAS_VNNI, reason="this processor has no AVX-512 VNNI")
@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({}, "int8"),
        ({"dtype": "bfloat16"}, "none"),
        ({"generator_quantization": Quantization.NONE}, "none"),
        ({"generator_quantization": Quantization.INT4}, "int4"),
    ],
)
def test_auto_is_for_float32_and_gives_way_to_what_is_asked_for(
    small_is_large: None, changed: dict[str, Any], expected: str
):
    assert with_quantizations(RuntimeSettings(verifier="", **changed)).generator_quantization == expected


def test_auto_chooses_for_each_model_by_itself(small_is_large: None, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("espalier.kernels.cpu.backend.CpuBackend.keeps_int8", True)
    weights = {}
    for role in ("generator", "verifier"):
        weights[role] = Checkpoint(locate(f"demo-{role}")).decoder_config.layer_weights
    monkeypatch.setattr(decoder, "MIN_INT8_WEIGHTS", max(weights.values()))
    chosen = with_quantizations(RuntimeSettings())
    large = max(weights, key=lambda role: weights[role])
    found = {role: getattr(chosen, f"{role}_quantization") for role in weights}
    assert found == {role: "int8" if role == large else "none" for role in weights}


def test_auto_is_none_where_bytes_are_not_multiplied(small_is_large: None, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("espalier.kernels.cpu.backend.CpuBackend.keeps_int8", False)
    assert with_quantizations(RuntimeSettings()).generator_quantization is Quantization.NONE
