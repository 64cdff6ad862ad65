"""Draws that a matcher guides: masks, forks of its state, company, preemption, errors."""

import dataclasses
import threading
import time
from collections.abc import Callable, Iterable

import numpy as np
import pytest
from engine_driver import drain, generate, release
from residues import Residues

from espalier.engine.engine import Engine
from espalier.engine.guidance.matcher import MaskThread
from espalier.engine.models.model import Model
from espalier.engine.roles import GENERATOR
from espalier.engine.work import Generate, Generated, Sampling, StopCause

Make = Callable[..., Engine]
PROMPT = [9, 8, 7, 6, 5]
MANY = tuple(Sampling(temperature=1.5, key=key) for key in range(12))


class Hostile(Residues):
    """Computes for as long as it is let, but for its first tokens."""

    def __init__(self, history: Iterable[int], most: int, freed: threading.Event) -> None:
        super().__init__(history, most)
        self.freed = freed

    def allow(self, bits: np.ndarray) -> None:
        end = time.monotonic() + 60
        while len(self.history) > 2 and self.most and not self.freed.is_set():
            assert time.monotonic() < end, "nobody has given it up"
        super().allow(bits)

    def copy(self) -> "Hostile":
        return Hostile(self.history, self.most, self.freed)


@pytest.fixture
def endless(load_model: Callable[[str], Model]) -> Model:
    return dataclasses.replace(load_model("qwen2-untied"), eos_token_ids=())


def sampled(engine: Engine, owner: str = "a", samplings: tuple[Sampling, ...] = MANY, **how: object) -> list[Generated]:
    """Eight tokens of each sampling behind the prompt, in order of index; everything is released."""
    sequence = engine.open(GENERATOR, PROMPT, owner=owner)
    engine.submit(Generate(owner, sequence, samplings, 8, "", **how))
    done = sorted((d for d in drain(engine) if d.work.owner == owner), key=lambda d: d.indices)
    release(engine, sequence, *(d.sequence for d in done))
    return done


def said(done: list[Generated]) -> list[tuple]:
    return [(d.indices, tuple(d.token_ids), tuple(d.log_probabilities)) for d in done]


