"""The benchmarks' contestants compute what they are said to compute."""

import dataclasses
import importlib.util
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from engine_driver import generate, read, release
from plain import plain_classifier_scores
from typer.testing import CliRunner

from espalier.engine.errors import EspalierError
from espalier.engine.models.hub import locate
from espalier.engine.models.model import Model
from espalier.engine.work import Sampling
from espalier.experiments.cli.main import run_app
from espalier.experiments.lab.__main__ import app
from espalier.experiments.lab.bench.baselines.dense_loop import DenseLoop
from espalier.experiments.lab.bench.baselines.search_and_learn import SearchAndLearn, _Beam
from espalier.experiments.lab.bench.baselines.vllm_process import (
    NO_VLLM,
    VllmError,
    VllmProcess,
    VllmSettings,
    optional_vllm,
)
from espalier.experiments.lab.bench.searches.peers import running_peers
from espalier.search.request import AlgorithmName

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


PROBLEM = "A store has 47 pins in stock. (a) It makes 25 more. (b) It sends out 24. How many pins does it have now?"
TEXTS = ("47+25=72\n\n", "47+25=73\n\n73-24=49\n\n", "47+25=72\n\n72-24=48\n\n\\boxed{48}")


@pytest.fixture(scope="module")
def baseline() -> SearchAndLearn:
    return SearchAndLearn(locate("demo-generator"), locate("demo-verifier"))


def test_baseline_scores_a_path_as_the_verifiers_reference_does(baseline):
    beams = [_Beam([], text, 0.0, complete=False) for text in TEXTS]
    baseline._score([baseline._prompt_ids(PROBLEM)] * len(beams), beams)
    for beam in beams:
        steps = [step for step in beam.text.split("\n\n") if step]
        scores = plain_classifier_scores(locate("demo-verifier"), PROBLEM, steps, "\n\n", chat=True)
        assert beam.score == pytest.approx(scores[-1], abs=1e-5)


def test_baseline_solves_and_counts_what_it_reads_again(baseline):
    torch.manual_seed(0)
    baseline.generated_tokens = baseline.verifier_tokens = 0
    answer = baseline.solve(PROBLEM, 4, 2)
    assert answer.isdigit()
    prompt = len(baseline._prompt_ids(PROBLEM))
    assert baseline.generated_tokens > 4
    assert baseline.verifier_tokens > 4 * prompt + baseline.generated_tokens  # the prompt for each candidate and step


@pytest.mark.parametrize("algorithm", [AlgorithmName.BEAM, AlgorithmName.DVTS, AlgorithmName.BEST_OF_N])
def test_baseline_answers_each_of_several_problems(baseline, algorithm):
    torch.manual_seed(0)
    other = PROBLEM.replace("25", "31")
    answers = baseline.solve_all([PROBLEM, other], algorithm, 8, 2)
    assert answers == ["48", "54"]


class Cut:
    """Models whose every step is cut off at its limit."""

    def __init__(self) -> None:
        self.rows: list[int] = []

    def sample(self, rows: list[list[int]], stop_ids: Sequence[int], max_tokens: int) -> list[list[int]]:
        self.rows.append(len(rows))
        return [[7] * max_tokens for _ in rows]

    def classify(self, rows: list[list[int]]) -> list[list[float]]:
        return [[0.0, 1.0] for _ in rows]


def test_a_step_cut_off_at_its_limit_ends_its_beam():
    models = Cut()
    SearchAndLearn(locate("demo-generator"), locate("demo-verifier"), models).solve(PROBLEM, 4, 2)
    assert models.rows == [4]


def test_dvts_samples_every_open_beam_of_every_problem_at_once_and_ends_with_the_last():
    models = Cut()
    search = SearchAndLearn(locate("demo-generator"), locate("demo-verifier"), models)
    search.solve_all([PROBLEM] * 3, AlgorithmName.DVTS, 4, 2)
    assert models.rows == [3 * 4]


