"""Channels whose headers a model writes wrongly: no header's word is thought or answer, and none ends a thought."""

import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from search_runs import GREEDY, run
from thinkers import SHAPES, ids_of, thinker, write_thinker

from espalier.engine.models.checkpoint import Checkpoint
from espalier.engine.models.tokenizer import TextTokenizer
from espalier.search.completion import ChatPrompt, CompletionRequest
from espalier.search.run.orchestrator import Orchestrator
from espalier.search.run.sampled_text import SampledAnswer
from espalier.search.thoughts.marks import ThoughtMarks, find_marks
from espalier.search.thoughts.reading import MAX_HEADER_CHARACTERS, OPENED, make_reader

ANALYSIS = "<|channel|>analysis<|message|>"
FINAL = "<|start|>assistant<|channel|>final<|message|>"
SAID = "It is \\boxed{5}."
COMMENTARY = "<|channel|>commentary to=x<|message|>"
LONG = (
    "Then it goes on and on, word by word and never a mark, sentence by sentence and never an end, as if nobody asked."
)
LONG += " So it is."
IN_THOUGHT = {
    "a recipient": ["<|channel|>analysis to=functions.sum code<|message|>", "Add 2."],
    "a recipient before the channel": ["<|start|>assistant to=functions.sum<|channel|>analysis<|message|>", "Add 2."],
    "garbage": ["<|channel|>analysis zq ##<|message|>", "Add 2."],
    "garbage alone": ["<|channel|>zq??<|message|>", "Add 2."],
    "an empty header": ["<|channel|><|message|>", "Add 2."],
    "commentary": ["<|channel|>commentary<|message|>", "Add 2."],
    "a call": ["<|channel|>commentary to=functions.sum json<|message|>", "Add 2."],
    "doubled channels": ["<|channel|>commentary<|channel|>analysis<|message|>", "Add 2."],
    "a header twice": [ANALYSIS, ANALYSIS, "Add 2."],
    "two ends": ["<|channel|>analysis<|message|><|message|>", "Add 2."],
    "no end": ["<|channel|>analysis", " Add 2."],
    "no end behind a recipient": ["<|channel|>commentary to=functions.sum json", " Add 2."],
    "no end, and long": ["<|channel|>analysis", " " + LONG],
    "in the middle": [ANALYSIS, "Add ", "<|start|>assistant<|channel|>analysis to=x<|message|>", "2."],
    "a header without an end behind one": [ANALYSIS, "<|channel|>commentary", " Add 2."],
}
"""The first words of a thought, which says `Add 2.` or `LONG`."""
BEHIND = {
    "as it is": ["<|end|>", FINAL, SAID],
    "a type": ["<|end|>", "<|start|>assistant<|channel|>final json<|message|>", SAID],
    "no end": ["<|end|>", "<|start|>assistant<|channel|>final", f" {SAID}"],
    "no beginning": ["<|end|>", "assistant<|channel|>final<|message|>", SAID],
    "doubled channels": ["<|end|>", "<|start|>assistant<|channel|>analysis<|channel|>final<|message|>", SAID],
    "the thought has no end": ["<|channel|>final<|message|>", SAID],
    "no header": ["<|end|>", SAID],
    "a thought between": ["<|end|>", f"<|start|>assistant{ANALYSIS}", "<|end|>", FINAL, SAID],
    "a call between": ["<|end|>", f"<|start|>assistant{COMMENTARY}", "<|end|>", FINAL, SAID],
    "another answer": [
        "<|end|>",
        FINAL,
        "It is ",
        "<|end|>",
        "<|start|>assistant<|channel|>final x<|message|>",
        "\\boxed{5}.",
    ],
}
"""What comes behind a thought, and answers `SAID`"""