@pytest.mark.parametrize(
    "filters",
    [{}, {"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.2}, {"temperature": 0.0}, {"banned": (1, 2, 3, 4, 5)}],
    ids=str,
)
def test_only_allowed_tokens_are_drawn_and_each_fork_has_a_state_of_its_own(make_engine: Make, endless: Model, filters):
    matcher = Residues([3])
    samplings = tuple(dataclasses.replace(each, **filters) for each in MANY)
    done = sampled(make_engine(endless), samplings=samplings, matcher=matcher)
    assert [d.matcher.history for d in done] == [[3, *d.token_ids] for d in done]
    assert matcher.history == [3]
    assert sorted(i for d in done for i in d.indices) == list(range(len(MANY)))
    if "temperature" not in filters:
        assert any(one.token_ids[0] == other.token_ids[0] for one in done for other in done if one is not other)


def test_samplings_of_one_row_that_differ_in_their_filters_share_its_mask(make_engine: Make, endless: Model):
    mixed = tuple(dataclasses.replace(each, top_k=k % 3) for k, each in enumerate(MANY))
    done = sampled(make_engine(endless), samplings=mixed, matcher=Residues())
    assert all(len(d.matcher.history) == 8 for d in done)


def test_a_guided_step_goes_on_where_the_step_before_it_ended(make_engine: Make, endless: Model):
    engine = make_engine(endless)
    sequence = engine.open(GENERATOR, PROMPT)
    (whole,) = generate(engine, sequence, MANY[0], tokens=8, delimiter="", matcher=Residues())
    (first,) = generate(engine, sequence, MANY[0], tokens=3, delimiter="", matcher=Residues())
    (rest,) = generate(engine, first.sequence, Sampling(0.0), tokens=5, delimiter="", matcher=first.matcher)
    assert rest.matcher.history == [*first.token_ids, *rest.token_ids]
    assert first.token_ids == whole.token_ids[:3]
    release(engine, sequence, whole.sequence, first.sequence, rest.sequence)


def test_log_probabilities_are_those_of_all_tokens(make_engine: Make, endless: Model):
    guided, free = (sampled(make_engine(endless), samplings=MANY[:1], matcher=m) for m in (Residues(), None))
    only = [d.token_ids[0] for d in (*guided, *free)]
    assert only[0] != only[1], "the mask has to change the draw"
    engine = make_engine(endless)
    sequence = engine.open(GENERATOR, PROMPT)
    others = tuple(set(range(endless.config.vocab_size)) - {only[0]})
    (asked,) = generate(engine, sequence, Sampling(banned=others), tokens=1, delimiter="")
    assert asked.token_ids[0] == only[0]
    assert asked.log_probabilities[0] == guided[0].log_probabilities[0]
    release(engine, sequence, asked.sequence)


@pytest.mark.parametrize("options", [{}, {"launch_ahead": True}, {"max_batch_tokens": 5}], ids=str)
def test_guided_and_free_branches_have_the_same_bits_alone_and_beside_each_other(
    make_engine: Make, endless: Model, options
):
    alone = [said(sampled(make_engine(endless), matcher=m)) for m in (Residues(), Residues([4]), None)]
    engine = make_engine(endless, **options)
    sequences = [engine.open(GENERATOR, PROMPT, owner=owner) for owner in "abc"]
    for owner, sequence, matcher in zip("abc", sequences, (Residues(), Residues([4]), None), strict=True):
        engine.submit(Generate(owner, sequence, MANY, 8, "", matcher=matcher))
    done = [d for d in drain(engine) if isinstance(d, Generated)]
    together = [said(sorted((d for d in done if d.work.owner == o), key=lambda d: d.indices)) for o in "abc"]
    release(engine, *sequences, *(d.sequence for d in done))
    assert together == alone


def test_a_guided_owner_that_is_preempted_goes_on_to_the_same_bits(make_engine: Make, endless: Model):
    expected = said(sampled(make_engine(endless), matcher=Residues()))
    engine = make_engine(endless)
    sequence = engine.open(GENERATOR, PROMPT, owner="a")
    engine.submit(Generate("a", sequence, MANY, 8, "", matcher=Residues()))
    done: list = []
    for _ in range(4):  # in the middle of the work
        done += engine.step()
        engine.suspend("a")
        assert engine.stats()[GENERATOR].live_blocks == 0
        engine.resume_owner("a")
    done = sorted([*done, *drain(engine)], key=lambda d: d.indices)
    assert said(done) == expected
    release(engine, sequence, *(d.sequence for d in done))


@pytest.mark.parametrize("launch_ahead", [False, True])
def test_a_branch_whose_matcher_fails_ends_with_its_error_and_no_other_does(
    make_engine: Make, endless: Model, launch_ahead: bool
):
    engine = make_engine(endless, launch_ahead=launch_ahead)
    sequences = [engine.open(GENERATOR, PROMPT, owner=owner) for owner in "ab"]
    engine.submit(Generate("a", sequences[0], MANY[:2], 8, "", matcher=Residues(most=3)))
    engine.submit(Generate("b", sequences[1], MANY[:2], 8, "", matcher=Residues()))
    done = [d for d in drain(engine) if isinstance(d, Generated)]
    assert {(d.work.owner, d.cause, len(d.token_ids)) for d in done} == {
        ("a", StopCause.ERROR, 3),
        ("b", StopCause.LENGTH, 8),
    }
    assert {d.matcher.error for d in done if d.work.owner == "a"} == {"that is enough"}
    release(engine, *sequences, *(d.sequence for d in done))


def test_a_matcher_that_does_not_end_is_left_behind_and_the_others_go_on(make_engine: Make, endless: Model):
    engine, freed = make_engine(endless), threading.Event()
    expected = [said(sampled(engine, samplings=(MANY[key],), matcher=Residues([key]))) for key in range(4)]
    sequences = [engine.open(GENERATOR, PROMPT, owner=str(key)) for key in range(4)]
    for key, sequence in enumerate(sequences):
        matcher = Hostile([key], 10_000, freed) if key == 2 else Residues([key])
        engine.submit(Generate(str(key), sequence, (MANY[key],), 8, "", matcher=matcher))
    done = sorted(drain(engine), key=lambda one: one.work.owner)
    assert not freed.is_set()
    freed.set()
    assert [said([one]) for one in done if one.work.owner != "2"] == [expected[0], expected[1], expected[3]]
    assert (done[2].cause, len(done[2].token_ids)) == (StopCause.ERROR, 3)
    assert done[2].token_ids[:2] == list(expected[2][0][1][:2])
    release(engine, *sequences, *(one.sequence for one in done))


def test_a_thread_that_was_left_behind_touches_no_other_matcher():
    """Which its successor asks meanwhile."""
    asked: list[threading.Thread] = []

    class Watched(Residues):
        def allow(self, bits: np.ndarray) -> None:
            asked.append(threading.current_thread())
            super().allow(bits)

    masks, bits, before = MaskThread(), np.zeros((2, 8), dtype=np.uint8), set(threading.enumerate())
    masks.fill({0: Hostile([1, 2, 3], 10_000, threading.Event()), 1: Watched()}, bits)
    (successor,) = asked
    masks.close()
    for thread in set(threading.enumerate()) - before | {successor}:
        thread.join(60)
    assert asked == [successor]
    assert bits[1].any()


def test_an_error_of_a_matcher_is_raised_where_the_step_is_computed(make_engine: Make, endless: Model):
    class Broken(Residues):
        def allow(self, bits: np.ndarray) -> None:
            raise ZeroDivisionError

        def copy(self) -> "Broken":
            return self

    engine = make_engine(endless)
    sequence = engine.open(GENERATOR, PROMPT, owner="a")
    engine.submit(Generate("a", sequence, MANY, 8, "", matcher=Broken()))
    with pytest.raises(Exception) as raised:
        drain(engine)
    assert ZeroDivisionError in (type(raised.value), type(raised.value.__cause__))
    engine.cancel("a")
    release(engine, sequence)
