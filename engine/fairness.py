"""Dividing a step's tokens among searches."""

from collections.abc import Hashable, Mapping


def fair_shares(demands: Mapping[Hashable, int], budget: int) -> dict[Hashable, int]:
    """Max-min fair shares of `budget`: nobody gets more than they ask for, and what is left is split evenly.

    Args:
        demands: tokens each one could use.
        budget: tokens there are.

    Returns:
        Shares that add up to `budget`, or to all demands where these are less.
    """
    shares: dict[Hashable, int] = {}
    for place, (owner, demand) in enumerate(sorted(demands.items(), key=lambda entry: entry[1])):
        shares[owner] = min(demand, budget // (len(demands) - place))
        budget -= shares[owner]
    return shares
