"""Searches that are not run: the search's own algorithm on trees that a model draws from recorded paths.

A child of a modelled step is one of the recorded steps, with its score, tokens, end and answer. Which one:

1. A step that was recorded as a child of this one, as likely as it is that a further sample repeats one that was seen
   (the share of samples whose text was drawn more than once: I. Good, 1953).
2. Otherwise a text that was not seen yet. It is like those that were seen once, at the same depth of the same problem,
   behind a step in the same state (right, or wrong; see `recorded`) with one of the nearest scores (U. Lall and A.
   Sharma, 1996), so that a verifier that errs on a path errs on it again.
3. Where a problem has few such steps, now and then one of a problem of which about as many paths are right.

How often a step behind a right one is right too is drawn once for each depth of each problem, from what its counts
leave open: right steps that were never seen in so many samples may yet be drawn. So are the states of recorded steps,
from what the scores and ends of the paths tell of them. Each model is one such draw; several show how much is unknown.
"""

import math
import random
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from espalier.engine.errors import EspalierError
from espalier.experiments.advice.recorded import OwnTokens, RecordedStep, RecordedTree
from espalier.search.algorithms import make_algorithm, needs_verifier, vote_of
from espalier.search.algorithms.base import Expand
from espalier.search.request import SearchRequest
from espalier.search.result import Candidate
from espalier.search.tree import Node, Termination, aggregate
from espalier.search.voting.vote import select

_NEIGHBOURS = 10
"""Problems whose steps stand in for what a problem lacks."""
_BORROWED = 2.0
"""Steps of such problems beside the problem's own: of few steps, the scores would be drawn too often."""
_RATES = 1 / (1 + np.exp(-np.linspace(-6, 8, 57)))
_ROUNDS = 100
"""Steps of other problems that are added to each problem's own."""
_RIGHT = "right"


class UnpredictableSearchError(EspalierError):
    """A search asks for what recorded samples do not tell."""


class Modelled(NamedTuple):
    """The outcome of one modelled search.

    Attributes:
        right: whether its answer is right.
        tokens: of its distinct steps.
        own_tokens: the same, those that siblings begin with alike counted once; see `OwnTokens`.
    """

    right: bool
    tokens: int
    own_tokens: float


def _near(steps: Sequence[RecordedStep], like: RecordedStep, draw: random.Random) -> RecordedStep:
    """One of the ⌈√n⌉ of n steps whose scores are nearest to that of `like`."""
    if like.score is None or len(steps) < 2:
        return draw.choice(steps)
    score = like.score
    ranked = sorted(steps, key=lambda each: abs((0.5 if each.score is None else each.score) - score))
    return draw.choice(ranked[: math.isqrt(len(ranked) - 1) + 1])


def _drawn_again(steps: Sequence[RecordedStep], draw: random.Random) -> RecordedStep:
    """One of recorded steps, as likely as it was drawn."""
    return draw.choices(steps, [step.count for step in steps])[0]


def _mixture(counts: Sequence[tuple[int, int]]) -> np.ndarray:
    """The likeliest distribution over `_RATES` of the rates behind counts of k in n (Kiefer and Wolfowitz, 1956)."""
    likelihood = np.array([_likelihood(*each) for each in counts]).reshape(-1, len(_RATES))
    weights = np.full(len(_RATES), 1 / len(_RATES))
    for _ in range(_ROUNDS):
        posterior = likelihood * weights
        weights = (posterior / posterior.sum(1, keepdims=True)).sum(0) + 1e-3
        weights /= weights.sum()
    return weights


def _likelihood(k: int, n: int) -> np.ndarray:
    return _RATES**k * (1 - _RATES) ** (n - k)


