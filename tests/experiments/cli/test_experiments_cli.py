"""The command line on the demo pair, in this process but for what needs a process of its own."""

import io
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tiny_models import edit_tensors

from espalier.engine.errors import EspalierError
from espalier.engine.models.hub import locate
from espalier.experiments.runs.benchmarks import load_benchmark
from espalier.experiments.runs.folder import read_configuration
from espalier.search.request import AlgorithmName
from espalier.search.run.settings import RuntimeSettings

HEAVY = ("torch", "numpy", "transformers", "grpc", "matplotlib", "numba", "tokenizers", "math_verify", "sympy")
EVAL = ("eval", "--algorithm", "majority", "-N", 2, "--limit", 2)
SOLVE = ("solve", "Tom has 38 coins. (a) He finds 47 more. (b) He loses 25. How many coins does he have now?")


def words(text: str) -> str:
    """Text without line breaks and frames, as a person reads it."""
    return " ".join(text.replace("│", " ").split())


# --- help ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("command", "shown"),
    [
        ([], ["solve", "serve", "eval", "sweep"]),
        (
            ["solve"],
            ["--beam-width", "-N", "--expansion", "-M", "--endpoint", "--json", "ESPALIER_GENERATOR", "n is N·M"],
        ),
        (["serve"], ["--port", "--insecure-bind", "--max-searches", "ESPALIER_KV_MEMORY", "default: 50051"]),
        (["eval"], ["--benchmark", "--limit", "--out", "--json", "--seed", "best-of-n", "--in-flight"]),
        (["sweep"], ["--beam-width", "--expansion", "--benchmark", "--limit", "1,2,4"]),
    ],
)
@pytest.mark.parametrize("flag", ["--help", "-h"])
def test_help_shows_what_there_is(espalier, command, shown, flag):
    ran = espalier(*command, flag)
    assert ran.code == 0
    assert ran.err == ""
    for text in shown:
        assert text in words(ran.out), text


def test_a_shell_completes_commands():
    asked = {"_ESPALIER_COMPLETE": "complete_bash", "COMP_WORDS": "espalier so", "COMP_CWORD": "1"}
    command = Path(sys.executable).with_name("espalier")
    ran = subprocess.run([command], capture_output=True, text=True, check=True, env={**os.environ, **asked})
    assert ran.stdout.split() == ["solve"]


def test_no_command_shows_the_help(espalier):
    ran = espalier()
    assert "solve" in ran.out + ran.err


@pytest.mark.parametrize("command", ["--help", "solve --help", "serve --help", "eval --help", "sweep --help", "nope"])
def test_help_and_wrong_commands_import_nothing_heavy(command):
    script = (
        "import sys\n"
        "from espalier.experiments.cli.main import main\n"
        f"sys.argv = ['espalier', *{command.split()!r}]\n"
        "try:\n"
        "    main()\n"
        "except SystemExit:\n"
        "    pass\n"
        f"print('loaded:', *(name for name in {HEAVY!r} if name in sys.modules))\n"
    )
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert ran.stdout.splitlines()[-1] == "loaded:"


# --- mistakes ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nope"], "No such command 'nope'"),
        (["solve", "--nope"], "No such option: --nope"),
        ([*SOLVE, "-N", "x"], "Invalid value for '--beam-width' / '-N'"),
        ([*SOLVE, "-a", "dfs"], "'greedy', 'chain', 'majority', 'best-of-n', 'adaptive', 'beam', 'dvts'"),
        ([*SOLVE, "--aggregation", "max"], "'last', 'min', 'prod', 'mean'"),
        ([*SOLVE, "--vote", "loud"], "'naive', 'weighted', 'majority'"),
        (["eval", "--limit", "0"], "--limit: must be at least 1, is 0"),
        (["eval", "--in-flight", "0"], "Invalid value for '--in-flight'"),
        ([*SOLVE, "--kv-memory", "lots"], "'lots' is not a size; write 512M or 4G"),
        ([*SOLVE, "--grader-memory", "lots"], "'lots' is not a size; write 512M or 4G"),
        (["sweep", "-N", "1,1"], "lists 1 twice; write each value once"),
        (["sweep", "-M", "a"], "'a' is not a number; write a list like 0:3 or 1,2,4"),
    ],
)
def test_wrong_option_is_a_usage_error_that_says_what_is_wrong(espalier, arguments, said):
    ran = espalier(*arguments)
    assert ran.code == 2
    assert said in words(ran.err)