@pytest.fixture(scope="module")
def checkpoint(tiny_checkpoints: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return write_thinker(tiny_checkpoints["talker"], tmp_path_factory.mktemp("channels") / "it", SHAPES["harmony"])


@pytest.fixture(scope="module")
def tokenizer(checkpoint: Checkpoint) -> TextTokenizer:
    return TextTokenizer(checkpoint)


def marks_of(tokenizer: TextTokenizer) -> ThoughtMarks:
    marks = find_marks(tokenizer)
    assert marks is not None
    return marks


def streamed(tokenizer: TextTokenizer, ids: list[int], cut: int, opened: bool = False) -> tuple[str, str]:
    """Thought and content of tokens that come in two parts."""
    text = SampledAnswer(tokenizer, (), False, marks_of(tokenizer), opened)
    thought = shown = ""
    for part in (ids[:cut], ids[cut:]):
        text.add(part)
        thought, shown = thought + text.take_thought(), shown + text.take(False)
    text.end()
    thought, shown = thought + text.take_thought(), shown + text.take(True)
    assert (thought, shown) == (text.thought, text.text)
    return thought, shown


@pytest.mark.parametrize(("begins", "behind"), list(itertools.product(IN_THOUGHT, BEHIND)))
def test_words_of_headers_are_neither_thought_nor_answer_wherever_tokens_are_cut(
    begins: str, behind: str, tokenizer: TextTokenizer
):
    script = [*IN_THOUGHT[begins], *BEHIND[behind]]
    ids = [token for text in script for token in tokenizer.encode(text)]
    thought = LONG if "long" in begins else "Add 2."
    found = {streamed(tokenizer, ids, cut) for cut in range(0, len(ids) + 1, 3)}
    assert found == {(thought, SAID)}
    reader = make_reader(marks_of(tokenizer), tokenizer)
    for cut in range(0, len(ids) + 1, 3):  # as the steps of a path, where the prompt has opened the thought
        one = reader.read(ids[:cut], OPENED)
        two = reader.read(ids[cut:], one.position)
        end = reader.end(two.position)
        said = [each.text[each.thought_chars :] for each in (one, two, end)]
        assert "".join(each.text[: each.thought_chars] for each in (one, two, end)).strip() == thought
        assert "".join(said).strip() == SAID


@pytest.mark.parametrize(
    ("script", "thought", "content"),
    [
        ([SAID], "", SAID),
        ([LONG], "", LONG),
        (["<|channel|>final<|message|>", SAID], "", SAID),
        (["<|channel|>final", f" {SAID}"], "", SAID),
        (["<|message|>", SAID], "", SAID),
        ([ANALYSIS, "Add 2."], "Add 2.", ""),
        (["<|channel|>analysis"], "", ""),
        (["<|channel|>analysis to=functions.sum"], "", ""),
    ],
)
def test_paths_without_an_answer_or_without_a_thought(
    script: list[str], thought: str, content: str, tokenizer: TextTokenizer
):
    ids = [token for text in script for token in tokenizer.encode(text)]
    assert {streamed(tokenizer, ids, cut) for cut in range(len(ids) + 1)} == {(thought, content)}


def test_a_header_without_an_end_is_held_back_for_so_many_tokens_and_no_longer(tokenizer: TextTokenizer):
    text = SampledAnswer(tokenizer, (), False, marks_of(tokenizer), False)
    ids = tokenizer.encode("<|channel|>analysis " + "€" * 300)
    shown = next(place for place, token in enumerate(ids) if not text.add([token]) and text.take_thought())
    assert 3 * MAX_HEADER_CHARACTERS - 64 <= shown <= 3 * MAX_HEADER_CHARACTERS + 4  # three tokens a letter
    assert "\ufffd" not in text.thought


@pytest.mark.parametrize("rule", ["paragraph", "tokens:3"])
@pytest.mark.parametrize("behind", ["as it is", "the thought has no end"])
def test_a_search_reads_them_alike(
    behind: str, rule: str, checkpoint: Checkpoint, make_orchestrator: Callable[..., Orchestrator]
):
    for begins in IN_THOUGHT:
        script = [*IN_THOUGHT[begins], *(text for text in BEHIND[behind] if text != FINAL)]  # which the host writes
        request = replace(GREEDY, max_steps=None, max_step_tokens=None, max_tokens=400, step_rule=rule)
        result = run(make_orchestrator(thinker(checkpoint, *script), None), request).only
        assert result.best is not None
        thought = LONG if "long" in begins else "Add 2."
        assert (result.best.thought, result.best.content) == (thought, SAID), begins


def test_a_form_binds_the_answer_behind_a_broken_header(
    checkpoint: Checkpoint, make_orchestrator: Callable[..., Orchestrator]
):
    script = [ANALYSIS, "Add 2.", "<|end|>", "<|start|>assistant<|channel|>final json<|message|>", "He finds"]
    orchestrator = make_orchestrator(thinker(checkpoint, *script), None)
    prompt = ChatPrompt(({"role": "user", "content": "Tom"},))
    orchestrator.submit(CompletionRequest((prompt,), text_form="(x|y)(z|w)", temperature=0.0))
    results = [result for _ in iter(lambda: orchestrator.busy, False) for result in orchestrator.step()]
    (choice,) = results[0].choices
    assert (choice.thought, choice.text in ("xz", "xw", "yz", "yw")) == ("Add 2.", True)


def test_no_channel_is_drawn_in_the_answer_of_a_search(
    checkpoint: Checkpoint, make_orchestrator: Callable[..., Orchestrator]
):
    model = thinker(checkpoint, "Add 2.", "<|channel|>final<|message|>", SAID)
    again = set(ids_of(model, [FINAL, "<|end|>"])) & {model.tokenizer.token_id(t) for t in SHAPES["harmony"].tokens}
    orchestrator = make_orchestrator(model, None)
    seen = []
    submit = orchestrator.engine.submit
    orchestrator.engine.submit = lambda work, **how: (seen.append(work), submit(work, **how))  # type: ignore[method-assign]
    request = replace(GREEDY, max_steps=None, max_step_tokens=4, max_tokens=400)
    assert run(orchestrator, request).only.best.content == SAID  # type: ignore[union-attr]
    assert set(seen[-1].samplings[0].banned) == again - set(model.eos_token_ids)
