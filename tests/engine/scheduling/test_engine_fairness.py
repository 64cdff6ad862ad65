from collections.abc import Callable, Hashable
from types import SimpleNamespace

import numpy as np
import pytest
from engine_driver import drain, release
from hypothesis import given
from hypothesis import strategies as st

from espalier.engine.batches import FairSharing, RoleLoad
from espalier.engine.engine import Engine
from espalier.engine.roles import GENERATOR, VERIFIER
from espalier.engine.scheduling.planner import Chunk, StepPlan, WaitingRequest, fair_shares
from espalier.engine.work import Done, Generate, Generated, Sampling


def test_who_asks_for_little_gets_it_and_the_rest_is_split_evenly():
    assert fair_shares({"large": 100, "small": 3, "middle": 9}, 30) == {"small": 3, "middle": 9, "large": 18}
    assert fair_shares({"a": 50, "b": 50, "c": 50}, 31) == {"a": 10, "b": 10, "c": 11}


@given(st.dictionaries(st.integers(), st.integers(0, 50), max_size=8), st.integers(0, 100))
def test_shares_use_the_whole_budget_and_nobody_envies_one_who_got_more(demands: dict[Hashable, int], budget: int):
    shares = fair_shares(demands, budget)
    assert sum(shares.values()) == min(budget, sum(demands.values()))
    for owner, share in shares.items():
        assert 0 <= share <= demands[owner]
        if share < demands[owner]:
            assert all(other <= share + 1 for other in shares.values())


def test_a_search_of_many_candidates_does_not_starve_one_of_few(make_engine: Callable[..., Engine]):
    engine = make_engine("talker", max_batch_tokens=8)
    for owner, samplings in (("large", 60), ("small", 2)):
        sequence = engine.open(GENERATOR, [9] * 6, owner=owner)
        drawn = tuple(Sampling(temperature=3.0, key=key) for key in range(samplings))
        engine.submit(Generate(owner, sequence, drawn, 10, delimiter=""))
    done: list[Done] = []
    tokens: list[int] = []
    engine.on_step = lambda record: tokens.append(record.tokens)
    while sum(len(d.indices) for d in done if d.work.owner == "small") < 2:
        done += engine.step()
    assert len(tokens) <= 16, "ten tokens of two branches take ten steps, besides those of the prompts"
    assert tokens[2:] == [8] * (len(tokens) - 2), "all of the budget, and no more"
    done += drain(engine)
    assert sum(len(d.indices) for d in done) == 62
    release(engine, *(d.sequence for d in done), *{d.work.sequence for d in done})


def _sample(engine: Engine, owner: str, account: str, samplings: int, tokens: int, prompt: int = 9) -> None:
    engine.sharing.assign(owner, account)
    sequence = engine.open(GENERATOR, [prompt] * 6, owner=owner)
    drawn = tuple(Sampling(temperature=3.0, key=key) for key in range(samplings))
    engine.submit(Generate(owner, sequence, drawn, tokens, delimiter="", merge_equal=False))


def _computed_until(engine: Engine, owner: str, samplings: int) -> tuple[int, list[Done]]:
    """Tokens computed until all samplings of an owner have ended, and what has ended."""
    done: list[Done] = []
    while sum(len(d.indices) for d in done if isinstance(d, Generated) and d.work.owner == owner) < samplings:
        done += engine.step()
    return engine.stats()[GENERATOR].computed_tokens, done


@pytest.mark.parametrize("launch_ahead", [False, True])
def test_callers_share_the_models_time_whatever_they_ask_for(make_engine: Callable[..., Engine], launch_ahead: bool):
    computed: dict[str, int] = {}
    for account in ("one", "two"):
        engine = make_engine("talker", kv_memory_bytes=2**25, launch_ahead=launch_ahead)
        _sample(engine, "large", "one", 60, 100)
        _sample(engine, "small", account, 2, 100)
        computed[account], done = _computed_until(engine, "small", 2)
        done += drain(engine)
        assert sum(len(d.indices) for d in done if isinstance(d, Generated)) == 62
        release(engine, *(d.sequence for d in done), *{d.work.sequence for d in done})
    # The small one pays for 200 tokens and the constant of 100 steps, 16 each, at most; so does the large one, that may
    # be ahead by 1,024 and a step.
    assert computed["one"] > 4_000
    assert computed["two"] < 200 + (200 + 100 * 16) + 1024 + 60


