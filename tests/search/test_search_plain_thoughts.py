"""Conversations that a thinking generator answers without a search: its thought apart, stop texts, tags of callers."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from thinkers import REPORTED, SHAPES, thinker, write_thinker

from espalier.engine.models.checkpoint import Checkpoint
from espalier.engine.models.tokenizer import TextTokenizer
from espalier.search.completion import ChatPrompt, Choice, CompletionRequest, TextSampled
from espalier.search.request import SubmitOptions
from espalier.search.run.orchestrator import Orchestrator
from espalier.search.run.sampled_text import SampledAnswer
from espalier.search.thoughts.marks import find_marks
from espalier.search.thoughts.reading import OPENED, Position, make_reader

USER = {"role": "user", "content": "And now?"}
ASKED = CompletionRequest((ChatPrompt((USER,)),), max_tokens=400)
HARMONY_ANSWER = "<|start|>assistant<|channel|>final<|message|>"


@pytest.fixture
def checkpoint(tiny_checkpoints: dict[str, Path], tmp_path: Path) -> Callable[[str], Checkpoint]:
    return lambda shape: write_thinker(tiny_checkpoints["talker"], tmp_path / "thinker", SHAPES[shape])


@pytest.fixture
def say(
    checkpoint: Callable[[str], Checkpoint], make_orchestrator: Callable[..., Orchestrator]
) -> Callable[..., tuple[Choice, list[TextSampled]]]:
    """Has a generator of a shape say a script in answer to a conversation: the choice, and what was streamed of it."""

    def answer(shape: str, script: Sequence[str], request: CompletionRequest) -> tuple[Choice, list[TextSampled]]:
        orchestrator = make_orchestrator(thinker(checkpoint(shape), *script), None, kv_memory_bytes=2**23)
        events: list[object] = []
        orchestrator.submit(request, events.append, SubmitOptions(stream_text=True))
        results = [result for _ in iter(lambda: orchestrator.busy, False) for result in orchestrator.step()]
        orchestrator.engine.check_drained()
        (choice,) = results[0].choices
        return choice, [event for event in events if isinstance(event, TextSampled)]

    return answer


@pytest.mark.parametrize("name", REPORTED)
def test_a_thought_is_no_part_of_the_text(name: str, say: Callable[..., tuple[Choice, list[TextSampled]]]):
    shape, script, (thought, content, _) = REPORTED[name]
    choice, pieces = say(shape, script, ASKED)
    assert (choice.thought, choice.text, choice.finish_reason) == (thought, content, "stop")
    assert "".join(piece.thought for piece in pieces) == thought
    assert "".join(piece.text for piece in pieces) == content
    assert 0 < choice.thought_tokens < len(choice.token_ids)


@pytest.mark.parametrize("name", REPORTED)
def test_a_thought_is_told_apart_wherever_the_text_is_looked_at(name: str, checkpoint: Callable[[str], Checkpoint]):
    shape, script, (thought, content, _) = REPORTED[name]
    tokenizer = TextTokenizer(checkpoint(shape))
    marks = find_marks(tokenizer)
    assert marks is not None
    ids = [token for text in script for token in tokenizer.encode(text)]
    for cut in range(len(ids) + 1):
        text = SampledAnswer(tokenizer, (), False, marks, shape == "opened by the prompt")
        shown = ""
        for part in (ids[:cut], ids[cut:]):
            text.add(part)
            shown += text.take(False)
        text.end()
        assert (text.thought, shown + text.take(True)) == (thought, content)


@pytest.mark.parametrize(
    ("script", "thought", "content"),
    [
        (("<|channel|>analysis<|message|>Add: 7.", "<|end|>", HARMONY_ANSWER, "It is 7."), "Add: 7.", "It is 7."),
        (("<|channel|>final<|message|>", "It is 7."), "", "It is 7."),
    ],
)
def test_headers_of_channels_are_no_text(
    script: tuple[str, ...], thought: str, content: str, say: Callable[..., tuple[Choice, list[TextSampled]]]
):
    choice, pieces = say("harmony", script, ASKED)
    assert (choice.thought, choice.text) == (thought, content)
    assert "".join(piece.text for piece in pieces) == content


SECOND = {  # what comes behind a thought that is closed, and the text of it
    "a thought that goes on": (["Wait, 6.\n", "{close}", "\n\nIt is 7."], "Wait, 6.\n\n\nIt is 7."),
    "a mark at once": (["{close}", "\n\nIt is 7."], "It is 7."),
    "marks again and again": (["5. ", "{close}", "{close}", "It is 7."], "5. It is 7."),
    "a quoted mark": (["It is `", "{close}", "`."], "It is `{shown}`."),
    "a quoted thought": (["Say ", "{open}", "7", "{close}", " there."], "Say {shown_open}7{shown} there."),
}


@pytest.mark.parametrize("name", SECOND)
@pytest.mark.parametrize("shape", ["opened by the prompt", "opened by the model", "text"])
def test_a_second_closing_mark_is_no_text_of_the_answer_unless_it_is_quoted(
    shape: str, name: str, checkpoint: Callable[[str], Checkpoint]
):
    tokenizer = TextTokenizer(checkpoint(shape))
    marks = find_marks(tokenizer)
    assert marks is not None
    opened, shown = shape == "opened by the prompt", {} if SHAPES[shape].special else {"shown_open": "<think>"}
    parts, content = SECOND[name]
    texts = {"open": "<think>", "close": "</think>", "shown": "</think>" if shown else "", "shown_open": "", **shown}
    script = [*([] if opened else ["<think>"]), "Add.", "</think>", "\n\n", *(part.format(**texts) for part in parts)]
    ids = [token for text in script for token in tokenizer.encode(text)]
    reader = make_reader(marks, tokenizer)
    for cut in range(len(ids) + 1):
        text = SampledAnswer(tokenizer, (), False, marks, opened)
        pieces = ""
        for part in (ids[:cut], ids[cut:]):
            text.add(part)
            pieces += text.take(False)
        text.end()
        assert (text.thought, pieces + text.take(True)) == ("Add.", content.format(**texts))
        one = reader.read(ids[:cut], OPENED if opened else Position())
        two = reader.read(ids[cut:], one.position)
        if shape != "text":  # whose marks a step does not cut
            assert (one.text[one.thought_chars :] + two.text[two.thought_chars :]).lstrip() == content.format(**texts)


def test_stop_texts_end_nothing_within_a_thought(say: Callable[..., tuple[Choice, list[TextSampled]]]):
    script = "<think>The reply has to close with END. 9-4 is 5.", "</think>", "\n\nThe result is 5. END of text"
    choice, pieces = say("opened by the model", script, replace(ASKED, stop=("END",)))
    assert choice.thought == "The reply has to close with END. 9-4 is 5."
    assert (choice.text, choice.stop_text) == ("The result is 5. ", "END")
    assert "".join(piece.text for piece in pieces) == choice.text


def test_an_answer_that_was_cut_in_its_thought_has_no_text(say: Callable[..., tuple[Choice, list[TextSampled]]]):
    choice, _ = say("opened by the prompt", ["17 times 23 is € 391."], replace(ASKED, max_tokens=17))
    assert (choice.text, choice.finish_reason, choice.thought_tokens) == ("", "length", 17)
    assert choice.thought.startswith("17 times 23 is")


@pytest.mark.parametrize("script", ["It is 5.", "\n\n It is <think>5</think>.", "  \n"])
def test_without_a_thought_the_text_is_all_that_was_said(
    script: str, say: Callable[..., tuple[Choice, list[TextSampled]]]
):
    choice, pieces = say("text", [script], ASKED)
    assert (choice.thought, choice.thought_tokens, choice.text) == ("", 0, script)
    assert "".join(piece.text for piece in pieces) == script


@pytest.mark.parametrize("prompt", ["And now?", ChatPrompt((USER, {"role": "assistant", "content": "It"}), True)])
def test_texts_and_answers_that_are_continued_are_as_they_are(
    prompt: str | ChatPrompt, say: Callable[..., tuple[Choice, list[TextSampled]]]
):
    choice, _ = say("text", ["<think>Add.</think>5"], replace(ASKED, prompts=(prompt,)))
    assert (choice.thought, choice.text) == ("", "<think>Add.</think>5")


def test_what_looks_like_a_token_in_a_conversation_is_text(
    checkpoint: Callable[[str], Checkpoint], make_orchestrator: Callable[..., Orchestrator]
):
    model = thinker(checkpoint("opened by the prompt"), "5")
    orchestrator = make_orchestrator(model, None, kv_memory_bytes=2**23)
    said = "What does </think> mean, and <|im_end|>?"
    resolved = orchestrator.check(replace(ASKED, prompts=(ChatPrompt(({"role": "user", "content": said},)),)))
    ids = resolved.prompts[0].token_ids
    assert said in model.tokenizer.show(ids)
    plain = orchestrator.check(ASKED).prompts[0].token_ids
    for token in ("</think>", "<|im_end|>"):
        assert ids.count(model.tokenizer.token_id(token)) == plain.count(model.tokenizer.token_id(token))
