"""Answer probes: what is read on a fork of a path, what a search cut short answers by it, and what it costs."""

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast
from unittest.mock import create_autospec

import pytest
import torch
from rich.console import Console
from search_runs import ALL, BEAM, GREEDY, MAJORITY, outcome, run
from thinkers import SHAPES, thinker, write_thinker

from espalier.engine.engine import Engine
from espalier.engine.errors import InvalidRequestError
from espalier.engine.memory.sequences import KVSequence
from espalier.engine.models.checkpoint import Checkpoint
from espalier.engine.models.model import load_generator
from espalier.engine.work import Generated, PathStreams, StopCause
from espalier.experiments.cli.render import show_result
from espalier.search.grading.answers import content_before_brace
from espalier.search.growth.policies import Branch, PolicyContext
from espalier.search.growth.probes import AnswerProbes, ProbeScorer, probe_score
from espalier.search.request import SearchRequest, Vote
from espalier.search.result import Finished, NodeRecord, SearchResult, StopReason
from espalier.search.rules import StopRule, read_stop_rule
from espalier.search.run.executor import ResolvedRequest
from espalier.search.run.load import load_orchestrator
from espalier.search.run.orchestrator import Orchestrator
from espalier.search.run.resolve import Resolver
from espalier.search.run.running import UsageMeter
from espalier.search.run.settings import RuntimeSettings
from espalier.search.service.grpc_api.convert import from_wire, to_wire
from espalier.search.service.http_api.app import event_json
from espalier.search.service.http_api.openai.bodies import read_chat
from espalier.search.service.http_api.openai.completion import Completion
from espalier.search.service.http_api.openai.responses import ResponseObject, read_response
from espalier.search.service.model_names import ModelNames
from espalier.search.thoughts.plans import PROBE_ANSWER_TOKENS, ProbePlan
from espalier.search.trace import read_trace, replay, trace_of, write_trace
from espalier.search.tree import Node, Probe, Termination
from espalier.search.voting.vote import probed_answer

PATH = replace(GREEDY, max_steps=None, max_step_tokens=None, max_tokens=400)


@pytest.fixture
def checkpoint(tiny_checkpoints: dict[str, Path], tmp_path: Path) -> Checkpoint:
    return write_thinker(tiny_checkpoints["talker"], tmp_path / "thinker", SHAPES["opened by the prompt"])


@pytest.fixture
def thinking_model(checkpoint: Checkpoint):
    """A generator with random weights, which goes on and on in its thought."""
    return load_generator(checkpoint, torch.float32, "cpu")


def without_probes(result: SearchResult) -> tuple[tuple[NodeRecord, ...], tuple]:
    return tuple(replace(node, probe=None) for node in result.nodes), outcome(result)


def probes_of(result: SearchResult) -> list[Probe]:
    return [node.probe for node in result.nodes if node.probe]


# ---- what is read


@pytest.mark.parametrize(
    ("written", "answer"),
    [
        ("42}", "42"),
        (" \\frac{1}{2} }. So", "\\frac{1}{2}"),
        ("\\{1, 2\\}}", "\\{1, 2\\}"),
        ("\\frac{1}{2", None),
        ("}", ""),
    ],
)
def test_a_box_ends_with_its_own_brace(written: str, answer: str | None):
    assert content_before_brace(written) == answer


@pytest.mark.parametrize("rule", ["paragraph", "tokens:3"])
@pytest.mark.parametrize("name", [name for name in ALL if name != "greedy"])
def test_paths_go_on_to_the_bit_as_without_probes(
    name: str, rule: str, thinking_model, make_orchestrator: Callable[..., Orchestrator]
):
    request = replace(ALL[name], thinking="12", max_tokens=200, max_steps=8, temperature=0.7, step_rule=rule)
    plain = run(make_orchestrator(thinking_model, kv_memory_bytes=2**23), request).only
    orchestrator = make_orchestrator(thinking_model, kv_memory_bytes=2**23)
    probed = run(orchestrator, replace(request, probe_every=4)).only
    orchestrator.engine.check_drained()
    assert probes_of(probed)
    assert without_probes(probed)[1][:2] == without_probes(plain)[1][:2]
    assert replay(trace_of(probed)) == len(probed.rounds)