def test_callers_of_equal_searches_stay_in_one_batch(make_engine: Callable[..., Engine]):
    steps: list[int] = []
    for account in ("caller {}", "one caller"):
        engine = make_engine("talker", kv_memory_bytes=2**25)
        for number in range(4):
            _sample(engine, f"search {number}", account.format(number), 20 + number, 100)
        done = drain(engine)
        steps.append(engine.stats()[GENERATOR].steps)
        release(engine, *(d.sequence for d in done), *{d.work.sequence for d in done})
    assert steps[0] == steps[1], "none of them gets far enough ahead"


def test_who_finds_no_room_beside_one_that_is_ahead_waits_and_does_not_fail(
    make_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
):
    engine = make_engine("talker", kv_memory_bytes=2**25, reserved_share=0.01)
    pool = engine.schedulers[GENERATOR].pools[0]
    reservations = [engine.admission.try_reserve({GENERATOR: 50}, owner) for owner in ("large", "small")]
    _sample(engine, "large", "one", 40, 40)
    done: list[Done] = []
    before = pool.live_blocks
    while not (before and pool.live_blocks >= before + 35):  # each branch has begun another block
        before = pool.live_blocks
        done += engine.step()
    _sample(engine, "small", "two", 1, 3, prompt=11)
    engine.sharing.over_share({"large", "small"})
    engine.sharing.charge(GENERATOR, _step_of("large", 10_000))
    taken = [pool.allocate() for _ in range(pool.allocatable_blocks)]
    steps = engine.stats()[GENERATOR].steps
    with monkeypatch.context() as patch:
        patch.setattr(FairSharing, "charge", None)  # nobody pays for a step that could not be fair
        done += engine.step()
    assert engine.stats()[GENERATOR].steps == steps + 1
    pool.free(taken)
    done += drain(engine)
    assert sum(len(d.indices) for d in done if isinstance(d, Generated)) == 41
    release(engine, *(d.sequence for d in done), *{d.work.sequence for d in done})
    for reservation in reservations:
        assert reservation is not None
        engine.admission.release(reservation)


def _step_of(owner: str, tokens: int) -> StepPlan:
    work = Generate(owner, SimpleNamespace(), (Sampling(),), 1)  # type: ignore[arg-type]
    nothing = np.empty(0, np.int64)
    return StepPlan([], [Chunk(WaitingRequest(work, 0), tokens)], nothing, nothing, nothing, ([], []))


def test_a_caller_that_had_nothing_to_do_has_no_credit_from_that_time():
    sharing = FairSharing({GENERATOR: 10}, "cpu")
    for owner in ("busy", "other", "late"):
        sharing.assign(owner, owner)
    assert not sharing.over_share({"busy", "other"})
    for owner in ("busy", "other"):
        sharing.charge(GENERATOR, _step_of(owner, 5_000))
    assert not sharing.over_share({"busy", "other"})
    assert not sharing.over_share({"busy", "other", "late"})
    sharing.charge(GENERATOR, _step_of("busy", 2_000))
    assert sharing.over_share({"busy", "other", "late"}) == {"busy"}
    sharing.charge(GENERATOR, _step_of("late", 200))
    assert sharing.over_share({"busy", "other", "late"}) == {"busy"}
    for owner in ("late", "other"):
        sharing.charge(GENERATOR, _step_of(owner, 1_800))
    assert not sharing.over_share({"busy", "other", "late"})


def test_accounts_of_a_group_get_together_what_one_alone_gets():
    sharing, owners = FairSharing({GENERATOR: 10}, "cpu"), ["one 1", "one 2", "one 3", "other"]
    for owner in owners:
        sharing.assign(owner, owner, owner.split()[0])
    tokens = dict.fromkeys(owners, 0)
    for _ in range(400):
        throttled = sharing.over_share(owners)
        for owner in set(owners) - throttled:
            sharing.charge(GENERATOR, _step_of(owner, 100))
            tokens[owner] += 100
    group = [tokens[owner] for owner in owners[:3]]
    assert sum(group) == pytest.approx(tokens["other"], rel=0.05)
    assert max(group) == pytest.approx(min(group), rel=0.05)
    for owner in owners:
        sharing.forget(owner)
    assert not sharing.contended


