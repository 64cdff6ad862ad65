"""The list of path policies, in the order in which they are asked: what is not in it does not shape a path."""

from espalier.search.algorithms import stops_early, unused_fields
from espalier.search.growth.policies import PathPolicy, PolicyContext


def make_policies(context: PolicyContext) -> list[PathPolicy]:
    """The policies of a search; modules of those that it does not need are not loaded."""
    resolved, policies = context.resolved, list[PathPolicy]()
    request, budget, thoughts = resolved.request, None, None
    if request.generator_budget is not None or request.verifier_budget is not None:
        from espalier.search.growth.budget import Budget

        policies.append(budget := Budget.of(context))
    if stops_early(request):
        from espalier.search.growth.early_stop import EarlyStopping

        policies.append(EarlyStopping(request, context.scorer is not None, context.meter))
    if resolved.thoughts:
        from espalier.search.growth.thoughts import PathThoughts

        policies.append(thoughts := PathThoughts.of(context, resolved.thoughts, budget))
    if resolved.probes:
        from espalier.search.growth.probes import AnswerProbes

        policies.append(AnswerProbes(context, thoughts, budget))
    if resolved.grammar:
        from espalier.search.growth.forms import PathForms

        policies.append(PathForms(context.matchers[resolved.grammar], thoughts))
    unsure = request.stop_unsure.value if "stop_unsure" not in unused_fields(request) else None
    if unsure or (request.vote and request.vote.reads_confidence):
        from espalier.search.growth.confidence import ConfidenceFilter, LogProbabilities

        policies.append(ConfidenceFilter(unsure, context.meter) if unsure else LogProbabilities())
    if request.merge_duplicates and (context.scorer is None or context.scorer.needs.merges == "text"):
        from espalier.search.growth.merging import Merging

        policies.append(Merging(thoughts, context.meter))
    return policies