@pytest.mark.parametrize("name", ["beam", "lookahead", "dvts"])
def test_what_the_host_writes_behind_short_steps_fits_what_is_reserved(
    name: str, thinking_model, make_orchestrator: Callable[..., Orchestrator]
):
    """The text that closes a thought is many times as long as a step of three tokens. `run` watches what is held."""
    request = replace(ALL[name], thinking="12", max_tokens=150, max_steps=5, temperature=0.7, step_rule="tokens:3")
    for seed in range(3):
        result = run(make_orchestrator(thinking_model, kv_memory_bytes=2**23), replace(request, seed=seed)).only
        assert any(node.appended for node in result.nodes)


def test_log_probabilities_are_those_without_probes(thinking_model, make_orchestrator: Callable[..., Orchestrator]):
    request = replace(MAJORITY, thinking="60", max_tokens=240, max_steps=None, step_rule="tokens:5", temperature=0.7)
    plain = run(make_orchestrator(thinking_model), request).only
    probed = run(make_orchestrator(thinking_model), replace(request, probe_every=5)).only

    def said(result: SearchResult) -> list[tuple]:
        nodes = ((n.path, n.text, n.score, n.log_probability, n.termination, n.multiplicity) for n in result.nodes)
        return sorted(nodes)

    assert len(probes_of(probed)) > 6
    assert said(probed) == said(plain)


def test_searches_with_probes_do_not_depend_on_company_or_memory(
    thinking_model, make_orchestrator: Callable[..., Orchestrator]
):
    request = replace(BEAM, thinking="30", max_tokens=200, max_steps=12, step_rule="tokens:4", probe_every=8)
    requests = [replace(request, seed=seed) for seed in range(3)]
    requests += [replace(MAJORITY, thinking="30", max_tokens=200, max_steps=None, step_rule="tokens:4", probe_every=8)]
    alone = [run(make_orchestrator(thinking_model, kv_memory_bytes=2**22), each).only for each in requests]
    crowded = make_orchestrator(thinking_model, kv_memory_bytes=9 * 2**18, reserved_share=0.05)
    together = run(crowded, *requests).results
    crowded.engine.check_drained()
    for one, other in zip(alone, together, strict=True):
        assert outcome(one) == outcome(other)
        assert sorted((n.path, n.probe) for n in one.nodes if n.probe) == sorted(
            (n.path, n.probe) for n in other.nodes if n.probe
        )
        assert one.usage.probe_tokens == other.usage.probe_tokens


def test_a_probe_reads_the_answer_in_a_closed_thought(
    checkpoint: Checkpoint, make_orchestrator: Callable[..., Orchestrator]
):
    """The script says its next token wherever it is: the probe reads on from the thought."""
    model = thinker(checkpoint, "Is", " it", "\n\n", "42}", *"x" * 40)
    result = run(make_orchestrator(model), replace(PATH, probe_every=1, thinking="100")).only
    first = result.nodes[1].probe
    assert first is not None
    assert 0 < first.certainty <= 1
    assert result.usage.probe_tokens == sum(probe.tokens for probe in probes_of(result))


def probes_by(plan: ProbePlan, prompt_tokens: int, engine: Engine | None = None) -> AnswerProbes:
    """The probes of a search by a plan."""
    limits = SimpleNamespace(prompt_tokens=prompt_tokens)
    request = SearchRequest("1+1?")
    resolved = SimpleNamespace(request=request, probes=plan, probe_grammar=None, generator_limits=limits)
    search = "search", cast(ResolvedRequest, resolved), cast(Engine, engine), None, UsageMeter(), {}
    return AnswerProbes(PolicyContext(*search, call_outside=lambda work, then: then(work())), None, None)


def test_a_probe_is_as_certain_as_the_geometric_mean_of_its_tokens_probabilities():
    def read(*parts: tuple[str, list[float]]) -> Probe | None:
        last = None
        engine = create_autospec(Engine, instance=True)
        engine.fork.return_value = ["fork"]
        probes = probes_by(ProbePlan(1, (1, 2, 3), (), (), 500), 0, engine)
        branch = Branch(Node(1, ROOT, (0,)), True, PathStreams(0, ""))
        probes.start(branch, cast(KVSequence, "path"), (1, 2, 3))
        for text, log_probabilities in parts:
            (work,) = engine.submit.call_args.args
            ids = [5] * len(log_probabilities)
            last = probes.read(Generated(work, (0,), work.sequence, ids, text, log_probabilities, StopCause.MARK, 0, 0))
        assert engine.release.call_count == 1
        return last

    half, eighth = math.log(0.5), math.log(0.125)
    assert read(("42}", [half, half, half])) == Probe("42", pytest.approx(0.5), 6)
    assert read((r"\frac{1}", [half] * 2), ("{2}", [half]), ("}", [eighth])) == Probe(
        r"\frac{1}{2}", pytest.approx(2 ** (-6 / 4)), 7
    )
    assert read(("}", [half])) == Probe("", 0.0, 4)
    # An answer that is longer than a probe is none.
    assert read(("{" * 31 + "}", [half] * 32)) == Probe("", 0.0, 35)


