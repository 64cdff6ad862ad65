"""Grammars compiled for a model's tokens, and what is refused."""

import json
import subprocess
import sys
from collections.abc import Callable

import numpy as np
import pytest
from engine_driver import generate, release

from espalier.engine.engine import Engine
from espalier.engine.guidance import compiled
from espalier.engine.guidance.compiled import GrammarCompiler
from espalier.engine.guidance.grammar import Grammar, GrammarError, json_grammar, lark_grammar, regex_grammar
from espalier.engine.models.model import Model
from espalier.engine.roles import GENERATOR
from espalier.engine.work import Sampling, StopCause

POINT = {"type": "object", "properties": {"x": {"type": "integer", "maximum": 99, "minimum": 0}}, "required": ["x"]}


def blanks(**options: object) -> Grammar:
    return json_grammar({**POINT, "x-guidance": options})


@pytest.fixture(scope="module")
def compiler(load_model: Callable[[str], Model]) -> GrammarCompiler:
    return GrammarCompiler(load_model("talker"))


def matches(compiler: GrammarCompiler, grammar: Grammar, text: str) -> bool:
    """Whether a whole text is one of the grammar's."""
    matcher, ids = compiler.compile(grammar), compiler._text.encode(text)
    return matcher.library.try_consume_tokens(ids) == len(ids) and matcher.library.is_accepting()


@pytest.mark.parametrize(
    ("grammar", "right", "wrong"),
    [
        (regex_grammar(r"\d+"), ["7", "007"], ["", "7a", "٧", "-7"]),
        (regex_grammar(r"[a-z]+", r".{2}"), ["ab"], ["a", "abc", "A1"]),
        (regex_grammar('a/"b'), ['a/"b'], ["a/b"]),
        (json_grammar(POINT), ['{"x": 7}', '{"x":7, "y": 8}'], ['{"x": 7}\n', '{"x":  7}', '{ "x":7}', "{}"]),
        (blanks(whitespace_flexible=True), ['{\n  "x": 7\n}', '{ "x" :7}'], ['{"x": 7}\n', '{"x":\n\n7}']),
        (blanks(whitespace_flexible=False), ['{"x":7}'], ['{"x": 7}', '{"x":7,\n"y":8}']),
        (blanks(whitespace_flexible=False, lenient=True, whitespace_pattern=" "), ['{"x":7}'], ['{"x": 7}']),
        (blanks(whitespace_pattern=""), ['{"x":7}'], ['{"x": 7}']),
        (blanks(whitespace_pattern=r"\t{0,2}"), ['{"x":7}', '{\t"x":\t\t7}'], ['{"x": 7}', '{"x":\t\t\t7}']),
        (json_grammar(POINT), ['{"x": 99}'], ['{"x": 100}', '{"x": -1}', '{"x": "7"}']),
        (json_grammar(True), ["3", '"a"', "[1, {}]"], ["a", "'a'"]),
        (lark_grammar('start: "a" b?\nb: /[0-9]/'), ["a", "a3"], ["3", "a33"]),
        (lark_grammar('root ::= "a" | "b" [0-9]+'), ["a", "b42"], ["b", "c"]),
        (json_grammar(POINT).within('start: "<" @answer ">"'), ['<{"x": 1}>'], ['{"x": 1}', "<1>"]),
    ],
    ids=str,
)  # fmt: skip
def test_a_grammar_allows_its_texts_as_a_whole(compiler: GrammarCompiler, grammar: Grammar, right, wrong):
    assert [matches(compiler, grammar, text) for text in (*right, *wrong)] == [True] * len(right) + [False] * len(wrong)


def test_a_grammar_whose_compilation_would_not_end_is_refused(compiler: GrammarCompiler, monkeypatch):
    """This one takes minutes, and ever more memory, within all limits of the library."""
    monkeypatch.setattr(compiled, "_MAX_COMPILE_SECONDS", 0.3)
    endless = json_grammar({"allOf": [{"type": "integer", "multipleOf": number} for number in (97, 89, 83, 79)]})
    with pytest.raises(GrammarError, match=r"takes more than 0.3 s or 64 MiB to compile"):
        compiler.prepare(endless)
    monkeypatch.setattr(subprocess, "run", None)
    with pytest.raises(GrammarError, match="to compile"):
        compiler.prepare(endless)


@pytest.mark.skipif(sys.platform != "linux", reason="the system limits no memory")
def test_a_grammar_that_would_hold_much_memory_is_refused(compiler: GrammarCompiler):
    """Of three characters more than one that is allowed: 90 MB for each search that waits."""
    with pytest.raises(GrammarError, match="64 MiB to compile"):
        compiler.prepare(regex_grammar("a{1000000}"))
    compiler.prepare(
        json_grammar({"type": "object", "properties": {f"p{i}": {"type": "integer"} for i in range(1500)}})
    )


