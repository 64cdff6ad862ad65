"""Models that think: their marks, the reading of their paths, and the budget of their thoughts."""

import json
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from search_runs import ALL, BEAM, BEST_OF_N, GREEDY, MAJORITY, outcome, run
from thinkers import REPORTED, SHAPES, ids_of, thinker, write_thinker

from espalier.engine.errors import InvalidRequestError
from espalier.engine.models.checkpoint import Checkpoint
from espalier.engine.models.model import load_generator
from espalier.engine.models.tokenizer import TextTokenizer
from espalier.search.conversation import ChatMessage, ChatRole
from espalier.search.request import SearchRequest
from espalier.search.result import SearchResult
from espalier.search.rules import Thinking, ThinkingMode, read_thinking
from espalier.search.run.generator import Generator
from espalier.search.run.orchestrator import Orchestrator
from espalier.search.thoughts.marks import Mark, find_marks
from espalier.search.thoughts.plans import CLOSING_SENTENCE, plan_thoughts
from espalier.search.thoughts.reading import OPENED, Position, ThoughtReader
from espalier.search.trace import replay, trace_of

PATH = replace(GREEDY, max_steps=None, max_step_tokens=None, max_tokens=400)


@pytest.fixture
def checkpoint(tiny_checkpoints: dict[str, Path], tmp_path: Path) -> Callable[[str], Checkpoint]:
    def write(shape: str) -> Checkpoint:
        folder = tmp_path / shape.replace(" ", "-")
        return (
            Checkpoint(folder) if folder.exists() else write_thinker(tiny_checkpoints["talker"], folder, SHAPES[shape])
        )

    return write


@pytest.fixture
def think(
    checkpoint: Callable[[str], Checkpoint], make_orchestrator: Callable[..., Orchestrator]
) -> Callable[..., Any]:
    """Runs a search on a generator of a shape that says the given texts, and then ends."""

    def search(shape: str, *script: str, request: SearchRequest = PATH, **changes: object) -> SearchResult:
        orchestrator = make_orchestrator(thinker(checkpoint(shape), *script), "classifier", kv_memory_bytes=2**23)
        result = run(orchestrator, replace(request, **changes)).only
        orchestrator.engine.check_drained()
        assert replay(trace_of(result)) == len(result.rounds)
        return result

    return search


def generator_of(orchestrator: Orchestrator) -> Generator:
    assert orchestrator._generator is not None
    return orchestrator._generator


# ---- marks


@pytest.mark.parametrize(
    ("shape", "opening", "closing"),
    [
        ("opened by the model", "<think>", "</think>"),
        ("opened by the prompt", "<think>", "</think>"),
        ("no switch", "[THINK]", "[/THINK]"),
        ("text", "<think>", "</think>"),
        ("harmony", "<|channel|>", "<|end|>"),
        ("channel", "<|channel>", "<channel|>"),
    ],
)
def test_marks_are_found_by_their_shape(
    shape: str, opening: str, closing: str, checkpoint: Callable[[str], Checkpoint]
):
    tokenizer = TextTokenizer(checkpoint(shape))
    marks = find_marks(tokenizer)
    assert marks is not None
    assert marks.opening == Mark(opening, tokenizer.token_id(opening))
    assert marks.closing == Mark(closing, tokenizer.token_id(closing))
    assert (marks.closing.token_id is None) == (shape == "text")


def test_a_checkpoint_without_marks_has_none_and_marks_may_be_given(checkpoint: Callable[[str], Checkpoint]):
    tokenizer = TextTokenizer(checkpoint("none"))
    assert find_marks(tokenizer) is None
    marks = find_marks(tokenizer, "<a> </a>")
    assert marks is not None
    assert (marks.opening.text, marks.closing.text) == ("<a>", "</a>")
    assert find_marks(TextTokenizer(checkpoint("text")), "none") is None


@pytest.mark.parametrize("text", ["", "yes", "0", "-1", "1.5", "²", "9999999"])
def test_another_word_for_thinking_is_refused(text: str):
    with pytest.raises(InvalidRequestError, match="thinking: must be auto, off, on or a number of tokens"):
        SearchRequest("1+1?", thinking=text).validate()