@pytest.mark.parametrize("inside", [True, False])
def test_a_probe_leaves_its_path_a_token_of_the_budget_and_none_of_the_context(inside: bool):
    plan = ProbePlan(every=4, in_thought=(1,) * 7, in_text=(2,) * 5, behind_paragraph=(3,) * 2, context=100)
    opening = (1,) * 7 if inside else (2,) * 5
    node = Node(1, ROOT, (0,), text="So", num_tokens=9)
    needed = len(opening) + PROBE_ANSWER_TOKENS
    within = probes_by(plan, prompt_tokens=100 - 9 - needed)
    assert within.opening(node, inside, needed + 1) == opening
    assert within.opening(node, inside, needed) == ()
    assert probes_by(plan, prompt_tokens=101 - 9 - needed).opening(node, inside, 1000) == ()


# ---- where


def test_steps_are_probed_once_a_path_has_so_many_more_tokens(
    thinking_model, make_orchestrator: Callable[..., Orchestrator]
):
    request = replace(PATH, thinking="60", max_tokens=240, step_rule="tokens:5", probe_every=20)
    result = run(make_orchestrator(thinking_model), request).only
    tokens, at = 0, []
    for node in result.nodes[1:]:
        tokens += node.tokens
        if node.probe:
            at.append(tokens)
    assert at == [20, 40]  # at 60 the thought is closed, and a path that answers is not probed


def test_paths_without_a_thought_are_probed_behind_their_steps(make_orchestrator: Callable[..., Orchestrator]):
    result = run(make_orchestrator(), replace(MAJORITY, probe_every=1)).only
    inner = {node.parent_id for node in result.nodes}
    assert {node.node_id for node in result.nodes if node.probe} == inner - {None, 0}


def test_nothing_is_probed_by_default(make_orchestrator: Callable[..., Orchestrator]):
    result = run(make_orchestrator(), MAJORITY).only
    assert (probes_of(result), result.usage.probe_tokens, result.probed) == ([], 0, None)


@pytest.mark.parametrize("every", [0, -1, 2**21])
def test_a_number_of_tokens_out_of_range_is_refused(every: int):
    with pytest.raises(InvalidRequestError, match="probe_every"):
        SearchRequest("1+1?", probe_every=every).validate()


# ---- accounts


@pytest.mark.parametrize("name", ["majority", "beam", "mcts"])
def test_probes_are_counted_once_in_every_account(
    name: str, thinking_model, make_orchestrator: Callable[..., Orchestrator]
):
    request = replace(ALL[name], thinking="24", max_tokens=200, max_steps=10, step_rule="tokens:4", temperature=0.7)
    plain = run(make_orchestrator(thinking_model, kv_memory_bytes=2**23), request).only.usage
    probed = run(make_orchestrator(thinking_model, kv_memory_bytes=2**23), replace(request, probe_every=8)).only
    usage, probes = probed.usage, sum(probe.tokens for probe in probes_of(probed))
    assert usage.probe_tokens == probes > 0
    for name in ("generated_tokens", "generator_tokens", "generator_tree_tokens"):
        assert getattr(usage, name) == getattr(plain, name) + probes, name


@pytest.mark.parametrize("budget", [60, 150, 333])
def test_a_budget_holds_with_its_probes(budget: int, thinking_model, make_orchestrator: Callable[..., Orchestrator]):
    request = replace(MAJORITY, thinking="200", max_tokens=600, max_steps=None, step_rule="tokens:4", probe_every=8)
    result = run(make_orchestrator(thinking_model), replace(request, beam_width=2, generator_budget=budget)).only
    assert result.usage.generated_tokens <= budget
    assert result.stop_reason is StopReason.BUDGET


# ---- early stop


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("agree:3,tokens:512", StopRule(3, 512)),
        ("agree:2,certainty:0.95,tokens:1", StopRule(2, 1, 0.95)),
    ],
)
def test_a_rule_has_a_number_of_probes_and_a_floor(text: str, rule: StopRule):
    assert str(rule) == text
    assert read_stop_rule(text) == rule


