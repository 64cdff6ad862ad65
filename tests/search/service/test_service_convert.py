from dataclasses import fields, replace

import pytest
from scripted_orchestrator import CANDIDATE, NODES, result_of

from espalier.engine.errors import InvalidRequestError
from espalier.search.conversation import ChatMessage, ChatRole
from espalier.search.request import Aggregation, AlgorithmName, EarlyStop, SearchRequest, Vote
from espalier.search.result import (
    Candidate,
    CandidateDone,
    Event,
    Finished,
    NodeRecord,
    ScoredStep,
    SearchResult,
    Started,
    StepDone,
    StopReason,
    Usage,
)
from espalier.search.rollout import Labels, RolloutRequest, RolloutStep
from espalier.search.service.grpc_api.convert import (
    event_from_wire,
    event_to_wire,
    from_wire,
    request_from_wire,
    request_to_wire,
    to_wire,
)
from espalier.search.service.queues import fitted
from espalier.v1 import search_pb2 as pb

FULL = SearchRequest(
    problem="Où est ∑?",
    algorithm=AlgorithmName.BEST_OF_N,
    beam_width=7,
    expansion=3,
    vote=Vote.NAIVE,
    aggregation=Aggregation.PROD,
    temperature=0.0,
    top_k=40,
    top_p=0.9,
    min_p=0.05,
    repetition_penalty=1.05,
    presence_penalty=-1.5,
    frequency_penalty=0.25,
    logit_bias="3:-100.0,50256:2.5",
    max_steps=5,
    max_step_tokens=77,
    step_rule="markers",
    end_at_box=False,
    max_tokens=1000,
    seed=2**62,
    lookahead_steps=2,
    simulations=48,
    exploration=0.75,
    rebase_temperature=0.2,
    iterations=3,
    confidence=0.9,
    generator_budget=5000,
    verifier_budget=2**33,
    time_limit=12.5,
    merge_duplicates=False,
    history=(
        ChatMessage(ChatRole.SYSTEM, "Be brief."),
        ChatMessage(ChatRole.PROBLEM, ""),
        ChatMessage(ChatRole.ASSISTANT, "", more='{"tool_calls": [{"function": {"name": "sum", "arguments": "{}"}}]}'),
        ChatMessage(ChatRole.TOOL, "5", more='{"tool_call_id": "c1"}'),
        ChatMessage(ChatRole.SYSTEM, "In ∑."),
    ),
    early_stop=EarlyStop.FRUGAL,
)
ONLY_HERE = {"rounds", "sampled", "error"}
"""Of a result. One that failed leaves the server as a status."""
RESULT = result_of(FULL, "s1", StopReason.FINISHED)
GROWN = StepDone("s1", 2, 0, (), CANDIDATE, True, NODES, 1.25, {"generator": 17, "verifier": 2**40})


@pytest.mark.parametrize(
    ("message", "kind", "renamed"),
    [
        (pb.SolveProblemRequest, SearchRequest, {"include_nodes": None, "priority": None}),
        (pb.SearchResult, SearchResult, {"omitted_candidates": None, "omitted_nodes": None}),
        (
            pb.Usage,
            Usage,
            {
                "queue_duration": "queue_seconds",
                "first_step_duration": "first_step_seconds",
                "search_duration": "seconds",
            },
        ),
        (pb.Candidate, Candidate, {}),
        (pb.ScoredStep, ScoredStep, {}),
        (pb.SearchNode, NodeRecord, {"depth": None}),
        (pb.StepDone, StepDone, {"search_duration": "seconds", "omitted_nodes": None}),
        (pb.SearchStarted, Started, {"": "prompt_tokens"}),
        (pb.CandidateDone, CandidateDone, {}),
        (pb.RolloutRequest, RolloutRequest, {"priority": None}),
        (pb.RolloutStep, RolloutStep, {}),
    ],
)
def test_every_field_of_a_dataclass_is_on_the_wire_and_the_other_way_round(message, kind, renamed):
    on_wire = {renamed.get(field.name, field.name) for field in message.DESCRIPTOR.fields} - {None}
    on_wire |= {renamed[name] for name in renamed if not name}  # only here

    assert on_wire == {field.name for field in fields(kind)} - ONLY_HERE


@pytest.mark.parametrize("request_", [FULL, SearchRequest("x"), replace(FULL, vote=None, temperature=None, seed=0)])
def test_a_request_survives_the_wire(request_):
    assert request_from_wire(request_to_wire(request_)) == (request_, [])


@pytest.mark.parametrize(
    ("field", "member"),
    [(f, m) for f, kind in (("algorithm", AlgorithmName), ("vote", Vote), ("aggregation", Aggregation)) for m in kind],
)
def test_every_enum_member_survives_the_wire(field, member):
    request = replace(FULL, **{field: member})

    assert request_from_wire(request_to_wire(request))[0] == request


@pytest.mark.parametrize(
    ("wire", "kind"),
    [
        (pb.Algorithm, AlgorithmName),
        (pb.Vote, Vote),
        (pb.Aggregation, Aggregation),
        (pb.StopReason, StopReason),
        (pb.Labels, Labels),
    ],
)
def test_the_wire_has_no_enum_value_without_a_member(wire, kind):
    assert len(wire.items()) == len(kind) + 1  # and UNSPECIFIED


