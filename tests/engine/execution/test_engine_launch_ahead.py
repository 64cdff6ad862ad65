"""Batches that are launched before the results of the last one are taken in."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
from engine_driver import drain, release

from espalier.engine.engine import Engine, EngineSettings
from espalier.engine.execution.runner import ModelRunner
from espalier.engine.memory.sequences import KVSequence
from espalier.engine.models.model import Model
from espalier.engine.roles import GENERATOR, VERIFIER
from espalier.engine.work import Done, Generate, Generated, Sampling, Score, Scored
from espalier.kernels.cpu.decoder import CpuLayers


@pytest.fixture
def models(load_model: Callable[[str], Model]) -> dict[str, Model]:
    return {GENERATOR: load_model("talker"), VERIFIER: load_model("classifier")}


def engine_of(models: dict[str, Model], ahead: bool = True) -> Engine:
    return Engine(models, EngineSettings(2**20, 4, max_batch_tokens=5, launch_ahead=ahead))


def submit_both(engine: Engine, owner: str = "search") -> list[KVSequence]:
    """Two children of a generator sequence, and six scores of a verifier sequence, read over two steps."""
    generator, verifier = (engine.open(role, list(range(20, 40)), owner=owner) for role in (GENERATOR, VERIFIER))
    engine.submit(Generate(owner, generator, (Sampling(key=1), Sampling(key=2)), 3, ""))
    engine.submit(Score(owner, verifier, tuple(range(7, 13)), tuple(range(6))))
    return [generator, verifier]


def release_all(engine: Engine, opened: list[KVSequence], done: list[Done]) -> None:
    release(engine, *opened, *(d.sequence for d in done if isinstance(d, Generated)))
    engine.check_drained()


def describe(done: Done) -> tuple:
    if isinstance(done, Scored):
        return ("scored", done.values.tobytes())
    return ("generated", done.indices, tuple(done.token_ids), done.log_probability)


def is_all_of_one(done: list[Done]) -> bool:
    indices = sorted(index for d in done if isinstance(d, Generated) for index in d.indices)
    return indices == [0, 1] and [len(d.values) for d in done if isinstance(d, Scored)] == [6]


def test_the_other_models_batch_is_launched_before_the_last_results_are_waited_for(
    models: dict[str, Model], monkeypatch: pytest.MonkeyPatch
):
    events: list[str] = []
    launch, wait = ModelRunner.launch, ModelRunner.wait

    def launched(self: ModelRunner, *step: Any) -> Any:
        events.append(f"launch {self.role}")
        return launch(self, *step)

    monkeypatch.setattr(ModelRunner, "launch", launched)
    monkeypatch.setattr(
        ModelRunner, "wait", lambda self, *b: (events.append(f"collect {self.role}"), wait(self, *b))[1]
    )
    engine = engine_of(models)
    opened = submit_both(engine)
    done = drain(engine)
    assert any(a.startswith("launch") and b.startswith("launch") for a, b in pairwise(events)), events
    assert sorted(events.count(f"launch {role}") - events.count(f"collect {role}") for role in models) == [0, 0]
    release_all(engine, opened, done)


def test_results_come_one_step_late_and_are_the_same(models: dict[str, Model]):
    found, steps = {}, {}
    for ahead in (True, False):
        engine = engine_of(models, ahead)
        opened, done, steps[ahead] = submit_both(engine), [], 0
        while engine.busy:
            done += engine.step()
            steps[ahead] += 1
        found[ahead] = sorted(map(describe, done))
        release_all(engine, opened, done)
    assert found[True] == found[False]
    assert steps[True] > steps[False]


def test_cancelling_drops_what_is_in_flight_and_leaves_others_theirs(models: dict[str, Model]):
    for steps in range(1, 20):
        engine = engine_of(models)
        opened = [*submit_both(engine, "one"), *submit_both(engine, "other")]
        done = [d for _ in range(steps) for d in engine.step()]
        engine.cancel("one")
        late = drain(engine)
        assert all(d.work.owner == "other" for d in late)
        done += late
        assert is_all_of_one([d for d in done if d.work.owner == "other"])
        release_all(engine, opened, done)


def test_preempting_waits_for_what_is_in_flight_and_loses_nothing(models: dict[str, Model]):
    for steps in range(1, 20):
        engine = engine_of(models)
        opened = submit_both(engine)
        done = [d for _ in range(steps) for d in engine.step()]
        engine.suspend("search")
        engine.resume_owner("search")
        assert all(scheduler.pools[0].live_blocks == 0 for scheduler in engine.schedulers.values())
        done += drain(engine)
        assert is_all_of_one(done)
        release_all(engine, opened, done)


def test_the_same_models_next_batch_is_launched_before_its_draws_are_known(
    models: dict[str, Model], monkeypatch: pytest.MonkeyPatch
):
    events: list[tuple[str, bool]] = []
    forward, wait = CpuLayers.forward, ModelRunner.wait

    def computed(self: CpuLayers, *args: Any) -> Any:
        events.append(("computed", args[0].drawn is not None))
        return forward(self, *args)

    monkeypatch.setattr(CpuLayers, "forward", computed)
    monkeypatch.setattr(ModelRunner, "wait", lambda self, *b: (events.append(("known", False)), wait(self, *b))[1])
    engine = engine_of({GENERATOR: models[GENERATOR]})
    prompt = engine.open(GENERATOR, [20, 21, 22], owner="search")
    engine.submit(Generate("search", prompt, (Sampling(key=1),), 6, ""))
    done = drain(engine)
    assert isinstance(done[0], Generated)
    assert len(done[0].token_ids) == 6
    # A prompt, whose child is there once its first token is known; then five tokens, four of them before that.
    later = [("computed", True), ("known", False)]
    assert events == [("computed", False), ("known", False), ("computed", False), *later * 4, ("known", False)]
    assert engine.stats()[GENERATOR].computed_tokens == 3 + 5
    release_all(engine, [prompt], done)


def outcomes(models: dict[str, Model], ahead: bool, requests: list[dict[str, Any]]) -> tuple[list[tuple], int]:
    """What each request gives, all at once, and the tokens computed for it."""
    engine = Engine(models, EngineSettings(2**22, 4, launch_ahead=ahead))
    opened = []
    for number, options in enumerate(requests):
        opened.append(engine.open(GENERATOR, [20 + number % 7, 31, 40], owner=number))
        engine.submit(Generate(number, opened[-1], **options))
    done = drain(engine)
    computed = engine.stats()[GENERATOR].computed_tokens
    found = sorted(
        (d.work.owner, d.indices, tuple(d.token_ids), d.log_probability, d.cause, d.own_tokens, d.computed_tokens)
        for d in done
        if isinstance(d, Generated)
    )
    release_all(engine, opened, done)
    return found, computed


@pytest.mark.parametrize("merge_equal", [True, False])
@pytest.mark.parametrize("temperature", [0.0, 0.3, 1.0])
def test_branches_that_part_or_stop_are_found_a_step_late_and_end_alike(
    models: dict[str, Model], merge_equal: bool, temperature: float
):
    requests = [
        {
            "samplings": tuple(Sampling(temperature=temperature, key=100 * number + i) for i in range(1 + number % 4)),
            "max_tokens": 3 + number % 9,
            "delimiter": "\n" if number % 2 else "",
            "merge_equal": merge_equal,
        }
        for number in range(24)
    ]
    (ahead, more), (expected, fewer) = (outcomes(models, ahead, requests) for ahead in (True, False))
    assert ahead == expected
    assert more >= fewer
    causes = {cause for *_, cause, _, _ in expected}
    assert len(causes) > 1 or not temperature, causes  # some stop where nobody knew before