class SearchModel:
    """Draws trees like the recorded ones, with the states of all steps drawn once.

    Attributes:
        trees: the recorded ones.
        own_tokens: what a step costs beside its siblings.
        right: the states of the recorded steps.
        repeated: of right and of wrong steps, the share whose text was drawn more than once, where one could have been.
    """

    def __init__(self, trees: Sequence[RecordedTree], seed: int, own_tokens: OwnTokens | None = None) -> None:
        """Draw the states of the steps of `trees`, whose `stays_right` is set."""
        self.trees = trees
        self.own_tokens = own_tokens or OwnTokens(trees)
        self._seed = seed
        self.right: dict[RecordedStep, bool] = {}
        draw = random.Random(f"{seed} states")
        for tree in trees:
            self.right[tree.root] = True
            for step in tree.steps[1:]:
                assert step.parent is not None
                self.right[step] = self.right[step.parent] and draw.random() < step.stays_right
        self._problem_of = {step: i for i, tree in enumerate(trees) for step in tree.steps}
        # By problem: the steps at a depth, in a state, with children in a state; and of the children of right steps at
        # a depth, the right ones and all.
        self._inner: list[dict[tuple[int, bool, bool], list[RecordedStep]]] = [defaultdict(list) for _ in trees]
        self._transitions: list[dict[int, tuple[int, int]]] = [{} for _ in trees]
        for step, problem in self._problem_of.items():
            depth, is_right = step.depth, self.right[step]
            for state in {self.right[child] for child in step.children}:
                self._inner[problem][depth, is_right, state].append(step)
            if is_right and step.children:
                good, all_of = self._transitions[problem].get(depth, (0, 0))
                good += sum(child.count for child in step.children if self.right[child])
                self._transitions[problem][depth] = good, all_of + sum(child.count for child in step.children)
        ranked = sorted(range(len(trees)), key=lambda i: (trees[i].right / max(1, trees[i].paths), i))
        self._near: list[list[int]] = [[] for _ in trees]
        for place, i in enumerate(ranked):
            start = max(0, min(place - _NEIGHBOURS // 2, len(ranked) - _NEIGHBOURS - 1))
            self._near[i] = [other for other in ranked[start : start + _NEIGHBOURS + 1] if other != i]
        self._weights = _mixture([each for its in self._transitions for each in its.values()])
        self._stays = [dict[int, float]() for _ in trees]
        self._answers = [Counter[str]() for _ in trees]
        for step in (step for tree in trees for step in tree.ends()):
            self._answers[self._problem_of[step]][step.answer] += step.count
        self.repeated = {right: self._share_repeated(right) for right in (False, True)}

    def _share_repeated(self, right: bool) -> float:
        groups = [[c.count for c in step.children if self.right[c] is right] for step in self._problem_of]
        several = [counts for counts in groups if sum(counts) > 1]
        return sum(n for counts in several for n in counts if n > 1) / max(1, sum(map(sum, several)))

    def search(self, problem: int, request: SearchRequest) -> Modelled:
        """Run a search of `request`, which has every default filled in, on the problem of `trees[problem]`.

        Raises:
            UnpredictableSearchError: it asks for greedy steps.
        """
        return _ModelledSearch(self, problem, request, random.Random(f"{self._seed} {problem}")).run()

    def child(self, step: RecordedStep, problem: int, depth: int, draw: random.Random) -> tuple[RecordedStep, bool]:
        """A child of `step`, at `depth`, of a search on `problem`; and whether it is one with a text of its own."""
        right = self.right[step] and draw.random() < self._rate(self._problem_of[step], depth)
        own = [child for child in step.children if self.right[child] is right]
        once = [child for child in own if child.count == 1]
        count = sum(child.count for child in own)
        if count and draw.random() * (count + _BORROWED) >= len(once) + _BORROWED * (1 - self.repeated[right]):
            return _drawn_again(own, draw), False
        key = depth, self.right[step], right
        there = self._inner[self._problem_of[step]].get(key, [])
        seen = sum(self.right[child] is right for each in there for child in each.children)
        others = [steps for i in self._near[problem] if (steps := self._inner[i].get(key))]
        if others and draw.random() * (seen + _BORROWED) < _BORROWED:
            there = draw.choice(others)
        elif not there:
            there = [each for inner in self._inner for each in inner.get(key, [])]
        if not there:
            return RecordedStep(step, end=Termination.LENGTH), True
        like = _near(there, step, draw)
        again = once if like is step and once else [child for child in like.children if self.right[child] is right]
        return _drawn_again(again, draw), True

    def gave(self, problem: int, step: RecordedStep) -> int:
        """The number of recorded paths of a problem that gave the answer of `step`; 0 for a step of another problem."""
        return self._answers[problem][step.answer] if self._problem_of.get(step) == problem else 0

    def _rate(self, problem: int, depth: int) -> float:
        """Probability that a step of a problem behind a right one is right, drawn once from what is known of it."""
        rates = self._stays[problem]
        if depth not in rates:
            posterior = self._weights * _likelihood(*self._transitions[problem].get(depth, (0, 0)))
            draw = random.Random(f"{self._seed} {problem} {depth}")
            rates[depth] = draw.choices(_RATES.tolist(), posterior.tolist())[0]
        return rates[depth]


class _ModelledSearch:
    """One search: the tree, and the recorded step that each node of it is."""

    def __init__(self, model: SearchModel, problem: int, request: SearchRequest, draw: random.Random) -> None:
        self._model = model
        self._problem = problem
        self._request = request
        self._draw = draw
        self._root = Node(0, None, ())
        self._step: dict[Node, RecordedStep] = {self._root: model.trees[problem].root}
        self._new: set[Node] = set()  # nodes of paths with a text that was not recorded
        self._own_tokens = 0.0

    def run(self) -> Modelled:
        algorithm = make_algorithm(self._request, self._root)
        while not algorithm.finished():
            told = [node for expand in algorithm.ask() for node in self._expand(expand)]
            algorithm.tell(sorted(told, key=lambda node: node.path))
        voters = [node for node in algorithm.kept() if node.complete]
        best = select([self._candidate(node) for node in voters], vote_of(self._request)).best
        tokens = sum(node.num_tokens for node in self._step)
        return Modelled(best is not None and best.answer == _RIGHT, tokens, self._own_tokens)

    def _expand(self, expand: Expand) -> list[Node]:
        if expand.greedy:
            raise UnpredictableSearchError("it takes greedy steps, and samples do not tell which those are")
        grown = self._children(expand.node, expand.children)
        if not expand.to_end:
            return grown
        ended: list[Node] = []
        while grown:
            ended += [node for node in grown if not node.open]
            grown = [child for node in grown if node.open for child in self._children(node, node.multiplicity)]
        return ended

    def _children(self, parent: Node, count: int) -> list[Node]:
        step, merged, nodes = self._step[parent], dict[RecordedStep | bool, Node](), list[Node]()
        for index in range(parent.num_children, parent.num_children + count):
            child, is_new = self._model.child(step, self._problem, parent.depth, self._draw)
            right = self._model.right.get(child, False)
            same = child if not is_new else right  # a text that was not recorded may be drawn again, too
            if same in merged and not (is_new and self._draw.random() >= self._model.repeated[right]):
                twin = merged[same]
                twin.multiplicity += 1
                twin.draws = (*twin.draws, index)
                continue
            node = Node(
                len(self._step), parent, (*parent.path, index), num_tokens=child.tokens, own_tokens=child.tokens,
                verifier_tokens=child.tokens, score=child.score, termination=child.end, draws=(index,),
            )  # fmt: skip
            self._step[node] = child
            self._own_tokens += self._model.own_tokens.of(child, len(nodes))
            nodes.append(node)
            if is_new or parent in self._new:
                self._new.add(node)
            merged[same] = node
        parent.num_children += count
        return nodes

    def _candidate(self, node: Node) -> Candidate:
        step = self._step[node]
        answer = _RIGHT if step.right else step.answer
        if answer and not step.right and node in self._new and self._model.gave(self._problem, step) < 2:
            answer = f"{answer} {node.node_id}"  # it was drawn once: those like it differ
        scored = needs_verifier(self._request)
        score = aggregate(node.step_scores(), self._request.aggregation) if scored else None
        return Candidate(node.node_id, answer, score, node.multiplicity, ())
