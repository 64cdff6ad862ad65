import pytest

from espalier.engine.scheduling.role_policy import GENERATOR, VERIFIER, GeneratorFirst, RoleLoad

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