def test_prepared_grammars_are_few_in_bytes(compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(compiled, "_tried", lambda grammar: 2**26)
    monkeypatch.setattr(GrammarCompiler, "_compile", lambda self, grammar: object())
    grammars = [regex_grammar(f"{i}") for i in range(12)]
    for grammar in grammars:
        compiler.prepare(grammar)
    assert [compiler.prepared(grammar) is not None for grammar in grammars] == [False] * 4 + [True] * 8


def test_a_grammar_that_a_busy_machine_does_not_compile_may_be_asked_for_again(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
):
    run, grammar = subprocess.run, regex_grammar("later")

    def busy(command: list[str], **how: object) -> None:
        raise subprocess.TimeoutExpired(command, 60.0)

    monkeypatch.setattr(subprocess, "run", busy)
    with pytest.raises(GrammarError, match="was not compiled within 60 s"):
        compiler.prepare(grammar)
    monkeypatch.setattr(subprocess, "run", run)
    compiler.prepare(grammar)


def test_a_grammar_is_tried_once(compiler: GrammarCompiler, monkeypatch):
    tried: list[object] = []
    run = subprocess.run
    monkeypatch.setattr(subprocess, "run", lambda *args, **how: tried.append(args) or run(*args, **how))
    for _ in range(2):
        compiler.prepare(regex_grammar("once"))
    assert len(tried) == 1


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: regex_grammar("("), "unclosed group"),
        (lambda: regex_grammar("(?=a)b"), "look-around"),
        (lambda: regex_grammar(r"[^\s\S]"), "allows no text"),
        (lambda: json_grammar({"type": "array", "uniqueItems": True}), "uniqueItems"),
        (lambda: json_grammar({"type": "array", "uniqueItems": True, "x-guidance": {"lenient": True}}), "uniqueItems"),
        (lambda: json_grammar({"type": "string", "format": "nonsense"}), "nonsense"),
        (lambda: json_grammar({"$ref": "https://example.org/schema.json"}), "does not fetch"),
        (lambda: json_grammar({"$ref": "#"}), "allows no text"),
        (lambda: json_grammar(False), "not"),
        (lambda: lark_grammar("start: nothing"), "nothing"),
        (lambda: lark_grammar("start: " + "(" * 20_000), "nested"),
        (lambda: lark_grammar("start: <|im_end|>"), "cannot be compiled"),
    ],
)
def test_what_cannot_be_used_is_refused_with_the_reason(compiler: GrammarCompiler, make, why: str):
    with pytest.raises(GrammarError, match=why) as refused:
        compiler.prepare(make())
    assert "\n" not in str(refused.value)


def test_the_end_is_drawn_where_nothing_else_may_come(
    make_engine: Callable[..., Engine], load_model: Callable[[str], Model], compiler: GrammarCompiler
):
    engine = make_engine(load_model("talker"))
    sequence = engine.open(GENERATOR, [9, 8, 7])
    matcher = compiler.compile(regex_grammar(r"(ab|cd)[0-9]{2}"))
    samplings = [Sampling(temperature=2.0, key=key) for key in range(8)]
    done = generate(engine, sequence, *samplings, tokens=30, delimiter="", matcher=matcher)
    assert {d.cause for d in done} == {StopCause.EOS}
    assert all(matches(compiler, regex_grammar(r"(ab|cd)[0-9]{2}"), d.text) for d in done)
    assert len({d.text for d in done}) > 2
    release(engine, sequence, *(d.sequence for d in done))


def test_a_matcher_that_was_given_a_wrong_token_allows_the_end_alone(
    load_model: Callable[[str], Model], compiler: GrammarCompiler
):
    model = load_model("talker")
    matcher = compiler.compile(regex_grammar(r"\d+"))
    other = matcher.copy()
    matcher.advance(model.tokenizer.encode("a")[0])
    bits = np.zeros((model.config.vocab_size + 7) // 8, dtype=np.uint8)
    matcher.allow(bits)
    assert np.flatnonzero(np.unpackbits(bits, bitorder="little")).tolist() == sorted(model.eos_token_ids)
    assert matcher.error
    assert not other.error


def test_a_prepared_grammar_is_compiled_once_and_used_by_one_search_alone(
    load_model: Callable[[str], Model], monkeypatch: pytest.MonkeyPatch
):
    compiler, compiled_ones = GrammarCompiler(load_model("talker")), []
    compile_ = GrammarCompiler._compile
    monkeypatch.setattr(GrammarCompiler, "_compile", lambda self, g: compiled_ones.append(g) or compile_(self, g))
    grammar = regex_grammar("a+")
    compiler.prepare(grammar)
    assert compiler.prepared(grammar) is not None
    assert compiler.prepared(grammar) is None
    assert compiled_ones == [grammar]


def test_prepared_grammars_that_nobody_asks_for_give_way_even_equal_ones(
    load_model: Callable[[str], Model], monkeypatch: pytest.MonkeyPatch
):
    compiler = GrammarCompiler(load_model("talker"))
    monkeypatch.setattr(GrammarCompiler, "_compile", lambda self, grammar: object())
    first, second = regex_grammar("a+"), regex_grammar("b+")
    compiler.prepare(first)
    for _ in range(1000):
        compiler.prepare(second)
    assert compiler.prepared(first) is None
    kept = 0
    while compiler.prepared(second) is not None:
        kept += 1
    assert 1 < kept < 100


def test_a_grammar_that_takes_too_long_fails_for_all_its_branches(
    compiler: GrammarCompiler, load_model: Callable[[str], Model], monkeypatch: pytest.MonkeyPatch
):
    matcher = compiler.compile(regex_grammar("a+"))
    branch = matcher.copy()
    monkeypatch.setattr(compiled, "MAX_SECONDS", -1.0)
    branch.advance(load_model("talker").tokenizer.encode("a")[0])
    assert "takes more than" in branch.error
    assert matcher.error == branch.error


def test_the_library_is_not_imported_without_a_grammar():
    modules = "espalier.search.run.orchestrator, espalier.experiments.cli.main"
    code = f"import sys, {modules}; print('llguidance' in sys.modules)"
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert told.stdout.strip() == "False"


def test_a_grammar_is_the_same_whatever_order_its_schema_has_been_sent_in():
    assert json.loads(json_grammar(POINT).source)["grammars"][0]["json_schema"]["required"] == ["x"]
    assert json_grammar(POINT) == json_grammar(dict(POINT))
