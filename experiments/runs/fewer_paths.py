"""Searches of independent paths that are derived from one with more paths.

The random stream of each sampled step depends on the seed, the problem and the step's place in the tree, and not on N.
So the first n of N independent paths are those of a search with N = n: what is left of the tree is its tree, and the
same vote of what is left selects its answer. Seconds and memory were those of the larger search, and are not known.
"""

from collections.abc import Sequence
from dataclasses import replace

from espalier.engine.errors import EspalierError
from espalier.experiments.runs.grid import key_of
from espalier.search.algorithms import has_independent_paths
from espalier.search.request import EarlyStop, SearchRequest, Vote
from espalier.search.result import NodeRecord, Sampled, SearchResult, StopReason, Usage
from espalier.search.voting.equivalence import MathVerify
from espalier.search.voting.vote import select

_Path = tuple[int, ...]


def holds_the_paths_of(larger: SearchRequest, smaller: SearchRequest) -> bool:
    """Return true if the first paths of the search `larger` are those of `smaller`; both with every default filled in.

    A budget is split among the paths, and a time limit or early stop may cut off some, so there must be none.
    """
    limits = larger.generator_budget, larger.verifier_budget, larger.time_limit
    whole = has_independent_paths(larger) and larger.early_stop is EarlyStop.OFF and set(limits) == {None}
    alike = key_of(replace(larger, beam_width=smaller.beam_width)) == key_of(smaller)
    return whole and alike and larger.beam_width > smaller.beam_width


def without_early_stop(requests: Sequence[SearchRequest]) -> list[SearchRequest]:
    """Return the requests with searches of independent paths run to their end, with the same answers.

    Raises:
        EspalierError: one of them asks for `frugal`, which is there to compute less.
    """
    if any(has_independent_paths(request) and request.early_stop is EarlyStop.FRUGAL for request in requests):
        raise EspalierError("--early-stop frugal: --share-work derives cells from whole searches; leave out one")
    return [replace(each, early_stop=EarlyStop.OFF) if has_independent_paths(each) else each for each in requests]


def with_fewer_paths(result: SearchResult, paths: int, equivalence: MathVerify | None) -> SearchResult | None:
    """Return the result of the search with the first `paths` paths only.

    In its usage, seconds and KV memory are 0, as they are not known.

    Args:
        result: a finished search of more independent paths, without budgets and time limit.
        paths: the smaller N.
        equivalence: see `Executor`.

    Returns:
        None if the search did not finish, or computed tokens again after a preemption, which the smaller one might
        not have had.
    """
    whole = result.usage
    again = whole.generator_tokens != whole.generator_tree_tokens or whole.verifier_tokens != whole.verifier_tree_tokens
    if result.stop_reason is not StopReason.FINISHED or again:
        return None
    counts: dict[_Path, int] = {(): paths}
    kept: list[tuple[NodeRecord, Sampled]] = []
    for node, sampled in sorted(zip(result.nodes, result.sampled, strict=True), key=lambda pair: pair[0].path):
        if node.path:
            counts[node.path] = sum(draw < counts.get(node.path[:-1], 0) for draw in sampled.draws)
        if counts[node.path]:
            many = counts[node.path] if node.path else node.multiplicity
            kept.append((replace(node, multiplicity=many), sampled))
    many = {node.node_id: node.multiplicity for node, _ in kept}
    candidates = tuple(replace(c, multiplicity=many[c.node_id]) for c in result.candidates if c.node_id in many)
    configuration = replace(result.configuration, beam_width=paths)
    outcome = select(candidates, configuration.vote or Vote.NAIVE, equivalence)
    best = outcome.best
    return replace(
        result,
        answer=best.answer if best else "",
        score=best.score if best else None,
        best=best,
        candidates=candidates,
        nodes=tuple(sorted((node for node, _ in kept), key=lambda node: node.node_id)),
        usage=_usage(kept, whole.prompt_tokens),
        configuration=configuration,
        grader=outcome.grader,
        rounds=(),
        sampled=(),
    )


def _usage(kept: Sequence[tuple[NodeRecord, Sampled]], prompt: int) -> Usage:
    """The usage of a search with these nodes, ordered by path; `prompt` counts the generator's tokens before them."""
    parents = {node.parent_id for node, _ in kept}
    steps = [node for node, _ in kept if node.path]
    verifier = sum(sampled.verifier_tokens for _, sampled in kept)
    # Below the prompt, as `tree.computed_once` counts them.
    probes = sum(node.probe.tokens for node in steps if node.probe)
    generator = prompt + probes + sum(s.own_tokens - (node.node_id not in parents) for node, s in kept if node.path)
    problem = kept[0][1].verifier_tokens
    to: dict[_Path, tuple[int, int]] = {(): (0, 0)}  # tokens sampled and read
    generator_alone, verifier_alone = probes, 0
    for node, sampled in kept[1:]:  # the root is first
        own, read = to[node.path[:-1]]
        own, read = to[node.path] = own + node.tokens, read + sampled.verifier_tokens
        if node.node_id not in parents:
            generator_alone += node.multiplicity * (prompt + own) * bool(own)
            verifier_alone += node.multiplicity * (problem + read) * bool(read)
    return Usage(
        generator_tokens=generator,
        generator_tree_tokens=generator,
        generator_saved_tokens=max(0, generator_alone - generator),
        generated_tokens=probes + sum(node.multiplicity * node.tokens for node in steps),
        probe_tokens=probes,
        verifier_tokens=verifier,
        verifier_tree_tokens=verifier,
        verifier_saved_tokens=max(0, verifier_alone - verifier),
        nodes=sum(node.multiplicity for node in steps),
        duplicates=sum(node.multiplicity - 1 for node in steps),
        prompt_tokens=prompt,
    )
