"""`--verifier self`: the generator asked about its own steps, on its own weights."""

import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from paths import PROBLEM
from search_runs import outcome
from test_prm_in_search import assert_complete_paths_alone_have_a_score
from tiny_models import edit_json
from transformers import AutoModelForCausalLM, AutoTokenizer

from espalier.engine.errors import CheckpointError, InvalidRequestError
from espalier.engine.work import Generate, Generated, Sampling, StopCause
from espalier.experiments.planning.plan import planned_models, planned_question
from espalier.prm.base import Sampled
from espalier.prm.scorer import ScoredSearch, ScoreStatus, StepNode
from espalier.prm.scorers.own_path import OwnPathSession, OwnPathVerifier, tokens_in_common, tokens_of_questions
from espalier.search.request import Aggregation, AlgorithmName, SearchRequest
from espalier.search.result import SearchResult, StopReason
from espalier.search.run.generator import render_turns
from espalier.search.run.load import load_orchestrator, load_verifier_alone
from espalier.search.run.orchestrator import Orchestrator
from espalier.search.run.settings import RuntimeSettings
from espalier.search.scores import ScoreRequest
from espalier.search.tree import Node

REQUEST = SearchRequest(
    PROBLEM, AlgorithmName.BEAM, beam_width=2, expansion=3, max_steps=3, max_tokens=60, max_step_tokens=20, seed=3
)
BEST_OF_N = replace(REQUEST, algorithm=AlgorithmName.BEST_OF_N, beam_width=4)
MCTS = replace(REQUEST, algorithm=AlgorithmName.MCTS, simulations=4)
LOOKAHEAD = replace(REQUEST, algorithm=AlgorithmName.LOOKAHEAD, expansion=2, lookahead_steps=1)
QUESTION = "Is this solution right so far, its last step included? Answer with one word: Yes or No."


@pytest.fixture
def settings(family_folders: dict[str, Path]) -> RuntimeSettings:
    return RuntimeSettings(str(family_folders["yes-no"]), "self", kv_memory=2**23, system_prompt="")


@pytest.fixture
def copied(settings: RuntimeSettings, tmp_path: Path) -> RuntimeSettings:
    """With a copy of the generator that a test may change."""
    return replace(settings, generator=str(shutil.copytree(settings.generator, tmp_path / "generator")))


def searched(orchestrator: Orchestrator, request: SearchRequest = REQUEST) -> SearchResult:
    orchestrator.submit(request)
    while True:
        if results := orchestrator.step():
            (result,) = results
            assert isinstance(result, SearchResult)
            return result


def test_the_generators_weights_serve_both(settings: RuntimeSettings):
    orchestrator = load_orchestrator(settings)
    models = orchestrator.engine.models
    assert models["verifier"].decoder is models["generator"].decoder
    assert models["verifier"].digest == models["generator"].digest
    assert orchestrator.describe_models()["verifier_family"] == "yes-no on its own path"


@pytest.fixture
def paths(monkeypatch: pytest.MonkeyPatch) -> dict[StepNode, list[int]]:
    """Tokens of each step's path as the generator has them when it is asked, with its prompt."""
    seen: dict[StepNode, list[int]] = {}
    score_sampled = OwnPathSession.score_sampled

    def remember(self: OwnPathSession, node: StepNode, done: Generated) -> None:
        score_sampled(self, node, done)
        ids = self._engine.token_ids(done.sequence)
        seen[node] = ids[:-1] if done.cause is StopCause.EOS else ids

    monkeypatch.setattr(OwnPathSession, "score_sampled", remember)
    return seen