@pytest.mark.parametrize(
    ("arguments", "option"),
    [([*SOLVE, "--kv-memory", "lots"], "--kv-memory"), (["sweep", "-N", "0"], "-N"), (["sweep", "-M", "0"], "-M")],
)
def test_wrong_value_names_its_option(espalier, arguments, option):
    assert option in words(espalier(*arguments).err)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([*SOLVE, "-N", 0], "must be between 1 and 256, is 0"),
        ([*SOLVE, "-M", 65], "must be between 1 and 64, is 65"),
        ([*SOLVE, "-N", 256, "-M", 5], "must be at most 1024, is 1280"),
        ([*SOLVE, "--temperature", "nan"], "temperature"),
        ([*SOLVE, "--threads", "0"], "--threads: must be at least 1, is 0"),
        ([*SOLVE, "--grader-memory", "63M"], "--grader-memory: must be at least 64M, is 63M"),
        (["eval", "--grader-memory", "0"], "--grader-memory: must be at least 64M, is 0"),
        (["serve", "--grader-memory", "1K"], "--grader-memory: must be at least 64M, is 1K"),
        (["sweep", "--grader-memory", "1K"], "--grader-memory: must be at least 64M, is 1K"),
        (["serve", "--port", "99999"], "--port must be between 0 and 65535, is 99999"),
        (["serve", "--max-searches", "0"], "--max-searches must be between 1 and 4096, is 0"),
        ([*SOLVE, "--top-p", "1.5"], "must be above 0 and at most 1, is 1.5"),
        ([*SOLVE, "--seed", "-1"], "seed"),
        ([*SOLVE, "--max-steps", "0"], "--max-steps:"),
        ([*SOLVE, "--max-tokens", "0"], "--max-tokens:"),
        ([*SOLVE, "--max-step-tokens", "0"], "--max-step-tokens:"),
        (["solve", " "], "problem: must not be empty"),
        (["solve", "word " * 2000], "1024"),
        ([*SOLVE, "--dtype", "int8"], "auto, float32, bfloat16, float16"),
        ([*SOLVE, "--device", "tpu9"], "auto, cpu, cuda or cuda:N"),
        ([*SOLVE, "--device", "mps"], "--device"),
        ([*SOLVE, "--device", "meta"], "--device"),
        ([*SOLVE, "--kv-memory", "0"], "--kv-memory"),
        ([*SOLVE, "--kv-memory", "1K"], "--kv-memory"),
        ([*SOLVE, "--kv-memory", "100000T"], "--kv-memory"),
        ([*SOLVE, "--kv-memory", "1M", "-N", 64], "the pool holds 980.0 KiB; raise --kv-memory"),
        ([*SOLVE, "--generator", "nope"], "not one of demo-generator, demo-thinking-generator, demo-verifier"),
        ([*SOLVE, "--verifier", "nope"], "not one of demo-generator, demo-thinking-generator, demo-verifier"),
        ([*SOLVE, "-a", "greedy", "--generator", "demo-verifier"], "not a generator"),
        ([*SOLVE, "--verifier", "demo-generator"], "nothing in it says which"),
        (
            [*SOLVE, "-a", "beam", "--verifier", ""],
            "--verifier: beam needs one, and there is none for --generator demo-generator",
        ),
        (
            [*SOLVE, "-a", "beam", "--generator", "org/unheard-of"],
            "--verifier: beam needs one, and there is none for --generator org/",
        ),
        ([*SOLVE, "--generator", "./nowhere/small.gguf"], "no checkpoint './nowhere/small.gguf'"),
        ([*SOLVE, "--generator", "nowhere/small.gguf"], "no checkpoint 'nowhere/small.gguf'"),
        (["eval", "-a", "beam", "--generator", "/nowhere/at/all"], "no checkpoint '/nowhere/at/all'"),
        ([*SOLVE, "--generator", "demo-generator+nowhere"], "no checkpoint 'nowhere'"),
        (
            [*SOLVE, "-a", "beam", "--generator", "demo-generator+org/mine"],
            "there is none for --generator demo-generator+org/mine",
        ),
        ([*SOLVE, "--generator", "demo-genrator"], "did you mean 'demo-generator'?"),
        ([*SOLVE, "--verifier", "confidnce"], "--verifier: no checkpoint 'confidnce'"),
        (["eval", "--grader", "exat"], "did you mean 'exact'?"),
        (["eval", "--benchmark", "demo-trainin"], "did you mean 'demo-training'?"),
        ([*SOLVE, "--verifier", "none", "--vote", "weighted"], "--verifier: majority with the vote weighted needs one"),
        (["eval", "-a", "dvts", "--generator", "org/unheard-of"], "--verifier: dvts needs one"),
        (
            ["sweep", "-a", "beam", "--generator", "org/unheard-of"],
            "--verifier names a process reward model that fits the generator",
        ),
        (
            ["plan", "-a", "beam", "--memory", "1G", "--generator", "Qwen2.5-1.5B"],
            "self, confidence and lowest-confidence need neither",
        ),
        ([*SOLVE, "--endpoint", "127.0.0.1:9"], "no server at 127.0.0.1:9; start one with: espalier serve"),
        (["view", "nowhere.json"], "cannot read a trace from nowhere.json: No such file or directory"),
        (["sweep", "--grid", "nowhere.yaml"], "--grid: cannot read 'nowhere.yaml': No such file or directory"),
        (["eval", "--benchmark", "nowhere.jsonl"], "neither a file, a folder, a hub id"),
        (["serve", "--host", "0.0.0.0"], "--insecure-bind"),
        (["serve", "--port", 0, "--generator", "nope"], "not one of demo-generator, demo-thinking-generator,"),
    ],
)
def test_mistake_is_one_line_and_exit_code_two(espalier, arguments, said):
    ran = espalier(*arguments)
    assert ran.code == 2
    lines = [line for line in ran.err.splitlines() if line.strip() and "; attempt " not in line]
    assert len(lines) == 1, ran.err
    assert lines[-1].startswith("error: ")
    assert said in lines[-1]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([*SOLVE, "--vote", "majorty"], "'lowest-confidence'; did you mean 'majority'?"),
        ([*SOLVE, "-a", "best"], "; did you mean 'best-of-n'?"),
        (["sweep", "--vote", "majorty"], "lowest-confidence, is 'majorty'; did you mean 'majority'?"),
        (["learn-verifier", "--out", "x", "--trunk-quantization", "int9"], "'--trunk-quantization': 'int9' is not one"),
        ([*SOLVE, "-N", "four"], "Invalid value for '--beam-width' / '-N': must be a valid integer"),
        ([*SOLVE, "--bem-width", 4], "--beam-width"),
    ],
)
def test_typers_own_errors_name_the_nearest_value_and_hold_no_words_of_its_validator(espalier, arguments, said):
    ran = espalier(*arguments)
    assert ran.code == 2
    assert said in ran.err
    assert "Value error" not in ran.err
    assert "Input should" not in ran.err
    assert ran.err.count("did you mean") <= 1