def test_fields_left_out_take_the_dataclass_defaults():
    assert request_from_wire(pb.SolveProblemRequest(problem="x")) == (SearchRequest("x"), [])


def test_values_no_message_can_hold_are_listed_before_anything_is_sent():
    with pytest.raises(InvalidRequestError) as caught:
        request_to_wire(replace(FULL, beam_width=2**40, seed=-(2**70), problem="\ud800"))

    assert {v.field for v in caught.value.violations} == {"beam_width", "seed", "problem"}


def test_a_result_survives_the_wire_with_its_tree():
    assert from_wire(to_wire(RESULT)) == RESULT


def test_a_result_without_answer_survives_the_wire():
    result = replace(result_of(FULL, "s2", StopReason.CANCELLED), nodes=())

    assert result.best is None
    assert from_wire(to_wire(result)) == result


@pytest.mark.parametrize(
    "event",
    [
        Started("s1", FULL),
        StepDone("s1", 2, 16, NODES),
        GROWN,
        CandidateDone("s1", CANDIDATE),
        Finished("s1", RESULT),
    ],
)
def test_an_event_survives_the_wire(event):
    assert event_from_wire(event_to_wire(event)) == event


def test_an_event_of_a_newer_server_is_no_event():
    assert event_from_wire(pb.SolveProblemStreamResponse()) is None


@pytest.mark.parametrize(
    "word", ["", "eos", "boxed", "length", "budget", "degenerate", "duplicate", "pruned", "cancelled"]
)
def test_every_termination_survives_the_wire(word):
    node = replace(NODES[2], termination=word)

    event = event_from_wire(event_to_wire(StepDone("s1", 1, 1, (node,))))

    assert isinstance(event, StepDone)
    assert event.kept == (node,)


def test_a_termination_the_contract_has_no_word_for_does_not_fail_the_search():
    node = replace(NODES[2], termination="invented-later")

    event = event_from_wire(event_to_wire(StepDone("s1", 1, 1, (node,))))

    assert isinstance(event, StepDone)
    assert event.kept[0].termination == "unspecified"


def within(limit: int, event: Event) -> pb.SolveProblemStreamResponse:
    message = fitted(event, event_to_wire, pb.SolveProblemStreamResponse.ByteSize, limit)
    assert message is not None
    assert message.ByteSize() <= limit
    return message


def test_a_result_over_the_size_limit_gives_up_its_tree_first():
    cut = within(4096, Finished("s", replace(RESULT, nodes=NODES * 1000))).result
    assert (cut.omitted_nodes, len(cut.nodes)) == (4000, 0)
    assert (cut.omitted_candidates, len(cut.candidates)) == (0, 1)


def test_a_result_over_the_size_limit_gives_up_its_last_candidates_and_keeps_the_answer():
    many = tuple(replace(CANDIDATE, node_id=i) for i in range(1000))
    cut = within(4096, Finished("s", replace(RESULT, candidates=many))).result
    assert len(cut.candidates) + cut.omitted_candidates == 1000
    assert [c.node_id for c in cut.candidates] == list(range(len(cut.candidates)))
    assert cut.candidates
    assert (cut.answer, cut.best.answer) == ("42", "42")


def test_a_result_that_nothing_makes_small_enough_is_sent_without_tree_and_candidates():
    cut = fitted(Finished("s", RESULT), event_to_wire, lambda message: message.ByteSize(), 10)
    assert cut is not None
    assert (len(cut.result.nodes), len(cut.result.candidates), cut.result.answer) == (0, 0, "42")


STEP = StepDone("s1", 3, 4, NODES[1:3] * 100, CANDIDATE, nodes=NODES * 50, blocks={"generator": 9})


@pytest.mark.parametrize("event", [Finished("s", RESULT), STEP, CandidateDone("s1", CANDIDATE), Started("s1", FULL)])
def test_an_event_within_the_size_limit_is_left_alone(event: Event):
    whole = event_to_wire(event)
    assert within(whole.ByteSize(), event) == whole


def test_a_step_report_over_the_size_limit_gives_up_its_nodes_and_the_steps_of_its_best_path():
    cut = within(event_to_wire(STEP).ByteSize() - 1, STEP).step
    assert (len(cut.kept), len(cut.nodes), cut.omitted_nodes) == (0, 0, 200)
    assert (cut.depth, cut.scored, cut.best.answer, len(cut.best.steps)) == (3, 4, "42", 0)
    assert dict(cut.blocks) == {"generator": 9}


def test_a_step_report_that_is_cut_names_no_best_path_where_there_is_none():
    assert not within(60, replace(STEP, best=None)).step.HasField("best")


def test_a_candidate_over_the_size_limit_gives_up_its_steps():
    cut = within(40, CandidateDone("s1", CANDIDATE)).candidate.candidate
    assert (cut.answer, len(cut.steps)) == ("42", 0)


@pytest.mark.parametrize("event", [STEP, CandidateDone("s1", CANDIDATE), Started("s1", FULL)])
def test_progress_that_cannot_be_cut_to_the_size_limit_is_left_out(event: Event):
    assert fitted(event, event_to_wire, lambda message: message.ByteSize(), 10) is None


def test_a_message_without_a_role_is_a_violation_of_the_history():
    message = pb.SolveProblemRequest(problem="x", history=[pb.ChatMessage(content="y")])
    _, violations = request_from_wire(message)
    assert [violation.field for violation in violations] == ["history"]
