"""The benchmarks' contestants compute the same thing, and the reports have the shape that others read."""

import dataclasses
import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from engine_driver import generate, read, release
from typer.testing import CliRunner

from espalier.engine.model import Model
from espalier.engine.sampling import Sampling
from espalier.experiments.bench import report
from espalier.experiments.bench.__main__ import app
from espalier.experiments.peers.dense_loop import DenseLoop

GREEDY = Sampling(temperature=0.0)


class WatchedLoop(DenseLoop):
    """Takes the likeliest token instead of sampling, and keeps the logits."""

    def __init__(self, model: Model) -> None:
        super().__init__(model.decoder, model.head)
        self.logits: list[torch.Tensor] = []

    def _sample(self, hidden: torch.Tensor) -> torch.Tensor:
        self.logits.append(self._head(hidden))
        return self.logits[-1].argmax(dim=-1)


@pytest.mark.parametrize("name", ["qwen2-tied", "qwen2-untied", "llama3-rope"])
def test_dense_loop_and_engine_give_the_same_logits_and_greedy_tokens(load_model, make_engine, name):
    model = dataclasses.replace(load_model(name), eos_token_ids=())
    engine = make_engine(model)
    prompts = torch.randint(4, 300, (3, 11), generator=torch.Generator().manual_seed(0))
    new_tokens = 9

    loop = WatchedLoop(model)
    tokens = [loop.prefill(prompts, new_tokens)]
    for _ in range(new_tokens - 1):
        tokens.append(loop.decode(tokens[-1]))
    dense = torch.stack(tokens, dim=1)
    assert dense.shape == (3, new_tokens)

    for row, prompt in enumerate(prompts.tolist()):
        sequence = engine.open("generator", prompt)
        (ours,) = generate(engine, sequence, GREEDY, tokens=new_tokens, delimiter="", in_place=True)
        assert list(ours.token_ids) == dense[row].tolist()
        release(engine, sequence)
        whole = engine.open("generator", [])
        logits = read(engine, whole, prompt + dense[row].tolist()[:-1])[len(prompt) - 1 :]
        release(engine, whole)
        np.testing.assert_allclose(logits, torch.stack([step[row] for step in loop.logits]).numpy(), atol=1e-4)


def test_dense_loop_samples_from_the_softmax(load_model):
    model = load_model("qwen2-untied")
    torch.manual_seed(0)
    prompt = torch.arange(5, 12).repeat(4000, 1)
    drawn = torch.bincount(DenseLoop(model.decoder, model.head).prefill(prompt, 1), minlength=model.config.vocab_size)
    watched = WatchedLoop(model)
    watched.prefill(prompt[:1], 1)
    expected = torch.softmax(watched.logits[0][0], dim=-1)
    assert (drawn / 4000 - expected).abs().max() < 0.05


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    monkeypatch.setattr("espalier.experiments.bench.engine.BATCHES", (1, 3))

    def bench(*arguments: object) -> Any:
        return CliRunner().invoke(app, [str(a) for a in arguments])

    return bench


def test_engine_benchmark_writes_rows_ratios_and_machine(bench, tmp_path):
    file = tmp_path / "deep" / "engine.json"
    ran = bench("engine", "--prompt-tokens", 8, "--new-tokens", 4, "--repeats", 1, "--json", file)
    assert ran.exit_code == 0, ran.output
    document = json.loads(file.read_text())
    assert set(document) >= {"title", "rows", "ratios", "machine"}
    assert [row["batch"] for row in document["rows"]] == [1, 3]
    assert all(value > 0 for row in document["rows"] for value in row.values())
    assert set(document["ratios"]) == {"decode@1/dense", "decode@3/dense"}
    assert document["ratios"]["decode@1/dense"] == pytest.approx(
        document["rows"][0]["espalier tokens/s"] / document["rows"][0]["dense loop tokens/s"]
    )
    assert set(document["machine"]) >= {"processor", "threads", "python", "packages"}
    assert document["machine"]["packages"]["torch"] == torch.__version__.partition("+")[0] or "+" in torch.__version__
    assert "decode@1/dense" in ran.output


def test_search_benchmark_compares_numbers_in_flight(bench, tmp_path):
    file = tmp_path / "search.json"
    ran = bench("search", "-N", 2, "-M", 2, "--problems", 2, "--repeats", 1, "--json", file)
    assert ran.exit_code == 0, ran.output
    document = json.loads(file.read_text())
    assert [row["in flight"] for row in document["rows"]] == [1, 8, 32]
    assert all(row["problems/min"] > 0 for row in document["rows"])
    assert set(document["ratios"]) == {"beam@8/1", "beam@32/1"}


def test_part_of_the_demo_benchmark_keeps_its_mix_of_levels(monkeypatch, tmp_path):
    from espalier.experiments.bench import accuracy

    taken: list[int] = []

    def stop(_: object) -> None:
        raise RuntimeError("seen enough")

    monkeypatch.setattr(accuracy, "load_orchestrator", lambda _: None)
    monkeypatch.setattr(
        accuracy, "evaluate", lambda _, problems, *a, **k: taken.extend(p.level for p in problems) or stop(None)
    )
    for limit in (25, 50, 100, 300):
        taken.clear()
        with pytest.raises(RuntimeError, match="seen enough"):
            accuracy.run(limit, 0, tmp_path / str(limit))
        assert len(taken) == limit
        counts = [taken.count(level) for level in (1, 2, 3, 4, 5)]
        assert max(counts) - min(counts) <= 1, f"limit {limit}: {counts}"


def test_table_and_file_hold_the_same_figures(tmp_path, capsys):
    rows = [{"batch": 1, "rate": 1234.5678}, {"batch": 64, "rate": 2.5}]
    report.publish("some title", rows, {"a/b": 1.234}, tmp_path / "x.json")
    out = capsys.readouterr().out
    for text in ("some title", "1,235", "2.5", "64", "a/b  1.23x"):
        assert text in out
    assert json.loads((tmp_path / "x.json").read_text())["rows"] == rows


def test_no_file_is_written_unless_asked_for(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    report.publish("some title", [{"batch": 1}], {}, None)
    assert list(tmp_path.iterdir()) == []


def test_benchmark_of_an_unknown_checkpoint_is_one_line(bench):
    ran = bench("engine", "--generator", "nope")
    assert ran.exit_code == 2
    assert ran.exception is None or isinstance(ran.exception, SystemExit)
    assert "no checkpoint 'nope'" in ran.output
