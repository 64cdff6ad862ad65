"""Loads benchmarks: problems with their gold answers, by name, from a file, a folder or the Hugging Face hub.

What can be read, and how a part of a dataset is named, is in `benchmark_files`. These fields of a record are read:

- the problem: `problem`, `Body` and `Question` together, `question`, or `prompt`;
- the gold answer: `answer`, `final_answer`, `solution`, or `reward_model.ground_truth`;
- optionally an id, `unique_id`, `id` or `extra_info.index`, a `level`, and a `subfield`, `subject`, `category` or
  `type`.

The first of these names that exists is used, ignoring case; a field map gives other names. A name with dots is the way
to a field within a field: `reward_model.ground_truth`, `prompt.0.content`.

A problem is a text, or a conversation: a list of messages with `role` and `content`, of which the last is the problem.
An id that occurs again gets a number behind it, as in `a1#2`.

A gold answer is a number, or LaTeX without dollars. In a worked solution, it is found as a model's answer is, in the
last box, as in MATH, or after the last `####`, as in GSM8K; see `search.grading.answers`. A list holds several accepted
answers, any of which is right.

So GSM8K, MATH-500, AIME and AMC are read as they are, and data for reinforcement learning with verl. A record with
`final_answer` and `answer_type` is one of OlympiadBench, and is graded as its authors do
(https://github.com/OpenBMB/OlympiadBench, `inference/judge.py`):

- with `is_multiple_answer`, the listed answers are one, and all must be given, in any order;
- `error` is how far a number may be off, absolutely; several, with commas between them, are of the answers in order;
  none of a tuple;
- `unit` is not graded: an answer may have or lack it;
- `context` precedes the question.

Its proofs, and answers that a human must judge, cannot be graded, and its images cannot be read: such records are
refused. Unlike the authors' judge, a number without a percent sign is not right for being 100 times too large or small.
"""

import json
import logging
import math
import random
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from itertools import islice
from typing import Any

from espalier.experiments.demo import benchmark_path
from espalier.experiments.runs.benchmark_files import BenchmarkError, Record, read_records
from espalier.search.conversation import ChatMessage, ChatRole, split_conversation
from espalier.search.grading.answers import boxed, doubt_of, extract_gold

FIELDS: dict[str, tuple[str, ...]] = {
    "problem": ("problem", "Body+Question", "question", "prompt"),
    "answer": ("answer", "final_answer", "solution", "reward_model.ground_truth"),
    "id": ("unique_id", "id", "extra_info.index"),
    "level": ("level",),
    "subject": ("subfield", "subject", "category", "type"),
}
"""Fields read from a record and their possible names; a plus joins two texts, a dot leads into a field."""

_KINDS = {dict: "an object", list: "a list", str: "text", bool: "true or false", int: "a number", float: "a number"}
_ROLES = (ChatRole.SYSTEM, ChatRole.USER, ChatRole.ASSISTANT)
_SHOWN_FIELDS = 12
_MAX_SHOWN = 40
_MAX_LEVEL_DIGITS = 9
_DEMO_TRAINING = 2000
"""Problems of `demo-training` without a limit."""
_EXACT = 1e-8
"""Tolerance of an answer of OlympiadBench that has none, among others that have one."""
_IMAGE = re.compile(r"<(?:img|image)_\d+>")
_SHOWN_GOLDS = 3
_log = logging.getLogger("espalier.benchmarks")


@dataclass(frozen=True, slots=True)
class Problem:
    """One record. `answer` is the gold answer, LaTeX without dollars; `level` and `subject` are None if absent.

    `alternatives` are further accepted answers. `tolerances` say how far numbers may be off, absolutely: one for each
    member of the gold answer in order, or one for all; empty where only equal ones are right. `history` holds the
    messages before the problem, where the record is a conversation.
    """

    unique_id: str
    problem: str
    answer: str
    level: int | None
    alternatives: tuple[str, ...] = ()
    subject: str | None = None
    tolerances: tuple[float, ...] = ()
    history: tuple[ChatMessage, ...] = ()

    @property
    def golds(self) -> tuple[str, ...]:
        """All accepted answers."""
        return self.answer, *self.alternatives


