import pytest

from espalier.engine.scheduling.role_policy import GENERATOR, VERIFIER, GeneratorFirst, RoleLoad, StrictAlternation

IDLE = RoleLoad(0, 0)


@pytest.mark.parametrize(
    ("generator", "verifier", "expected"),
    [
        (RoleLoad(3, 0), IDLE, GENERATOR),
        (IDLE, RoleLoad(0, 1), VERIFIER),
        (RoleLoad(3, 0), RoleLoad(0, 99), GENERATOR),
        (RoleLoad(3, 0), RoleLoad(0, 100), VERIFIER),
        (RoleLoad(0, 5), RoleLoad(0, 7), GENERATOR),
    ],
)
def test_the_verifier_runs_when_enough_waits_or_the_generator_is_idle(
    generator: RoleLoad, verifier: RoleLoad, expected: str
):
    assert GeneratorFirst(enough_tokens=100).choose(generator, verifier) == expected


def test_strict_alternation_takes_turns_while_both_have_work():
    policy, busy = StrictAlternation(), RoleLoad(1, 0)
    assert [policy.choose(busy, busy) for _ in range(4)] == [GENERATOR, VERIFIER, GENERATOR, VERIFIER]


def test_strict_alternation_never_chooses_an_idle_side():
    policy, busy = StrictAlternation(), RoleLoad(0, 4)
    assert [policy.choose(IDLE, busy) for _ in range(3)] == [VERIFIER] * 3
    assert [policy.choose(busy, IDLE) for _ in range(3)] == [GENERATOR] * 3
