from collections.abc import Callable, Hashable

import pytest
from engine_driver import drain, release
from hypothesis import given
from hypothesis import strategies as st

from espalier.engine.engine import Engine
from espalier.engine.errors import PoolTooSmallError
from espalier.engine.scheduling.planner import fair_shares
from espalier.engine.scheduling.role_policy import GENERATOR
from espalier.engine.work import Done, Generate, Sampling


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
    steps = 0
    while sum(len(d.indices) for d in done if d.work.owner == "small") < 2:
        done += engine.step()
        steps += 1
    assert steps <= 16, "ten tokens of two branches take ten steps, besides those of the prompts"
    done += drain(engine)
    assert sum(len(d.indices) for d in done) == 62
    release(engine, *(d.sequence for d in done), *{d.work.sequence for d in done})


def test_a_quota_splits_the_kv_pool(make_engine: Callable[..., Engine]):
    engine = make_engine("qwen2-untied", "qwen2-tied", slab_bytes=2**16)
    engine.kv_pool.set_quota("generator", 5)
    generator, verifier = (engine.schedulers[role].pool for role in ("generator", "verifier"))
    per_slab = generator.layout.blocks_per_slab
    assert generator.allocatable_blocks == 5 * per_slab
    assert verifier.allocatable_blocks == engine.kv_pool.num_slabs * verifier.layout.blocks_per_slab
    blocks = [generator.allocate() for _ in range(5 * per_slab)]
    assert (generator.allocatable_blocks, generator.owned_slabs) == (0, 5)
    generator.free(blocks)
    engine.admission.require_fits_alone({"generator": 5 * per_slab})
    with pytest.raises(PoolTooSmallError):
        engine.admission.require_fits_alone({"generator": 5 * per_slab + 1})
