"""Particle filtering and particle Gibbs over steps, weighted by verifier scores."""

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from annotated_types import Interval

from espalier.search.algorithms.base import SAMPLING, Expand, MemoryEstimate, SearchAlgorithm, path_score, viable
from espalier.search.common_fields import CommonFields
from espalier.search.schema import option
from espalier.search.tree import Node


def uniforms(seed: int, problem: str, label: str, round_number: int, count: int) -> list[float]:
    """Uniform draws in [0, 1) that depend only on the arguments.

    Args:
        seed: the request's seed.
        problem: the problem's text.
        label: purpose of the draws; different purposes get independent draws.
        round_number: the counter.
        count: number of draws.
    """
    texts = (f"{seed}\x1f{label}\x1f{round_number}\x1f{i}\x1f{problem}" for i in range(count))
    digests = (hashlib.sha256(text.encode()).digest() for text in texts)
    return [(int.from_bytes(digest[:8], "little") >> 11) * 2.0**-53 for digest in digests]


def systematic(weights: Sequence[float], count: int, draw: float) -> list[int]:
    """Systematic resampling (Carpenter et al., 1999): how often each index is drawn; sums to `count`.

    Index i has the expectation `count * weights[i] / sum(weights)`, and is drawn that often, rounded down or up.

    Args:
        weights: non-negative, not all 0.
        count: number of draws.
        draw: one uniform draw in [0, 1).
    """
    return picks(weights, [(draw + i) / count for i in range(count)])


def picks(weights: Sequence[float], draws: Sequence[float]) -> list[int]:
    """Multinomial resampling: how often each index is drawn, given uniform draws in [0, 1)."""
    counts = [0] * len(weights)
    total = sum(weights)
    last = max(i for i, weight in enumerate(weights) if weight > 0)
    for draw in draws:
        left = draw * total
        for i, weight in enumerate(weights):
            left -= weight
            if (left < 0 and weight > 0) or i == last:
                counts[i] += 1
                break
    return counts


_CLIP = 1e-7
"""Scores are clipped to this distance from 0 and 1, where the logit is infinite."""


def weigh(score: float) -> float:
    """Unnormalized weight of a particle: the odds of its score; normalized, the softmax of the scores' logits."""
    score = min(max(score, _CLIP), 1 - _CLIP)
    return score / (1 - score)


class ParticleSearch(SearchAlgorithm):
    """N particles, each a path; after every step they are resampled in proportion to their weights.

    Puri et al., 2025 ("Rollout Roulette"): the weights are the softmax of the logits of the path scores. Complete
    particles stay in the population and are resampled too. Resampling is systematic and stops when all particles are
    complete; the vote then weighs them.

    With several iterations this is particle Gibbs: each iteration after the first takes one path of the previous one as
    its reference, drawn by weight, and runs N-1 free particles beside it. These are resampled independently from the
    whole population, including the reference's step of the same depth. An iteration ends when its free particles are
    complete. The particles of all iterations vote, with their counts.

    Particles on the same node are stored as a count. A path that was cut off has no weight.
    """

    uses = ("beam_width", "vote", *SAMPLING)

    @dataclass(frozen=True)
    class Parameters:
        """Parameters of `particle`."""

        iterations: int = option(1, "iterations of the filter; more than one is particle Gibbs", Interval(ge=1, le=64))

    def __init__(self, request: CommonFields, root: Node) -> None:
        self._root = root
        self._seed, self._problem = request.seed, request.problem
        self._aggregation = request.aggregation
        self._particles = request.beam_width
        # With one particle there would be only the reference.
        self._iterations_left: int = self.parameters(request).iterations if self._particles > 1 else 1
        self._free: Counter[Node] = Counter({root: self._particles})
        self._reference: list[Node] = []
        self._depth = 0
        self._rounds = 0
        self._votes: Counter[Node] = Counter()

    @classmethod
    def memory(cls, request: CommonFields) -> tuple[MemoryEstimate, ...]:
        """N paths and their next steps.

        A later iteration may branch at any inner step, so that each holds a partial block.
        """
        inner = request.max_steps or 0 if cls.parameters(request).iterations > 1 else 0
        particles = request.beam_width
        return (MemoryEstimate(paths=particles, steps=particles, partial_blocks=particles * inner),)

    @classmethod
    def sampled(cls, request: CommonFields) -> tuple[int, int]:
        """N paths in each iteration."""
        return request.beam_width * cls.parameters(request).iterations, 0

    def ask(self) -> Sequence[Expand]:
        """One child for each incomplete free particle."""
        return [Expand(node, count) for node, count in self._free.items() if node.open]

    def tell(self, nodes: Sequence[Node]) -> None:
        """Move and resample the particles, and start the next iteration when one ends."""
        self._rounds += 1
        self._depth += 1
        moved = Counter({node: count for node, count in self._free.items() if node.complete})
        moved.update({node: node.multiplicity for node in nodes if viable(node)})
        # The reference's step at this depth, or its last one if it is shorter.
        population = moved + Counter(self._reference[: self._depth][-1:])
        settled = not population or (bool(moved) and self._all_complete(moved))
        self._free = moved if settled else self._resampled(population)
        if self._all_complete(self._free):
            self._end_iteration()
        self._count_votes()

    def finished(self) -> bool:
        """True if the last iteration has ended."""
        return not self._iterations_left

    def kept(self) -> Sequence[Node]:
        """The particles, all complete paths that vote, and nodes from which a later iteration may branch."""
        kept = dict.fromkeys((*self._votes, *self._free))
        if self._iterations_left > 1:
            kept |= dict.fromkeys((self._root, *(n for particle in self._free for n in particle.lineage())))
            kept |= dict.fromkeys(self._reference)
        if self._iterations_left and self._reference:
            kept |= dict.fromkeys(self._reference[self._depth :])
        return list(kept)

    @staticmethod
    def _all_complete(particles: Counter[Node]) -> bool:
        return all(node.complete for node in particles)

    def _resampled(self, population: Counter[Node]) -> Counter[Node]:
        """Draw as many free particles as there are now from the population, by weight."""
        nodes, weights = self._weights(population)
        if self._reference:
            # Independent draws: conditional resampling needs them to preserve the target distribution.
            free = self._particles - 1
            counts = picks(weights, self._draws("ancestors", free))
        else:
            counts = systematic(weights, self._particles, self._draws("resampling", 1)[0])
        return Counter({node: count for node, count in zip(nodes, counts, strict=True) if count})

    def _weights(self, population: Counter[Node]) -> tuple[list[Node], list[float]]:
        """The nodes of a population in path order, and the weight of each."""
        nodes = sorted(population, key=lambda node: node.path)
        return nodes, [population[node] * weigh(path_score(node, self._aggregation)) for node in nodes]

    def _end_iteration(self) -> None:
        population = self._free + Counter(self._reference[-1:])
        self._votes += population
        self._iterations_left -= 1
        self._depth = 0
        if not population:
            self._iterations_left = 0  # every path was cut off: there is no reference
        if not self._iterations_left:
            self._free, self._reference = Counter(), []
            return
        nodes, weights = self._weights(population)
        (chosen,) = (i for i, n in enumerate(picks(weights, self._draws("reference", 1))) if n)
        self._reference = nodes[chosen].lineage()
        self._free = Counter({self._root: self._particles - 1})

    def _count_votes(self) -> None:
        votes = self._votes + self._free
        for node, count in votes.items():
            if node.complete:
                node.multiplicity = count

    def _draws(self, label: str, count: int) -> list[float]:
        return uniforms(self._seed, self._problem, f"particle {label}", self._rounds, count)