def load_benchmark(
    name: str,
    limit: int | None = None,
    field_map: Mapping[str, str] | None = None,
    offline: bool = False,
    notify: Callable[[str], None] = _log.warning,
) -> list[Problem]:
    """Load a benchmark; see this module for the format.

    Args:
        name: `demo` for the bundled benchmark, `demo-training` for others like it (2,000 without a limit), a file, a
            folder, or a hub id; see `benchmark_files`.
        limit: number of records to load from the start; None for all.
        field_map: the record's names for the keys of `FIELDS`, if they differ.
        offline: take a benchmark of the hub from the cache, and use no network.
        notify: called with what a user should know, a sentence each: ids that repeat and were changed, and gold
            answers that can hardly be compared.

    Raises:
        BenchmarkError: the benchmark is missing or invalid; names the file and the line or row.
    """
    if name == "demo-training":
        return _demo_training(_DEMO_TRAINING if limit is None else limit)
    source, records = read_records(str(benchmark_path()) if name == "demo" else name, offline)
    problems: list[Problem] = []
    doubts, repeats, taken = list[str](), list[str](), Counter[str]()
    for record in islice(records, limit):
        reading = _Reading(record, field_map or {})
        problem = reading.problem(f"{source}/{record.number}")
        doubts += reading.doubts
        given = _unique(problem.unique_id, taken)
        if given != problem.unique_id:
            repeats.append(f"{record.place}: {problem.unique_id!r} becomes {given!r}")
        problems.append(replace(problem, unique_id=given))
    if not problems:
        raise BenchmarkError(f"{name} holds no problems")
    if doubts:
        shown = "; ".join(doubts[:_SHOWN_GOLDS] + ["…"] * (len(doubts) > _SHOWN_GOLDS))
        of = f"{len(doubts)} of {len(problems)} problems of {name}"
        notify(f"{of} have a gold answer that only the same text equals: {shown}")
    if repeats:
        of = f"{len(repeats)} of {len(problems)} records of {name}"
        notify(f"{of} repeat the id of an earlier one and get a number behind it, first {repeats[0]}")
    return problems


def _unique(wanted: str, taken: Counter[str]) -> str:
    """The id of the next record, which says `wanted`: that, or `ID#2` and so on where it is `taken`.

    Only the records before it count, so that an id does not depend on how many are read, and a run goes on with the
    ids that it began with.
    """
    given = wanted
    while taken[given]:
        taken[wanted] += 1
        given = f"{wanted}#{taken[wanted]}"
    taken[given] += 1
    return given


def _demo_training(count: int) -> list[Problem]:
    from espalier.experiments.demo.problems import LEVELS, make_problem

    rng = random.Random("demo-training")
    problems: list[Problem] = []
    for number in range(1, count + 1):  # levels alternate
        level = (number - 1) % len(LEVELS) + 1
        made = make_problem(rng, rng.choice(LEVELS[level]))
        problems.append(Problem(f"demo-training/{number}", made.text, made.answer, level, subject=made.subject))
    return problems