def test_one_group_alone_pays_as_accounts_without_groups_do():
    sharing = FairSharing({GENERATOR: 10}, "cpu")
    for owner in ("one", "two"):
        sharing.assign(owner, owner, "a group")
    sharing.over_share(("one", "two"))
    for _ in range(18):
        sharing.charge(GENERATOR, _step_of("one", 1))
    assert not sharing.over_share(("one", "two")), "18 tokens and 18 steps of 16: less than 320"
    sharing.charge(GENERATOR, _step_of("one", 1))
    assert sharing.over_share(("one", "two")) == {"one"}


def _books(*owners: str) -> FairSharing:
    sharing = FairSharing({GENERATOR: 10, VERIFIER: 5}, "cpu")
    for owner in owners:
        sharing.assign(owner, owner)
    assert not sharing.over_share(owners)
    return sharing


def test_a_step_costs_its_tokens_and_a_constant_that_all_in_it_share():
    """A step is 16 tokens more on a CPU, and an account may be ahead by 320."""
    sharing = _books("often", "seldom")
    for _ in range(20):
        sharing.charge(GENERATOR, _step_of("often", 1))
    assert sharing.over_share({"often", "seldom"}) == {"often"}, "20 tokens, and 20 steps"
    sharing.charge(GENERATOR, _step_of("seldom", 4))
    assert not sharing.over_share({"often", "seldom"})

    shared = _books("one", "other", "idle")
    step = _step_of("one", 1)
    step.chunks += _step_of("other", 1).chunks
    for _ in range(35):
        shared.charge(GENERATOR, step)
    assert not shared.over_share({"one", "other", "idle"}), "9 a step for each of two"
    shared.charge(GENERATOR, step)
    assert shared.over_share({"one", "other", "idle"}) == {"one", "other"}

    small = _books("often", "seldom")
    for _ in range(37):
        small.charge(VERIFIER, _step_of("often", 1))
    assert not small.over_share({"often", "seldom"}), "of a model of half the size, a step costs half as much"
    small.charge(VERIFIER, _step_of("often", 1))
    assert small.over_share({"often", "seldom"}) == {"often"}


def test_an_account_that_comes_back_has_no_credit_from_what_it_had_paid_before():
    sharing = _books("busy", "other", "late")
    sharing.charge(GENERATOR, _step_of("late", 100))
    sharing.over_share({"busy", "other"})
    for owner in ("busy", "other"):
        sharing.charge(GENERATOR, _step_of(owner, 5_000))
    assert not sharing.over_share({"busy", "other"})
    assert not sharing.over_share({"busy", "other", "late"})
    sharing.charge(GENERATOR, _step_of("late", 400))
    assert sharing.over_share({"busy", "other", "late"}) == {"late"}


def test_what_an_account_is_ahead_by_is_kept_while_it_has_nothing_to_do():
    sharing = _books("busy", "other")
    sharing.charge(GENERATOR, _step_of("busy", 1_000))
    assert not sharing.over_share({"other"})
    assert sharing.over_share({"busy", "other"}) == {"busy"}


def test_leaving_somebody_out_is_worthwhile_where_it_saves_the_constant_of_two_steps():
    sharing = _books("one", "other")
    loads = {GENERATOR: RoleLoad(30, 10), VERIFIER: RoleLoad(0, 20)}
    assert sharing.is_worthwhile(loads, {GENERATOR: RoleLoad(10, 8), VERIFIER: RoleLoad(0, 10)})
    assert not sharing.is_worthwhile(loads, {GENERATOR: RoleLoad(10, 9), VERIFIER: RoleLoad(0, 10)})


@pytest.mark.parametrize("samplings", [8, 60])
def test_accounts_pay_for_steps_alone_that_leave_out_who_is_ahead(
    samplings: int, make_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
):
    """Leaving out eight branches saves less than the constant of a step; leaving out sixty is worth it."""
    engine = make_engine("talker", kv_memory_bytes=2**25)
    _sample(engine, "large", "one", samplings, 6)
    _sample(engine, "small", "two", 1, 6, prompt=11)
    done = engine.step()
    engine.sharing.charge(GENERATOR, _step_of("large", 10_000))
    charged: list[set[Hashable]] = []
    charge = FairSharing.charge

    def noting(self: FairSharing, role: str, plan: StepPlan) -> None:
        charged.append({branch.work.owner for branch in plan.branches})
        charge(self, role, plan)

    monkeypatch.setattr(FairSharing, "charge", noting)
    done += engine.step()
    assert charged == ([{"small"}] if samplings == 60 else [])
    done += drain(engine)
    release(engine, *(d.sequence for d in done), *{d.work.sequence for d in done})