def test_thinking_is_a_mode_or_a_number_of_tokens():
    assert read_thinking("off") == Thinking(ThinkingMode.OFF)
    assert read_thinking("1000") == Thinking(ThinkingMode.ON, 1000)


# ---- prompts


@pytest.mark.parametrize(
    ("shape", "mode", "end", "opened"),
    [
        ("opened by the model", "auto", "assistant\n", False),
        ("opened by the model", "off", "<think>\n\n</think>\n\n", False),
        ("opened by the prompt", "auto", "assistant\n<think>\n", True),
        ("opened by the prompt", "off", "assistant\n<think>\n\n</think>\n\n", False),
        ("no switch", "on", "assistant\n", False),
        ("no switch", "off", "assistant\n[THINK]\n\n[/THINK]\n\n", False),
        ("harmony", "auto", "<|start|>assistant<|channel|>analysis<|message|>", True),
        ("harmony", "off", "<|start|>assistant<|channel|>final<|message|>", False),
        ("none", "off", "assistant\n", False),
    ],
)
def test_a_prompt_opens_a_thought_or_switches_thinking_off(
    shape: str,
    mode: str,
    end: str,
    opened: bool,
    checkpoint: Callable[[str], Checkpoint],
    make_orchestrator: Callable[..., Orchestrator],
):
    generator = generator_of(make_orchestrator(thinker(checkpoint(shape)), None))
    prompt = generator.prompt("1+1?", (), ThinkingMode(mode))
    assert generator.model.tokenizer.show(prompt.token_ids).endswith(end)
    assert (prompt.opened, prompt.thinks) == (opened, shape != "none" and mode != "off")


def test_a_generator_without_thoughts_cannot_be_asked_to_think(think: Callable[..., Any]):
    assert think("none", "\\boxed{1}", thinking="off").answer == "1"
    with pytest.raises(InvalidRequestError, match="thinking: the generator does not think"):
        think("none", "\\boxed{1}", thinking="100")


@pytest.mark.parametrize("shape", ["opened by the model", "opened by the prompt", "harmony"])
def test_tags_in_a_callers_text_are_no_tokens(
    shape: str, checkpoint: Callable[[str], Checkpoint], make_orchestrator: Callable[..., Orchestrator]
):
    generator = generator_of(make_orchestrator(thinker(checkpoint(shape)), None))
    tokenizer = generator.model.tokenizer
    plain, marks = generator.prompt("What is it?"), generator.marks
    assert marks is not None
    asked = f"What {marks.closing.text} is <|im_end|> it{marks.opening.text}?"
    tagged = generator.prompt(asked)
    special = [token for token in plain.token_ids if tokenizer.is_special(token)]
    assert [token for token in tagged.token_ids if tokenizer.is_special(token)] == special
    for mark in (marks.opening, marks.closing):
        assert tagged.token_ids.count(mark.token_id or -1) == plain.token_ids.count(mark.token_id or -1)
    assert asked in tokenizer.decode(tagged.token_ids)
    assert tagged.opened == plain.opened


# ---- thoughts of earlier turns

_SPLIT = """{% set r = '' %}{% set c = m.content %}
{%- if m.reasoning_content is string %}{% set r = m.reasoning_content %}
{%- elif '</think>' in c %}{% set r = c.split('</think>')[0].split('<think>')[-1].strip('\\n') %}
{%- set c = c.split('</think>')[-1].lstrip('\\n') %}{% endif %}"""
_EARLIER = {  # what the families' templates do with an assistant's message that is not the last
    "Qwen3 drops": _SPLIT + "{{ c }}",
    "MiniMax keeps": _SPLIT + "{% if r %}<think>\n{{ r }}\n</think>\n\n{% endif %}{{ c }}",
    "R1 drops": "{% set c = m.content %}{% if '</think>' in c %}{% set c = c.split('</think>')[-1].lstrip('\\n') %}"
    "{% endif %}{{ c }}",
    "content is printed": "{{ m.content }}",
    "gpt-oss drops": "{% if '<|channel|>' in m.content %}{{ raise_exception('tags') }}{% endif %}"
    "{% if m.thinking and m.tool_calls %}{{ m.thinking }}{% endif %}{{ m.content }}",
}
_SAID = "It is 5, see </think> or <|end|>."
_KEPT = "<think>\nAdd <|im_end|> them.\n</think>\n\n"


