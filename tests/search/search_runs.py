"""Running searches to their end under watch, and comparing what came out."""

import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

from espalier.engine.engine import Engine
from espalier.search.request import AlgorithmName, EarlyStop, SearchRequest
from espalier.search.result import Event, SearchResult
from espalier.search.run.orchestrator import Orchestrator
from espalier.search.run.running import AnyRunning

PROBLEM = "Tom starts with 38 coins. He finds 47 more."

BEAM = SearchRequest(PROBLEM, AlgorithmName.BEAM, 3, 3, max_steps=5, max_step_tokens=12, max_tokens=40, seed=1)
BEST_OF_N = SearchRequest(PROBLEM, AlgorithmName.BEST_OF_N, 6, max_steps=5, max_step_tokens=12, max_tokens=40, seed=2)
MAJORITY = SearchRequest(PROBLEM, AlgorithmName.MAJORITY, 6, max_steps=5, max_step_tokens=12, max_tokens=40, seed=3)
GREEDY = SearchRequest(PROBLEM, AlgorithmName.GREEDY, max_steps=3, max_step_tokens=12, max_tokens=40)
CHAIN = replace(GREEDY, algorithm=AlgorithmName.CHAIN, max_steps=5)
ADAPTIVE = replace(MAJORITY, algorithm=AlgorithmName.ADAPTIVE, beam_width=9, expansion=3, confidence=1.0)
DVTS = replace(BEAM, algorithm=AlgorithmName.DVTS)
LOOKAHEAD = replace(BEAM, algorithm=AlgorithmName.LOOKAHEAD, beam_width=2, lookahead_steps=2)
REBASE = replace(BEAM, algorithm=AlgorithmName.REBASE)
PARTICLE = replace(BEAM, algorithm=AlgorithmName.PARTICLE, beam_width=5)
GIBBS = replace(PARTICLE, beam_width=4, iterations=3)
MCTS = replace(BEAM, algorithm=AlgorithmName.MCTS, simulations=8)
AUTO = replace(BEAM, algorithm=AlgorithmName.AUTO)
ALL = {
    str(request.algorithm): request
    for request in (
        BEAM, BEST_OF_N, MAJORITY, GREEDY, CHAIN, ADAPTIVE, DVTS, LOOKAHEAD, REBASE, PARTICLE, MCTS, AUTO,
    )
} | {"particle-gibbs": GIBBS, "frugal best-of-n": replace(BEST_OF_N, early_stop=EarlyStop.FRUGAL)}  # fmt: skip


@dataclass
class Watched:
    """Results in order of submission, events by search, and the most searches seen running at once."""

    results: list[SearchResult] = field(default_factory=list)
    events: dict[str, list[Event]] = field(default_factory=dict)
    most_running: int = 0

    @property
    def only(self) -> SearchResult:
        (result,) = self.results
        return result


def run(orchestrator: Orchestrator, *requests: SearchRequest) -> Watched:
    """Run searches to their ends, checking reservations after every step and the pool often."""
    watched, ended = Watched(), {}

    def watch(event: Event) -> None:
        watched.events.setdefault(event.search_id, []).append(event)

    ids = [orchestrator.submit(request, watch) for request in requests]
    for step in itertools.count():
        if not orchestrator.busy:
            break
        results = orchestrator.step()
        ended |= {result.search_id: result for result in results}
        watched.most_running = max(watched.most_running, orchestrator.running)
        if orchestrator.busy and not orchestrator.engine.busy and not voting(orchestrator) and not results:
            orchestrator.close()
            raise AssertionError("a search is left and the engine has no work: it would never end")
        check_reserved(orchestrator.engine)
        if step % 16 == 0:  # it looks at every block
            orchestrator.engine.check_integrity()
    watched.results = [ended[search_id] for search_id in ids]
    return watched


def voting(orchestrator: Orchestrator) -> int:
    """Searches whose tree is complete, and that have no result yet."""
    return sum(search.tree_complete and search.result is None for search in orchestrator._searches.values())


def check_reserved(engine: Engine) -> None:
    """No KV group holds more blocks than its searches reserved, where they reserve all that they may need."""
    if engine.settings.reserved_share < 1:
        return
    for name, pool in engine.admission.pools.items():
        assert pool.live_blocks <= engine.admission.reserved_blocks[name], f"{name} holds more than was reserved"


def tree(result: SearchResult) -> list[tuple]:
    """Every node by what it says and not by when it was made: texts and scores from the root, fate, multiplicity."""
    by_id = {node.node_id: node for node in result.nodes}

    def lineage(node_id: int) -> tuple:
        node = by_id[node_id]
        parent = () if node.parent_id is None else lineage(node.parent_id)
        return (*parent, (node.text, node.score))

    nodes = [(lineage(node.node_id), node.termination, node.multiplicity) for node in result.nodes]
    return sorted(nodes, key=repr)


def outcome(result: SearchResult) -> tuple:
    """All of a result that must not depend on company: the tree, the candidates in order, the answer."""
    candidates = [(c.answer, c.score, c.multiplicity, c.steps) for c in result.candidates]
    return tree(result), candidates, result.answer, result.score, result.stop_reason


_ALONE: dict[SearchRequest, tuple] = {}


def outcome_alone(request: SearchRequest, make_orchestrator: Callable[[], Orchestrator]) -> tuple:
    """The outcome of a search that had an engine as it usually is to itself; each is run once a session."""
    if request not in _ALONE:
        _ALONE[request] = outcome(run(make_orchestrator(), request).only)
    return _ALONE[request]


def crowd(count: int) -> Iterable[SearchRequest]:
    """Searches of other problems by every algorithm."""
    kinds = list(ALL.values())
    for i in range(count):
        kind = kinds[i % len(kinds)]
        fields = kind.to_dict() | {"problem": f"Problem {i}: " + "how many? " * (i % 5), "seed": 100 + i}
        yield SearchRequest(**fields)


def waiting_in(orchestrator: Orchestrator) -> list[AnyRunning]:
    """The searches that wait, those of each account in their order."""
    return [search for waiting in orchestrator._queue._waiting.values() for search in waiting]
