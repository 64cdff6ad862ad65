"""`espalier plan`."""

import json

import pytest
import torch
from fixed_steps import write_pair
from typer.testing import CliRunner
from zoo_models import write_checkpoint

from espalier.engine.models.options import Quantization
from espalier.experiments.cli.main import app
from espalier.experiments.planning.inspection import inspect_checkpoint
from espalier.experiments.planning.plan import planned_models
from espalier.kernels.cpu import HAS_VNNI
from espalier.search.run.settings import RuntimeSettings

QWEN = ["--generator", "Qwen2.5-1.5B", "--verifier", "Qwen2.5-Math-PRM-7B"]


def planned(*flags: str) -> dict:
    done = CliRunner().invoke(app, ["plan", "--json", *flags])
    assert done.exit_code == 0, (done.output, done.exception)
    return json.loads(done.stdout)


def refusal(*flags: str) -> str:
    done = CliRunner().invoke(app, ["plan", *flags], env={"COLUMNS": "200"})
    assert done.exit_code != 0
    return f"{done.output}{done.exception}"


def test_a_generator_that_is_asked_itself_reads_questions_and_holds_no_second_kv():
    flags = ("--generator", "Qwen2.5-1.5B", "--card", "h100", "-N", "4")
    alone = planned(*flags, "--verifier", "", "-a", "majority")
    asked = planned(*flags, "--verifier", "self", "-a", "best-of-n")
    assert asked["models"] == alone["models"]
    assert asked["search"] == alone["search"]
    assert [plan["speed"][-1]["generator_share"] < 1 for plan in (alone, asked)] == [False, True]
    longer = planned(*flags, "--verifier", "self", "-a", "best-of-n", "--steps", "40", "--step-tokens", "10")
    asking = [(1 - p["speed"][0]["generator_share"]) * p["speed"][0]["seconds"] for p in (asked, longer)]
    assert asking[1] == pytest.approx(asking[0], rel=0.05), "paths of as many tokens are asked about once"