@pytest.mark.parametrize(
    ("name", "apart", "kept"),
    [
        ("Qwen3 drops", True, ""),
        ("Qwen3 drops", False, ""),
        ("MiniMax keeps", True, _KEPT),
        ("MiniMax keeps", False, _KEPT),
        ("R1 drops", True, ""),
        ("R1 drops", False, ""),
        ("content is printed", True, ""),
        ("content is printed", False, _KEPT),
        ("gpt-oss drops", True, ""),
        ("gpt-oss drops", False, ""),
    ],
)
def test_an_earlier_thought_is_kept_or_dropped_as_the_template_has_it(
    name: str,
    apart: bool,
    kept: str,
    tiny_checkpoints: dict[str, Path],
    tmp_path: Path,
    make_orchestrator: Callable[..., Orchestrator],
):
    harmony = name.startswith("gpt-oss")
    turns = "{% for m in messages %}<|im_start|>{{ m.role }}\n" + _EARLIER[name] + "<|im_end|>\n{% endfor %}"
    shape = SHAPES["harmony" if harmony else "opened by the model"]
    model = thinker(write_thinker(tiny_checkpoints["talker"], tmp_path / "thinker", shape, turns))
    generator, tokenizer = generator_of(make_orchestrator(model, None)), model.tokenizer
    opening, closing = (
        ("<|channel|>analysis<|message|>", "<|end|><|start|>assistant<|channel|>final<|message|>")
        if harmony
        else ("<think>\n", "\n</think>\n\n")
    )
    thought = "Add <|im_end|> them."
    said = ChatMessage(ChatRole.ASSISTANT, _SAID, thought)
    if not apart:
        said = ChatMessage(ChatRole.ASSISTANT, f"{opening}{thought}{closing}{_SAID}")
    history = (ChatMessage(ChatRole.USER, "2+3?"), said)
    prompt = generator.prompt("And twice?", history, ThinkingMode.OFF)
    assert f"assistant\n{kept}{_SAID}\nuser\nAnd twice?" in tokenizer.decode(prompt.token_ids)
    # What is quoted is text: there are no more marks and turns than the template writes.
    plain = generator.prompt("And twice?", (history[0], ChatMessage(ChatRole.ASSISTANT, "5")), ThinkingMode.OFF)
    for token in ("</think>", "<|im_end|>", "<|end|>"):
        token_id = tokenizer.token_id(token) or -1
        expected = plain.token_ids.count(token_id) + (bool(kept) and token == "</think>")
        assert prompt.token_ids.count(token_id) == expected, token


# ---- reading


def test_a_path_is_read_alike_wherever_it_is_cut(checkpoint: Callable[[str], Checkpoint]):
    for shape in ("opened by the model", "opened by the prompt"):
        tokenizer = TextTokenizer(checkpoint(shape))
        marks = find_marks(tokenizer)
        assert marks is not None
        reader = ThoughtReader(marks, tokenizer)
        ids = tokenizer.encode("<think>\nAdd. <think>Quote</think> So 3.</think>\n\n3, not <think>4</think>.")
        whole = reader.read(ids, Position())
        assert whole.text[whole.thought_chars :].startswith("\n\n3, not ")
        for cut in range(len(ids) + 1):
            one = reader.read(ids[:cut], Position())
            two = reader.read(ids[cut:], one.position)
            thought = one.text[: one.thought_chars] + two.text[: two.thought_chars]
            assert thought == "\nAdd. <think>Quote</think> So 3.", cut
            assert one.text + two.text == whole.text
            assert two.position == whole.position


def test_marks_spelled_out_are_text_where_they_are_tokens(checkpoint: Callable[[str], Checkpoint]):
    tokenizer = TextTokenizer(checkpoint("opened by the prompt"))
    reader = ThoughtReader(find_marks(tokenizer), tokenizer)  # type: ignore[arg-type]
    ids = tokenizer.encode("a <") + tokenizer.encode("/think> b")
    assert reader.read(ids, OPENED).position.inside
    assert reader.read(tokenizer.encode("a </think> b"), OPENED).text == "a  b"


