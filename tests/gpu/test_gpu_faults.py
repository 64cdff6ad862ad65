"""What goes wrong on a GPU, and what is left afterwards; needs all that Espalier imports."""

import dataclasses
import gc
import signal

import pytest
import torch

from espalier.engine.engine import Engine, EngineSettings
from espalier.engine.errors import DeviceError, NumericalError, PoolExhaustedError
from espalier.engine.execution.runner import ModelRunner
from espalier.engine.models.checkpoint import Checkpoint
from espalier.engine.models.model import Model, load_generator
from espalier.engine.roles import GENERATOR
from espalier.engine.work import Generate, Generated, Sampling, stream_key
from espalier.experiments.demo import generator_path


def model_on_gpu() -> Model:
    return load_generator(Checkpoint(generator_path()), torch.bfloat16, "cuda")


def decode(engine: Engine, rows: int = 8, tokens: int = 20) -> list[list[int]]:
    """What some prompts are continued by."""
    for row in range(rows):
        sequence = engine.open(GENERATOR, [3 + row] * 20, owner=row)
        sampling = Sampling(temperature=1.0, key=stream_key(0, str(row), (0,)))
        engine.submit(Generate(row, sequence, (sampling,), tokens, "", in_place=True))
    texts: dict[int, list[int]] = {}
    while engine.busy:
        for done in engine.step():
            assert isinstance(done, Generated)
            texts[done.work.owner] = engine.token_ids(done.sequence)  # type: ignore[index]
            engine.release(done.sequence)
    engine.check_drained()
    return [texts[row] for row in range(rows)]


def test_an_engine_gives_its_memory_back_and_the_next_one_has_it():
    model = model_on_gpu()
    found = []
    for _ in range(3):
        gc.collect()
        torch.cuda.empty_cache()
        free, _ = torch.cuda.mem_get_info()
        engine = Engine({GENERATOR: model}, EngineSettings(int(0.6 * free), launch_ahead=True))
        found.append(decode(engine))
        engine.close()
        del engine
    assert found[0] == found[1] == found[2]


def test_a_kv_pool_that_does_not_fit_is_refused_and_leaves_the_device_usable():
    model = model_on_gpu()
    with pytest.raises(PoolExhaustedError, match="--kv-memory"):
        Engine({GENERATOR: model}, EngineSettings(2 * torch.cuda.get_device_properties(0).total_memory))
    engine = Engine({GENERATOR: model}, EngineSettings(2**28))
    assert decode(engine)
    engine.close()


def test_a_step_that_finds_no_memory_says_so():
    model = model_on_gpu()
    engine = Engine({GENERATOR: model}, EngineSettings(2**28))
    decode(engine)
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info()
    taken = torch.empty(free - 2**22, dtype=torch.uint8, device="cuda")
    try:
        with pytest.raises(DeviceError, match="memory"):
            decode(engine, rows=300)
    finally:
        del taken
        engine.close()


@pytest.mark.parametrize("launch_ahead", [False, True])
def test_weights_that_are_no_numbers_fail_the_owners_and_not_the_device(launch_ahead: bool):
    model = model_on_gpu()
    weight = model.decoder.embedding.clone()
    engine = Engine({GENERATOR: model}, EngineSettings(2**28, launch_ahead=launch_ahead))
    model.decoder.embedding.fill_(float("nan"))
    with pytest.raises(NumericalError) as raised:
        decode(engine)
    for owner in raised.value.owners:
        engine.abandon(owner)
    for owner in range(8):
        engine.abandon(owner)
    model.decoder.embedding.copy_(weight)
    assert decode(engine)
    engine.close()


def test_an_interrupt_takes_effect_between_steps_and_loses_nothing(monkeypatch: pytest.MonkeyPatch):
    engine = Engine({GENERATOR: model_on_gpu()}, EngineSettings(2**28, launch_ahead=True))
    expected = decode(engine)
    launch, calls = ModelRunner.launch, 0

    def interrupted(*arguments: object):
        nonlocal calls
        calls += 1
        if calls == 5:
            signal.raise_signal(signal.SIGINT)
        return launch(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(ModelRunner, "launch", interrupted)
    step, interrupts = engine.step, 0

    def until_done():
        nonlocal interrupts
        try:
            return step()
        except KeyboardInterrupt:
            interrupts += 1
            return []

    monkeypatch.setattr(engine, "step", until_done)
    assert decode(engine) == expected
    assert interrupts == 1
    engine.close()


def test_a_closed_engines_model_serves_the_next_with_other_blocks():
    model = dataclasses.replace(model_on_gpu(), eos_token_ids=())
    for block_size in (16, 32, 16):
        engine = Engine({GENERATOR: model}, EngineSettings(2**28, block_size=block_size))
        assert all(len(text) == 40 for text in decode(engine))
        engine.close()
