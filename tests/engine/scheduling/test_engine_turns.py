import pytest

from espalier.engine.batches import GeneratorFirst, RoleLoad
from espalier.engine.roles import GENERATOR, VERIFIER

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


def test_scores_wait_for_so_many_steps_of_the_generator_at_most():
    policy = GeneratorFirst(enough_tokens=100, max_deferred_steps=3)
    busy, few = RoleLoad(3, 0), RoleLoad(0, 5)
    assert [policy.choose(busy, IDLE) for _ in range(5)] == [GENERATOR] * 5, "nothing waits"
    assert [policy.choose(busy, few) for _ in range(9)] == ([GENERATOR] * 3 + [VERIFIER]) * 2 + [GENERATOR]
    assert policy.choose(busy, RoleLoad(0, 100)) == VERIFIER
    assert [policy.choose(busy, few) for _ in range(4)] == [GENERATOR] * 3 + [VERIFIER], "each wait begins anew"


def test_a_gpu_takes_more_tokens_at_a_time():
    busy, waiting = RoleLoad(3, 0), RoleLoad(0, 600)
    chosen = {device: GeneratorFirst.on(device).choose(busy, waiting) for device in ("cpu", "cuda")}
    assert chosen == {"cpu": VERIFIER, "cuda": GENERATOR}


def test_a_role_is_busy_with_branches_or_with_tokens():
    assert (RoleLoad(2, 3).tokens, RoleLoad(2, 3).busy) == (5, True)
    assert [RoleLoad(1, 0).busy, RoleLoad(0, 1).busy, IDLE.busy] == [True, True, False]
