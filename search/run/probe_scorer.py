"""The scorer `probe`: a step is worth how surely and steadily its path gives one answer. It needs no verifier.

The score is the certainty of the path's last probe times the share of its last three probes that give the same answer.
The answer of a complete path takes the place of a probe, with a certainty of 1. Sources: the agreement of probes is
what Dynasor (arXiv:2412.20993) ends thoughts by, the certainty of a trial answer what DEER (arXiv:2504.15895) does.
"""

from collections.abc import Iterable

from espalier.prm.scorer import ScoredSearch, Scorer, ScorerNeeds, ScoreSession, StepNode, StepScore
from espalier.search.grading.answers import exact_match_key
from espalier.search.tree import Node, Probe

LAST = 3
"""Probes of a path that are compared."""
UNKNOWN = 0.5
"""Score of a step before the first probe of its path."""


class ProbeScorer(Scorer):
    """Scores steps by the probes of their paths, which the search makes for it; see the module."""

    name = "probe"
    needs = ScorerNeeds(reads="probes", merges="tokens")

    def begin(self, search: ScoredSearch) -> ScoreSession:
        """See `Scorer`."""
        return _ProbeSession()


class _ProbeSession(ScoreSession):
    def _want(self, node: StepNode, in_place: bool) -> Iterable[StepScore]:  # probed already, if it is to be
        assert isinstance(node, Node), "probes are of a search's own nodes"
        return (StepScore(node, probe_score(node.probes())),)


def probe_score(probes: list[Probe]) -> float:
    """Return the score of a path with these probes, the last one first."""
    if not probes:
        return UNKNOWN
    last, compared = probes[0], probes[:LAST]
    alike = sum(exact_match_key(probe.answer) == exact_match_key(last.answer) for probe in compared)
    return last.certainty * alike / len(compared)