@pytest.mark.parametrize("text", ["agree:3", "tokens:512", "agree:0,tokens:5", "agree:2,certainty:2,tokens:5", "3"])
def test_a_rule_without_a_floor_or_out_of_range_is_refused(text: str):
    with pytest.raises(InvalidRequestError, match=r"stop_when: is written like agree:3,tokens:512"):
        SearchRequest("1+1?", probe_every=8, stop_when=text).validate()


def test_a_rule_needs_probes_and_thoughts(make_orchestrator: Callable[..., Orchestrator]):
    with pytest.raises(InvalidRequestError, match="stop_when: needs probe_every"):
        SearchRequest("1+1?", stop_when="agree:1,tokens:1").validate()
    with pytest.raises(InvalidRequestError, match="stop_when: is about thoughts, and the generator has none here"):
        make_orchestrator().submit(replace(MAJORITY, probe_every=8, stop_when="agree:1,tokens:1"))


@pytest.mark.parametrize(
    ("probes", "tokens", "holds"),
    [
        ([("5", 0.9), ("5.0", 0.8)], 100, True),
        ([("5", 0.9), ("5", 0.8)], 99, False),
        ([("5", 0.9), ("5", 0.7)], 100, False),
        ([("5", 0.9), ("6", 0.9)], 100, False),
        ([("5", 0.9)], 100, False),
        ([("", 0.9), ("", 0.9)], 100, False),
        ([("5", 0.9), ("5", 0.9), ("6", 0.9)], 100, True),
    ],
)
def test_a_thought_is_enough_once_its_last_probes_agree(probes: list[tuple], tokens: int, holds: bool):
    rule = StopRule(agree=2, tokens=100, certainty=0.8)
    assert rule.holds([Probe(*each, 10) for each in probes], tokens) == holds


@pytest.mark.parametrize("request_", [replace(MAJORITY, beam_width=2, max_steps=None), replace(BEAM, max_steps=60)])
def test_a_thought_is_closed_where_its_probes_agree_and_the_path_answers(
    request_: SearchRequest, checkpoint: Checkpoint, make_orchestrator: Callable[..., Orchestrator]
):
    thought = [token for _ in range(20) for token in ("7", "}")]
    limits = {"max_step_tokens": None, "max_tokens": None, "thinking": "250", "step_rule": "tokens:4"}
    request = replace(request_, **limits, probe_every=8, temperature=1.0, stop_when="agree:3,tokens:20")
    model = thinker(checkpoint, *thought, *"It is", " \\boxed{8}")
    orchestrator = make_orchestrator(model, kv_memory_bytes=2**24)
    result = run(orchestrator, request).only
    orchestrator.engine.check_drained()
    closed = [node for node in result.nodes if node.appended]
    assert closed
    for node in closed:
        path = [other for other in result.nodes if other.path == node.path[: len(other.path)] and other.path]
        agreeing = [step.probe for step in path if step.probe and step.probe.answer][-3:]
        assert [probe.answer for probe in agreeing] == ["7"] * 3
        assert sum(step.tokens for step in path) >= 20
    assert len(closed[0].path) <= 10
    assert replay(trace_of(result)) == len(result.rounds)


# ---- answers of searches that are cut short


def says(answer: str, certainty: float) -> Probe:
    return Probe(answer, certainty, 10)


def leaf(place: int, *probes: Probe | None, multiplicity: int = 1, end: Termination | None = None) -> list[Node]:
    """The nodes of one path from the root, with the probe of each."""
    nodes, parent = [], ROOT
    for depth, probe in enumerate(probes):
        parent = Node(100 * place + depth + 1, parent, (*parent.path, place if depth == 0 else 0))
        parent.probe, parent.multiplicity = probe, multiplicity
        nodes.append(parent)
    nodes[-1].termination = end
    return nodes


ROOT = Node(0, None, ())


def test_the_last_probes_of_paths_vote_by_their_certainty():
    nodes = [
        ROOT,
        *leaf(0, says("3", 0.9), says("4", 0.6), None),
        *leaf(1, says("5", 0.5)),
        *leaf(2, says("4.0", 0.2)),
        *leaf(3, None),
    ]
    found = probed_answer(nodes)
    assert found is not None
    assert (found.answer, found.node_id) == ("4", 2)
    assert found.share == pytest.approx(0.8 / 1.3)


