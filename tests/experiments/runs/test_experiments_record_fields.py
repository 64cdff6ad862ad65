"""Fields within fields, prompts that are conversations, ids that repeat, and 40 kinds of malformed records."""

import json
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
from run_samples import CONFIGURATION, REQUEST

from espalier.experiments.cli.options import Selection
from espalier.experiments.runs.benchmark_files import BenchmarkError
from espalier.experiments.runs.benchmarks import Problem, load_benchmark
from espalier.experiments.runs.evaluate import Evaluation
from espalier.experiments.runs.folder import RunFolder
from espalier.experiments.runs.record import Sample
from espalier.search.conversation import ChatMessage, ChatRole

# A row of DAPO-Math-17k and other data for verl, shortened; see https://github.com/marin-community/marin/issues/6279
VERL = {
    "data_source": "math",
    "prompt": [{"role": "user", "content": "What is 2 + 3?"}],
    "ability": "MATH",
    "reward_model": {"ground_truth": "5", "style": "rule"},
    "extra_info": {"index": "a1"},
}
MATH = {"problem": "1+1?", "answer": "2"}
SYSTEM, ASKED, ANSWERED = (
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is 2 + 3?"},
    {"role": "assistant", "content": "5"},
)


@pytest.fixture
def write(tmp_path) -> Callable[..., str]:
    def write(*records: object, name: str = "some.jsonl") -> str:
        lines = [r if isinstance(r, bytes) else json.dumps(r).encode() for r in records]
        (tmp_path / name).write_bytes(b"\n".join(lines))
        return str(tmp_path / name)

    return write


def ids_of(name: str, **options) -> list[str]:
    return [problem.unique_id for problem in load_benchmark(name, notify=lambda _: None, **options)]


# --- fields within fields, conversations -----------------------------------------------------------------------------


def test_a_row_for_verl_is_read_as_it_is(write):
    assert load_benchmark(write(VERL)) == [Problem("a1", "What is 2 + 3?", "5", None)]


def test_a_field_map_leads_into_fields(write):
    record = {"task": {"text": "1+1?", "hint": "Add."}, "grading": {"golds": [{"value": 2}]}, "a.b": "x"}
    fields = {"problem": "task.hint+task.text", "answer": "grading.golds.0.value", "id": "a.b"}
    assert load_benchmark(write(record), field_map=fields) == [Problem("x", "Add. 1+1?", "2", None)]
    fields = {"problem": "prompt.0.content", "answer": "reward_model.ground_truth", "subject": "ability"}
    assert load_benchmark(write(VERL), field_map=fields) == [Problem("a1", "What is 2 + 3?", "5", None, subject="MATH")]


def test_a_field_map_takes_a_conversation_too(write):
    (problem,) = load_benchmark(write(VERL | {"chat": [ASKED]}), field_map={"problem": "chat"})
    assert problem.problem == "What is 2 + 3?"


def test_messages_before_the_problem_are_its_history(write):
    parts = {"role": "user", "content": [{"type": "text", "text": "And "}, {"type": "text", "text": "twice that?"}]}
    (problem,) = load_benchmark(write(VERL | {"prompt": [SYSTEM, ASKED, ANSWERED, parts]}))
    assert problem.problem == "And twice that?"
    assert problem.history == (
        ChatMessage(ChatRole.SYSTEM, "Be brief."),
        ChatMessage(ChatRole.USER, "What is 2 + 3?"),
        ChatMessage(ChatRole.ASSISTANT, "5"),
    )


def test_golds_listed_within_a_text_are_all_accepted(write):
    (problem,) = load_benchmark(write(VERL | {"reward_model": {"ground_truth": '["\\\\frac{1}{2}", "0.5"]'}}))
    assert problem.golds == ("\\frac{1}{2}", "0.5")
    (interval,) = load_benchmark(write({"problem": "Which?", "answer": "[1, 2]"}))
    assert interval.golds == ("[1, 2]",)


def test_the_very_name_of_a_field_comes_before_one_in_capitals(write):
    (problem,) = load_benchmark(write({"Answer": "wrong", "answer": "2", "problem": "1+1?"}))
    assert problem.answer == "2"


def test_a_record_without_a_field_shows_the_fields_within_its_fields(write):
    with pytest.raises(
        BenchmarkError, match=r"some\.jsonl:1: no answer: the record has prompt, rule\.gold, rule\.by; "
    ):
        load_benchmark(write({"prompt": "1+1?", "rule": {"gold": "2", "by": "x"}}))
    with pytest.raises(BenchmarkError, match=r"--field-map answer=NAME, or NAME\.FIELD for a field within it"):
        load_benchmark(write({"prompt": "1+1?"}))


def test_a_search_reads_the_messages_before_a_problem(make_orchestrator, grader):
    plain = Problem("p", "What is 1+1?", "2", None)
    told = replace(plain, history=(ChatMessage(ChatRole.USER, "Say a number."), ChatMessage(ChatRole.ASSISTANT, "7")))
    prompts: list[int] = []
    for problem in (plain, told):
        samples: list[Sample] = []
        Evaluation(make_orchestrator(), [problem], grader, "some", on_sample=samples.append).run(REQUEST)
        prompts.append(samples[0].usage["prompt_tokens"])
        assert samples[0].is_of(problem)
    assert prompts[1] > prompts[0]
    assert not samples[0].is_of(plain)


