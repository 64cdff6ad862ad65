"""Searches and completions whose answers or texts have a given form."""

import json
import pickle
import re
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from search_runs import ALL, BEAM, BEST_OF_N, GREEDY, MAJORITY, outcome, run
from thinkers import SHAPES, thinker, write_thinker

from espalier.engine.errors import InvalidRequestError
from espalier.engine.guidance import compiled
from espalier.engine.guidance.compiled import GrammarCompiler
from espalier.engine.guidance.grammar import Grammar, GrammarError
from espalier.search.common_fields import answer_in
from espalier.search.completion import ChatPrompt, CompletionRequest
from espalier.search.request import AlgorithmName
from espalier.search.result import SearchResult, StopReason
from espalier.search.rules import read_form
from espalier.search.run.executor import Resolved
from espalier.search.run.orchestrator import Orchestrator
from espalier.search.trace import replay, trace_of

Make = Callable[..., Orchestrator]
DIGITS = r"\d{1,3}"
FEW = {"answer_form": r"[1-3]", "max_tokens": 60, "max_steps": 8, "temperature": 1.5}


def complete_nodes(result: SearchResult) -> list:
    return [node for node in result.nodes if node.termination in ("eos", "boxed")]


def test_a_form_is_read_by_its_kind():
    assert (read_form(r"\d+").kind, read_form("regex:json:").text) == ("regex", "json:")
    assert read_form('json:{"type": "object"}').schema == {"type": "object"}
    assert read_form('grammar:start: "a"').kind == "grammar"
    for wrong in ("json:", "json:[1]", "json:" + "[" * 50_000, "regex:", "x" * 70_000):
        with pytest.raises(ValueError):
            read_form(wrong)


@pytest.mark.parametrize(
    ("form", "text", "answer"),
    [
        (r"\d+", r"So \boxed{12}, no: \boxed{13}. Done", "13"),
        (r"\d+", r"The answer is 12", ""),
        (r"\d+", r"So \boxed{12} and \boxed{1", ""),
        (r"\\frac\{\d\}\{\d\}", r"So \boxed{\frac{1}{2}}.", r"\frac{1}{2}"),
        ('json:{"type": "string"}', r'So \boxed{"}{"}!', '"}{"'),
    ],
)
def test_the_answer_is_what_the_last_box_holds(form: str, text: str, answer: str):
    assert answer_in(text, replace(GREEDY, answer_form=form)) == answer


@pytest.mark.parametrize("name", ALL)
def test_no_search_has_a_candidate_without_an_answer_of_the_form(name: str, make_orchestrator: Make):
    orchestrator = make_orchestrator(kv_memory_bytes=2**23)
    result = run(orchestrator, replace(ALL[name], **FEW)).only
    assert all(re.fullmatch("[1-3]", candidate.answer) for candidate in result.candidates)
    assert all(re.search(r"\\(boxed|fbox)\{[1-3]\}", path_of(result, node)) for node in complete_nodes(result))
    assert not re.search(r"\\(boxed|fbox)(?!\{[1-3]?)", "".join(node.text for node in result.nodes))
    assert replay(trace_of(result)) == len(result.rounds)
    orchestrator.engine.check_drained()


def path_of(result: SearchResult, node) -> str:
    by_id, text = {each.node_id: each for each in result.nodes}, ""
    while node.parent_id is not None:
        text, node = node.text + text, by_id[node.parent_id]
    return text


@pytest.mark.parametrize("request_", [BEAM, MAJORITY, BEST_OF_N], ids=lambda r: r.algorithm)
def test_a_text_of_the_form_is_the_answer_and_a_cut_one_has_no_vote(request_, make_orchestrator: Make):
    form = {"text_form": r"[ab]{6,9}(c|d)", "max_tokens": 40, "temperature": 2.0}
    result = run(make_orchestrator(), replace(request_, **form)).only
    assert result.candidates
    assert all(re.fullmatch(r"[ab]{6,9}(c|d)", candidate.answer) for candidate in result.candidates)
    cut = run(make_orchestrator(), replace(request_, **{**form, "max_tokens": 3, "max_steps": None})).only
    assert not cut.candidates
    assert {node.termination for node in cut.nodes if node.parent_id is not None} <= {"length", "", "pruned"}


def test_forms_change_nothing_in_company_in_scarce_memory_or_launched_ahead(make_orchestrator: Make):
    requests = [replace(ALL[name], **FEW) for name in ("beam", "majority", "mcts")]
    requests += [replace(BEST_OF_N, text_form=r"[ab]{6,9}(c|d)"), BEAM]
    alone = [outcome(run(make_orchestrator(kv_memory_bytes=2**23), request).only) for request in requests]
    for options in ({}, {"kv_memory_bytes": 2**19, "reserved_share": 0.2}, {"launch_ahead": True}):
        orchestrator = make_orchestrator(**{"kv_memory_bytes": 2**23, **options})
        together = run(orchestrator, *requests)
        assert [outcome(result) for result in together.results] == alone, options
        if "reserved_share" in options:
            assert orchestrator.engine.stats()["generator"].preemptions