def test_paths_that_were_dropped_for_others_have_no_vote_and_merged_ones_several():
    nodes = [
        ROOT,
        *leaf(0, says("3", 0.9), end=Termination.PRUNED),
        *leaf(1, says("4", 0.3), multiplicity=2),
        *leaf(2, says("5", 0.5)),
    ]
    found = probed_answer(nodes)
    assert found is not None
    assert (found.answer, found.share) == ("4", pytest.approx(0.6 / 1.1))
    assert probed_answer([ROOT, *leaf(0, says("", 0.0)), *leaf(1, None)]) is None


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize("request_", [replace(MAJORITY, beam_width=3), BEAM])
def test_a_search_out_of_time_answers_from_its_first_probe_on(
    request_: SearchRequest, checkpoint: Checkpoint, make_orchestrator: Callable[..., Orchestrator]
):
    clock = Clock()
    limits = {"max_steps": None, "max_step_tokens": None, "max_tokens": None, "time_limit": 10.0}
    request = replace(request_, **limits, thinking="250", step_rule="tokens:4", probe_every=8, temperature=1.0)
    answers = []
    for steps in range(2, 60, 3):
        model = thinker(checkpoint, *(token for _ in range(200) for token in ("7", "}")))
        orchestrator = make_orchestrator(model, kv_memory_bytes=2**24)
        orchestrator._clock = clock
        clock.now = 0.0
        orchestrator.submit(request)
        if any(orchestrator.step() for _ in range(steps)):
            break
        clock.now = 11.0
        (result,) = [result for _ in range(3) for result in orchestrator.step()]
        orchestrator.engine.check_drained()
        assert result.stop_reason is StopReason.DEADLINE
        read = any(probe.answer for probe in probes_of(result))
        assert ((result.answer != ""), (result.probed is not None)) == (read, read)
        if result.probed:
            assert (result.best, result.probed.share) == (None, 1.0)
        answers.append(result.answer)
    assert "" in answers
    assert "7" in answers
    assert answers == sorted(answers), "once there is an answer, it stays"


@pytest.fixture
def cut_short(checkpoint: Checkpoint, make_orchestrator: Callable[..., Orchestrator]) -> Callable[..., SearchResult]:
    """Runs a search of two paths whose budget ends in mid-thought."""
    model = thinker(checkpoint, *(token for _ in range(200) for token in ("7", "}")))
    request = replace(MAJORITY, beam_width=2, max_steps=None, max_step_tokens=None, max_tokens=None, thinking="250")
    request = replace(request, step_rule="tokens:4", generator_budget=300)

    def search(**changes: object) -> SearchResult:
        return run(make_orchestrator(model), replace(request, **changes)).only

    return search


def test_a_search_whose_budget_ends_in_its_thought_answers_by_its_probes(cut_short: Callable[..., SearchResult]):
    assert cut_short().answer == ""
    result = cut_short(probe_every=8)
    assert (result.answer, result.stop_reason, result.best) == ("7", StopReason.BUDGET, None)
    assert result.probed is not None
    assert result.probed.share == 1.0
    assert result.probed.node_id in {node.node_id for node in result.nodes if node.probe}
    assert result.probed.node_id in result.selected_path