# --- ids that repeat -------------------------------------------------------------------------------------------------


def test_an_id_that_repeats_gets_a_number_and_a_notice(write):
    said: list[str] = []
    name = write(*({**MATH, "id": each} for each in ("a", "b", "a", "a")))
    assert [problem.unique_id for problem in load_benchmark(name, notify=said.append)] == ["a", "b", "a#2", "a#3"]
    (notice,) = said
    assert f"2 of 4 records of {name} repeat the id of an earlier one" in notice
    assert f"first {name}:3: 'a' becomes 'a#2'" in notice


def test_an_id_that_looks_like_a_number_behind_another_stays_unique(write):
    assert ids_of(write(*({**MATH, "id": each} for each in ("a", "a#2", "a", "a#2", "a")))) == [
        "a", "a#2", "a#3", "a#2#2", "a#4",
    ]  # fmt: skip
    assert ids_of(write({**MATH, "id": "some/2"}, MATH)) == ["some/2", "some/2#2"]


def test_ids_do_not_depend_on_how_many_records_are_read_nor_on_their_order(write):
    name = write(*({**MATH, "id": each} for each in "abcabcaab"))
    whole = ids_of(name)
    assert len(set(whole)) == 9
    assert [ids_of(name, limit=limit) for limit in range(1, 10)] == [whole[:limit] for limit in range(1, 10)]
    shuffled = Selection(shuffle=True, shuffle_seed=3, limit=4).of(load_benchmark(name, notify=lambda _: None))
    assert {problem.unique_id for problem in shuffled} < set(whole)


def test_a_run_with_repeated_ids_goes_on_with_the_same(write, make_orchestrator, grader, tmp_path):
    problems = load_benchmark(
        write(*({"problem": f"{n}+1?", "answer": "2", "id": "a"} for n in range(3))), notify=lambda _: None
    )
    for limit, fresh in ((2, {"a", "a#2"}), (3, {"a#3"})):
        samples: list[Sample] = []
        folder = RunFolder(tmp_path / "run", CONFIGURATION)
        asked = problems[:limit]
        evaluation = Evaluation(make_orchestrator(), problems, grader, "some", asked, on_sample=samples.append)
        summary = evaluation.run(REQUEST, folder)
        assert {sample.unique_id for sample in samples} == fresh
        assert summary.problems == limit


def test_the_command_says_which_ids_it_changed(write, espalier, tmp_path):
    name = write({**MATH, "id": "a"}, {"problem": "2+2?", "answer": "4", "id": "a"})
    ran = espalier("eval", "--benchmark", name, "-a", "greedy", "--max-tokens", 8, "--out", tmp_path / "out")
    assert ran.code == 0, ran.err
    assert "notice: 1 of 2 records of " in ran.err
    assert "'a' becomes 'a#2'" in ran.err


# --- malformed records -----------------------------------------------------------------------------------------------


def olympiad(**changes: object) -> dict[str, object]:
    return {"question": "1?", "final_answer": ["1"], "answer_type": "Numerical", "is_multiple_answer": False} | changes


def chat(*messages: object) -> dict[str, object]:
    return {**VERL, "prompt": list(messages)}