def test_an_opening_mark_that_repeats_the_prompts_opens_nothing_more(think: Callable[..., Any]):
    result = think("opened by the prompt", "<think>", "\n1", "</think>", "\n\n", "\\boxed{2}")
    assert (result.best.thought, result.answer) == ("1", "2")


@pytest.mark.parametrize("rule", ["paragraph", "tokens:1", "tokens:3"])
@pytest.mark.parametrize("shape", ["opened by the model", "opened by the prompt", "no switch", "channel", "text"])
def test_a_box_in_a_thought_is_no_answer_whatever_the_steps(shape: str, rule: str, think: Callable[..., Any]):
    opening, closing = {"no switch": ("[THINK]", "[/THINK]"), "channel": ("<|channel>thought\n", "<channel|>")}.get(
        shape, ("<think>", "</think>")
    )
    opening = "" if shape == "opened by the prompt" else opening
    script = [opening, "\nFirst \\boxed{7}", "\n\n", "wrong.\n", closing, "\n\n", "So", "\n\n", "\\boxed{12}"]
    result = think(shape, *script, step_rule=rule)
    assert result.best is not None
    assert result.best.thought == "First \\boxed{7}\n\nwrong."
    assert result.best.content == "So\n\n\\boxed{12}"
    assert (result.answer, result.usage.appended_tokens) == ("12", 0)


@pytest.mark.parametrize("rule", ["paragraph", "tokens:1", "tokens:2", "tokens:5"])
@pytest.mark.parametrize("name", REPORTED)
def test_paths_that_parsers_have_stumbled_over_are_read(name: str, rule: str, think: Callable[..., Any]):
    shape, script, (thought, content, answer) = REPORTED[name]
    result = think(shape, *script, step_rule=rule, end_at_box=False)
    assert result.best is not None
    assert (result.best.thought, result.best.content, result.answer) == (thought, content, answer)


def test_the_answers_channel_is_begun_for_the_model(think: Callable[..., Any]):
    result = think("harmony", "Add: \\boxed{7}.", "<|end|>", "It is \\boxed{8}.")
    assert (result.best.thought, result.best.content, result.answer) == ("Add: \\boxed{7}.", "It is \\boxed{8}.", "8")
    assert result.usage.appended_tokens > 4


def test_a_model_that_thinks_though_it_is_switched_off_is_read_as_thinking(think: Callable[..., Any]):
    result = think("opened by the model", "<think>", "\\boxed{1}", "</think>", "\\boxed{2}", thinking="off")
    assert (result.best.thought, result.answer) == ("\\boxed{1}", "2")


def test_a_model_that_answers_at_once_has_no_thought(think: Callable[..., Any]):
    result = think("opened by the model", "It is \\boxed{1}", "\n\n", "<think>", "x")
    assert (result.best.thought, result.best.content) == ("", "It is \\boxed{1}\n\n")


def test_a_path_that_ends_in_its_thought_has_no_answer_and_no_vote(think: Callable[..., Any]):
    result = think("opened by the prompt", "17 times 23 is 391.", " The answer is 391.")
    assert (result.answer, result.candidates) == ("", ())
    assert result.nodes[-1].termination == "unclosed"
    assert result.nodes[-1].thought_chars == len(result.nodes[-1].text)


@pytest.mark.parametrize("thinking", ["on", "200"])
def test_a_path_that_ends_in_its_thought_goes_on_to_its_answer_where_thinking_is_asked_for(
    thinking: str, checkpoint: Callable[[str], Checkpoint], make_orchestrator: Callable[..., Orchestrator]
):
    model = thinker(
        checkpoint("opened by the prompt"), "17 times 23.", "<|im_end|>", "It is \\boxed{391}.", "<|im_end|>"
    )
    result = run(make_orchestrator(model, None), replace(PATH, thinking=thinking)).only
    assert result.best is not None
    assert (result.best.thought, result.best.content, result.answer) == ("17 times 23.", "It is \\boxed{391}.", "391")
    assert [node.appended != "" for node in result.nodes[1:]] == [True, False]
    assert result.usage.generator_tokens == result.usage.generator_tree_tokens


# ---- budgets


