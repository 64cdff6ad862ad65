"""An engine without models: what it samples and scores is written in the text so far, and comes back in any order."""

import hashlib
import itertools
import random
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np

from espalier.engine.engine import Footprint
from espalier.engine.work import Done, Generate, Generated, Sampling, Score, Scored, StopCause
from espalier.prm.base import FamilyInfo, PrmFamily, ScoreInput, StepPath
from espalier.prm.limits import PathLimits
from espalier.prm.verifier import Verifier
from espalier.search.algorithms import needs_verifier, with_defaults
from espalier.search.growth.search import RunningSearch
from espalier.search.request import AlgorithmName, SearchRequest, SubmitOptions
from espalier.search.result import SearchResult, StopReason
from espalier.search.run.executor import ResolvedRequest
from espalier.search.run.running import Submission, UsageMeter
from espalier.search.voting.vote import select

PROMPT, VERIFIER_PROMPT = 5, 7
"""Tokens of any problem, as either model reads it."""

WORDS = ("x", "y", "xy", "\\boxed{1}", "\\boxed{2}", "\n\n", "<eos>")
"""The vocabulary; `xy` is also two tokens, so that equal texts may come of different ones."""
_ODDS = (8, 6, 6, 1, 1, 14, 1)


@dataclass(eq=False)
class Row:
    """A sequence of either role: what the generator's says, the verifier's token ids, and how many tokens that are."""

    role: str
    text: str = ""
    ids: tuple[int, ...] = ()
    length: int = 0
    released: bool = False


@dataclass
class ScriptedEngine:
    """Plays the engine and the generator of one search at once.

    Attributes:
        order: picks which finished work is handed over next; work is finished as soon as it is asked for.
    """

    order: random.Random
    models: dict[str, Any] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)
    ready: list[Callable[[], Done]] = field(default_factory=list)

    # --- the engine

    def cancel(self, owner: str) -> None:
        self.ready.clear()

    def release(self, row: Row) -> None:
        assert not row.released, "released twice"
        row.released = True

    def length(self, row: Row) -> int:
        return row.length

    def footprint(self, rows: list[Row]) -> Footprint:
        assert not any(row.released for row in rows)
        return Footprint(len(rows), Counter(row.role for row in rows), {})

    def step(self) -> Done:
        """Any one of the pieces of work that are finished."""
        return self.ready.pop(self.order.randrange(len(self.ready)))()

    @property
    def live(self) -> int:
        """Sequences that nobody released."""
        return sum(not row.released for row in self.rows)

    # --- the generator

    def open(self, role: str, token_ids: list[int], salt: bytes, owner: str) -> Row:
        return self.row(role, ids=tuple(token_ids), length=len(token_ids))

    def _generate(self, work: Generate) -> None:
        parent = cast(Any, work.sequence)
        assert not parent.released
        assert work.max_tokens >= 1, "a step of no tokens"
        alike: dict[tuple[str, ...], list[int]] = {}
        for i, sampling in enumerate(work.samplings):
            alike.setdefault(draw(parent, sampling, work.max_tokens), []).append(i)
        for tokens, indices in alike.items():
            lower = [other for other, at in alike.items() if at[0] < indices[0]]
            self.ready.append(lambda t=tokens, i=tuple(indices), o=lower: self._generated(work, parent, t, i, o))

    def _generated(
        self, work: Generate, parent: Row, tokens: tuple[str, ...], indices: tuple[int, ...], lower: list[tuple]
    ) -> Generated:
        text = "".join(token for token in tokens if token != "<eos>")
        row = parent if work.in_place else self.row("generator")
        row.text, row.length = parent.text + text, parent.length + len(tokens)
        shared = max((_common(tokens, other) for other in lower), default=0)
        cause = {"\n\n": StopCause.DELIMITER, "<eos>": StopCause.EOS}.get(tokens[-1], StopCause.LENGTH)
        if cause is StopCause.DELIMITER and not text.strip():
            cause = StopCause.LENGTH  # a delimiter ends a step that has other content alone
        ids, own = list(map(WORDS.index, tokens)), len(tokens) - shared
        return Generated(work, indices, cast(Any, row), ids, text, [-0.5] * len(tokens), cause, own, own)

    # --- the verifier

    def fork(self, parent: Row, count: int) -> list[Row]:
        assert not parent.released
        return [self.row(parent.role, ids=parent.ids, length=parent.length) for _ in range(count)]

    def submit(self, work: Score | Generate) -> None:
        if isinstance(work, Generate):
            self._generate(work)
            return
        row = cast(Any, work.sequence)
        assert not row.released
        row.ids, row.length = row.ids + work.token_ids, row.length + len(work.token_ids)
        scores = [[_random("score", row.ids).choice((0.1, 0.4, 0.4, 0.9))] for _ in work.score_positions]
        values = np.array(scores, np.float32).reshape(-1, 1)
        self.ready.append(lambda: Scored(work, values, len(work.token_ids) or row.length))

    def row(self, role: str, ids: tuple[int, ...] = (), length: int = 0) -> Row:
        self.rows.append(Row(role, ids=ids, length=length))
        return self.rows[-1]