def test_every_endpoint_says_the_probed_answer(cut_short: Callable[..., SearchResult]):
    result = cut_short(probe_every=8)
    received = from_wire(to_wire(result))
    assert (received.answer, received.probed, received.best) == ("7", result.probed, None)
    assert probes_of(received) == probes_of(result)
    asked = {"model": "m", "messages": [{"role": "user", "content": "6+1?"}]}
    completion = Completion("id", read_chat(asked, ModelNames("m", 0)), 0)
    whole, chunks = completion.whole(result), completion.last_chunks(result)
    message = whole["choices"][0]["message"]
    assert (message["content"], whole["choices"][0]["finish_reason"]) == ("\\boxed{7}", "length")
    assert message["reasoning_content"]
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert "".join(delta.get("content", "") for delta in deltas) == message["content"]
    assert whole["espalier"]["probed"]["share"] == 1.0
    assert whole["usage"]["completion_tokens"] == result.usage.generated_tokens
    response = ResponseObject("id", read_response({"model": "m", "input": "6+1?"}, ModelNames("m", 0)), 0).whole(result)
    thought, said = response["output"]
    assert (response["status"], response["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert (thought["content"][0]["text"], said["content"][0]["text"]) == (message["reasoning_content"], "\\boxed{7}")
    stream = ResponseObject("id", read_response({"model": "m", "input": "6+1?"}, ModelNames("m", 0)), 0)
    events = stream.events(Finished("id", result))
    texts = [event["delta"] for event in events if event["type"] == "response.output_text.delta"]
    assert ("".join(texts), events[-1]["response"]["output"]) == ("\\boxed{7}", response["output"])
    event = json.loads(event_json(Finished("id", result), {}))["result"]
    assert (event["answer"], event["probed"]["share"], event["stop_reason"]) == ("7", 1.0, "budget")
    console = Console(record=True, width=200)
    show_result(console, result, None)
    assert "answer  7   (probed: no path has ended; 100% of the probes)" in console.export_text()


def test_a_complete_answer_goes_before_probed_ones(make_orchestrator: Callable[..., Orchestrator]):
    result = run(make_orchestrator(), replace(MAJORITY, probe_every=1)).only
    assert (result.best is None) or result.probed is None


# ---- the scorer


def test_a_path_is_worth_its_certainty_and_how_long_its_answer_has_stayed():
    assert probe_score([]) == 0.5
    assert probe_score([says("5", 0.8)]) == 0.8
    assert probe_score([says("5", 0.9), says("5.0", 0.1), says("6", 0.9), says("6", 0.9)]) == pytest.approx(0.6)
    assert probe_score([says("", 0.0), says("5", 0.9)]) == 0.0


SCORED = [name for name in ALL if name not in ("greedy", "chain")]


@pytest.mark.parametrize("name", SCORED)
def test_every_search_takes_the_scores_of_probes_alone_and_in_company(
    name: str, thinking_model, make_orchestrator: Callable[..., Orchestrator]
):
    request = replace(ALL[name], thinking="16", max_tokens=150, max_steps=7, step_rule="tokens:4", vote=Vote.WEIGHTED)
    request = replace(request, temperature=0.7)

    def probing(**options: object) -> Orchestrator:
        orchestrator = make_orchestrator(thinking_model, None, **options)
        orchestrator._scorer = ProbeScorer()
        orchestrator._resolver = Resolver(orchestrator.engine, orchestrator._generator, ProbeScorer())
        return orchestrator

    alone = run(probing(kv_memory_bytes=2**24), request).only
    assert alone.error == ""
    crowded = probing(kv_memory_bytes=2**23, reserved_share=0.05, max_batch_tokens=16)
    among = run(crowded, request, replace(request, seed=8)).results[0]
    crowded.engine.check_drained()
    assert outcome(among) == outcome(alone)
    assert replay(trace_of(alone)) == len(alone.rounds)
    by_id = {node.node_id: node for node in alone.nodes}
    scored = [node for node in alone.nodes if node.score is not None]
    assert scored
    for node in scored:
        path, at = [], node
        while at.parent_id is not None:
            path.append(at)
            at = by_id[at.parent_id]
        assert node.score == probe_score([step.probe for step in path if step.probe])
    assert alone.usage.verifier_tokens == 0
    assert alone.usage.probe_tokens == sum(probe.tokens for probe in probes_of(alone)) > 0


def test_a_solver_takes_it_by_name():
    settings = RuntimeSettings(verifier="probe", threads=1)
    orchestrator = load_orchestrator(settings)
    try:
        result = run(orchestrator, SearchRequest("Tom has 3 coins. (a) He finds 4 more. How many?", max_tokens=60)).only
        assert [node.probe is not None for node in result.nodes[1:] if node.score is not None]
        assert result.configuration.probe_every == 1
    finally:
        orchestrator.close()


# ---- traces


def test_a_trace_holds_the_probes(thinking_model, make_orchestrator: Callable[..., Orchestrator], tmp_path: Path):
    request = replace(MAJORITY, thinking="24", max_tokens=200, max_steps=None, step_rule="tokens:4", probe_every=8)
    result = run(make_orchestrator(thinking_model), request).only
    write_trace(result, tmp_path / "trace.json")
    trace = read_trace(tmp_path / "trace.json")
    recorded = [Probe(**node["probe"]) for node in trace["nodes"] if node["probe"]]
    assert recorded == probes_of(result)
    assert recorded
    first = next(node for node in trace["nodes"] if node["probe"])
    first["probe"]["certainty"] = 2.0
    (tmp_path / "wrong.json").write_text(json.dumps(trace))
    with pytest.raises(Exception, match=r"probe\.certainty: input should be less than or equal to 1"):
        read_trace(tmp_path / "wrong.json")