def malformed() -> Iterator[tuple[object, str]]:
    """Records that nothing can be made of, and what is said of each, behind the file and the line."""
    for value, kind in ((None, "null"), (5, "a number"), (True, "true or false"), ({"a": 1}, "an object")):
        yield {**MATH, "problem": value}, f"its problem is {kind}" if value is not None else "no problem: "
    for gold, said in (
        (True, "its answer is true or false"), ({"value": 2}, "its answer is an object"), ([], "an empty list"),
        ([["2"]], "its answer is a list, not"), ([None], "its answer is null"), ("", "its answer is empty"),
        ("\\boxed{}", "its answer is empty"), ("It is 2.\n####", "its answer is empty"),
        ("One and one\nis 2.", "its answer has several lines"), (["2", " "], "its answer is empty"),
    ):  # fmt: skip
        yield {**MATH, "answer": gold}, said
    yield {**MATH, "id": {"a": 1}}, "its id is an object"
    yield {**MATH, "unique_id": 1.5}, "its unique_id is a number, not a text or a whole number"
    for messages, said in (
        ([], "it has no messages"),
        (["What?"], "message 1 is no object with a role"),
        ([{"content": "What?"}], "the role of message 1 is None, none of system, user, assistant"),
        ([{"role": "human", "content": "What?"}], "the role of message 1 is 'human'"),
        ([ASKED, ANSWERED], "the last of its 2 messages is the assistant's"),
        ([SYSTEM, {"role": "user"}], "the content of message 2 is no text"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}], "the content of message 1 is no"),
        ([{"role": "user", "content": " "}], "its prompt is empty"),
    ):  # fmt: skip
        yield chat(*messages), f"its prompt is no conversation: {said}" if "empty" not in said else said
    yield VERL | {"reward_model": {"style": "rule"}}, "no answer: the record has data_source, prompt, ability, reward"
    yield VERL | {"reward_model": {"ground_truth": {"target": 5}}}, "its reward_model.ground_truth is an object"
    yield olympiad(error="about 1"), "its error is 'about 1', not a tolerance"
    yield olympiad(error="-1"), "its error is '-1', not a tolerance"
    yield olympiad(final_answer=["1", "2"], is_multiple_answer="yes"), "its is_multiple_answer is text"
    yield olympiad(final_answer=[]), "its final_answer is empty, as of a proof"
    yield olympiad(answer_type="Need_human_evaluate"), "cannot be graded by a program"
    yield olympiad(image_1="x.png"), "it has images"
    for line, said in (
        (b'{"problem": "1?", "answer": "1"', "not JSON"),
        (b'{"problem": "1?", "answer": 1e999}', "its answer is inf, not a number"),
        (b'{"problem": "1?", "answer": NaN}', "its answer is nan, not a number"),
        (b'{"problem": "1?", "answer": "1", "answer": "2"}', "an object names 'answer' twice"),
        (b'{"problem": "1?", "answer": ' + b"9" * 5000 + b"}", "JSON that cannot be read: Exceeds the limit (4300"),
        (b'{"problem": "1?", "answer": ' + b"[" * 100_000, "JSON that cannot be read: maximum recursion"),
        (b'{"problem": "1\\ud800?", "answer": "1"}', "its 'problem' holds '\\ud800', a lone surrogate"),
        (b'{"problem": "1?", "answer": "\\uDFFF"}', "its 'answer' holds '\\udfff', a lone surrogate"),
        (b'{"problem": "1?", "answer": "1", "id": "\\ud83d"}', "its 'id' holds '\\ud83d', a lone surrogate"),
        ('{"problem": "ß?", "answer": "1"}'.encode("latin-1"), "not text in UTF-8: invalid continuation byte (0xdf)"),
        (b'{"problem": "1?"}{"answer": "1"}', "not JSON: Extra data"),
        (b'["1?", "1"]', "a list, not an object"),
        (b"\x1f\x8b\x08\x00\x00", "not text in UTF-8"),
    ):  # fmt: skip
        yield line, said


MALFORMED = list(malformed())


@pytest.mark.parametrize("place", range(len(MALFORMED)))
def test_a_malformed_record_is_refused_with_its_file_line_and_field(write, place):
    record, said = MALFORMED[place]
    name = write(MATH, b"", record)
    with pytest.raises(BenchmarkError) as refused:
        load_benchmark(name)
    message = str(refused.value)
    assert message.startswith(f"{name}:3: ")
    assert said in message
    assert "\n" not in message


def test_there_are_at_least_forty_kinds_of_malformed_records():
    assert len(MALFORMED) >= 40


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            b'[\n{"problem": "1?", "answer": "1"},\n{"problem": "2?",\n "problem": "3?"}]',
            "some.json:3: JSON that cannot be read: an object names",
        ),
        (b'[\n{"problem": "1?", "answer": "\\ud800"}]', "some.json:2 (record 1): its 'answer' holds '\\ud800'"),
        (
            b'[\n{"problem": "1?",\n\n"answer": ' + b"9" * 5000,
            "some.json:2: JSON that cannot be read: Exceeds the limit (4300",
        ),
    ],
)
def test_a_malformed_record_of_an_array_has_its_line(write, text, said):
    with pytest.raises(BenchmarkError) as refused:
        load_benchmark(write(text, name="some.json"))
    assert said in str(refused.value)


@pytest.mark.parametrize("field", ["level", "subject"])
def test_a_level_or_subject_that_the_map_names_must_be_one(write, field):
    name = write(MATH | {"much": [1]})
    with pytest.raises(
        BenchmarkError, match=rf"some\.jsonl:1: its much is a list, not a {'level' if field == 'level' else 'text'}"
    ):
        load_benchmark(name, field_map={field: "much"})


def test_a_level_of_very_many_digits_is_none(write):
    assert load_benchmark(write(MATH | {"level": "9" * 5000}))[0].level is None


@pytest.mark.parametrize("name", ["a" * 5000, "x\0y"])
def test_a_name_that_no_system_takes_is_no_benchmark(name):
    with pytest.raises(BenchmarkError, match="neither a file, a folder, a hub id"):
        load_benchmark(name)


def test_a_byte_order_mark_crlf_and_blank_lines_are_read_over(write):
    lines = [
        b'\xef\xbb\xbf{"problem": "What is 2 + 3?", "answer": "5"}\r',
        b"\r",
        b'{"problem": "Why?", "answer": "5"}\r',
    ]
    lines += [
        b"",
        b'{"problem": "How?", "answer": "5"}',
        b"   ",
        b"",
    ]  # https://github.com/microsoft/promptflow/issues/3670
    assert [problem.problem for problem in load_benchmark(write(*lines))] == ["What is 2 + 3?", "Why?", "How?"]
