"""Where steps end, what becomes of a path whose step is full, and which of its boxed answers counts."""

from collections.abc import Callable
from dataclasses import replace

import pytest
from engine_driver import scripted
from search_runs import ADAPTIVE, BEAM, BEST_OF_N, GREEDY, MAJORITY, run

from espalier.engine.errors import InvalidRequestError
from espalier.engine.models.model import Model
from espalier.search.algorithms import with_defaults
from espalier.search.request import EarlyStop, SearchRequest
from espalier.search.result import SearchResult
from espalier.search.rules import MARKERS, StepRule, read_step_rule
from espalier.search.run.orchestrator import Orchestrator

PATH = replace(GREEDY, max_steps=None, max_step_tokens=None, max_tokens=200)


@pytest.fixture
def say(
    load_model: Callable[[str], Model], make_orchestrator: Callable[..., Orchestrator]
) -> Callable[..., SearchResult]:
    """Runs a search on a generator that says the given texts, and then ends."""

    def search(*script: str, request: SearchRequest = PATH, **changes: object) -> SearchResult:
        talker = load_model("talker")
        ids = [token for text in script for token in talker.tokenizer.encode(text)]
        model = scripted(talker, ids + [talker.eos_token_ids[0]] * 600)
        orchestrator = make_orchestrator(model, "classifier", kv_memory_bytes=2**23)
        result = run(orchestrator, replace(request, **changes)).only
        orchestrator.engine.check_drained()
        return result

    return search


def steps(result: SearchResult) -> list[str]:
    return [node.text for node in sorted(result.nodes, key=lambda node: node.path)[1:]]


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("paragraph", StepRule("\n\n")),
        ("markers", StepRule(markers=MARKERS)),
        ("tokens:64", StepRule(tokens=64)),
        ("text:###", StepRule("###")),
        ("text: a:b", StepRule(" a:b")),
    ],
)
def test_a_rule_is_read_from_its_text(text: str, rule: StepRule):
    assert read_step_rule(text) == rule
    SearchRequest("1+1?", step_rule=text).validate()


@pytest.mark.parametrize(
    "text",
    ["", "lines", "tokens:", "tokens:0", "tokens:1.5", "tokens:²", "tokens:9999999", "text:", "text:" + "a" * 65],
)
def test_a_rule_that_is_none_is_refused_by_name(text: str):
    with pytest.raises(InvalidRequestError, match="step_rule"):
        SearchRequest("1+1?", step_rule=text).validate()


def test_by_default_a_step_is_a_paragraph(say: Callable[..., SearchResult]):
    assert steps(say("Tom\n\nHe\nfinds\n\n2")) == ["Tom\n\n", "He\nfinds\n\n", "2"]


def test_a_step_may_be_a_number_of_tokens(say: Callable[..., SearchResult]):
    result = say("1", "2", "\n\n", "3", "4", "5", "6", step_rule="tokens:3")
    assert steps(result) == ["12\n\n", "345", "6"]
    assert [node.tokens for node in result.nodes[1:]] == [3, 3, 2]
    assert result.configuration.max_step_tokens == 3


def test_a_step_may_end_with_a_text_wherever_the_tokens_cut_it(say: Callable[..., SearchResult]):
    assert steps(say("#", "#", "# 1", "##", "#", "2\n\n", "3", step_rule="text:###")) == ["### 1###", "2\n\n3"]


def test_a_step_may_end_where_a_sentence_begins_with_a_marker(say: Callable[..., SearchResult]):
    text = "So 3. Waiting 4. Wait, so So. Some\n\nSo it is 5.\nHmm"
    assert steps(say(*text, step_rule="markers")) == ["So 3. Waiting 4. Wait,", " so So. Some\n\nSo ", "it is 5.\nHmm"]