@pytest.mark.parametrize("shape", SHAPES)
def test_a_thought_is_free_and_what_comes_behind_it_is_bound(
    shape: str, tiny_checkpoints: dict[str, Path], tmp_path: Path, make_orchestrator: Make
):
    marks = {
        "opened by the model": ("<think>", "</think>"),
        "opened by the prompt": ("", "</think>"),
        "no switch": ("[THINK]", "[/THINK]"),
        "harmony": ("", "<|end|>"),
        "channel": ("<|channel>", "<channel|>"),
    }
    checkpoint = write_thinker(tiny_checkpoints["talker"], tmp_path / "thinker", SHAPES[shape])
    opening, closing = marks.get(shape, ("", ""))
    script = [opening, "Tom has no coins", closing] if closing else []
    model = thinker(checkpoint, *filter(None, script), "He finds", ends=600)
    path = replace(GREEDY, max_steps=None, max_step_tokens=None, max_tokens=400)
    result = run(make_orchestrator(model, None), replace(path, text_form="(x|y)(z|w)")).only
    assert re.fullmatch("[xy][zw]", result.answer)
    thought = "".join(step.text[: step.thought_chars] for step in result.best.steps)
    assert thought.strip() == ("Tom has no coins" if closing else "")


@pytest.mark.parametrize("rule", ["paragraph", "tokens:4", "tokens:1"])
def test_a_form_begins_behind_a_thought_though_it_has_room_for_the_thoughts_marks(
    rule: str, tiny_checkpoints: dict[str, Path], tmp_path: Path, make_orchestrator: Make
):
    """Marks that are text can be drawn as part of the form: what they open is a thought all the same."""
    checkpoint = write_thinker(tiny_checkpoints["talker"], tmp_path / "thinker", SHAPES["text"])
    model = thinker(checkpoint, "<think>", "no", "</think>", "xz", ends=600)
    path = replace(GREEDY, max_steps=None, max_step_tokens=None, max_tokens=400, step_rule=rule)
    result = run(make_orchestrator(model, None), replace(path, text_form="<think>no</think>q|[xy][zw]")).only
    assert result.best is not None
    assert (result.best.thought, result.answer) == ("no", "xz")


@pytest.mark.parametrize("opened", [False, True])
def test_plain_sampling_binds_what_comes_behind_the_thought(
    opened: bool, tiny_checkpoints: dict[str, Path], tmp_path: Path, make_orchestrator: Make
):
    shape = SHAPES["opened by the prompt" if opened else "opened by the model"]
    checkpoint = write_thinker(tiny_checkpoints["talker"], tmp_path / "thinker", shape)
    script = [*([] if opened else ["<think>"]), "Tom has no coins", "</think>", "He finds"]
    orchestrator = make_orchestrator(thinker(checkpoint, *script), None)
    prompt = ChatPrompt(({"role": "user", "content": "Tom"},))
    (choice,) = completed(orchestrator, CompletionRequest((prompt,), text_form="(x|y)(z|w)", temperature=0.0))
    assert re.fullmatch("[xy][zw]", choice.text)
    assert choice.thought == "Tom has no coins"
    assert choice.finish_reason == "stop"


def completed(orchestrator: Orchestrator, request: CompletionRequest) -> list:
    orchestrator.submit(request)
    results = []
    while orchestrator.busy:
        results += orchestrator.step()
    return list(results[0].choices)


@pytest.mark.parametrize("how", [{}, {"logprobs": 2}, {"stop": ("#",)}], ids=str)
def test_choices_have_the_form_or_are_cut(how: dict, make_orchestrator: Make):
    schema = {"type": "object", "properties": {"a": {"enum": ["yes", "no"]}}, "required": ["a"]}
    schema["additionalProperties"] = False
    request = CompletionRequest(
        ("Tom starts", "He finds"), samples=4, temperature=1.0, max_tokens=200, text_form=f"json:{json.dumps(schema)}"
    )
    choices = completed(make_orchestrator(), replace(request, **how))
    assert {choice.finish_reason for choice in choices} == {"stop"}
    assert {json.loads(choice.text)["a"] for choice in choices} <= {"yes", "no"}
    assert {c.finish_reason for c in completed(make_orchestrator(), replace(request, max_tokens=2))} == {"length"}