@pytest.mark.parametrize(
    ("shape", "budget"),
    [
        *(("opened by the prompt", budget) for budget in range(9, 16)),
        ("opened by the model", 12),
        ("text", 12),
        ("harmony", 12),
    ],
)
def test_a_thought_is_closed_at_its_budget_and_the_path_answers(shape: str, budget: int, think: Callable[..., Any]):
    """A letter of three tokens is at 11 to 13; the script goes on wherever the thought is cut."""
    opening = {"opened by the model": "<think>", "text": "<think>"}.get(shape, "")
    thought = [opening, *"Try 6*7. So € \\boxed{42"]
    result = think(shape, *thought, *"x" * 40, thinking=str(budget), request=replace(PATH, max_tokens=300))
    closed = [node for node in result.nodes if node.appended]
    assert closed[0].appended == CLOSING_SENTENCE.strip()
    spent = sum(node.tokens for node in result.nodes[1:] if node.thought_chars or node.node_id <= closed[0].node_id)
    assert budget <= spent <= budget + 8
    assert "\ufffd" not in "".join(node.text for node in result.nodes)
    assert result.answer == ""  # half a box in a thought is never read
    assert result.nodes[-1].termination == "eos"


def test_a_budget_that_ends_in_a_box_leaves_its_half_in_the_thought(think: Callable[..., Any]):
    thought, content = "Try 6*7. So \\boxed{4", "The answer is 42."
    result = think("opened by the prompt", *thought, content, thinking=str(len(thought)))
    assert (result.best.thought, result.best.content, result.answer) == (thought, content, "42")
    assert result.usage.appended_tokens > 0


@pytest.mark.parametrize("request_", [BEST_OF_N, BEAM])
def test_an_answer_is_scored_behind_a_step_that_is_a_mark_alone(request_: SearchRequest, think: Callable[..., Any]):
    script = "Try 6*7.", "\n\n", "</think>", "\n\n\\boxed{42}", "<|im_end|>"
    result = think(
        "opened by the prompt",
        *script,
        request=replace(request_, beam_width=1, max_steps=6, max_step_tokens=40, max_tokens=300),
    )
    assert [(node.text.strip(), node.score is None) for node in result.nodes[1:]] == [
        ("Try 6*7.", False),
        ("", True),
        ("\\boxed{42}", False),
    ]
    assert result.answer == "42"


@pytest.mark.parametrize("budget", range(9, 14))
def test_an_answer_is_not_cut_where_its_thoughts_budget_ends(budget: int, think: Callable[..., Any]):
    script = *"Try 6*7.", "</think>", "\n\n", "\\boxed{42}", "<|im_end|>"
    result = think("opened by the prompt", *script, thinking=str(budget))
    assert result.answer == "42"
    assert [node.text.strip() for node in result.nodes if node.text.strip()] == ["Try 6*7.", "\\boxed{42}"]


def test_what_comes_after_the_close_is_the_answer_and_a_second_close_is_no_text(think: Callable[..., Any]):
    """Of marks that are text, which are not masked."""
    script = "<think>", *"Try 6*7.", "</think>", "\n\n", "It is 42", "\n\n", "\\boxed{2}"
    result = think("text", *script, thinking="13")
    assert [node.appended != "" for node in result.nodes[1:]] == [True, False, False, False]
    assert (result.best.thought, result.best.content) == ("Try 6*7.", "It is 42\n\n\\boxed{2}")
    assert result.answer == "2"


