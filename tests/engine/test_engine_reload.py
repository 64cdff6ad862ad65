"""Other weights take a model's place while it samples: no KV of the old ones is read again, and nothing is lost."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from engine_driver import drain, generate, release
from hybrids import write_hybrid_talker
from scripted_drafts import FixedLength
from tiny_models import disturb

from espalier.engine.engine import Engine
from espalier.engine.errors import MisuseError
from espalier.engine.execution.sampling import key_after
from espalier.engine.models.checkpoint import Checkpoint
from espalier.engine.models.model import Model, load_generator
from espalier.engine.roles import GENERATOR
from espalier.engine.work import Generate, Generated, Sampling

Make = Callable[..., Engine]
Pair = tuple[Model, Model]
PROMPT = [5 + i * i % 90 for i in range(23)]
KEYS = (7, 8)
TOKENS = 24


def pair_of(folder: Path) -> Pair:
    """The model of a checkpoint, and another with the same configuration; nothing that they sample ends early."""
    before = replace(load_generator(Checkpoint(folder), torch.float32, "cpu"), eos_token_ids=())
    after = load_generator(Checkpoint(disturb(folder)), torch.float32, "cpu")
    return before, replace(after, eos_token_ids=(), tokenizer=before.tokenizer)


@pytest.fixture(scope="module", params=["qwen2-untied", "mistral-window", "qwen3-mixed-window", "hybrid"])
def pair(
    request: pytest.FixtureRequest, tiny_checkpoints: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Pair:
    name, folder = request.param, tmp_path_factory.mktemp("pair") / "model"
    made = name == "hybrid"
    return pair_of(write_hybrid_talker(folder) if made else shutil.copytree(tiny_checkpoints[name], folder))


@pytest.fixture
def plain_pair(copy_of: Callable[[str], Path]) -> Pair:
    return pair_of(copy_of("qwen2-untied"))


def begin(engine: Engine, steps: int) -> tuple[object, list[Generated]]:
    """Sample two children of the prompt for some steps."""
    sequence = engine.open(GENERATOR, PROMPT)
    samplings = tuple(Sampling(key=key) for key in KEYS)
    engine.submit(Generate("sampler", sequence, samplings, TOKENS, ""))
    done: list[Generated] = []
    for _ in range(steps):
        done += engine.step()  # type: ignore[arg-type]
    assert not done
    return sequence, done


def tokens_of(engine: Engine, count: int, given: list[int], key: int) -> Generated:
    """What an engine draws behind the prompt and given tokens, with the rest of a stream."""
    sequence = engine.open(GENERATOR, PROMPT + given)
    (one,) = generate(engine, sequence, Sampling(key=key_after(key, len(given))), tokens=count, delimiter="")
    release(engine, sequence, one.sequence)
    return one


@pytest.mark.parametrize(
    ("options", "steps"),
    [({}, 1), ({}, 9), ({"launch_ahead": True}, 9), ({"draft_tokens": 4}, 9), ({"max_batch_tokens": 5}, 2)],
    ids=str,
)
def test_what_is_sampled_goes_on_as_a_fresh_engine_of_the_new_weights_would(
    options: dict, steps: int, pair: Pair, make_engine: Make
):
    before, after = pair
    engine = make_engine(before, **options)
    sequence, _ = begin(engine, steps)
    engine.replace_model(GENERATOR, after)
    engine.check_integrity()
    assert sum(pool.live_blocks + pool.cached_blocks for pool in engine.schedulers[GENERATOR].pools) == 0
    running = engine.schedulers[GENERATOR]._branches.running
    drawn = {
        i: int(engine.schedulers[GENERATOR].table.lengths[b.row]) - len(PROMPT) for b in running for i in b.indices
    }
    done = [one for one in drain(engine) if isinstance(one, Generated)]
    old, new = make_engine(before), make_engine(after)
    assert sorted(i for one in done for i in one.indices) == [0, 1]
    for one in done:
        for index in one.indices:
            count = drawn.get(index, 0)
            assert steps < 9 or count > 5, "the old weights have sampled"
            first, rest = one.token_ids[:count], one.token_ids[count:]
            if count:
                assert first == tokens_of(old, count, [], KEYS[index]).token_ids
            fresh = tokens_of(new, TOKENS - count, first, KEYS[index])
            assert rest == fresh.token_ids
            assert one.log_probabilities[count:] == fresh.log_probabilities
    release(engine, sequence, *(one.sequence for one in done))  # type: ignore[arg-type]


def test_a_prompt_that_was_cached_is_computed_again(pair: Pair, make_engine: Make):
    before, after = pair
    engine = make_engine(before)
    for _ in range(2):
        tokens_of(engine, 3, [], 7)
    hits = engine.stats()[GENERATOR].cache_hits
    assert hits > 0
    engine.replace_model(GENERATOR, after)
    again = tokens_of(engine, TOKENS, [], 7)
    assert engine.stats()[GENERATOR].cache_hits == hits
    assert again.token_ids == tokens_of(make_engine(after), TOKENS, [], 7).token_ids
    tokens_of(engine, 3, [], 7)
    assert engine.stats()[GENERATOR].cache_hits > hits, "the cache goes on"


def test_there_and_back_is_as_if_nothing_had_been(plain_pair: Pair, make_engine: Make):
    before, after = plain_pair
    engine = make_engine(before)
    expected = tokens_of(engine, TOKENS, [], 7)
    engine.replace_model(GENERATOR, after)
    changed = tokens_of(engine, TOKENS, [], 7)
    engine.replace_model(GENERATOR, before)
    assert tokens_of(engine, TOKENS, [], 7).token_ids == expected.token_ids != changed.token_ids


def test_a_draft_model_stays_and_what_it_drafts_is_verified_by_the_new_weights(plain_pair: Pair, make_engine: Make):
    before, after = plain_pair
    engine = make_engine(before, draft=before, draft_tokens=3)
    speculation = engine.schedulers[GENERATOR].speculation
    assert speculation
    speculation.lengths, speculation.length = FixedLength(3), 3
    tokens_of(engine, TOKENS, [], 7)
    drafted = engine.stats()[GENERATOR].drafted_tokens
    assert drafted > 0
    engine.replace_model(GENERATOR, after)
    assert tokens_of(engine, TOKENS, [], 7).token_ids == tokens_of(make_engine(after), TOKENS, [], 7).token_ids
    assert engine.stats()[GENERATOR].drafted_tokens > drafted


def test_a_verifier_keeps_its_kv(plain_pair: Pair, make_engine: Make):
    before, after = plain_pair
    engine = make_engine(before, "qwen2-tied")
    sequence = engine.open("verifier", PROMPT)
    engine.submit(Generate("reader", sequence, (Sampling(key=1),), 1, "", in_place=True))
    drain(engine)
    live = engine.stats()["verifier"].live_blocks
    engine.replace_model(GENERATOR, after)
    assert engine.stats()["verifier"].live_blocks == live > 0
    release(engine, sequence)


def test_a_model_of_another_configuration_is_refused_and_the_old_one_goes_on(
    plain_pair: Pair, make_engine: Make, load_model: Callable[[str], Model]
):
    before, after = plain_pair
    engine = make_engine(before)
    sequence, _ = begin(engine, 5)
    for other in (load_model("qwen2-tied"), replace(after, tokenizer=load_model("qwen2-tied").tokenizer)):
        with pytest.raises(MisuseError, match="same configuration"):
            engine.replace_model(GENERATOR, other)
    done = [one for one in drain(engine) if isinstance(one, Generated)]
    old = make_engine(before)
    for one in done:
        assert one.token_ids == tokens_of(old, TOKENS, [], KEYS[one.indices[0]]).token_ids
    release(engine, sequence, *(one.sequence for one in done))  # type: ignore[arg-type]
