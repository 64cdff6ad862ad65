"""A search tree written down in advance, and the loop that feeds it to an algorithm; no engine."""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from espalier.search.algorithms.base import Expand, SearchAlgorithm
from espalier.search.tree import Node, Termination, prune

Path = tuple[int, ...]
State = tuple[str, ...]


@dataclass(frozen=True)
class Step:
    """One node of the script: its score, how it ended, its text, and its tokens."""

    score: float | None = None
    end: Termination | None = None
    text: str = "step\n\n"
    tokens: int = 0
    verifier_tokens: int = 0


EOS, BOXED, LENGTH = Termination.EOS, Termination.BOXED, Termination.LENGTH


@dataclass
class Outcome:
    """What an algorithm did with a scripted tree."""

    asked: list[list[tuple[Path, int]]]
    expands: list[list[Expand]]
    kept: list[list[Path]]
    nodes: dict[Path, Node]
    voters: list[Node]

    @property
    def final(self) -> list[Path]:
        return self.kept[-1]

    @property
    def votes(self) -> dict[Path, int]:
        """Paths that vote and how often."""
        return {node.path: node.multiplicity for node in self.voters}

    def of_termination(self, termination: Termination | None) -> set[Path]:
        return {path for path, node in self.nodes.items() if node.termination is termination}


def drive(
    make: Callable[[Node], SearchAlgorithm],
    script: "Mapping[Path, Step] | Streams",
    shuffle: random.Random | None = None,
    rounds: int = 10_000,
) -> Outcome:
    """Run an algorithm to its end; siblings are told in order of path, or shuffled and renumbered.

    As in the orchestrator, what the algorithm does not keep is marked and cannot be asked for again. Out of a plain
    script every child is a node of its own; out of `Streams`, siblings that say the same are one.
    """
    root = Node(0, None, ())
    algorithm = make(root)
    outcome, alive, sampled_from = Outcome([], [], [], {}, []), [root], set()
    while not algorithm.finished():
        expands = list(algorithm.ask())
        assert expands, "not finished, and nothing asked for"
        assert len({expand.node for expand in expands}) == len(expands), "a node was asked for twice in a round"
        for expand in expands:
            assert expand.children >= 1
            assert expand.node in alive, f"{expand.node.path} was given up before"
            assert expand.node.open, f"{expand.node.path} has ended"
        outcome.asked.append([(expand.node.path, expand.children) for expand in expands])
        outcome.expands.append(expands)
        grow = _grow_merged if isinstance(script, Streams) else _grow
        told = [node for expand in expands for node in grow(expand, script, outcome.nodes)]
        sampled_from |= {expand.node for expand in expands if not expand.greedy}
        if shuffle:
            shuffle.shuffle(told)
            for node in told:
                node.node_id = shuffle.randrange(10**9)
        else:
            told.sort(key=lambda node: node.path)
        algorithm.tell(told)
        kept = list(algorithm.kept())
        assert len(set(kept)) == len(kept), "a node is kept twice"
        assert set(kept) <= {*alive, *told}, "a node is kept that was given up before"
        prune([*alive, *told], kept, {*sampled_from, root})
        alive = kept
        outcome.kept.append([node.path for node in kept if node is not root])
        if len(outcome.asked) > rounds:
            raise AssertionError("the algorithm does not end")
    outcome.voters = [node for node in algorithm.kept() if node.complete]
    assert all(not node.open for node in algorithm.kept()), "finished, and still keeps open nodes"
    return outcome


def _grow(expand: Expand, script: Mapping[Path, Step], nodes: dict[Path, Node]) -> list[Node]:
    grown = []
    for _ in range(expand.children):
        node = _child(expand.node, script, nodes)
        node.rollout = expand.greedy
        while expand.to_end and node.open:
            node = _child(node, script, nodes)
        grown.append(node)
    return grown


def _child(parent: Node, script: Mapping[Path, Step], nodes: dict[Path, Node]) -> Node:
    draw = parent.num_children
    path = (*parent.path, draw)
    parent.num_children += 1
    step = script[path]
    node = Node(len(nodes) + 1, parent, path, text=step.text, score=step.score, termination=step.end, draws=(draw,))
    node.num_tokens, node.verifier_tokens = step.tokens, step.verifier_tokens
    nodes[path] = node
    return node


class Streams:
    """A generator that says the same again and again: what follows a text is one stream, however often it is asked.

    The i-th sample after the same text is the same step, whether one node asks for it or several nodes of that text ask
    in turn: so a search that merges equal siblings and one that does not are given the same samples.
    """

    def __init__(self, seed: int, depth: int = 4, texts: int = 3, cut: float = 0.15) -> None:
        self._seed, self._depth, self._texts, self._cut = seed, depth, texts, cut
        self._taken: dict[State, int] = {}

    def next(self, state: State) -> Step:
        """The next sample after `state`. Equal texts after equal texts have equal scores and ends."""
        i = self._taken.get(state, 0)
        self._taken[state] = i + 1
        text = f"{random.Random(f'{self._seed} {state} {i}').randrange(self._texts)}\n\n"
        of_text = random.Random(f"{self._seed} {state} {text}")
        end = of_text.choices([None, EOS, LENGTH], [0.6, 0.4 - self._cut, self._cut])[0]
        if len(state) + 1 >= self._depth and end is None:
            end = EOS
        return Step(None if end is LENGTH else of_text.uniform(0.05, 0.95), end, text)


def texts_of(node: Node) -> State:
    return tuple(step.text for step in node.lineage())


def _grow_merged(expand: Expand, streams: Streams, nodes: dict[Path, Node]) -> list[Node]:
    """Children of which those with the same text and end are one."""
    assert not expand.to_end
    parent, merged = expand.node, {}
    for draw in range(parent.num_children, parent.num_children + expand.children):
        step = streams.next(texts_of(parent))
        if twin := merged.get((step.text, step.end)):
            twin.draws = (*twin.draws, draw)
            twin.multiplicity += 1
            continue
        node = Node(len(nodes) + 1, parent, (*parent.path, draw), text=step.text, score=step.score, draws=(draw,))
        node.termination, node.rollout = step.end, expand.greedy
        nodes[node.path] = merged[step.text, step.end] = node
    parent.num_children += expand.children
    return list(merged.values())


class RandomTree(dict):
    """A random script, the same for the same seed; scores often tie."""

    def __init__(self, seed: int, depth: int = 4, scores: Sequence[float] = (0.1, 0.2, 0.5, 0.5, 0.9)) -> None:
        super().__init__()
        self._seed, self._depth, self._scores = seed, depth, scores

    def __missing__(self, path: Path) -> Step:
        draw = random.Random(f"{self._seed} {path}")
        end = draw.choice([None, None, None, EOS, BOXED, LENGTH]) if len(path) < self._depth else EOS
        text = f"\\boxed{{{draw.randrange(3)}}}" if end in (EOS, BOXED) else "step\n\n"
        self[path] = Step(draw.choice(self._scores), end, text)
        return self[path]