class ScriptedFamily(PrmFamily):
    """A verifier's family whose scores depend on the text alone."""

    info = FamilyInfo("scripted", (), "")
    model = cast(
        Any,
        SimpleNamespace(
            require_embedded=lambda *_: None,
            config=SimpleNamespace(max_positions=10**6),
            tokenizer=SimpleNamespace(control_tokens=frozenset()),
        ),
    )

    def __init__(self) -> None:
        super().__init__(self.model)

    def prompt_ids(self, problem: str) -> list[int]:
        return [0] * VERIFIER_PROMPT

    def read(self, path: StepPath) -> ScoreInput:
        step = path.steps[-1]
        ids = (_random(step).getrandbits(30), *map(ord, step.strip()), 0)
        assert len(ids) == verifier_tokens(step)
        return ScoreInput(ids, (len(ids) - 1,))


def verifier_tokens(step: str) -> int:
    """How many tokens the verifier reads a step as."""
    return len(step.strip()) + 2


def _random(*key: object) -> random.Random:
    return random.Random(hashlib.sha256(repr(key).encode()).digest())


def draw(parent: Row, sampling: Sampling, most: int) -> tuple[str, ...]:
    """The tokens of one step: what is drawn after a text depends on it and on the stream alone."""
    draws = _random(parent.text, sampling.key if sampling.temperature else "greedy")
    tokens: list[str] = []
    while len(tokens) < most and not (
        tokens and tokens[-1] in ("\n\n", "<eos>") and (len(tokens) > 1 or tokens[-1] == "<eos>")
    ):
        tokens += draws.choices(WORDS, _ODDS)
    return tuple(tokens)


def _common(one: tuple[str, ...], other: tuple[str, ...]) -> int:
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


@dataclass
class Run:
    """A search on a scripted engine, step by step."""

    search: RunningSearch
    engine: ScriptedEngine
    meter: UsageMeter

    @property
    def result(self) -> SearchResult:
        assert self.search.result is not None, "the search has no result"
        return self.search.result

    def finish(self, watch: Callable[[], None] = lambda: None, stop_after: int | None = None) -> SearchResult:
        """Hand over work until there is a result; `watch` looks on after each piece. Cancels after `stop_after`."""
        self.search.start()
        for handed in itertools.count():
            watch()
            if self.search.result is not None:
                return self.result
            if handed == stop_after:
                self.search.stop(StopReason.CANCELLED)
            if self.search.candidates is not None:
                self.search.end(select(self.search.candidates, self.search.vote))
                continue
            assert self.engine.ready, "it has no result, and waits for nothing"
            assert handed < 100_000, "it does not end"
            self.search.handle(self.engine.step())
        raise AssertionError


def begin(request: SearchRequest, order: int, path_tokens: int = 40, verifier_room: int = 90) -> Run:
    """A search that has not started; `order` is the seed by which finished work is handed over."""
    engine = ScriptedEngine(random.Random(order))
    scored = needs_verifier(request)
    greedy = request.algorithm is AlgorithmName.GREEDY
    effective = replace(with_defaults(request), temperature=0.0 if greedy else 1.0, top_k=0, top_p=1.0, min_p=0.0)
    limits = PathLimits(PROMPT, path_tokens, min(request.max_step_tokens, path_tokens))
    room = PathLimits(VERIFIER_PROMPT, verifier_room, verifier_room) if scored else None
    family = ScriptedFamily()
    prompts = tuple(range(PROMPT)), tuple(family.prompt_ids(request.problem))
    resolved = ResolvedRequest(effective, limits, room, {}, *prompts)
    scorer = Verifier(family) if scored else None
    of_engine = cast(Any, engine), scorer, None, time.monotonic
    submission = Submission(
        "search", SubmitOptions(), lambda event: None, *of_engine, lambda _, work, then: then(work())
    )
    search = RunningSearch(resolved, submission)
    return Run(search, engine, search.meter)