def test_a_path_whose_matcher_fails_ends_with_the_error_and_never_votes(
    make_orchestrator: Make, monkeypatch: pytest.MonkeyPatch
):
    orchestrator = make_orchestrator()
    resolved = orchestrator.check(replace(BEAM, text_form="[ab]+"))
    monkeypatch.setattr(compiled, "MAX_SECONDS", -1.0)
    results: list[SearchResult] = []
    names = [orchestrator.submit(resolved), orchestrator.submit(BEAM)]
    while orchestrator.busy:
        results += orchestrator.step()
    bound, free = sorted(results, key=lambda result: names.index(result.search_id))
    assert {node.termination for node in bound.nodes if node.parent_id is not None} <= {"error", "duplicate"}
    assert not bound.candidates
    assert "takes more than" in bound.warnings[-1]
    assert free.candidates


def test_probes_answer_in_the_form(make_orchestrator: Make):
    asked = replace(
        GREEDY, max_steps=None, max_step_tokens=None, max_tokens=200, temperature=1.5, algorithm=AlgorithmName.CHAIN
    )
    asked = replace(asked, step_rule="tokens:4", probe_every=4, generator_budget=60, answer_form=r"[1-3]{2}")
    result = run(make_orchestrator(verifier=None), asked).only
    probed = [node.probe.answer for node in result.nodes if node.probe]
    assert probed
    assert all(re.fullmatch("[1-3]{2}", answer) for answer in probed)


@pytest.mark.parametrize(
    ("fields", "wrong"),
    [
        ({"answer_form": "("}, "answer_form"),
        ({"text_form": 'json:{"uniqueItems": true}'}, "text_form"),
        ({"text_form": "json:{"}, "text_form"),
        ({"answer_form": "a", "text_form": "b"}, "answer_form"),
        ({"text_form": "a", "probe_every": 8}, "text_form"),
    ],
    ids=str,
)
def test_a_form_that_cannot_be_used_is_refused_by_its_field(fields: dict, wrong: str, make_orchestrator: Make):
    with pytest.raises(InvalidRequestError) as refused:
        make_orchestrator().submit(replace(BEAM, **fields))
    assert [violation.field for violation in refused.value.violations] == [wrong]


def checked_elsewhere(make_orchestrator: Make, **fields: object) -> Resolved:
    """A request that another process has checked."""
    elsewhere = make_orchestrator()
    return pickle.loads(pickle.dumps(elsewhere.check(replace(BEAM, **FEW, **fields))))


def test_what_another_process_has_checked_is_compiled_off_the_engines_thread_while_others_go_on(
    make_orchestrator: Make, monkeypatch: pytest.MonkeyPatch
):
    resolved, free = checked_elsewhere(make_orchestrator), replace(BEAM, seed=7)
    expected = [outcome(run(make_orchestrator(), request).only) for request in (replace(BEAM, **FEW), free)]
    orchestrator, threads, may_compile = make_orchestrator(), [], threading.Event()
    compile_ = GrammarCompiler._compile

    def slow(self: GrammarCompiler, grammar: Grammar) -> object:
        threads.append(threading.current_thread())
        assert may_compile.wait(60)
        return compile_(self, grammar)

    monkeypatch.setattr(GrammarCompiler, "_compile", slow)
    bound, other = orchestrator.submit(resolved), orchestrator.submit(free)
    ended = []
    while not ended:
        ended += orchestrator.step()
    assert [result.search_id for result in ended] == [other]
    may_compile.set()
    while orchestrator.busy:
        ended += orchestrator.step()
    assert [result.search_id for result in ended] == [other, bound]
    assert [outcome(result) for result in reversed(ended)] == expected
    assert threads
    assert threading.main_thread() not in threads


def test_a_search_whose_grammar_is_being_compiled_is_cancelled_at_once_and_one_that_cannot_be_fails_alone(
    make_orchestrator: Make, monkeypatch: pytest.MonkeyPatch
):
    resolved = checked_elsewhere(make_orchestrator)
    orchestrator, may_compile = make_orchestrator(), threading.Event()

    def refused(self: GrammarCompiler, grammar: Grammar) -> object:
        may_compile.wait(60)
        raise GrammarError("is too complex")

    monkeypatch.setattr(GrammarCompiler, "_compile", refused)
    cancelled = orchestrator.submit(resolved)
    assert not orchestrator.step()
    orchestrator.cancel(cancelled)
    (result,) = orchestrator.step()
    assert result.stop_reason is StopReason.CANCELLED
    orchestrator.submit(resolved)
    may_compile.set()
    ended = []
    while orchestrator.busy:
        ended += orchestrator.step()
    assert [(result.stop_reason, result.error) for result in ended] == [(StopReason.FAILED, "is too complex")]
    orchestrator.engine.check_drained()