@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0, "top_k": 1}, {"temperature": 1.0, "min_p": 0.5}])
@pytest.mark.parametrize("closed_by_host", [True, False])
@pytest.mark.parametrize("shape", ["opened by the prompt", "channel"])
def test_a_mark_is_never_drawn_again_behind_a_closed_thought(
    shape: str,
    closed_by_host: bool,
    sampling: dict[str, Any],
    checkpoint: Callable[[str], Checkpoint],
    make_orchestrator: Callable[..., Orchestrator],
):
    """The model finds both marks likelier than what it would say else, in a thought that it has no mark for, too."""
    model = load_generator(checkpoint(shape), torch.float32, "cpu")
    marks = find_marks(model.tokenizer)
    assert marks is not None
    thought = (
        ["<|channel>thought\n"] * (shape == "channel") + ["Try 6*7."] + [marks.closing.text] * (not closed_by_host)
    )
    said, answer = ids_of(model, thought), ids_of(model, ["It is 42", "\n\n", "\\boxed{42}", "<|im_end|>"])
    calls = count()

    def head(hidden: torch.Tensor) -> torch.Tensor:
        logits, place = torch.zeros(len(hidden), model.config.vocab_size), next(calls)
        if place < len(said):
            logits[:, said[place]] = 100.0
        else:
            logits[:, [marks.opening.token_id, marks.closing.token_id]] = 100.0
            logits[:, answer[place - len(said)]] = 50.0
        return logits

    orchestrator = make_orchestrator(replace(model, head=head), None)
    budget = str(len(said)) if closed_by_host else "100"
    result = run(orchestrator, replace(PATH, **{"thinking": budget, "temperature": 0.0, **sampling})).only
    orchestrator.engine.check_drained()
    assert result.best is not None
    assert (result.best.thought, result.best.content) == ("Try 6*7.", "It is 42\n\n\\boxed{42}")
    assert sum(bool(node.appended) for node in result.nodes) == closed_by_host
    # Log-probabilities are those of the model, to which the marks are likelier by far.
    assert (result.nodes[-1].log_probability or 0) < -50
    assert replay(trace_of(result)) == len(result.rounds)


def test_a_thought_that_goes_round_in_circles_is_closed(think: Callable[..., Any]):
    loop = ["1+2 is not 4 but 3 and so on.", "\n\n"] * 3
    result = think("opened by the prompt", *loop, "It is \\boxed{3}", "\n\n")
    assert result.answer == "3"
    assert [node.appended != "" for node in result.nodes[1:]] == [False, False, True, False]


def test_a_model_that_thinks_again_and_again_comes_to_an_end(think: Callable[..., Any]):
    result = think("opened by the prompt", *["x ", "<think>", "y"] * 100, thinking="5", max_tokens=300)
    assert (result.answer, result.stop_reason) == ("", "finished")
    again = [text for i in range(50) for text in ("<think>", f"{i}+{i * i % 83}", "\n\n")]
    result = think("text", "<think>", *"12345", *again, thinking="10", max_tokens=300)
    assert result.nodes[-1].termination == "length"
    assert sum(node.appended != "" for node in result.nodes) >= 2


def test_the_answers_tokens_are_kept_without_a_budget(think: Callable[..., Any]):
    words = [f"{i}+{i * i % 83} " for i in range(200)]
    result = think("opened by the prompt", *words, max_tokens=300)
    closed = next(node for node in result.nodes if node.appended)
    answer = [node for node in result.nodes if node.node_id > closed.node_id]
    assert answer
    assert sum(node.tokens for node in answer) >= 75


def test_a_budget_that_cannot_be_kept_is_an_error(think: Callable[..., Any]):
    with pytest.raises(InvalidRequestError, match=r"thinking: a thought of 390 tokens, .* do not fit into"):
        think("opened by the prompt", "x", thinking="390")
    with pytest.raises(InvalidRequestError, match="or switch thinking off"):
        think("opened by the prompt", "x", max_tokens=20)


def test_the_closing_mark_is_the_special_token(checkpoint: Callable[[str], Checkpoint]):
    tokenizer = TextTokenizer(checkpoint("opened by the prompt"))
    marks = find_marks(tokenizer)
    assert marks is not None
    plan = plan_thoughts(marks, tokenizer, Thinking(ThinkingMode.ON), True, 400)
    assert plan.closing.count(marks.closing.token_id) == 1


@pytest.mark.parametrize("request_", [MAJORITY, BEAM])
def test_every_path_of_a_search_with_a_budget_comes_to_an_end(request_: SearchRequest, think: Callable[..., Any]):
    """All paths share the script's tokens step by step, as the generator says the same in each."""
    request = replace(request_, max_steps=None, max_step_tokens=None, max_tokens=300, temperature=0.0)
    result = think("opened by the prompt", *"Is it 5", request=request, thinking="5")
    assert result.usage.appended_tokens > 0
    assert result.candidates


def test_accounts_add_up_where_the_host_has_written(
    checkpoint: Callable[[str], Checkpoint], make_orchestrator: Callable[..., Orchestrator]
):
    orchestrator = make_orchestrator(thinker(checkpoint("opened by the prompt"), *"Is it 5"), None)
    usage = run(orchestrator, replace(PATH, thinking="5")).only.usage
    assert usage.generator_tokens == usage.generator_tree_tokens
    assert usage.generated_tokens + usage.appended_tokens + usage.prompt_tokens == usage.generator_tokens + 1


