"""The branches of a model: children that are being sampled, token by token, and what becomes of the tokens drawn."""

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np

from espalier.engine.guidance.matcher import MaskThread, Matcher
from espalier.engine.memory.sequences import KVSequence, SequenceTable
from espalier.engine.models.model import Model
from espalier.engine.models.tokenizer import TextTokenizer
from espalier.engine.work import Generate, Generated, Sampling, StepMarks, StopCause

Rule = tuple[str, tuple[str, ...], StepMarks]
"""Delimiter, markers and marks of some work."""
_WINDOW = 32
"""Last tokens of a step that are looked at for a marker, with what stands before and behind it."""
_IN_LETTER = re.compile(rb"(?:[\xc2-\xf4]|[\xe0-\xf4][\x80-\xbf]|[\xf0-\xf4][\x80-\xbf]{2})\Z")
"""The end of bytes that begin a letter of UTF-8 and do not finish it."""
_WORD = re.compile(rb"\w*", re.ASCII)


@dataclass(slots=True, eq=False)
class RunningRequest:
    """A branch: one child that is being sampled, token by token.

    Attributes:
        work: the request that it is a child of.
        indices: the request's samplings that drew the same tokens so far.
        sequence: its tokens.
        start: length of the sequence before the first sampled token.
        shared: sampled tokens that were computed before it diverged from another branch.
        computed_tokens: tokens computed for it besides the sampled ones: its parent's pending ones, and those computed
            again after a preemption freed its KV.
        matcher: what it may draw next; None for anything.
        draft: tokens proposed for it, which the next step may verify.
        draft_matchers: what may be drawn behind each token of `draft`, where the branch is guided.
        drafted: tokens proposed for it that were verified, since it began.
        accepted: those of them that it drew and went on behind, so tokens that it has without a step of their own.
    """

    work: Generate
    indices: list[int]
    sequence: KVSequence
    start: int
    shared: int = 0
    computed_tokens: int = 0
    matcher: Matcher | None = None
    draft: list[int] = field(default_factory=list)
    draft_matchers: list[Matcher] = field(default_factory=list)
    drafted: int = 0
    accepted: int = 0

    @property
    def row(self) -> int:
        """Its sequence's row of the table."""
        return self.sequence.row


