import json
import math
from dataclasses import replace

import pytest

from espalier.engine.errors import InvalidRequestError
from espalier.search.completion import ChatPrompt, CompletionRequest
from espalier.search.conversation import ChatMessage, ChatRole, conversation_text
from espalier.search.request import AlgorithmName, SearchRequest
from espalier.search.rollout import RolloutRequest
from espalier.search.schema import declared, from_values
from espalier.search.scores import ScoreSessionRequest

GOOD = {"problem": "1+1?"}


def violations(**fields: object) -> list[str]:
    """Names of the fields that are refused, in order."""
    try:
        SearchRequest(**{**GOOD, **fields}).validate()
    except InvalidRequestError as error:
        return [violation.field for violation in error.violations]
    return []


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"beam_width": 256, "expansion": 4},
        {"beam_width": 16, "expansion": 64},
        {"temperature": 0.0, "top_p": 1.0},
        {"temperature": 10.0, "top_p": 1e-9},
        {"max_steps": 2**20, "max_step_tokens": 2**20, "max_tokens": 2**20},
        {"max_steps": 1, "max_step_tokens": 1, "max_tokens": 1},
        {"seed": 2**63 - 1},
        {"problem": "x" * 32 * 1024},
        {"lookahead_steps": 1, "simulations": 1, "iterations": 1, "exploration": 0.0, "confidence": 0.5},
        {"lookahead_steps": 16, "simulations": 1024, "iterations": 64, "exploration": 100.0, "confidence": 1.0},
        {"rebase_temperature": 0.001},
        {"rebase_temperature": 100.0},
        {"algorithm": AlgorithmName.PARTICLE, "beam_width": 256, "expansion": 64},
        {"algorithm": AlgorithmName.MAJORITY, "beam_width": 256, "expansion": 64},  # M does not apply
    ],
)
def test_requests_at_their_bounds_are_taken(fields: dict[str, object]):
    assert violations(**fields) == []


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("problem", ""),
        ("problem", " \n"),
        ("problem", "x" * (32 * 1024 + 1)),
        ("problem", "ü" * (16 * 1024 + 1)),
        ("beam_width", 0),
        ("expansion", -1),
        ("expansion", 65),
        ("max_steps", 0),
        ("max_steps", 2**20 + 1),
        ("max_step_tokens", 0),
        ("max_step_tokens", 2**20 + 1),
        ("max_tokens", 0),
        ("max_tokens", 2**20 + 1),
        ("temperature", -0.1),
        ("temperature", 10.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("top_k", -1),
        ("top_k", 2**31),
        ("min_p", -0.1),
        ("min_p", 1.5),
        ("min_p", math.nan),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_p", math.nan),
        ("lookahead_steps", 0),
        ("lookahead_steps", 17),
        ("simulations", 0),
        ("simulations", 1025),
        ("iterations", 0),
        ("iterations", 65),
        ("exploration", -0.1),
        ("exploration", 100.5),
        ("exploration", math.nan),
        ("rebase_temperature", 0.0),
        ("rebase_temperature", 101.0),
        ("rebase_temperature", math.nan),
        ("confidence", 0.4),
        ("confidence", 1.1),
        ("confidence", math.nan),
        ("seed", -1),
        ("seed", 2**63),
    ],
)
def test_a_field_out_of_its_bounds_is_named(field: str, value: object):
    assert violations(**{field: value}) == [field]


def test_too_many_candidates_are_refused_though_each_factor_is_allowed():
    assert violations(beam_width=256, expansion=5) == ["expansion"]


def test_too_large_a_tree_is_refused_though_each_factor_is_allowed():
    assert violations(algorithm=AlgorithmName.MCTS, simulations=64, expansion=64) == []
    assert violations(algorithm=AlgorithmName.MCTS, simulations=65, expansion=64) == ["simulations"]


def test_every_violation_is_listed_and_not_only_the_first():
    wrong = {"problem": " ", "beam_width": 300, "max_steps": 0, "temperature": -1.0, "top_p": 2.0, "seed": -5}
    assert violations(**wrong) == ["problem", "beam_width", "temperature", "top_p", "max_steps", "seed", "expansion"]


def test_a_violation_names_the_limit_and_the_value():
    with pytest.raises(InvalidRequestError, match="max_steps: must be between 1 and 1048576, is 2000000"):
        SearchRequest("1+1?", max_steps=2_000_000).validate()


def test_a_problem_that_is_not_valid_unicode_is_a_violation():
    assert violations(problem="half a pair: \ud800") == ["problem"]