def test_a_trace_says_what_the_host_wrote(think: Callable[..., Any]):
    trace = json.loads(json.dumps(trace_of(think("opened by the prompt", *"Is it 5", thinking="5"))))
    assert [node["appended"] for node in trace["nodes"] if node["appended"]] == [CLOSING_SENTENCE.strip()]


# ---- thinking on


def test_a_model_that_closes_its_thought_thinks_on_as_often_as_asked(think: Callable[..., Any]):
    script = ["Try 6.", "</think>", " no, 7.", "</think>", " yes, 7.", "</think>", "\n\n", "\\boxed{7}"]
    result = think("opened by the prompt", *script, more_thinking=2)
    assert [node.appended for node in result.nodes[1:]] == ["Wait", "Wait", "", ""]
    assert (result.best.thought, result.best.content, result.answer) == ("Try 6. no, 7. yes, 7.", "\\boxed{7}", "7")
    once = think("opened by the prompt", *script[:4], "\n\n", "\\boxed{6}", more_thinking=1)
    assert (once.best.thought, once.answer) == ("Try 6. no, 7.", "6")


@pytest.mark.parametrize(
    ("last", "thinking"),
    [("</think>", {"more_thinking": 1}), ("<|im_end|>", {"thinking": "on"}), ("5", {"thinking": "2"})],
)
def test_the_host_writes_in_place_of_a_mark_or_an_end_and_behind_any_other_token(
    last: str,
    thinking: dict[str, object],
    checkpoint: Callable[[str], Checkpoint],
    make_orchestrator: Callable[..., Orchestrator],
    monkeypatch: pytest.MonkeyPatch,
):
    orchestrator = make_orchestrator(thinker(checkpoint("opened by the prompt"), "6", last), None)
    engine, seen = orchestrator.engine, list[tuple[list[int], list[int]]]()
    append = engine.append

    def watch(sequence: Any, token_ids: Any, instead_of: int = 0) -> None:
        before = engine.token_ids(sequence)
        append(sequence, token_ids, instead_of)
        seen.append((before, engine.token_ids(sequence)))

    monkeypatch.setattr(engine, "append", watch)
    run(orchestrator, replace(PATH, **thinking))
    before, after = seen[0]
    sampled = generator_of(orchestrator).model.tokenizer.encode(last)
    assert before[-len(sampled) :] == sampled
    kept = before if last == "5" else before[:-1]
    assert after[: len(kept)] == kept
    written = generator_of(orchestrator).model.tokenizer.show(after[len(kept) :])
    assert written.strip().startswith("Wait" if last == "</think>" else CLOSING_SENTENCE.strip())


def test_a_path_that_ends_where_it_was_to_think_on_answers_all_the_same(think: Callable[..., Any]):
    script = ["Try 6.", "</think>", " no, 7.", "<|im_end|>", "\\boxed{7}", "<|im_end|>"]
    result = think("opened by the prompt", *script, more_thinking=2)
    assert [node.appended for node in result.nodes[1:]] == ["Wait", CLOSING_SENTENCE.strip(), ""]
    assert (result.best.thought, result.answer) == ("Try 6. no, 7.", "7")


def test_a_path_thinks_on_within_its_budget_alone(think: Callable[..., Any]):
    script = ["Try 6.", "</think>", *" no, it is rather seven", "</think>", "\\boxed{7}"]
    result = think("opened by the prompt", *script, more_thinking=60, thinking="30")
    assert sum(node.appended == "Wait" for node in result.nodes) == 1
    assert any(node.appended == CLOSING_SENTENCE.strip() for node in result.nodes) or result.answer == "7"
    usage = result.usage
    assert usage.generator_tokens == usage.generator_tree_tokens


