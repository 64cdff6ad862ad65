"""How many random examples a property is tried with: few in every run, and `make test-slow` tries them all."""

from hypothesis import settings

STEADY, THOROUGH = "steady", "thorough"
"""Profiles of hypothesis: the same few examples in every run however slow the machine, and the same many."""


def register_profiles() -> None:
    """Register both profiles and choose the one of few examples, which `--hypothesis-profile` overrides."""
    settings.register_profile(STEADY, deadline=None, derandomize=True, max_examples=_few(100))
    settings.register_profile(THOROUGH, deadline=None, derandomize=True)
    settings.load_profile(STEADY)


def random_examples(thorough: int) -> settings:
    """Settings of a test that is tried with `thorough` examples by `make test-slow`, and else with a quarter."""
    return settings(max_examples=thorough if settings.get_current_profile_name() == THOROUGH else _few(thorough))


def _few(thorough: int) -> int:
    return max(25, thorough // 4)