# A stand-in for vLLM: it keeps time by a clock of its own, on which the first token takes 5 s and every other 0.25 s.
STAND_IN = """
import os, sys, time
from types import SimpleNamespace

__version__ = "0.0.1"
now = 0.0
time.perf_counter = lambda: now


class SamplingParams:
    def __init__(self, **options):
        self.options = options


class PoolingParams(SamplingParams):
    pass


class LLM:
    def __init__(self, model, **options):
        os.write(1, b"loading\\n")
        print("a banner")
        self.tokens_at_once = options["max_num_batched_tokens"]

    def generate(self, prompts, sampling, use_tqdm):
        global now
        print("a progress bar")
        if sampling is None:
            return [SimpleNamespace(outputs=[SimpleNamespace(text="A 1\\n\\nB 2", token_ids=(7, 8))]) for _ in prompts]
        rows = [prompt["prompt_token_ids"] for prompt in prompts]
        if sampling.options["max_tokens"] == 13:
            raise RuntimeError("no thirteen tokens")
        if sampling.options["max_tokens"] == 14:
            print("a last word", file=sys.stderr, flush=True)
            os._exit(3)
        new = sampling.options["max_tokens"]
        now += 5 + 0.25 * (new - 1)
        if stops := sampling.options.get("stop_token_ids"):
            grown = [[row[0], stops[0]] for row in rows]
        else:
            grown = [[7] * new for _ in rows]
        return [SimpleNamespace(outputs=[SimpleNamespace(token_ids=tuple(ids))]) for ids in grown]

    def encode(self, prompts, pooling_params, pooling_task, use_tqdm):
        import torch

        assert pooling_task == "token_classify"
        rows = [prompt["prompt_token_ids"] for prompt in prompts]
        return [SimpleNamespace(outputs=SimpleNamespace(data=torch.tensor([[i, -i] for i in row]))) for row in rows]
"""
SETTINGS = VllmSettings(Path("generator"), Path("verifier"))


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """This interpreter has a `vllm`, and so have those started from it."""
    (tmp_path / "vllm.py").write_text(STAND_IN)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")])))


@pytest.fixture
def vllm(stand_in: None) -> Iterator[VllmProcess]:
    with VllmProcess(sys.executable, SETTINGS) as vllm:
        yield vllm


def test_vllm_gets_rows_and_gives_continuations_and_last_logits_whatever_it_prints(vllm):
    assert vllm.description.startswith("vLLM 0.0.1, ")
    assert vllm.sample([[5, 6], [8]], [2, 3], 20) == [[5, 2], [8, 2]]
    assert vllm.classify([[5, 6], [8]]) == [[6, -6], [8, -8]]


def test_decode_rate_of_vllm_leaves_out_prefill_and_first_token(vllm):
    assert vllm.decode_rate([[5, 6]] * 3, 9) == pytest.approx(3 / 0.25)


def test_a_failed_call_of_vllm_says_why_and_the_next_one_works(vllm):
    with pytest.raises(VllmError, match="RuntimeError: no thirteen tokens"):
        vllm.decode_rate([[5]], 13)
    assert vllm.classify([[8]]) == [[8, -8]]


def test_a_vllm_that_dies_leaves_its_last_word(vllm):
    with pytest.raises(VllmError, match="process ended: a last word"):
        vllm.sample([[5]], [], 14)
    with pytest.raises(VllmError, match="process ended: a last word"):
        vllm.classify([[5]])


def test_vllms_process_ends_with_the_context(stand_in):
    with optional_vllm(None, SETTINGS) as vllm:
        assert vllm is not None
        assert vllm._child.poll() is None
    assert vllm._child.poll() == 0


def test_vllm_takes_no_part_when_told_so_or_not_importable(stand_in, monkeypatch):
    with optional_vllm(NO_VLLM, SETTINGS) as vllm:
        assert vllm is None
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with optional_vllm(None, SETTINGS) as vllm:
        assert vllm is None


def test_benchmarks_take_vllm_in_where_it_is(stand_in, monkeypatch):
    monkeypatch.setattr("espalier.experiments.lab.bench.engine.decode.BATCHES", (3,))
    monkeypatch.setattr("espalier.experiments.lab.bench.searches.rate.IN_FLIGHT", (1, 2))
    engine = CliRunner().invoke(app, ["bench", "engine", "--prompt-tokens", "8", "--new-tokens", "4", "--repeats", "1"])
    assert engine.exit_code == 0, engine.output
    for text in ("vLLM 0.0.1", "vllm", "decode@3/dense", "decode@3/vllm"):
        assert text in engine.output
    search = CliRunner().invoke(app, ["bench", "search", "-N", "2", "-M", "2", "--problems", "1", "--repeats", "1"])
    assert search.exit_code == 0, search.output
    for text in ("vLLM 0.0.1", "beam@1/transformers", "beam@1/vllm", "beam@2/vllm"):
        assert text in search.output