def test_a_full_step_ends_and_its_path_goes_on(say: Callable[..., SearchResult]):
    result = say("1", "2", "3", "\n\n", "\\boxed{1}", "\n\n", max_step_tokens=2)
    assert steps(result) == ["12", "3\n\n", "\\boxed{1}\n\n"]
    assert (result.answer, result.nodes[-1].termination) == ("1", "boxed")


def test_in_beam_search_too(say: Callable[..., SearchResult]):
    result = say(
        "1", "2", "3", "\n\n", "\\boxed{1}", "\n\n", request=BEAM, beam_width=1, expansion=1, max_step_tokens=2
    )
    assert steps(result) == ["12", "3\n\n", "\\boxed{1}\n\n"]
    assert result.answer == "1"


@pytest.mark.parametrize("request_", [GREEDY, MAJORITY, BEST_OF_N, ADAPTIVE])
def test_searches_of_whole_paths_have_no_limits_on_steps_unless_asked_for(request_: SearchRequest):
    free = with_defaults(replace(request_, max_steps=None, max_step_tokens=None))
    assert (free.max_steps, free.max_step_tokens) == (None, None)
    assert with_defaults(replace(request_, max_steps=7)).max_steps == 7
    assert with_defaults(replace(BEAM, max_steps=None, max_step_tokens=None)).max_steps == 40


def test_a_greedy_path_goes_on_for_more_than_forty_steps(say: Callable[..., SearchResult]):
    numbers = [text for i in range(50) for text in (f"{i * i % 83}+{i}", "\n\n")]
    result = say(*numbers, "\\boxed{1}", max_tokens=400)
    assert result.answer == "1"
    assert len(result.nodes) == 52


def test_a_path_that_is_as_long_as_it_may_be_has_no_answer(say: Callable[..., SearchResult]):
    result = say("\\boxed{1}", "2", "3", "4", max_tokens=3)
    assert (result.answer, result.nodes[-1].termination) == ("", "length")


def test_a_path_ends_with_the_paragraph_of_its_first_box(say: Callable[..., SearchResult]):
    script = "\\boxed{0}", "\n\n", "no", "\n\n", "\\boxed{1}"
    assert say(*script).answer == "0"
    assert say(*script, end_at_box=False).answer == "1"


def test_boxes_of_one_answer_apart_are_read_together_at_the_end_of_the_path(say: Callable[..., SearchResult]):
    assert say("\\boxed{1}", "\n\n", "or", "\n\n", "\\boxed{2}", end_at_box=False).answer == "1, 2"


@pytest.mark.parametrize("rule", ["tokens:1", "tokens:2", "tokens:3", "tokens:5", "text:d", "markers"])
def test_under_every_rule_a_box_ends_its_path_with_its_paragraph(say: Callable[..., SearchResult], rule: str):
    result = say(*"It is \\boxed{", "12", "}.", "\n\n", *"No it is \\boxed{3}", "\n\n", step_rule=rule)
    if rule.startswith("tokens"):
        assert result.answer == "12"
        assert "".join(steps(result)).startswith("It is \\boxed{12}.\n\n")
    assert result.answer in ("12", "3")


def test_short_steps_are_no_loop_and_repeated_paragraphs_are_one(say: Callable[..., SearchResult]):
    assert say(*"111 222\n\n333", "\n\n", "\\boxed{1}", "\n\n", step_rule="tokens:1").answer == "1"
    lines = "1+2=3", "\n\n", "2+1=4", "\n\n"
    result = say(*lines * 20, step_rule="tokens:2")
    assert result.nodes[-1].termination == "degenerate"
    assert result.usage.generated_tokens < 80


def test_the_rule_changes_where_steps_end_and_not_what_an_independent_path_says(
    make_orchestrator: Callable[..., Orchestrator],
):
    texts = set()
    for rule in ("paragraph", "text:\n\n"):
        result = run(make_orchestrator(), replace(MAJORITY, step_rule=rule, early_stop=EarlyStop.OFF)).only
        texts.add(tuple(sorted((node.path, node.text) for node in result.nodes)))
    assert len(texts) == 1