def test_known_shapes_are_planned_without_any_file():
    plan = planned(*QWEN, "--card", "h100", "-N", "8", "-M", "4")
    assert plan["models"]["generator"]["kv_bytes_per_token"] == 28 * 2 * 2 * 128 * 2
    assert plan["models"]["verifier"]["weight_bytes"] == pytest.approx(2 * 7.07e9, rel=0.02)
    search = plan["search"]
    assert search["peak_bytes"] == pytest.approx(sum(search["peak_bytes_by_role"].values()))
    assert search["mean_bytes"] < search["peak_bytes"] < search["worst_case_bytes"]
    assert search["peak_bytes"] < search["logical_peak_bytes"]
    fit = plan["searches_that_fit"]
    assert fit["at_their_peaks"] == int(plan["device"]["kv_pool_bytes"] // search["peak_bytes"])
    assert fit["at_their_peaks"] <= fit["on_average"]
    rates = [row["rounds_per_second"] for row in plan["speed"]]
    assert rates == sorted(rates)


@pytest.mark.skipif(not HAS_VNNI, reason="products of bytes need AVX-512 VNNI")
def test_a_cpus_products_with_int8_weights_are_those_of_bytes():
    plain, as_bytes = (
        planned(*QWEN, "--card", "cpu", "--generator-quantization", kind, "--verifier-quantization", kind)
        for kind in ("none", "int8")
    )
    assert as_bytes["speed"][0]["seconds"] < 0.7 * plain["speed"][0]["seconds"], "bounded by products in both"


def test_float32_takes_twice_the_memory_of_bfloat16():
    single, half = (planned(*QWEN, "--memory", "80G", "--dtype", name)["search"] for name in ("float32", "bfloat16"))
    assert single["peak_bytes"] == 2 * half["peak_bytes"]


def test_quantised_weights_leave_more_for_kv_and_are_read_faster():
    int8 = "--generator-quantization", "int8", "--verifier-quantization", "int4"
    whole, small = planned(*QWEN, "--card", "h100"), planned(*QWEN, "--card", "h100", *int8)
    for role, low, high in (("generator", 0.5, 0.7), ("verifier", 0.25, 0.4)):
        share = small["models"][role]["weight_bytes"] / whole["models"][role]["weight_bytes"]
        assert low < share < high  # the embedding and the head stay as they are
    assert [small["models"][role]["quantization"] for role in ("generator", "verifier")] == ["int8", "int4"]
    assert small["search"] == whole["search"]
    assert small["device"]["kv_pool_bytes"] > whole["device"]["kv_pool_bytes"]
    assert small["speed"][0]["rounds_per_second"] > whole["speed"][0]["rounds_per_second"]
    shown = CliRunner().invoke(app, ["plan", *QWEN, "--card", "h100", *int8], env={"COLUMNS": "160"}).output
    assert "in int8 and bfloat16" in shown


def test_a_quantised_folder_is_planned_with_the_bytes_that_models_inspect_shows(tmp_path):
    generator, verifier = map(str, write_pair(tmp_path, 1, 5, (3, 2, 16), (2, 1, 8)))
    flags = "--memory", "8G", "--dtype", "float32", "--generator-quantization", "int8"
    plan = planned("--generator", generator, "--verifier", verifier, *flags)
    found = inspect_checkpoint(generator, torch.float32, Quantization.INT8)
    assert plan["models"]["generator"]["weight_bytes"] == found.weight_bytes
    assert found.weight_bytes < inspect_checkpoint(generator, torch.float32).weight_bytes


def test_a_verifier_of_a_generators_class_needs_its_family_as_when_it_is_loaded(tiny_checkpoints):
    flags = "--verifier", str(tiny_checkpoints["qwen2-untied"]), "--memory", "8G", "--dtype", "float32"
    assert "nothing in it says which" in refusal(*flags)
    assert "no single token for 'Yes'" in refusal(*flags, "--verifier-family", "yes-no")


def test_a_folders_sizes_are_read_from_its_configuration(tmp_path):
    generator, verifier = write_pair(tmp_path, 1, 5, (3, 2, 16), (2, 1, 8))
    plan = planned("--generator", str(generator), "--verifier", str(verifier), "--memory", "8G", "--dtype", "float32")
    assert plan["models"]["generator"]["kv_bytes_per_token"] == 3 * 2 * 2 * 16 * 4
    assert plan["models"]["verifier"]["kv_bytes_per_token"] == 2 * 2 * 1 * 8 * 4
    files = (generator / "model.safetensors").stat().st_size
    assert plan["models"]["generator"]["weight_bytes"] == pytest.approx(files, rel=0.05)


def test_a_search_without_scores_needs_no_verifier():
    assert list(planned(*QWEN, "--memory", "24G", "-a", "majority")["models"]) == ["generator"]


def test_without_a_speed_there_is_a_memory_plan_alone():
    assert planned(*QWEN, "--memory", "24G")["speed"] == []
    faster = planned(*QWEN, "--memory", "24G", "--bandwidth", "2000", "--matrix-rate", "500")["speed"]
    slower = planned(*QWEN, "--memory", "24G", "--bandwidth", "1000", "--matrix-rate", "250")["speed"]
    assert faster[0]["rounds_per_second"] > slower[0]["rounds_per_second"]


def test_the_plan_is_shown_as_text():
    shown = CliRunner().invoke(app, ["plan", *QWEN, "--card", "a100"], env={"COLUMNS": "160"})
    assert shown.exit_code == 0
    assert "searches that fit" in shown.output
    assert "the floor on a100" in shown.output


DRAFTS = *QWEN, "--card", "h100", "--draft", "Qwen2.5-0.5B"


def test_a_draft_models_weights_leave_less_for_kv_and_its_gain_ends_where_products_bound_the_step():
    plain, drafting = planned(*QWEN, "--card", "h100"), planned(*DRAFTS)
    assert plain["drafts"] is None
    assert drafting["search"] == plain["search"]
    assert drafting["models"]["draft"]["weight_bytes"] == pytest.approx(2 * 0.494e9, rel=0.01)
    assert drafting["device"]["kv_pool_bytes"] < plain["device"]["kv_pool_bytes"] - 0.9e9
    drafts = drafting["drafts"]
    rows, gains, lengths = ([row[name] for row in drafts["batches"]] for name in ("rows", "gain", "draft_tokens"))
    assert rows == [2**i for i in range(len(rows))]
    assert gains[0] > 1.3
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[-1] == 0 < lengths[-2]
    assert gains[-1] == 1
    assert rows[-2] <= drafts["pays_up_to"] < rows[-1]


def test_drafts_gain_more_the_more_of_them_are_accepted_and_nothing_if_none_is():
    gains = [
        planned(*DRAFTS, "--draft-acceptance", share)["drafts"]["batches"][0]["gain"] for share in ("0", "0.8", "0.95")
    ]
    assert gains[0] == 1 < gains[1] < gains[2]


def test_drafts_of_the_tree_take_no_time_of_their_own():
    tree = planned(*QWEN, "--card", "h100", "--draft", "tree", "--draft-acceptance", "0.91")
    assert list(tree["models"]) == ["generator", "verifier"]
    assert tree["drafts"]["batches"][0]["gain"] > planned(*DRAFTS)["drafts"]["batches"][0]["gain"]
    assert tree["drafts"]["batches"][0]["draft_tokens"] == 8
    assert planned(*QWEN, "--card", "h100", "--draft", "tree")["drafts"]["batches"][0]["gain"] == pytest.approx(
        1.32, 0.01
    )


def test_drafts_are_refused_where_a_recurrent_state_cannot_go_back(tmp_path):
    flags = "--verifier", "", "--card", "h100", "--draft", "tree", "-a", "majority"
    assert "states cannot go back" in refusal("--generator", str(write_checkpoint(tmp_path, "qwen3_next")), *flags)


def test_what_drafts_gain_is_shown():
    shown = CliRunner().invoke(app, ["plan", *DRAFTS], env={"COLUMNS": "160"}).output
    assert "drafts, 91% of them accepted, pay up to" in shown
    never = CliRunner().invoke(app, ["plan", *DRAFTS, "--draft-acceptance", "0"], env={"COLUMNS": "160"}).output
    assert "pay at no size" in never


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ((*QWEN, "--memory", "24G", "--draft", "no-such"), "no checkpoint 'no-such'"),
        ((), "--card or --memory is needed"),
        (("--card", "x"), "takes a100, h100, h200 or cpu"),
        (("--memory", "24G", "--bandwidth", "10"), "--bandwidth and --matrix-rate go together"),
        (("--memory", "24G", "--dtype", "int3"), "--dtype takes one of"),
        (("--memory", "24G", "-N", "300"), "beam_width"),
        ((*QWEN, "--memory", "24G", "-a", "mcts"), "mcts has no closed form"),
        ((*QWEN, "--memory", "4G"), "leaves nothing for the KV pool"),
        (("--memory", "24G", "--generator", "no-such"), "no checkpoint 'no-such'"),
    ],
)
def test_wrong_input_is_one_clear_error(flags: tuple[str, ...], said: str):
    assert said in refusal(*flags)


def test_a_tied_embedding_counts_once():
    tied = planned_models(RuntimeSettings("Qwen2.5-1.5B", ""), False, torch.bfloat16)["generator"]
    assert tied.memory_bytes == tied.weight_bytes