KINDS = {
    SearchRequest: SearchRequest("x"),
    CompletionRequest: CompletionRequest(("x",)),
    ScoreSessionRequest: ScoreSessionRequest("x"),
    RolloutRequest: RolloutRequest(problem="x"),
}


@pytest.mark.parametrize(
    ("kind", "name"),
    [(kind, field.name) for kind in KINDS for field in declared(kind) if field.kind is str],
)
@pytest.mark.parametrize("text", ["text:\ud800", "\udfff", "json:\ud800\ud800"])
def test_a_text_that_is_not_valid_unicode_is_a_violation_in_every_field(kind: type, name: str, text: str):
    """A step's delimiter of half a pair, which JSON can say, ended the engine."""
    with pytest.raises(InvalidRequestError, match=rf"{name}: must be valid Unicode, has an unpaired surrogate"):
        replace(KINDS[kind], **{name: text}).validate()


@pytest.mark.parametrize(
    "prompt",
    [
        ChatPrompt(({"role": "user", "content": "x"},), variables={"a": [{"b": "\ud800"}]}),
        ChatPrompt(({"role": "user", "content": "x"},), variables={"\ud800": 1}),
        ChatPrompt(({"role": "user", "content": "x"}, {"role": "assistant", "content": "", "reasoning": "\ud800"})),
    ],
    ids=["variable", "name", "thought"],
)
def test_all_that_a_template_may_write_is_valid_unicode(prompt: ChatPrompt):
    with pytest.raises(InvalidRequestError, match="prompts: must be valid Unicode"):
        CompletionRequest((prompt,)).validate()


def test_a_request_is_plain_json():
    request = SearchRequest("1+1?", temperature=0.5, history=(ChatMessage(ChatRole.USER, "Hello."),))
    assert from_values(SearchRequest, json.loads(json.dumps(request.to_dict()))) == request


# ---- the messages before the problem


def said(role: str, content: str = "So.") -> ChatMessage:
    return ChatMessage(ChatRole(role), content)


def calling(more: str = '{"tool_calls": [{"function": {"name": "price", "arguments": "{}"}}]}') -> ChatMessage:
    return ChatMessage(ChatRole.ASSISTANT, "", more=more)


@pytest.mark.parametrize(
    "history",
    [
        (said("system"),),
        (said("user"), said("assistant")),
        (said("assistant"), said("user"), said("user")),
        (said("user", ""),),
        (said("user", "x" * 128 * 1024),),
        (said("user"),) * 256,
        (said("system"), said("user"), said("system"), said("system")),
        (said("problem"), calling(), said("tool"), said("system")),
    ],
)
def test_a_history_at_its_bounds_is_taken(history: tuple[ChatMessage, ...]):
    assert violations(history=history) == []


@pytest.mark.parametrize(
    ("history", "named"),
    [
        ((said("problem"), said("user")), "history"),
        ((said("problem"), said("problem")), "history"),
        ((said("problem"), said("assistant"), said("system")), "history"),
        ((calling("[]"),), "history"),
        ((calling('{"tool_calls": [{}]}'),), "history"),
        ((calling('{"role": "system"}'),), "history"),
        ((said("user", "half a pair: \ud800"),), "history"),
        ((said("user", "x" * (128 * 1024 + 1)),), "history"),
        ((said("user"),) * 257, "history"),
        ([said("user")], "history"),
        (({"role": "user", "content": "So."},), "history"),
        ((ChatMessage("boss", "So."),), "history"),  # pyright: ignore[reportArgumentType]
        ((ChatMessage(ChatRole.USER, 3),), "history"),  # pyright: ignore[reportArgumentType]
    ],
)
def test_a_history_that_breaks_a_rule_is_named(history: object, named: str):
    assert violations(history=history) == [named]


def test_a_conversation_as_plain_text_names_its_speakers_and_leaves_out_the_system():
    assert conversation_text("And twice that?", ()) == "And twice that?"
    assert conversation_text("And twice that?", (said("system"),)) == "And twice that?"
    turns = (said("system"), said("user", "6*7?"), said("assistant", "42."))
    assert conversation_text("And twice that?", turns) == "User: 6*7?\n\nAssistant: 42.\n\nUser: And twice that?"
    behind = (said("problem"), said("system"), calling(), said("tool", "5"), said("system"))
    assert conversation_text("A pen?", behind) == "User: A pen?\n\nAssistant: price({})\n\nTool: 5"
    assert conversation_text("A pen?", behind[:2]) == "A pen?"