class _Reading:
    """Reads the fields of one record."""

    def __init__(self, record: Record, field_map: Mapping[str, str]) -> None:
        self._place = record.place
        self._map = field_map
        self.doubts: list[str] = []
        if not isinstance(record.fields, dict):
            raise self._error(f"{_kind(record.fields)}, not an object with a problem and its answer")
        self._record: dict[str, Any] = record.fields
        folded = {name.lower(): value for name, value in reversed(record.fields.items())}
        self._folded: dict[str, Any] = folded | record.fields  # the very name comes first
        self._of_olympiad_bench = {"final_answer", "answer_type"} <= self._folded.keys()

    def problem(self, default_id: str) -> Problem:
        name, value = self._take("problem")
        if not isinstance(value, str | list):
            raise self._error(f"its {name} is {_kind(value)}, not text or a list of messages")
        try:
            text, history = (value, ()) if isinstance(value, str) else _read_chat(value)
        except ValueError as error:
            raise self._error(f"its {name} is no conversation: {error}") from None
        if not text.strip():
            raise self._error(f"its {name} is empty")
        if self._of_olympiad_bench:
            text = self._with_context(text)
            self._require_gradable()
        golds = self._golds(*self._take("answer"))
        of_answer = golds[0], self._level(), golds[1:], self._subject(), self._tolerances()
        return Problem(self._id(default_id), text, *of_answer, history)

    def _take(self, what: str) -> tuple[str, Any]:
        """The first name under which the record has a field, and its value."""
        for found in self._found(what):
            return found
        names = _names_in(self._record)
        shown = ", ".join(names[:_SHOWN_FIELDS]) + (", …" if len(names) > _SHOWN_FIELDS else "")
        wanted = ", ".join([self._map[what]] if what in self._map else FIELDS[what]).replace("+", " and ")
        flag = f"name it with --field-map {what}=NAME, or NAME.FIELD for a field within it"
        raise self._error(f"no {what}: the record has {shown or 'no fields'}; wanted: {wanted}; {flag}")

    def _found(self, what: str) -> Iterator[tuple[str, Any]]:
        """All names under which the record has a field, and the values."""
        mapped = what in self._map
        fields = self._record if mapped else self._folded
        for name in (self._map[what],) if mapped else FIELDS[what]:
            values = [_value_at(fields, part) for part in (name if mapped else name.lower()).split("+")]
            if len(values) > 1 and all(isinstance(value, str) for value in values):
                yield name, " ".join(str(value).strip() for value in values)
            elif len(values) == 1 and values[0] is not None:
                yield name, values[0]

    def _optional(self, what: str) -> Iterator[tuple[str, Any]]:
        """The same of a field that need not be there, unless a field map names it."""
        return iter([self._take(what)]) if what in self._map else self._found(what)

    def _golds(self, name: str, value: Any) -> tuple[str, ...]:
        if isinstance(value := _as_listed(value), list):
            if not value:
                raise self._error(f"its {name} is an empty list")
            if len(value) > 1 and self._wants_all():
                return (", ".join(self._gold(name, one).strip("$ ") for one in value),)
            return tuple(dict.fromkeys(self._gold(name, one) for one in value))
        return (self._gold(name, value),)

    def _gold(self, name: str, value: Any) -> str:
        if isinstance(value, bool) or not isinstance(value, str | int | float):
            raise self._error(f"its {name} is {_kind(value)}, not a text, a number or a list of these")
        if not isinstance(value, str):
            if not math.isfinite(value):
                raise self._error(f"its {name} is {value}, not a number")
            return _plain_number(value)
        if gold := extract_gold(value):
            if doubt := doubt_of(gold):
                self.doubts.append(f"{self._place}, {name}: {doubt}")
            return gold
        if boxed(value).cut >= 0:
            raise self._error(f"its {name} has a last box without an end, so its answer is not known")
        if "####" not in value and "\\boxed" not in value and "\n" in value.strip():
            how = "'#### gold' or \\boxed{gold}"
            raise self._error(f"its {name} has several lines and must give the answer as {how}")
        raise self._error(f"its {name} is empty: a problem needs a gold answer")

    def _with_context(self, question: str) -> str:
        context = self._folded.get("context")
        text = f"{context}\n{question}" if isinstance(context, str) and context.strip() else question
        if self._folded.get("image_1") is not None or _IMAGE.search(text):
            raise self._error("it has images, and a search reads text alone; take one of OlympiadBench's TO parts")
        return text

    def _require_gradable(self) -> None:
        """Refuse what has no answer to compare with; its solution would otherwise be taken for one."""
        if "answer" in self._map or self._folded.get("answer") is not None:
            return
        answer, kind = self._folded["final_answer"], self._folded["answer_type"]
        if answer is None or answer == []:
            raise self._error("its final_answer is empty, as of a proof, which cannot be graded; take the OE parts")
        if "human" in str(kind).lower():
            raise self._error(f"its answer_type is {kind}: it cannot be graded by a program")
        if isinstance(answer, str) and answer.startswith(("['", '["')):
            raise self._error("its final_answer is a list written as a text; take JSON or Parquet, which have lists")

    def _wants_all(self) -> bool:
        """Return true if a list of answers is one answer, rather than several of which any is right."""
        several = self._folded.get("is_multiple_answer")
        if several is None or isinstance(several, bool):
            return several is True
        raise self._error(f"its is_multiple_answer is {_kind(several)}, not true or false")

    def _tolerances(self) -> tuple[float, ...]:
        """OlympiadBench's `error`; none for a tuple, as its authors grade."""
        error = self._folded.get("error") if self._of_olympiad_bench else None
        if error is None or error == "" or "Tuple" in str(self._folded["answer_type"]):
            return ()
        try:
            found = tuple(float(part) if part.strip() else _EXACT for part in str(error).split(","))
        except ValueError:
            found = (math.nan,)
        if not all(0 <= each < math.inf for each in found):
            raise self._error(f"its error is {error!r}, not a tolerance such as 0.1, nor several such as 0.1,0.02")
        return found

    def _id(self, default: str) -> str:
        for name, value in self._optional("id"):
            if isinstance(value, bool) or not isinstance(value, str | int):
                raise self._error(f"its {name} is {_kind(value)}, not a text or a whole number")
            if value != "":
                return str(value)
        return default

    def _level(self) -> int | None:
        """The level as a number, also from MATH's `Level 5`; None without one."""
        name, value = next(self._optional("level"), ("level", None))
        text = str(value).removeprefix("Level ").removesuffix(".0")
        if text.isdecimal() and len(text) <= _MAX_LEVEL_DIGITS:
            return int(text)
        if "level" in self._map:
            raise self._error(f"its {name} is {_shown(value)}, not a level such as 3 or Level 3")
        return None

    def _subject(self) -> str | None:
        """The subject as text; None without one."""
        for name, value in self._optional("subject"):
            if isinstance(value, str) and value.strip():
                return value.strip()
            if "subject" in self._map:
                raise self._error(f"its {name} is {_shown(value)}, not a text")
        return None

    def _error(self, what: str) -> BenchmarkError:
        return BenchmarkError(f"{self._place}: {what}")