def test_unknown_keys_of_files_are_answered_with_the_nearest(espalier, tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text("beem_width: 4\nmodels:\n  genrator: x\n")
    said = espalier(*SOLVE, "--config", file).err
    assert "beem_width (did you mean 'beam_width'?), models.genrator (did you mean 'generator'?)" in said
    file.write_text("beem_width: [4]\n")
    assert "beem_width; did you mean 'beam_width'?" in espalier("sweep", "--grid", file).err
    file.write_text("vote: [majorty]\n")
    assert "did you mean 'majority'?" in espalier("sweep", "--grid", file).err


def test_folder_that_is_no_checkpoint_is_refused(espalier, tmp_path):
    ran = espalier(*SOLVE, "--generator", tmp_path, "--verifier", "demo-verifier")
    assert ran.code == 2
    assert "has no config.json" in ran.err


def test_another_generator_without_a_verifier_still_runs_searches_that_need_none(espalier):
    generator = locate("demo-generator")
    for search in (("majority", "-N", 4), ("greedy",), ("best-of-n", "-N", 2, "--verifier", "confidence")):
        ran = espalier(*SOLVE, "--generator", generator, "--json", "-a", *search)
        assert ran.code == 0, ran.err
        assert json.loads(ran.out)["answer"] in ("50", "60")


def test_without_a_verifier_the_default_search_is_one_that_needs_none(espalier, tmp_path):
    """In every command that has one, said in a line; the file of options that names none too."""
    told = "notice: no verifier is loaded, so that the default search is majority, greedy for a single path"
    ways = "--verifier confidence scores steps", "--verifier LARGER_MODEL --verifier-family likelihood-ratio"
    (tmp_path / "options.yaml").write_text(f"generator: {locate('demo-generator')}\n")
    alone = "--config", tmp_path / "options.yaml"
    for arguments, algorithm in (((), "majority"), (("-N", 1), "greedy"), (("--verifier", "confidence"), "beam")):
        ran = espalier(*SOLVE, *alone, *arguments, "--json")
        assert ran.code == 0, ran.err
        assert json.loads(ran.out)["configuration"]["algorithm"] == algorithm
        assert json.loads(ran.out)["warnings"] == []
        assert ran.err.count(told) == ran.err.count(ways[1]) == ran.err.count(ways[0]) == (algorithm != "beam")
    short = "--limit", 1, "-N", 2, "--verifier", "none"
    assert told in espalier("eval", *alone, *short, "--out", tmp_path / "run").err
    (sample,) = (tmp_path / "run" / "samples.jsonl").read_text().splitlines()
    assert json.loads(sample)["warnings"] == []
    assert read_configuration(tmp_path / "run").values["algorithm"] == "majority"
    ran = espalier("sweep", "--limit", 1, "-N", "1,2", *alone, "--out", tmp_path / "sweep", "--json")
    assert told in ran.err
    assert [cell["algorithm"] for cell in json.loads(ran.out)] == ["greedy", "majority"]
    ran = espalier("plan", "--memory", "8G", "--generator", "Qwen2.5-1.5B")
    assert ran.code == 0
    assert ran.out.startswith("majority, N=4")
    ran = espalier("advise", "--limit", 1, "--paths", 2, "-N", 2, *alone, "--out", tmp_path / "advice", "--json")
    assert ran.code == 0, ran.err
    assert {each["search"]["algorithm"] for each in json.loads(ran.out)["searches"]} == {"greedy", "majority"}


def test_a_problem_that_the_pair_was_not_taught_is_answered_with_a_warning(espalier, tmp_path):
    asked = "A train leaves at noon. How far is it now?"
    ran = espalier("solve", asked, "-a", "greedy", "--max-tokens", 8, "--json")
    assert ran.code == 0, ran.err
    (warning,) = json.loads(ran.out)["warnings"]
    assert "never taught the words noon, far, is" in warning
    assert f"warning: {warning}" in ran.err
    file = tmp_path / "foreign.jsonl"
    file.write_text(json.dumps({"problem": asked, "answer": "7"}))
    short = "-a", "greedy", "--max-tokens", 8
    ran = espalier("eval", "--benchmark", file, *short, "--out", tmp_path / "run")
    assert "warning: of 1 of 1 problems, such as: the bundled generator reads" in ran.err
    (sample,) = (tmp_path / "run" / "samples.jsonl").read_text().splitlines()
    assert json.loads(sample)["warnings"] == [warning]
    other = espalier("solve", asked, *short, "--generator", locate("demo-generator"))
    assert "warning" not in other.err, "only the bundled one, by its name"


def test_eval_into_a_file_is_refused(espalier, tmp_path):
    (tmp_path / "file").write_text("")
    ran = espalier(*EVAL, "--out", tmp_path / "file")
    assert ran.code == 2
    assert ran.err.startswith("error: ")


def test_environment_names_the_models(espalier, monkeypatch):
    monkeypatch.setenv("ESPALIER_GENERATOR", "from-the-environment")
    assert "no checkpoint 'from-the-environment'" in espalier(*SOLVE).err
    assert "no checkpoint 'from-the-line'" in espalier(*SOLVE, "--generator", "from-the-line").err
    monkeypatch.setenv("ESPALIER_KV_MEMORY", "rubbish")
    assert espalier(*SOLVE).code == 2


@pytest.mark.parametrize("command", [SOLVE, EVAL, ("sweep", "--limit", 1), ("serve", "--port", 0)])
def test_grader_memory_reaches_what_compares_answers(espalier, monkeypatch, tmp_path, command):
    """From the line, else from the environment, else as `RuntimeSettings` has it."""
    from espalier.search.grading import math_verify as grading
    from espalier.search.service import server

    seen: list[int] = []

    def stop(settings: RuntimeSettings, _: object) -> None:
        seen.append(settings.grader_memory)
        raise EspalierError("seen")

    monkeypatch.setattr("espalier.search.run.load.load_orchestrator", stop)
    monkeypatch.setattr(server, "serve", lambda load, *_, **__: load())
    monkeypatch.chdir(tmp_path)
    assert RuntimeSettings().grader_memory == grading.DEFAULT_MEMORY_BYTES
    espalier(*command)
    monkeypatch.setenv("ESPALIER_GRADER_MEMORY", "300M")
    espalier(*command)
    espalier(*command, "--grader-memory", "1.5G")
    assert seen == [2 * 2**30, 300 * 2**20, 3 * 2**29]


def test_grader_memory_is_that_of_who_grades_an_evaluation_too(espalier, monkeypatch):
    from espalier.search.grading.math_verify import Grader

    made: list[int] = []
    begin = Grader.__init__
    monkeypatch.setattr(
        Grader,
        "__init__",
        lambda self, *args, **named: made.append(named["memory_bytes"]) or begin(self, *args, **named),
    )
    assert espalier(*EVAL, "--grader-memory", "256M").code == 0
    assert made == [256 * 2**20] * 2  # one for the votes, one for the grades


# --- solve ---------------------------------------------------------------------------------------------------------


def test_solve_without_a_problem_solves_one_of_the_benchmark_and_shows_its_gold(espalier):
    ran = espalier("solve")
    assert ran.code == 0
    assert ran.err == ""
    (shown,) = [p for p in load_benchmark("demo") if p.problem in words(ran.out)]
    assert f"answer  {shown.answer}   (expected {shown.answer})" in ran.out
    assert "KV blocks held" in ran.out


def test_solve_json_is_the_whole_result_and_nothing_else(espalier):
    ran = espalier(*SOLVE, "--json", "-N", 2, "-M", 2, "--seed", 7)
    assert ran.code == 0
    assert ran.err == ""
    result = json.loads(ran.out)
    usage = result["usage"]
    assert usage["generated_tokens"] > 0
    assert 0 < usage["verifier_tokens"] <= 1.05 * usage["verifier_tree_tokens"]
    assert 0 < usage["physical_blocks"] <= usage["logical_blocks"]
    merged = sum(node["termination"] == "duplicate" for node in result["nodes"])
    assert usage["nodes"] - usage["duplicates"] == len(result["nodes"]) - 1 - merged
    assert result["configuration"]["problem"] == SOLVE[1]
    assert (result["configuration"]["beam_width"], result["configuration"]["seed"]) == (2, 7)
    assert result["configuration"]["vote"] == "weighted"  # the default, filled in
    assert set(result["digests"]) == {"generator", "verifier"}
    assert result["stop_reason"] == "finished"


def test_votes_of_the_demo_start_no_process(espalier, monkeypatch):
    from espalier.search.grading.math_verify import Grader

    monkeypatch.setattr(Grader, "submit", None)  # who calls it fails
    for algorithm in ("best-of-n", "majority", "beam"):
        ran = espalier(*SOLVE, "-a", algorithm, "-N", 8, "--json")
        assert ran.code == 0, ran.err
        result = json.loads(ran.out)
        assert result["grader"] == "exact-match"
        assert len({candidate["answer"] for candidate in result["candidates"]} - {""}) > 1 or algorithm == "beam"


def test_what_groups_answers_is_part_of_a_runs_configuration(espalier, tmp_path):
    run = "eval", "-a", "majority", "-N", 2, "--limit", 1, "--out", tmp_path / "run"
    assert espalier(*run).code == 0
    assert json.loads((tmp_path / "run" / "config.json").read_text())["answer_equivalence"].startswith("math-verify ")
    ran = espalier(*run, "--answer-equivalence", "exact-match")
    assert ran.code == 2
    assert 'answer_equivalence is "math-verify ' in ran.err


def test_solve_gives_the_same_text_again_and_another_with_another_seed(espalier):
    def texts(seed: int) -> list[str]:
        nodes = json.loads(espalier(*SOLVE, "--json", "--seed", seed, "--temperature", 1.5).out)["nodes"]
        return sorted(node["text"] for node in nodes)

    assert texts(1) == texts(1)
    assert texts(1) != texts(2)


def test_what_the_bundled_generator_was_never_taught_is_said(espalier):
    chain = ("solve", "--algorithm", "chain", "--json")
    ran = espalier(*chain, "A train leaves at noon. Where is it now?")
    assert ran.code == 0
    assert "never taught the words noon, Where, is" in words(ran.err)
    assert json.loads(ran.out)["nodes"]
    assert (
        "never taught" not in espalier(*chain, "A train leaves at noon.", "--generator", locate("demo-generator")).err
    )
    assert not espalier(*chain).err


def test_solve_reads_the_problem_from_standard_input(espalier, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO(f"\n{SOLVE[1]}\n"))
    result = json.loads(espalier("solve", "-", "--json", "-a", "greedy").out)
    assert result["configuration"]["problem"] == SOLVE[1]


def test_searches_that_read_no_scores_load_no_verifier(espalier):
    for algorithm in ("greedy", "majority", "chain", "adaptive"):
        ran = espalier(*SOLVE, "-a", algorithm, "-N", 2, "--json", "--verifier", "not-to-be-loaded")
        assert ran.code == 0, ran.err
        assert set(json.loads(ran.out)["digests"]) == {"generator"}


@pytest.mark.parametrize("problem", ["f is 1 on [a, b], how much is [a]?", "what is [/b] 1+1?", "[bold]1+1?"])
def test_brackets_in_a_problem_are_shown_as_they_are(espalier, problem):
    ran = espalier("solve", problem, "-a", "greedy")
    assert ran.code == 0
    assert problem in words(ran.out)


def test_solve_draws_the_tree(espalier, tmp_path):
    ran = espalier(*SOLVE, "-N", 2, "-M", 2, "--plot", tmp_path / "tree.svg")
    assert ran.code == 0
    assert (tmp_path / "tree.svg").read_text().lstrip().startswith("<?xml")


@pytest.mark.parametrize("algorithm", list(AlgorithmName))
def test_every_algorithm_solves_and_its_trace_replays(espalier, tmp_path, algorithm):
    ran = espalier(*SOLVE, "-a", algorithm, "-N", 3, "-M", 2, "--simulations", 4, "--trace", tmp_path / "t.json")
    assert ran.code == 0, ran.err
    again = espalier("replay", tmp_path / "t.json")
    assert again.code == 0, again.err
    rounds = len(json.loads((tmp_path / "t.json").read_text())["rounds"])
    assert f"{algorithm}: the same decisions in all {rounds} rounds" in words(again.out)


def test_a_file_that_is_no_trace_is_a_mistake_of_one_line(espalier, tmp_path):
    (tmp_path / "t.json").write_text("{}")
    ran = espalier("replay", tmp_path / "t.json")
    assert ran.code == 2
    assert "is no trace" in words(ran.err)


def test_a_search_cut_short_says_by_what(espalier):
    ran = espalier(*SOLVE, "--generator-budget", 20)
    assert ran.code == 0, ran.err
    assert "cut by --generator-budget" in words(ran.out)
    ran = espalier(*SOLVE, "--time-limit", 1e-6)
    assert "no answer" in words(ran.out)
    assert "cut by --time-limit" in words(ran.out)


# --- eval ----------------------------------------------------------------------------------------------------------


def test_eval_json_is_the_summary_and_nothing_else(espalier):
    ran = espalier(*EVAL, "--json")
    assert ran.code == 0
    summary = json.loads(ran.out)
    assert summary["problems"] == 2
    assert summary["accuracy"] == summary["correct"] / 2
    assert summary["low"] <= summary["accuracy"] <= summary["high"]
    assert summary["configuration"]["algorithm"] == "majority"
    assert summary["grader"].startswith("math-verify ")


def test_eval_shows_accuracy_with_an_interval(espalier):
    ran = espalier("eval", "--limit", 2, "-N", 2, "-M", 2)
    assert ran.code == 0
    assert "2 problems" in ran.out
    assert "at 95%" in ran.out
    assert "verifier 1.0" in ran.out


def test_eval_runs_on_a_file_in_the_format_of_gsm8k(espalier, tmp_path):
    lines = [
        {"question": "What is 12+3?", "answer": "12+3=<<12+3=15>>15\n#### 15"},
        {"question": "1+1?", "answer": "#### 2"},
    ]
    (tmp_path / "gsm.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    ran = espalier(*EVAL, "--benchmark", tmp_path / "gsm.jsonl", "--out", tmp_path / "run", "--json")
    assert json.loads(ran.out)["problems"] == 2
    golds = [json.loads(line)["gold"] for line in (tmp_path / "run" / "samples.jsonl").read_text().splitlines()]
    assert sorted(golds) == ["15", "2"]


def test_eval_that_is_run_again_resumes_and_another_seed_needs_another_folder(espalier, tmp_path):
    out = tmp_path / "run"
    first = json.loads(espalier(*EVAL, "--out", out, "--json").out)
    again = json.loads(espalier(*EVAL, "--out", out, "--json").out)
    assert again == first  # its seconds too
    other = espalier(*EVAL, "--out", out, "--seed", 1)
    assert other.code == 2
    assert "another configuration: seed is 0 there, 1 now; name another --out" in other.err


def test_eval_never_mixes_samples_of_other_weights(espalier, tmp_path):
    generator = tmp_path / "generator"
    shutil.copytree(locate("demo-generator"), generator)
    arguments = (*EVAL, "--generator", generator, "--out", tmp_path / "run")
    assert espalier(*arguments).code == 0
    edit_tensors(generator / "model.safetensors", {"model.norm.weight": torch.ones(256)})
    ran = espalier(*arguments)
    assert ran.code == 2
    assert "another configuration" in ran.err


def test_eval_with_a_pool_too_small_for_any_search_says_that_they_were_refused(espalier):
    ran = espalier("eval", "--limit", 2, "-N", 64, "--kv-memory", "1M")
    assert "refused" in ran.out + ran.err


# --- sweep ---------------------------------------------------------------------------------------------------------


def test_sweep_prints_its_cells_and_leaves_a_plot(espalier, tmp_path):
    out = tmp_path / "sweep"
    arguments = ("sweep", "-N", "1,2", "-M", "2", "--limit", 2, "--out", out)
    ran = espalier(*arguments, "--json")
    assert ran.code == 0
    cells = json.loads(ran.out)
    assert [(cell["beam_width"], cell["expansion"]) for cell in cells] == [(1, 2), (2, 2)]
    assert (out / "accuracy.png").stat().st_size > 5000
    assert json.loads((out / "cells.json").read_text()) == cells

    again = espalier(*arguments)
    assert again.code == 0
    assert [str(out / name) in again.out for name in ("sweep.csv", "accuracy.png")] == [True, True]


def test_every_search_option_lands_in_its_own_field(espalier):
    options = {
        "algorithm": ("best-of-n", "best-of-n"), "beam-width": (3, 3), "expansion": (5, 5), "vote": ("naive", "naive"),
        "aggregation": ("min", "min"), "temperature": (0.7, 0.7), "top-k": (11, 11), "top-p": (0.9, 0.9),
        "min-p": (0.02, 0.02), "max-steps": (7, 7), "max-step-tokens": (13, 13), "max-tokens": (29, 29),
        "seed": (17, 17), "lookahead-steps": (2, 2), "simulations": (9, 9), "exploration": (0.5, 0.5),
        "rebase-temperature": (0.3, 0.3), "iterations": (4, 4), "confidence": (0.8, 0.8),
        "generator-budget": (900, 900), "verifier-budget": (901, 901), "time-limit": (55.5, 55.5),
        "early-stop": ("frugal", "frugal"),
    }  # fmt: skip
    flags = [part for name, (given, _) in options.items() for part in (f"--{name}", given)]
    options["merge-duplicates"] = ("no-merge-duplicates", False)
    ran = espalier(*SOLVE, *flags, "--no-merge-duplicates", "--json")
    assert ran.code == 0, ran.err
    configuration = json.loads(ran.out)["configuration"]
    for name, (_, expected) in options.items():
        assert configuration[name.replace("-", "_")] == expected, name


@pytest.mark.parametrize(
    ("flags", "said"),
    [(("--top-k", -1), "--top-k"), (("--min-p", 2), "--min-p"), (("--reserved-share", 1.5), "--reserved-share")],
)
def test_options_out_of_range_are_named(espalier, flags, said):
    ran = espalier(*SOLVE, *flags)
    assert ran.code == 2
    assert said in words(ran.err)
