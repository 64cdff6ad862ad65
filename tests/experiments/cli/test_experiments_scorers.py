"""Verifiers without a model of their own, on the command line."""

import json
from pathlib import Path

import pytest
from trunk_heads import write_head

from espalier.engine.models.checkpoint import Checkpoint
from espalier.engine.models.hub import locate

PROBLEM = "Tom has 38 coins. (a) He finds 47 more. (b) He loses 12. How many coins does he have now?"


@pytest.fixture
def head(tmp_path: Path) -> Path:
    return write_head(tmp_path / "my-head", Checkpoint(locate("demo-generator")).digest(), 256, 2)


@pytest.fixture(params=["confidence", "trunk-head"])
def verifier(request: pytest.FixtureRequest, head: Path) -> str:
    return str(head) if request.param == "trunk-head" else request.param


def test_a_search_scores_every_step_and_reads_no_token_more(verifier: str, espalier):
    ran = espalier("solve", PROBLEM, "--verifier", verifier, "--json")
    assert ran.code == 0, ran.err
    result = json.loads(ran.out)
    assert result["answer"]
    assert result["usage"]["verifier_tokens"] == 0
    scores = [node["score"] for node in result["nodes"] if node["parent_id"] is not None and node["text"].strip()]
    assert all(0 < score < 1 for score in scores)
    assert len(set(scores)) > 2


def test_an_evaluation_says_what_scored_it(verifier: str, espalier, tmp_path: Path):
    ran = espalier("eval", "--verifier", verifier, "--algorithm", "beam", "--limit", 3, "--out", tmp_path / "run")
    assert ran.code == 0, ran.err
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert ("trunk-head" if Path(verifier).is_dir() else "confidence") in json.dumps(config)


def test_a_plan_and_an_estimate_count_no_verifier(verifier: str, espalier, tmp_path: Path):
    flags = ("--verifier", verifier, "--json")
    ran = espalier("plan", "--generator", "demo-generator", "--memory", "1G", *flags)
    assert ran.code == 0, ran.err
    assert list(json.loads(ran.out)["models"]) == ["generator"]
    ran = espalier("sweep", "--out", tmp_path / "sweep", "--limit", 2, "--dry-run", *flags)
    assert ran.code == 0, ran.err


def test_inspect_shows_whose_states_a_head_reads(head: Path, espalier):
    shown = espalier("models", "inspect", "demo-generator", head, "--memory", "1G")
    assert shown.code == 0, shown.err
    digest = Checkpoint(locate("demo-generator")).digest()
    text = " ".join(shown.out.split())
    assert "verifier: trunk-head reads the hidden state that a step's last token is drawn from" in text
    assert f"talker (digest {digest})" in text
    assert "2 layers" in text
    assert "paths of 1,024 tokens" in text
    (found,) = json.loads(espalier("models", "inspect", head, "--json").out)["checkpoints"]
    assert (found["family"], found["trunk_digest"], found["layers"]) == ("trunk-head", digest, 2)


def test_a_head_of_another_trunk_is_refused_in_one_line(espalier, tmp_path: Path):
    folder = write_head(tmp_path / "other", "0" * 64, 256, 1)
    ran = espalier("solve", PROBLEM, "--verifier", folder)
    assert ran.code != 0
    assert "is a head on the hidden states of talker" in " ".join(ran.err.split())
    assert "Traceback" not in ran.err


def test_eval_prm_takes_no_scorer_of_generations(verifier: str, espalier):
    ran = espalier("eval-prm", "--verifier", verifier)
    assert ran.code != 0
    assert "scores steps as a generator samples them" in " ".join(ran.err.split())