# A stand-in for search-and-learn's package: each search samples one solution of each problem, and has it scored.
SAL_SEARCH = """
def beam_search(examples, config, llm, prm):
    outputs = llm.generate([p for p in examples["problem"]], None, use_tqdm=False)
    texts = [[output.outputs[0].text] for output in outputs]
    return {"completions": texts, "scores": prm.score(examples["problem"], texts)}


dvts = best_of_n = beam_search
"""
SAL_CONFIG = """
class Config:
    def __init__(self, **options):
        self.__dict__.update(options)
"""


@pytest.fixture
def search_and_learn(tmp_path: Path) -> Path:
    package = tmp_path / "src" / "sal"
    package.mkdir(parents=True)
    for name, text in {"__init__": "", "search": SAL_SEARCH, "config": SAL_CONFIG}.items():
        (package / f"{name}.py").write_text(text)
    return package.parent


def test_search_and_learns_own_code_takes_part_in_both_precisions(stand_in, search_and_learn, monkeypatch):
    monkeypatch.setattr("espalier.experiments.lab.bench.searches.rate.IN_FLIGHT", (1,))
    options = [
        "--search-and-learn",
        str(search_and_learn),
        "--quantization",
        "int8",
        "--peers",
        "vllm,original,original-int8",
    ]
    sizes = ["-N", "2", "-M", "2", "--problems", "1", "--repeats", "1"]
    ran = CliRunner().invoke(app, ["bench", "search", *options, *sizes])
    assert ran.exit_code == 0, ran.output
    for text in ("beam, unmerged, int8@1/original", "beam@1/original-int8", "beam@1/vllm"):
        assert text in ran.output
    assert "@1/transformers" not in ran.output


def test_search_and_learns_own_code_needs_vllm(search_and_learn):
    with (
        pytest.raises(EspalierError, match="--vllm-python"),
        running_peers(NO_VLLM, search_and_learn, (), candidates=4),
    ):
        pass


def test_a_vllm_that_cannot_run_int8_leaves_its_row_out_and_says_why(stand_in, search_and_learn, tmp_path):
    file = tmp_path / "vllm.py"
    refusal = """
        if options["dtype"] == "bfloat16":
            raise RuntimeError("no kernel for bytes")
"""
    file.write_text(file.read_text().replace("        os.write(1", f"{refusal}        os.write(1", 1))
    with running_peers(None, search_and_learn, (), candidates=4) as (peers, remarks):
        assert list(peers) == ["transformers", "vllm", "original"]
        assert "no kernel for bytes" in remarks[-1]
    with (
        pytest.raises(EspalierError, match=r"original-int8 cannot run .*no kernel for bytes"),
        running_peers(None, search_and_learn, ("original-int8",), candidates=4),
    ):
        pass


@pytest.mark.parametrize("python", ["no-such-interpreter", "without"])
def test_asking_for_vllm_where_it_is_not_is_one_line_that_names_the_option(python, tmp_path, monkeypatch, capsys):
    if python == "without":
        python = str(tmp_path / "python")  # one that sees no packages at all
        Path(python).write_text(f'#!/bin/sh\nexec {sys.executable} -I -S "$@"\n')
        Path(python).chmod(0o755)
    monkeypatch.setattr(sys, "argv", ["lab", "bench", "engine", "--vllm-python", python])
    with pytest.raises(SystemExit) as ended:
        run_app(app)
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"--vllm-python {python}" in line


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")
def test_vllm_itself_scores_as_the_reference_does_and_solves(monkeypatch):
    monkeypatch.setenv("CXX", "no-compiler")  # eager: compiling takes minutes
    generator, verifier = locate("demo-generator"), locate("demo-verifier")
    with VllmProcess(sys.executable, VllmSettings(generator, verifier)) as vllm:
        assert vllm.description.endswith("eager")
        search = SearchAndLearn(generator, verifier, vllm)
        test_baseline_scores_a_path_as_the_verifiers_reference_does(search)
        assert search.solve(PROBLEM, 4, 2).isdigit()
        assert vllm.decode_rate([[5, 6, 7]] * 4, 8) > 0