def _kind(value: Any) -> str:
    return "null" if value is None else _KINDS.get(type(value), f"a {type(value).__name__}")


def _shown(value: Any) -> str:
    """A value that is not understood: a short text as it is, anything else by its kind."""
    return repr(value) if isinstance(value, str) and len(value) <= _MAX_SHOWN else _kind(value)


def _plain_number(number: float) -> str:
    """Format a number as a solver would write it: 27.0 becomes 27, and there are no exponents."""
    whole = isinstance(number, int) or number.is_integer()
    return str(int(number)) if whole else format(Decimal(repr(number)), "f")


def _value_at(fields: Mapping[str, Any], name: str) -> Any:
    """The value of a field; None without it.

    Args:
        fields: the record.
        name: the field's name, or the way to one within it, as in `reward_model.ground_truth` and `prompt.0.content`.
    """
    if name in fields:
        return fields[name]
    found: Any = fields
    for part in name.split("."):
        if isinstance(found, Mapping):
            found = found.get(part)
        elif isinstance(found, list) and part.isascii() and part.isdecimal() and int(part) < len(found):
            found = found[int(part)]
        else:
            return None
    return found


def _names_in(fields: Mapping[str, Any]) -> list[str]:
    """Names of a record's fields; of an object, the names that `_value_at` takes for what it holds."""
    return [
        name
        for outer, value in fields.items()
        for name in ([f"{outer}.{inner}" for inner in value] if isinstance(value, Mapping) and value else [outer])
    ]


def _read_chat(messages: Sequence[Any]) -> tuple[str, tuple[ChatMessage, ...]]:
    """The last message of the user in a conversation, and the messages around it: behind it are the system's alone.

    Args:
        messages: objects with a `role` and a `content`: a text, or a list of OpenAI's parts of text.

    Raises:
        ValueError: they are not; says what is wrong with which message.
    """
    read = [_message(number, message) for number, message in enumerate(messages, start=1)]
    spoken = [message.role for message in read if message.role is not ChatRole.SYSTEM]
    if spoken[-1:] != [ChatRole.USER]:
        last = f"the last of its {len(read)} messages is the {read[-1].role}'s" if read else "it has no messages"
        raise ValueError(f"{last}, and a problem is a message of the user")
    return split_conversation(read)


def _message(number: int, message: Any) -> ChatMessage:
    if not isinstance(message, Mapping):
        raise ValueError(f"message {number} is no object with a role and a content")
    role, content = message.get("role"), message.get("content")
    if role not in _ROLES:
        raise ValueError(f"the role of message {number} is {role!r}, none of {', '.join(_ROLES)}")
    if isinstance(content, list):  # parts in OpenAI's form
        texts = [part.get("text") for part in content if isinstance(part, Mapping) and part.get("type") == "text"]
        known = len(texts) == len(content) and all(isinstance(text, str) for text in texts)
        content = "".join(map(str, texts)) if known else None
    if not isinstance(content, str):
        raise ValueError(f"the content of message {number} is no text")
    thought = message.get("reasoning_content") or message.get("reasoning") or ""
    if not isinstance(thought, str):
        raise ValueError(f"the reasoning of message {number} is no text")
    return ChatMessage(ChatRole(role), content, thought)


def _as_listed(value: Any) -> Any:
    """The texts of a list that is itself written as a text, as in `["1", "2"]`; anything else as it is."""
    if not isinstance(value, str) or not value.lstrip().startswith('["'):
        return value
    try:
        listed = json.loads(value)
    except ValueError:
        return value
    return listed if all(isinstance(each, str) for each in listed) else value