@pytest.mark.parametrize(
    ("written", "tokens", "more"),
    [((), 17, True), ((), 18, False), ((), 19, False), (("Wait", ""), 17, True), (("Wait", "", "Wait"), 3, False)],
)
def test_a_path_is_asked_to_think_on_where_a_token_of_its_budget_is_left_for_it(
    written: tuple[str, ...], tokens: int, more: bool, checkpoint: Callable[[str], Checkpoint]
):
    tokenizer = TextTokenizer(checkpoint("opened by the prompt"))
    marks = find_marks(tokenizer)
    assert marks is not None
    plan = plan_thoughts(marks, tokenizer, Thinking(ThinkingMode.ON, 20), True, 400, more=2)
    plan = replace(plan, think_on=plan.think_on[:2])
    assert plan.thinks_on(written, tokens) is more


def test_thinking_on_needs_a_thought_and_a_mark_that_is_a_token(think: Callable[..., Any]):
    with pytest.raises(InvalidRequestError, match="more_thinking: is about thoughts, and the generator has none"):
        think("opened by the prompt", "x", thinking="off", more_thinking=1)
    with pytest.raises(InvalidRequestError, match="more_thinking: needs a closing mark that is one token"):
        think("text", "x", more_thinking=1)


# ---- every search


@pytest.mark.parametrize("name", [name for name in ALL if name != "greedy"])
def test_every_search_thinks_within_its_budget_alone_and_where_memory_is_short(
    name: str, checkpoint: Callable[[str], Checkpoint], make_orchestrator: Callable[..., Orchestrator]
):
    model = load_generator(checkpoint("opened by the prompt"), torch.float32, "cpu")
    request = replace(ALL[name], thinking="12", max_tokens=150, max_steps=6, temperature=0.7)
    requests = [replace(request, seed=seed) for seed in range(2)]
    alone = [run(make_orchestrator(model, kv_memory_bytes=2**22), each).only for each in requests]
    crowded = make_orchestrator(model, kv_memory_bytes=9 * 2**18, reserved_share=0.05)
    results = run(crowded, *requests).results
    crowded.engine.check_drained()
    assert list(map(outcome, results)) == list(map(outcome, alone))
    nodes = [node for result in results for node in result.nodes]
    closed = [node for node in nodes if node.appended]
    assert closed
    assert {node.appended for node in closed} == {CLOSING_SENTENCE.strip()}
    for result in results:
        assert replay(trace_of(result)) == len(result.rounds)
        assert not any("Considering" in candidate.content for candidate in result.candidates)
        assert all(candidate.thought_tokens <= 20 for candidate in result.candidates)


# ---- sampling of the mode

THINKING, ANSWERING = {"temperature": 0.6, "top_k": 20, "top_p": 0.95}, {"temperature": 0.7, "top_k": 20, "top_p": 0.8}


@pytest.mark.parametrize(
    ("shape", "configured", "thinking", "sampled"),
    [
        ("opened by the model", THINKING, "auto", THINKING),
        ("opened by the model", THINKING, "off", ANSWERING),
        ("opened by the model", ANSWERING, "100", THINKING),
        ("opened by the model", ANSWERING, "off", ANSWERING),
        ("opened by the model", THINKING | {"top_k": 40}, "off", THINKING | {"top_k": 40}),
        ("opened by the prompt", THINKING, "off", THINKING),  # its template has no switch
        ("none", THINKING, "off", THINKING),
        ("none", ANSWERING, "auto", ANSWERING),
    ],
)
def test_sampling_follows_the_checkpoint_for_the_mode(
    shape: str,
    configured: dict[str, float],
    thinking: str,
    sampled: dict[str, float],
    checkpoint: Callable[[str], Checkpoint],
    make_orchestrator: Callable[..., Orchestrator],
):
    engine = make_orchestrator(thinker(checkpoint(shape)), None).engine
    orchestrator = Orchestrator(engine, Generator(engine, "", configured), None)

    def checked(request: SearchRequest) -> SearchRequest:
        found = orchestrator.check(request).request
        assert isinstance(found, SearchRequest)
        return found

    open_fields = dict.fromkeys(("temperature", "top_k", "top_p", "max_steps", "max_step_tokens"))
    request = replace(MAJORITY, **open_fields, thinking=thinking, max_tokens=300)
    found = checked(request)
    assert {name: getattr(found, name) for name in sampled} == sampled
    assert orchestrator.defaults.fill(request).top_p == found.top_p
    own = replace(request, temperature=0.1, top_p=0.5)
    assert (checked(own).temperature, checked(own).top_p) == (0.1, 0.5)