@torch.no_grad()
def asked_by_transformers(folder: str, path_ids: list[int], questions: Sequence[str]) -> list[list[float]]:
    """Logits of the next token after a path, the end of its turn, and each question to its own opening."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    logits = []
    for question in questions:
        turns = [("user", "2"), ("assistant", "SOLUTION"), ("user", question)]
        messages = [{"role": role, "content": content} for role, content in turns]
        chat = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        after = tokenizer.encode(chat.partition("SOLUTION")[2], add_special_tokens=False)
        logits.append(model(torch.tensor([path_ids + after])).logits[0, -1].tolist())
    return logits


@pytest.mark.parametrize("system_prompt", ["", "Use steps."])
def test_the_question_follows_the_path_as_the_generator_has_it(
    system_prompt: str, settings: RuntimeSettings, paths: dict[StepNode, list[int]]
):
    settings = replace(settings, system_prompt=system_prompt)
    orchestrator = load_orchestrator(settings)
    result = searched(orchestrator)
    prompt = render_turns(orchestrator.engine.model("generator").tokenizer, system_prompt, PROBLEM).text
    ids = tuple(AutoTokenizer.from_pretrained(settings.generator).encode(prompt, add_special_tokens=False))
    yes, no = (AutoTokenizer.from_pretrained(settings.generator).convert_tokens_to_ids(a) for a in ("Yes", "No"))
    scored = {node: path for node, path in paths.items() if node.score is not None}
    assert len({node.score for node in scored}) > 3
    for node, path in scored.items():
        assert tuple(path[: len(ids)]) == ids
        ((logits),) = asked_by_transformers(settings.generator, path, [QUESTION])
        expected = torch.softmax(torch.tensor([logits[yes], logits[no]]), dim=-1)[0]
        assert node.score == pytest.approx(float(expected), abs=1e-5)
    assert {node.score for node in scored} <= {node.score for node in result.nodes}


def test_a_step_costs_its_question_and_one_token(settings: RuntimeSettings, paths: dict[StepNode, list[int]]):
    orchestrator = load_orchestrator(settings)
    result = searched(orchestrator)
    scorer = orchestrator._scorer
    assert isinstance(scorer, OwnPathVerifier)
    (question,) = scorer.needs.question_lengths
    asked = sum(node.score is not None for node in paths)
    assert result.usage.verifier_tokens == result.usage.verifier_tree_tokens == asked * (question + 1)
    orchestrator.engine.check_drained()


def test_the_whole_path_gives_the_same_score_to_the_bit(settings: RuntimeSettings):
    plain = searched(load_orchestrator(settings))
    checked = searched(load_orchestrator(replace(settings, verify_incremental=True)))
    assert [node.score for node in checked.nodes] == [node.score for node in plain.nodes]
    assert checked.usage == replace(
        plain.usage, seconds=checked.usage.seconds, first_step_seconds=checked.usage.first_step_seconds,
        queue_seconds=checked.usage.queue_seconds, peak_kv_bytes=checked.usage.peak_kv_bytes,
        generator_peak_kv_bytes=checked.usage.generator_peak_kv_bytes, logical_blocks=checked.usage.logical_blocks,
        physical_blocks=checked.usage.physical_blocks,
    )  # fmt: skip


@pytest.mark.parametrize("request_", [REQUEST, BEST_OF_N, MCTS, LOOKAHEAD], ids=lambda request: str(request.algorithm))
def test_a_search_asks_the_same_in_any_company(request_: SearchRequest, settings: RuntimeSettings):
    alone = searched(load_orchestrator(settings), request_)
    orchestrator = load_orchestrator(replace(settings, kv_memory=2**21, reserved_share=0.1))
    others = [replace(request_, seed=request_.seed + i, problem=f"{PROBLEM} {i}") for i in range(1, 4)]
    ids = [orchestrator.submit(each) for each in (*others, request_)]
    found = {}
    while len(found) < len(ids):
        found |= {result.search_id: result for result in orchestrator.step()}
    together = found[ids[-1]]
    assert [(node.path, node.score) for node in together.nodes] == [(node.path, node.score) for node in alone.nodes]
    assert any(node.score is not None for node in alone.nodes)
    orchestrator.engine.check_drained()


def test_best_of_n_asks_about_whole_paths_alone_where_their_last_score_is_the_one_that_counts(
    settings: RuntimeSettings,
):
    by_mean = replace(BEST_OF_N, aggregation=Aggregation.MEAN)
    result, of_all_steps = (searched(load_orchestrator(settings), request) for request in (BEST_OF_N, by_mean))
    assert_complete_paths_alone_have_a_score(result, of_all_steps)
    asked = sum(node.score is not None for node in result.nodes)
    assert result.usage.verifier_tokens == asked * planned_question(settings)


@pytest.mark.parametrize("budget", [1, 60, 400])
def test_the_verifiers_budget_holds_for_questions(budget: int, settings: RuntimeSettings):
    result = searched(load_orchestrator(settings), replace(REQUEST, verifier_budget=budget))
    assert result.usage.verifier_tokens <= budget
    assert result.stop_reason is StopReason.BUDGET


def test_memory_is_set_aside_for_the_forks(settings: RuntimeSettings):
    orchestrator = load_orchestrator(settings)
    resolved, plain = orchestrator.check(REQUEST), load_orchestrator(replace(settings, verifier="confidence"))
    assert resolved.blocks.keys() == {"generator"}, "the verifier's own KV is not used"
    assert resolved.blocks["generator"] > plain.check(REQUEST).blocks["generator"]
    result = searched(orchestrator)
    assert 0 < result.usage.physical_blocks <= resolved.blocks["generator"]
    assert result.usage.verifier_peak_kv_bytes == 0


def whole_paths(count: int) -> list[SearchRequest]:
    """Searches of whole paths, whose vote reads the scores of all steps."""
    fields = {"beam_width": 6, "max_steps": 6, "max_tokens": 60, "max_step_tokens": 20}
    kinds = [replace(BEST_OF_N, **fields), replace(BEST_OF_N, **fields, algorithm=AlgorithmName.ADAPTIVE, expansion=2)]
    aggregations = list(Aggregation)
    return [
        replace(kinds[i % 2], seed=i, problem=f"{PROBLEM} {i}", aggregation=aggregations[i // 2 % len(aggregations)])
        for i in range(count)
    ]


def expect_the_same_in_any_company(settings: RuntimeSettings, count: int, batches: Sequence[int]) -> None:
    requests = whole_paths(count)
    orchestrator = load_orchestrator(settings)
    alone = [
        (outcome(result), result.usage.verifier_tokens) for result in (searched(orchestrator, r) for r in requests)
    ]
    for batch in batches:
        orchestrator = load_orchestrator(replace(settings, max_batch_tokens=batch))
        ids = [orchestrator.submit(request) for request in requests]
        found: dict[str, SearchResult] = {}
        while len(found) < len(ids):
            found |= {result.search_id: result for result in orchestrator.step()}
        assert [(outcome(found[i]), found[i].usage.verifier_tokens) for i in ids] == alone
        orchestrator.engine.check_drained()


@pytest.mark.parametrize("family", ["yes-no", "judge"])
def test_whole_paths_have_the_same_votes_in_any_company(family: str, family_folders: dict[str, Path]):
    settings = RuntimeSettings(str(family_folders[family]), "self", family, kv_memory=2**24, system_prompt="")
    expect_the_same_in_any_company(settings, 16, batches=[48])


@pytest.mark.slow
@pytest.mark.parametrize("family", ["yes-no", "judge"])
def test_five_hundred_searches_of_whole_paths_are_the_same_in_any_company(family: str, family_folders: dict[str, Path]):
    settings = RuntimeSettings(str(family_folders[family]), "self", family, kv_memory=2**24, system_prompt="")
    expect_the_same_in_any_company(settings, 64, batches=[5, 48, 300, 2048])


def test_an_ending_without_text_is_reported_once_the_step_before_it_is_scored(settings: RuntimeSettings):
    """Else the search would count its path as unscored, and end before work that is under way."""
    orchestrator = load_orchestrator(settings)
    engine, scorer = orchestrator.engine, orchestrator._scorer
    assert scorer
    root = Node(0, None, ())
    step = Node(1, root, (0,), text="38+47=85\n\n")
    end = Node(2, step, (0, 0), text="")
    session = scorer.begin(ScoredSearch(engine, "search", root, PROBLEM, sampled=True))
    sequence = engine.open("generator", [5, 6, 7], owner="search")
    work = Generate("search", sequence, (Sampling(),), 1)
    done = Generated(work, (0,), sequence, [7], "", [0.0], StopCause.DELIMITER, 1, 1)
    assert session.score_sampled(step, done) is None
    (asked,) = session.want(step)
    assert asked.status is ScoreStatus.PENDING
    assert list(session.skip(end)) == []
    reports = []
    while not reports:
        reports = [report for done in engine.step() for report in session.take(done)]
    assert [report.node for report in reports] == [step, end]
    assert reports[0].score is not None
    session.close()
    engine.release(sequence)
    engine.check_drained()


TURNS = "{% for m in messages %}<|im_start|>{{ m.role }}OPENED\n{{ m.content }}<|im_end|>\n{% endfor %}"


@pytest.mark.parametrize(
    "template",
    [
        TURNS.replace("OPENED", "") + "<|im_start|>assistant\n-",
        TURNS.replace("OPENED", "{{ messages | length }}") + "<|im_start|>assistant\n",
    ],
    ids=["an answer opens with more than its turn", "the beginning depends on what follows"],
)
def test_where_the_turns_do_not_continue_the_path_it_is_read_apart(template: str, copied: RuntimeSettings):
    (Path(copied.generator) / "chat_template.jinja").write_text(template)
    orchestrator = load_orchestrator(copied)
    assert orchestrator.describe_models()["verifier_family"] == "yes-no"
    other = load_orchestrator(replace(copied, verifier=copied.generator, verifier_family="yes-no"))
    own, expected = searched(orchestrator), searched(other)
    assert [node.score for node in own.nodes] == [node.score for node in expected.nodes]
    assert own.usage.verifier_tokens == expected.usage.verifier_tokens > 0


def test_a_generator_that_thinks_is_read_apart(settings: RuntimeSettings):
    orchestrator = load_orchestrator(replace(settings, thought_marks="<think> </think>"))
    assert orchestrator.describe_models()["verifier_family"] == "yes-no"


def test_given_texts_are_read_on_a_kv_of_their_own(settings: RuntimeSettings):
    request = ScoreRequest(PROBLEM, (("38+47=85\n\n", "\\boxed{85}"), ("38+47=85\n\n", "So 86")))
    found = []
    for each in (settings, replace(settings, verifier=settings.generator, verifier_family="yes-no")):
        orchestrator = load_orchestrator(each)
        orchestrator.submit(request)
        while not (results := orchestrator.step()):
            pass
        found.append(results[0].solutions)
        orchestrator.engine.check_drained()
    assert found[0] == found[1]


def test_given_texts_are_scored_by_it_too(settings: RuntimeSettings):
    engine, verifier = load_verifier_alone(settings)
    assert verifier.name == "yes-no"
    assert list(engine.models) == ["verifier"]


def test_a_generator_without_a_chat_template_is_not_asked_and_its_weights_are_not_read(copied: RuntimeSettings):
    (Path(copied.generator) / "chat_template.jinja").unlink()
    read: list[int] = []
    with pytest.raises(CheckpointError, match=r"has no chat template, so it cannot be asked .* or confidence"):
        load_orchestrator(copied, lambda done, _: read.append(done))
    assert not read


def test_a_generator_without_a_token_for_an_answer_is_not_asked():
    with pytest.raises(CheckpointError, match="no single token for 'Yes', which the model answers with"):
        load_orchestrator(RuntimeSettings(verifier="self"))


def test_a_template_without_the_turns_between_is_refused(copied: RuntimeSettings):
    (Path(copied.generator) / "chat_template.jinja").write_text("{{ messages[0]['content'] }}")
    with pytest.raises(CheckpointError, match="leaves out a turn of three"):
        load_orchestrator(copied)


def test_it_is_planned_with_its_questions_and_with_a_second_kv_where_paths_are_read_apart(settings: RuntimeSettings):
    usage = searched(load_orchestrator(settings)).usage
    question = planned_question(settings)
    assert 10 < question < usage.verifier_tokens
    assert usage.verifier_tokens % question == 0
    assert list(planned_models(settings, True, torch.float32)) == ["generator"]
    thinking = replace(settings, thought_marks="<t> </t>")
    assert planned_question(thinking) == 0
    generator, apart = planned_models(thinking, True, torch.float32).values()
    assert (apart.kv_bytes_per_token, apart.memory_bytes) == (generator.kv_bytes_per_token, 0)


def test_it_may_be_asked_as_a_judge(family_folders: dict[str, Path], paths: dict[StepNode, list[int]]):
    folder = str(family_folders["judge"])
    settings = RuntimeSettings(folder, "self", "judge", kv_memory=2**24, system_prompt="", verify_incremental=True)
    orchestrator = load_orchestrator(settings)
    result = searched(orchestrator)
    assert orchestrator.engine.models["verifier"].decoder is orchestrator.engine.models["generator"].decoder
    assert orchestrator.describe_models()["verifier_family"].startswith("judge JudgeSettings(letters=5")
    scorer = orchestrator._scorer
    assert isinstance(scorer, OwnPathVerifier)
    family = scorer.family
    grades = AutoTokenizer.from_pretrained(folder).convert_tokens_to_ids(list("ABCDE0123456789"))
    for node, path in paths.items():
        logits = np.array(asked_by_transformers(folder, path, family.settings.questions))[:, grades]
        assert node.score == pytest.approx(family.evidence(logits, None, Sampled()), abs=1e-5)
    together = len(tokens_in_common(family.probes))
    assert together > 3
    each = 1 + together + sum(len(probe) - together for probe in family.probes)
    assert tokens_of_questions(family.probes) == each
    assert result.usage.verifier_tokens == each * sum(node.score is not None for node in paths)
    assert len({node.score for node in result.nodes}) > 3
    with pytest.raises(CheckpointError, match="needs a model of its own; --verifier self takes yes-no, judge"):
        load_orchestrator(replace(settings, verifier_family="likelihood"))


def test_questions_that_are_the_same_are_asked_each(copied: RuntimeSettings):
    criteria = ["It is right."] * 2
    edit_json(Path(copied.generator) / "config.json", {"prm": {"letters": 2, "criteria": criteria, "repeats": 1}})
    result = searched(load_orchestrator(replace(copied, verifier_family="judge", verify_incremental=True)))
    assert len({node.score for node in result.nodes}) > 3


@pytest.mark.parametrize(
    "wrong", [{"letters": 27}, {"letters": True}, {"repeats": 0}, {"criteria": "one"}, {"criteria": []}, {"more": 1}]
)
def test_what_a_judge_asks_is_checked(wrong: dict[str, object], copied: RuntimeSettings):
    edit_json(Path(copied.generator) / "config.json", {"prm": wrong})
    with pytest.raises(CheckpointError, match="has letters, from 2 to 26, repeats, from 1 to 6, and criteria, 1 to 8"):
        load_orchestrator(replace(copied, verifier_family="judge"))


@pytest.mark.parametrize("verifier", ["self", "confidence"])
def test_a_family_or_a_reference_of_no_checkpoint_is_refused(verifier: str, settings: RuntimeSettings):
    given = replace(settings, verifier=verifier, verifier_family="thinkprm", verifier_reference="other")
    with pytest.raises(InvalidRequestError, match="names no checkpoint") as caught:
        load_orchestrator(given)
    fields = ["verifier_reference"] if verifier == "self" else ["verifier_family", "verifier_reference"]
    assert [violation.field for violation in caught.value.violations] == fields