class DecodeRows:
    """Running branches as arrays, built anew only when the branches change.

    Attributes:
        branches: the branches, in the order of the arrays; one with a draft again for each token of that.
        indices: for each draw, the index of its sampling in the branch's request.
        branch_of: int64 `[draws]`, the branch of each draw; a branch has a draw for each of its samplings.
        firsts: int64 `[branches]`, the first draw of each branch.
        rows: int64 `[branches]`, the row of each branch's sequence.
        starts: int64 `[branches]`, the length of each sequence before its first sampled token.
        limits: int64 `[branches]`, the length at which each sequence stops.
        apart: bool `[draws]`, draws that become branches of their own even if they are equal.
        heads: the heads that some branch reads besides its draws.
        ends: the delimiters, markers and marks at which some branch stops.
        matchers: of the branches that are guided, by their number; of one with a draft, that behind each token of it.
    """

    def __init__(self, branches: list[RunningRequest]) -> None:
        self.branches = branches
        self.indices = [index for b in branches for index in b.indices]
        self.find_rows()
        self.starts = np.array([b.start for b in branches], dtype=np.int64)
        self.limits = np.array([b.start + b.work.max_tokens for b in branches], dtype=np.int64)
        counts = np.array([len(b.indices) for b in branches], dtype=np.int64)
        self.branch_of = np.repeat(np.arange(len(branches)), counts)
        self.firsts = counts.cumsum() - counts
        apart = [not b.work.merge_equal and len(b.indices) > 1 for b in branches]
        self.apart = np.array(apart, dtype=bool)[self.branch_of]
        self.heads = sorted({b.work.head for b in branches} - {""})
        self.ends = frozenset((b.work.delimiter, b.work.markers, b.work.marks) for b in branches)
        self.matchers = {i: b.matcher for i, b in enumerate(branches) if b.matcher is not None}

    @property
    def samplings(self) -> list[Sampling]:
        """The sampling of every draw."""
        return [b.work.samplings[i] for b in self.branches for i in b.indices]

    def allowed_tokens(self, vocabulary: int, masks: MaskThread) -> np.ndarray | None:
        """The tokens that each branch may draw, uint8 `[branches, ceil(vocabulary / 8)]`; None for any of all."""
        if not self.matchers:
            return None
        allowed = np.full((len(self.branches), (vocabulary + 7) // 8), 255, dtype=np.uint8)
        masks.fill(self.matchers, allowed)
        return allowed

    def find_rows(self) -> None:
        """Read `rows` again: a branch gets a sequence of its own once it has a token of its own."""
        self.rows = np.array([b.row for b in self.branches], dtype=np.int64)


@dataclass(slots=True)
class Draws:
    """The draws of one step: a token for each sampling of each branch.

    A branch with a draft of k tokens is there k + 1 times, with the draws behind its last token and behind each of the
    draft's: those up to the first that is not the draft's are its next tokens, as if each had been drawn in a step of
    its own.

        tokens of the branch  ... a b | x y z         b, x, y and z are computed, x y z being the draft
        draws                           x y u v       x and y are accepted, u is drawn behind them, v is dropped

    Attributes:
        decode: the branches.
        step_positions: int64 `[draws]`, the position of each draw within its step.
        batch_rows: int64 `[branches]`, the row of the batch of each branch; None where the batch is one token of each
            branch, in order.
        opened: branches that begin with this step.
        live: int64, the draws that are still live, once results of the step before showed that some branches had
            stopped or parted; None for all. `decode` and `step_positions` hold these alone.
        depths: int64 `[branches]`, how many tokens of its draft each branch is drawn behind; None without drafts.
        tokens: those that branches got, of a step with drafts whose results are processed.
    """

    decode: DecodeRows
    step_positions: np.ndarray
    batch_rows: np.ndarray | None = None
    opened: list[RunningRequest] = field(default_factory=list)
    live: np.ndarray | None = None
    depths: np.ndarray | None = None
    tokens: int = 0

    @property
    def positions(self) -> np.ndarray:
        """The position of each branch's new token in its sequence, int64 `[branches]`."""
        return self.decode.starts + self.step_positions[self.decode.firsts]

    def reached(self, token_ids: np.ndarray) -> np.ndarray:
        """True for branches that are drawn behind accepted tokens alone, by what was drawn; bool `[branches]`."""
        reached = np.ones(len(self.decode.branches), dtype=bool)
        depths = np.zeros(len(reached), dtype=np.int64) if self.depths is None else self.depths
        for b in np.flatnonzero(depths).tolist():
            drafted = self.decode.branches[b].draft[depths[b] - 1]
            before = token_ids[self.decode.firsts[b - 1] : self.decode.firsts[b]]
            reached[b] = reached[b - 1] and drafted in before
        return reached


class StepResults(NamedTuple):
    """Results of one step.

    Attributes:
        token_ids: int64 `[draws]`.
        log_probabilities: float32 `[draws]`.
        drawn_from: by the names of heads, float32 `[draws, k]`: what each says of the states drawn from.
        values: for each head of the plan's `reads`, float32 `[reads of the head, k]`.
    """

    token_ids: np.ndarray
    log_probabilities: np.ndarray
    drawn_from: dict[str, np.ndarray]
    values: list[np.ndarray]

    def of(self, draws: np.ndarray) -> "StepResults":
        """The results of some of the draws, int64."""
        drawn_from = {head: values[draws] for head, values in self.drawn_from.items()}
        return StepResults(self.token_ids[draws], self.log_probabilities[draws], drawn_from, self.values)


class RunningSamples:
    """Takes in what steps draw: branches grow, part where their samplings differ, and stop.

    Attributes:
        running: branches that have a token of their own, or would if they had not been sampled in place.
    """

    def __init__(self, table: SequenceTable, model: Model) -> None:
        self.running: list[RunningRequest] = []
        self._table = table
        self._tokenizer = model.tokenizer
        self._context = model.config.max_positions
        self._decode: DecodeRows | None = None
        self._is_eos = np.zeros(max(model.config.vocab_size, model.tokenizer.vocab_size), dtype=bool)
        self._is_eos[list(model.eos_token_ids)] = True
        self._ends = StepEnds(model.tokenizer, len(self._is_eos))

    def draws(
        self, sampled: list[RunningRequest], opened: list[RunningRequest], batch_rows: np.ndarray | None
    ) -> Draws:
        """The draws of a step that samples some branches, of which `opened` begin with it."""
        if batch_rows is not None and any(branch.draft for branch in sampled):
            return self._drafted_draws(sampled, opened, batch_rows)
        if self._decode is None or self._decode.branches != sampled:
            self._decode = DecodeRows(sampled)
        decode = self._decode
        step_positions = (self._table.lengths[decode.rows] - decode.starts)[decode.branch_of]
        return Draws(decode, step_positions, batch_rows, opened)

    def _drafted_draws(
        self, sampled: list[RunningRequest], opened: list[RunningRequest], batch_rows: np.ndarray
    ) -> Draws:
        """The draws of a step in which some branches have drafts; `batch_rows` are those of their last tokens."""
        counts = np.array([1 + len(branch.draft) for branch in sampled], dtype=np.int64)
        decode = DecodeRows([branch for branch, count in zip(sampled, counts, strict=True) for _ in range(count)])
        depths = np.arange(len(decode.branches)) - np.repeat(counts.cumsum() - counts, counts)
        step_positions = (self._table.lengths[decode.rows] - decode.starts + depths)[decode.branch_of]
        for b in decode.matchers:
            if depths[b]:
                decode.matchers[b] = decode.branches[b].draft_matchers[depths[b] - 1]
        rows = np.repeat(batch_rows - counts + 1, counts) + depths
        return Draws(decode, step_positions, rows, opened, depths=depths)

    def process_outputs(self, draws: Draws, results: StepResults) -> list[Generated]:
        """Append the drawn tokens, fork branches whose samplings differ, and take out branches that stop.

        Args:
            draws: what was drawn.
            results: those of the live draws.
        """
        if draws.depths is not None:
            return self._append_drafted(draws, draws.depths.tolist(), results)
        for branch in draws.opened:
            if not branch.work.in_place:
                branch.sequence = self._table.fork(branch.sequence)
        if draws.opened:
            draws.decode.find_rows()
        decode, positions = draws.decode, draws.positions
        rest: list[RunningRequest] = []
        if self.running != decode.branches:
            chosen = set(decode.branches)
            rest = [branch for branch in self.running if branch not in chosen]
        branches, parents, firsts = self._fork_diverged(decode, results.token_ids, positions)
        if len(branches) > len(decode.branches):
            decode = self._decode = DecodeRows(branches)
            positions = positions[parents]
        results = results.of(firsts)
        token_ids = results.token_ids
        for i, matcher in decode.matchers.items():
            matcher.advance(int(token_ids[i]))
        self._table.write_tokens(decode.rows, positions, token_ids)
        self._table.log_probabilities[decode.rows, positions] = results.log_probabilities
        return self._finish_stopped(decode, token_ids, positions, results.drawn_from, rest)

    def _append_drafted(self, draws: Draws, depths: list[int], results: StepResults) -> list[Generated]:
        """Process a step with drafts as the steps of a token each that it stands for; see `process_outputs`."""
        done: list[Generated] = []
        places: dict[tuple[RunningRequest, int], dict[int, int]] = {}  # by branch and depth: the draw of each sampling
        for b, (branch, depth) in enumerate(zip(draws.decode.branches, depths, strict=True)):
            first = int(draws.decode.firsts[b])
            places[branch, depth] = {index: first + i for i, index in enumerate(branch.indices)}
        branches = list(dict.fromkeys(draws.decode.branches))
        drafted, going_on = [branch for branch in branches if branch.draft], set[RunningRequest]()
        for branch in drafted:
            branch.drafted += len(branch.draft)
        depth = 0
        while branches:
            chosen = np.array([places[b, depth][index] for b in branches for index in b.indices], dtype=np.int64)
            its = Draws(DecodeRows(branches), draws.step_positions[chosen], opened=[] if depth else draws.opened)
            positions = its.positions
            if depth:  # what came before is what was computed
                self._table.computed[its.decode.rows] = positions
            draws.tokens += len(branches)
            done += self.process_outputs(its, results.of(chosen))
            going_on = set(self.running)
            branches = [
                branch
                for branch, position in zip(branches, positions.tolist(), strict=True)
                if branch in going_on
                and depth < len(branch.draft)
                and self._table.tokens[branch.row, position] == branch.draft[depth]
            ]
            for branch in branches:
                branch.accepted += 1
            depth += 1
        for branch in drafted:
            branch.draft = []
            if branch in going_on:
                self._table.free_beyond(branch.row)
        return done

    def are_full(self, decode: DecodeRows, positions: np.ndarray) -> np.ndarray:
        """True if each branch has as many tokens as it may, with those at `positions`; bool `[branches]`."""
        return positions + 1 >= np.minimum(decode.limits, self._context)

    def _fork_diverged(
        self, decode: DecodeRows, token_ids: np.ndarray, positions: np.ndarray
    ) -> tuple[list[RunningRequest], list[int], np.ndarray]:
        """Fork branches whose samplings drew different tokens, or are not to be merged.

        The sampling of the lowest index keeps the branch's sequence.

        Returns:
            All branches, for each of them the one of `decode` that it parted from, and the index of its token in
            `token_ids`.
        """
        branches, parents = decode.branches, list(range(len(decode.branches)))
        differs = (token_ids != token_ids[decode.firsts][decode.branch_of]) | decode.apart
        if not differs.any():
            return branches, parents, decode.firsts
        parted, firsts = list(branches), decode.firsts.tolist()
        for b in np.unique(decode.branch_of[differs]).tolist():
            branch, first = branches[b], firsts[b]
            groups: dict[int, list[int]] = {}  # places in `indices`, by token
            for place in range(len(branch.indices)):
                groups.setdefault(int(token_ids[first + place]) if branch.work.merge_equal else place, []).append(place)
            length = int(positions[b])
            for places in list(groups.values())[1:]:
                sequence = self._table.fork(branch.sequence, length)
                known = self._table.log_probabilities[:, branch.start : length]
                known[sequence.row] = known[branch.row]
                indices = [branch.indices[place] for place in places]
                matcher = branch.matcher.copy() if branch.matcher else None
                shared = length - branch.start
                parted.append(RunningRequest(branch.work, indices, sequence, branch.start, shared, matcher=matcher))
                parents.append(b)
                firsts.append(first + places[0])
            branch.indices = [branch.indices[place] for place in next(iter(groups.values()))]
        return parted, parents, np.array(firsts, dtype=np.int64)

    def _finish_stopped(
        self,
        decode: DecodeRows,
        token_ids: np.ndarray,
        positions: np.ndarray,
        head_outputs: dict[str, np.ndarray],
        rest: list[RunningRequest],
    ) -> list[Generated]:
        """Finish the branches whose tokens, at `positions`, are their last; `head_outputs` has a row for each."""
        full = self.are_full(decode, positions)
        may_stop = full | self._is_eos[token_ids] | self._ends.may_end(decode.ends)[token_ids]
        may_stop[[i for i, matcher in decode.matchers.items() if matcher.error]] = True
        flagged = np.flatnonzero(may_stop)
        done, stopped = [], set()
        for i in flagged.tolist():
            branch, length = decode.branches[i], int(positions[i]) + 1
            if cause := self._stop_cause(branch, int(token_ids[i]), length, bool(full[i])):
                self._table.truncate(branch.row, length)  # a step in flight may have gone on
                done.append(
                    self._finish(branch, cause, head_outputs[branch.work.head][i] if branch.work.head else None)
                )
                stopped.add(i)
        left = [b for i, b in enumerate(decode.branches) if i not in stopped] if stopped else decode.branches
        self.running = left + rest if rest else left
        return done

    def _stop_cause(self, branch: RunningRequest, token_id: int, length: int, full: bool) -> StopCause | None:
        """Why a branch stops whose token `token_id` is its last of `length`; None if it goes on."""
        if branch.matcher and branch.matcher.error:
            return StopCause.ERROR
        tokens = self._table.tokens[branch.row, branch.start : length]
        if self._ends.marked(branch.work.marks, tokens):
            return StopCause.MARK
        if self._is_eos[token_id]:
            return StopCause.EOS
        if self._ends.ended(branch.work, tokens):
            return StopCause.DELIMITER
        if length >= self._context:
            return StopCause.CONTEXT
        over = len(tokens) - branch.work.max_tokens
        if full and not (over < branch.work.overrun and self._ends.cuts(branch.work.marks, tokens)):
            return StopCause.LENGTH
        return None

    def _finish(self, branch: RunningRequest, cause: StopCause, values: np.ndarray | None) -> Generated:
        row = branch.row
        step = slice(branch.start, self._table.lengths[row])
        token_ids = self._table.tokens[row, step].tolist()
        return Generated(
            work=branch.work,
            indices=tuple(branch.indices),
            sequence=branch.sequence,
            token_ids=token_ids,
            text=self._tokenizer.decode(token_ids),
            log_probabilities=self._table.log_probabilities[row, step].tolist(),
            cause=cause,
            own_tokens=len(token_ids) - branch.shared,
            computed_tokens=branch.computed_tokens + int(self._table.computed[row]) - branch.start - branch.shared,
            values=values,
            matcher=branch.matcher,
            drafted_tokens=branch.drafted,
            accepted_tokens=branch.accepted,
        )


class StepEnds:
    """Finds the ends of steps in the tokens of one model."""

    def __init__(self, tokenizer: TextTokenizer, ids: int) -> None:
        """Look at a model's tokens, those of ids below `ids`."""
        self._tokenizer = tokenizer
        self._ids = ids
        self._of_byte: dict[int, np.ndarray] = {}
        self._of_rules: dict[frozenset[Rule], np.ndarray] = {}

    def may_end(self, rules: frozenset[Rule]) -> np.ndarray:
        """Return which tokens can end a step under one of some rules, bool `[ids]`."""
        if (found := self._of_rules.get(rules)) is None:
            found = np.zeros(self._ids, dtype=bool)
            for delimiter, markers, marks in rules:
                found[list(marks.end_ids)] = True
                if marks.end_text:
                    found |= self._with_byte(marks.end_text.encode()[-1])
                if delimiter:
                    found |= self._with_byte(delimiter.encode()[-1])
                if markers:
                    found |= self._beyond_words
            self._of_rules = {rules: found}  # batches have the same rules again and again
        return found

    def ended(self, work: Generate, token_ids: np.ndarray) -> bool:
        """Return whether a step has ended with the last of its tokens.

        A step of nothing but blanks is no step: a delimiter counts once there is content before it.
        """
        delimiter = work.delimiter.encode()
        if delimiter and self._with_byte(delimiter[-1])[token_ids[-1]]:
            # A long step is decoded as a whole only where it seems to end.
            last = token_ids[-max(_WINDOW, len(delimiter) + 1) :]
            text = self._tokenizer.decode(last.tolist())
            if work.delimiter in text and len(last) < len(token_ids):
                text = self._tokenizer.decode(token_ids.tolist())
            return work.delimiter in text.lstrip()[1:]
        if work.markers and self._beyond_words[token_ids[-1]]:
            return bool(_begun_by(work.markers).search(self._last(token_ids).lstrip()))
        return False

    def marked(self, marks: StepMarks, token_ids: np.ndarray) -> bool:
        """Return whether the last of a step's tokens is or completes a mark."""
        if token_ids[-1] in marks.end_ids:
            return True
        text = marks.end_text
        return bool(text and self._with_byte(text.encode()[-1])[token_ids[-1]]) and text in self._last(token_ids)

    def cuts(self, marks: StepMarks, token_ids: np.ndarray) -> bool:
        """Return whether a step that ended here would cut a letter of several bytes or an unbroken text."""
        if _IN_LETTER.search(self._tokenizer.decode_bytes(token_ids[-_WINDOW:].tolist())):
            return True
        text = self._last(token_ids)
        return any(text.endswith(part[:length]) for part in marks.unbroken for length in range(1, len(part)))

    def _last(self, token_ids: np.ndarray) -> str:
        return self._tokenizer.decode(token_ids[-_WINDOW:].tolist())

    def _with_byte(self, byte: int) -> np.ndarray:
        if byte not in self._of_byte:
            self._of_byte[byte] = self._where(lambda token: byte in token)
        return self._of_byte[byte]

    @cached_property
    def _beyond_words(self) -> np.ndarray:
        """Tokens of more than letters and digits: a word is over with one of these."""
        return self._where(lambda token: not _WORD.fullmatch(token))

    def _where(self, holds: Callable[[bytes], bool]) -> np.ndarray:
        found = np.zeros(self._ids, dtype=bool)
        table = self._tokenizer.token_bytes
        found[: len(table)] = [holds(token) for token in table]
        return found


@lru_cache(16)
def _begun_by(markers: tuple[str, ...]) -> re.Pattern[str]:
    """Matches where a sentence after another begins with one of `markers`, with the character after it."""
    return re.compile(rf"(?:[.!?…:]['\")\]]?\s+|\n\s*)(?:{'|'.join(map(re.escape, markers))})\W")
