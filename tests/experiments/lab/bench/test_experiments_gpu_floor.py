"""The floor of steps and searches on a GPU, on paper."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from espalier.experiments.lab.__main__ import app
from espalier.experiments.lab.bench.gpu.causes import CAUSES
from espalier.experiments.lab.bench.gpu.floor import search_rows, step_rows
from espalier.experiments.lab.bench.gpu.measured import layer_floors
from espalier.experiments.planning.roofline import (
    CARDS,
    MODELS,
    Card,
    decode_seconds,
    pass_seconds,
    scoring_seconds,
    tokens_of_a_pass,
)

QWEN, PRM = MODELS["Qwen2.5-1.5B"], MODELS["Qwen2.5-Math-PRM-7B"]
FREE_LAUNCHES = Card(bandwidth=1e12, matrix_rate=1e15, kernel_seconds=0.0)


def test_sizes_are_those_of_the_models():
    assert QWEN.parameters == pytest.approx(1.54e9, rel=0.01)
    assert PRM.parameters == pytest.approx(6.53e9, rel=0.01)
    assert QWEN.kv_bytes_per_token == 28 * 2 * 2 * 128 * 2


def test_a_decode_step_reads_the_weights_and_what_is_shared_once():
    alone = decode_seconds(QWEN, FREE_LAUNCHES, 1, 1000, 0)
    assert alone == (QWEN.weight_bytes + 1000 * QWEN.kv_bytes_per_token) / 1e12
    shared, unshared = (decode_seconds(QWEN, FREE_LAUNCHES, 64, 1000, s) for s in (900, 0))
    assert unshared - shared == pytest.approx(63 * 900 * QWEN.kv_bytes_per_token / 1e12)


def test_a_step_that_verifies_drafts_reads_as_much_and_multiplies_more():
    one, five = (decode_seconds(QWEN, FREE_LAUNCHES, 1, 1000, 0, tokens) for tokens in (1, 5))
    assert one == five
    slow = Card(bandwidth=1e20, matrix_rate=1e15, kernel_seconds=0.0)
    one, five = (decode_seconds(QWEN, slow, 3, 1000, 0, tokens) for tokens in (1, 5))
    assert five == pytest.approx(5 * one) == pytest.approx(2 * 15 * QWEN.parameters / 1e15)


def test_a_pass_is_the_drafts_one_by_one_and_a_step_that_verifies_them():
    small = MODELS["Qwen2.5-0.5B"]
    drafting, verifying = (
        decode_seconds(model, FREE_LAUNCHES, 4, 450, 0, tokens) for model, tokens in ((small, 1), (QWEN, 4))
    )
    assert pass_seconds(QWEN, small, FREE_LAUNCHES, 4, 450, 3) == 3 * drafting + verifying
    assert pass_seconds(QWEN, None, FREE_LAUNCHES, 4, 450, 3) == verifying
    assert tokens_of_a_pass(0.5, 3) == 1 + 0.5 + 0.25 + 0.125


def test_many_tokens_are_bound_by_products_and_tiny_models_by_launches():
    assert scoring_seconds(PRM, FREE_LAUNCHES, 10_000, 0) == 2 * 10_000 * PRM.parameters / 1e15
    slow = Card(bandwidth=1e20, matrix_rate=1e20, kernel_seconds=1e-6)
    assert decode_seconds(QWEN, slow, 1, 10, 0) == pytest.approx(10 * 28 * 1e-6)


@pytest.mark.parametrize("card", CARDS)
def test_more_searches_at_once_never_lower_the_rounds_a_second(card: str):
    rows = search_rows(QWEN, PRM, CARDS[card], 64, 200, 10, 50)
    rates = [row["rounds/s"] for row in rows]
    assert rates == sorted(rates)
    assert all(row["generator %"] + row["verifier %"] == pytest.approx(100) for row in rows)
    steps = step_rows(QWEN, PRM, CARDS[card], 450, 200)
    assert [row["rows"] for row in steps] == [1, 16, 64, 256]


def test_the_command_prints_the_floor_without_a_gpu_and_says_what_it_needs_otherwise(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    shown = CliRunner().invoke(app, ["bench", "gpu", "--model", "h100"])
    assert shown.exit_code == 0
    assert "floor on h100: beam search, N·M = 64" in shown.output
    refused = CliRunner().invoke(app, ["bench", "gpu"], env={"COLUMNS": "200"})
    assert "--model computes the floor on paper" in refused.output
    assert "must be one of a100, h100, h200" in CliRunner().invoke(app, ["bench", "gpu", "--model", "x"]).output


@pytest.mark.slow
def test_what_is_measured_on_a_gpu_can_be_rehearsed_without(tmp_path):
    rehearsed = CliRunner().invoke(app, ["bench", "gpu", "--rehearse", "--json", str(tmp_path / "gpu.json")])
    assert rehearsed.exit_code == 0, rehearsed.output
    parts = {path.name for path in tmp_path.iterdir()}
    totals = ("ceilings", "attention", "kernels", "products", "steps", "invariant", "searches")
    assert parts == {f"gpu-{part}.json" for part in (*totals, *CAUSES)}


def test_causes_can_be_rehearsed_without_a_gpu(tmp_path: Path):
    """The parts that take a CPU no longer than a few seconds; the others are slow."""
    arguments = ["bench", "gpu", "--rehearse", "--part", "plain", "--part", "profile"]
    rehearsed = CliRunner().invoke(app, [*arguments, "--json", str(tmp_path / "gpu.json")])
    assert rehearsed.exit_code == 0, rehearsed.output
    plain, profiled = (json.loads((tmp_path / f"gpu-{part}.json").read_text())["rows"] for part in ("plain", "profile"))
    assert [row["rows"] for row in plain] == [1, 16]
    assert all(row["ms"] > 0 for row in plain)
    assert [row["tokens of each"] for row in profiled] == [1, 1, 5]
    assert all(row["floors ms"] > 0 for row in profiled)


def test_kernels_of_a_layer_take_at_least_what_their_own_bytes_and_products_take():
    few, many = (layer_floors(QWEN, FREE_LAUNCHES, tokens, 450 * tokens) for tokens in (1, 512))
    read = sum(few[f"product {index}"] for index in range(4)) * QWEN.config.num_layers
    assert read == pytest.approx(2 * QWEN.config.layer_weights / 1e12, rel=0.01), "one row reads the weights"
    assert few["attention"] == pytest.approx(450 * 2 * 2 * 128 * 2 / 1e12, rel=0.02)
    assert many["attention"] == pytest.approx(512 * few["attention"])
    slow = layer_floors(QWEN, Card(bandwidth=1e12, matrix_rate=1e12), 512, 0)
    outputs, inputs = QWEN.config.layer_products[0]
    assert slow["product 0"] == 2 * 512 * outputs * inputs / 1e12, "many rows multiply"
    one_after_the_other = QWEN.config.num_layers * sum(many.values())
    assert one_after_the_other > decode_seconds(replace(QWEN, outputs=0), FREE_LAUNCHES, 512, 450, 0)
