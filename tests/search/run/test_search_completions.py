"""Completions over a real engine: text, tokens and log-probabilities without a search."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from engine_driver import scripted
from plain import plain_greedy, plain_logits
from search_runs import BEAM, MAJORITY, crowd, outcome, outcome_alone

from espalier.engine.errors import InvalidRequestError, RequestTooLargeError
from espalier.search.completion import (
    ChatPrompt,
    CompletionRequest,
    CompletionResult,
    TextSampled,
)
from espalier.search.request import SearchRequest, SubmitOptions
from espalier.search.result import Finished, StopReason
from espalier.search.run.orchestrator import Orchestrator
from espalier.search.run.sampled_text import SampledText

Make = Callable[..., Orchestrator]
TOM = "Tom starts with 38 coins. He finds 47 more."
SAMPLED = CompletionRequest((TOM, "Then he loses 12"), samples=3, temperature=1.0, max_tokens=40, seed=5)
LOGLIKELIHOOD = CompletionRequest(
    ((40, 41, 42, 43), (40, 41, 44)), temperature=0.0, max_tokens=1, echo=True, logprobs=1
)


def complete(
    orchestrator: Orchestrator, request: CompletionRequest, stream: bool = False, beside: tuple[SearchRequest, ...] = ()
) -> tuple[CompletionResult, list[TextSampled]]:
    events: list[object] = []
    name = orchestrator.submit(request, events.append, SubmitOptions(stream_text=stream))
    for other in beside:
        orchestrator.submit(other)
    results = {}
    while orchestrator.busy:
        results |= {result.search_id: result for result in orchestrator.step()}
        orchestrator.engine.check_integrity()
    assert events[-1] == Finished(name, results[name])
    return results[name], [event for event in events if isinstance(event, TextSampled)]


def said(result: CompletionResult) -> list[tuple]:
    """All of the choices that must not depend on company, memory or the pieces they were sampled in."""
    return [(c.index, c.text, c.token_ids, c.finish_reason, c.stop_text) for c in result.choices]


def pieces_of(orchestrator: Orchestrator, text: str) -> list[int]:
    return orchestrator.engine.model("generator").tokenizer.encode(text)


# ---- text


def test_a_greedy_completion_is_that_of_transformers(
    make_orchestrator: Make, tiny_checkpoints: dict[str, Path]
) -> None:
    orchestrator = make_orchestrator()
    request = CompletionRequest((TOM,), temperature=0.0, max_tokens=12)
    result, _ = complete(orchestrator, request)
    expected, _ = plain_greedy(tiny_checkpoints["talker"], pieces_of(orchestrator, TOM), 12)
    (choice,) = result.choices
    assert list(choice.token_ids) == expected[: len(choice.token_ids)]
    assert result.usage.prompt_tokens == len(pieces_of(orchestrator, TOM))


def test_samples_of_a_prompt_differ_and_come_back_with_the_seed(make_orchestrator: Make) -> None:
    result, _ = complete(make_orchestrator(), SAMPLED)
    assert [(c.index, c.prompt) for c in result.choices] == [(0, 0), (1, 0), (2, 0), (3, 1), (4, 1), (5, 1)]
    assert len({c.text for c in result.choices}) > 3
    again, _ = complete(make_orchestrator(), SAMPLED)
    other, _ = complete(make_orchestrator(), replace(SAMPLED, seed=6))
    assert said(again) == said(result) != said(other)


def test_a_choice_does_not_depend_on_the_batch_of_prompts_nor_on_the_number_of_samples(make_orchestrator: Make) -> None:
    together, _ = complete(make_orchestrator(), SAMPLED)
    alone, _ = complete(make_orchestrator(), replace(SAMPLED, prompts=SAMPLED.prompts[1:], samples=2))
    assert [c.text for c in alone.choices] == [c.text for c in together.choices[3:5]]


def test_streamed_text_is_the_same_as_that_of_a_whole_answer(make_orchestrator: Make) -> None:
    whole, none = complete(make_orchestrator(), SAMPLED)
    streamed, pieces = complete(make_orchestrator(), SAMPLED, stream=True)
    assert none == []
    assert said(streamed) == said(whole)
    for choice in whole.choices:
        its = [piece for piece in pieces if piece.index == choice.index]
        assert len(its) > 1
        assert "".join(piece.text for piece in its) == choice.text
        assert sum((piece.token_ids for piece in its), ()) == choice.token_ids
        assert [piece.finish_reason for piece in its] == [None] * (len(its) - 1) + [choice.finish_reason]
        assert [piece.prompt is not None for piece in its] == [True] + [False] * (len(its) - 1)


def test_completions_beside_searches_change_neither(make_orchestrator: Make) -> None:
    alone, _ = complete(make_orchestrator(), SAMPLED)
    crowded, _ = complete(make_orchestrator(), SAMPLED, beside=tuple(crowd(5)))
    assert said(crowded) == said(alone)
    orchestrator = make_orchestrator()
    orchestrator.submit(SAMPLED)
    name = orchestrator.submit(BEAM)
    results = {}
    while orchestrator.busy:
        results |= {result.search_id: result for result in orchestrator.step()}
    assert outcome(results[name]) == outcome_alone(BEAM, make_orchestrator)


def test_a_completion_that_is_preempted_comes_to_the_same_end(make_orchestrator: Make) -> None:
    alone, _ = complete(make_orchestrator(), SAMPLED)
    orchestrator = make_orchestrator(kv_memory_bytes=3 * 2**16, reserved_share=0.05)
    cramped, _ = complete(orchestrator, SAMPLED, beside=(MAJORITY, MAJORITY))
    assert orchestrator.engine.stats()["generator"].preemptions
    assert said(cramped) == said(alone)


def test_more_prompts_than_fit_are_worked_on_a_few_at_a_time(make_orchestrator: Make) -> None:
    request = replace(SAMPLED, prompts=tuple(f"{TOM} {i}" for i in range(40)), samples=2)
    whole, _ = complete(make_orchestrator(kv_memory_bytes=2**23), request)
    orchestrator = make_orchestrator(kv_memory_bytes=2**18)
    assert orchestrator.check(request).together < 8
    few, _ = complete(orchestrator, request)
    assert said(few) == said(whole)
    assert len(few.choices) == 80


# ---- stop texts


def test_a_stop_text_across_tokens_ends_a_choice_exactly_there(make_orchestrator: Make, load_model) -> None:
    ids = load_model("talker").tokenizer.encode("So the answer is $5$.\nNothing is left.")
    request = CompletionRequest((TOM,), temperature=0.0, max_tokens=30, stop=("er is $5$", "left"))
    result, _ = complete(make_orchestrator(scripted(load_model("talker"), [*ids, *ids])), request)
    (choice,) = result.choices
    assert (choice.text, choice.finish_reason, choice.stop_text) == ("So the answ", "stop", "er is $5$")
    kept = load_model("talker").tokenizer.decode(list(choice.token_ids))
    assert kept.startswith("So the answer is $5$")
    assert "Nothing" not in kept


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_text_may_be_kept_and_lie_across_what_is_sampled_at_a_time(
    stream: bool, make_orchestrator: Make, load_model
) -> None:
    text = "Then he loses 12 of them. Nothing is left. " * 2 + "The total is 5."
    ids = load_model("talker").tokenizer.encode(text)
    for stop in ("left. The", "12 of them. Noth", "total is"):
        request = CompletionRequest((TOM,), temperature=0.0, max_tokens=90, stop=(stop,), include_stop=True)
        result, pieces = complete(make_orchestrator(scripted(load_model("talker"), [*ids, *ids])), request, stream)
        (choice,) = result.choices
        assert choice.text == text[: text.index(stop) + len(stop)]
        if stream:
            assert "".join(piece.text for piece in pieces) == choice.text


def test_nothing_of_a_stop_text_is_ever_streamed(make_orchestrator: Make, load_model) -> None:
    tokenizer = load_model("talker").tokenizer
    for stop in ("XYZ", "aab", "é!"):
        text = SampledText(tokenizer, (stop,), include_stop=False)
        shown, told = "", []
        for letter in f"so {stop[:-1]} {stop[:-1]}{stop} more".replace("\n", " "):
            text.add(tokenizer.encode(letter))
            shown += text.take(ended=False)
            told.append(shown)
        assert text.stopped_by == stop
        assert all(text.text.startswith(shown) for shown in told)
        assert shown + text.take(ended=True) == text.text


# ---- tokens and log-probabilities


def test_log_likelihoods_are_those_of_transformers_for_every_prompt_token_and_one_more(
    make_orchestrator: Make, tiny_checkpoints: dict[str, Path]
) -> None:
    result, _ = complete(make_orchestrator(), LOGLIKELIHOOD)
    for ids, prompt, choice in zip(LOGLIKELIHOOD.prompts, result.prompts, result.choices, strict=True):
        assert prompt.token_ids == ids
        assert len(choice.token_ids) == 1
        read = (*prompt.logprobs, *choice.logprobs)
        logits = plain_logits(tiny_checkpoints["talker"], list(ids))
        expected = torch.log_softmax(logits, dim=-1)
        assert (read[0].logprob, read[0].top) == (None, ())
        for place, token in enumerate(read[1:]):
            assert token.logprob == pytest.approx(float(expected[place, token.token_id]), abs=2e-5)
            (best,) = token.top
            assert best.token_id == int(expected[place].argmax())
            assert token.token_id != best.token_id or token.logprob == best.logprob  # to the bit
        assert choice.token_ids == (read[-1].top[0].token_id,)


def test_reading_log_probabilities_changes_no_sample(make_orchestrator: Make) -> None:
    alone, _ = complete(make_orchestrator(), SAMPLED)
    for logprobs in (0, 3):
        read, _ = complete(make_orchestrator(), replace(SAMPLED, logprobs=logprobs))
        assert said(read) == said(alone)
        for choice in read.choices:
            assert [token.token_id for token in choice.logprobs] == list(choice.token_ids)
            assert all(len(token.top) == logprobs for token in choice.logprobs)


def test_log_probabilities_without_the_likeliest_are_the_same_as_with_them(make_orchestrator: Make) -> None:
    none, some = (complete(make_orchestrator(), replace(SAMPLED, logprobs=n))[0] for n in (0, 5))
    for one, other in zip(none.choices, some.choices, strict=True):
        assert [t.logprob for t in one.logprobs] == pytest.approx([t.logprob for t in other.logprobs], abs=1e-5)


def test_an_echo_without_new_tokens_reads_the_prompt_alone(make_orchestrator: Make) -> None:
    result, _ = complete(make_orchestrator(), replace(LOGLIKELIHOOD, max_tokens=0))
    assert [len(prompt.logprobs) for prompt in result.prompts] == [4, 3]
    assert [(c.text, c.token_ids, c.finish_reason) for c in result.choices] == [("", (), "length")] * 2
    assert result.usage.generated_tokens == 0


# ---- prompts


def test_a_conversation_is_rendered_by_the_template_alone_or_continued(make_orchestrator: Make) -> None:
    orchestrator = make_orchestrator()
    messages = ({"role": "user", "content": "2 + 3?"}, {"role": "assistant", "content": "First, add"})

    def prompt(**options: object) -> str:
        ids = orchestrator.check(CompletionRequest((ChatPrompt(messages, **options),))).prompts[0].token_ids
        return orchestrator.engine.model("generator").tokenizer.show(list(ids))

    assert prompt(continue_last=True).endswith("<|im_start|>assistant\nFirst, add")
    assert prompt().endswith("First, add<|im_end|>\n<|im_start|>assistant\n")
    assert prompt().startswith("<|im_start|>user\n2 + 3?")


@pytest.mark.parametrize(
    ("fields", "wrong"),
    [
        ({"prompts": ()}, "prompts"),
        ({"prompts": ("",)}, "prompts"),
        ({"prompts": ((1, -1),)}, "prompts"),
        ({"prompts": ((),)}, "prompts"),
        ({"prompts": ("a",) * 1025}, "prompts"),
        ({"prompts": ("a",) * 20, "samples": 128}, "samples"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"stop": ("",)}, "stop"),
        ({"stop": ("a",) * 17}, "stop"),
        ({"logprobs": 21}, "logprobs"),
        ({"temperature": -1.0}, "temperature"),
        ({"prompts": ((10**6,),)}, None),
    ],
)
def test_what_cannot_be_sampled_is_refused_by_name(
    fields: dict[str, object], wrong: str | None, make_orchestrator: Make
) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        make_orchestrator().check(replace(SAMPLED, **fields))
    assert wrong is None or wrong in {violation.field for violation in refused.value.violations}


def test_a_prompt_that_fills_the_context_is_too_large(make_orchestrator: Make) -> None:
    orchestrator = make_orchestrator()
    context = orchestrator.engine.model("generator").config.max_positions
    with pytest.raises(RequestTooLargeError, match=f"{context} tokens"):
        orchestrator.check(CompletionRequest(((5,) * context,)))
    assert orchestrator.check(CompletionRequest(((5,) * (context - 3),))).max_tokens == (3,)


# ---- ends


@pytest.mark.parametrize("steps", [1, 3, 9])
def test_a_cancelled_completion_keeps_what_it_has_and_holds_nothing(steps: int, make_orchestrator: Make) -> None:
    orchestrator = make_orchestrator()
    name = orchestrator.submit(replace(SAMPLED, max_tokens=200, stop=("zzz",)))
    for _ in range(steps):
        orchestrator.step()
    orchestrator.cancel(name)
    (result,) = orchestrator.step()
    assert result.stop_reason is StopReason.CANCELLED
    assert {c.finish_reason for c in result.choices} == {"abort"}
    orchestrator.engine.check_drained()


def test_a_time_limit_ends_choices_as_far_as_they_are(make_orchestrator: Make) -> None:
    orchestrator = make_orchestrator()
    orchestrator.submit(replace(SAMPLED, max_tokens=200, time_limit=1e-9))
    (result,) = orchestrator.step()
    assert result.stop_reason is StopReason.DEADLINE
    assert [c.finish_reason for c in result.choices] == ["abort"] * 6
