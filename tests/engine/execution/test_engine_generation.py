from collections.abc import Callable

import numpy as np
import pytest
from engine_driver import drain, generate, release, scripted

from espalier.engine.engine import Engine
from espalier.engine.errors import MisuseError
from espalier.engine.models.model import Model
from espalier.engine.roles import GENERATOR
from espalier.engine.work import Generate, Generated, Sampling, Score, StepMarks, StopCause

GREEDY = Sampling(temperature=0.0)


@pytest.fixture
def say(load_model: Callable[[str], Model], make_engine: Callable[..., Engine]) -> Callable[..., Generated]:
    """Generates a step from a model that is certain to say the given tokens."""

    def generate_script(*script: str | int, tokens: int = 30, prompt: int = 5, **options: object) -> Generated:
        model = load_model("talker")
        ids: list[int] = []
        for piece in script:
            ids += model.tokenizer.encode(piece) if isinstance(piece, str) else [piece]
        engine = make_engine(scripted(model, ids))
        sequence = engine.open(GENERATOR, [9] * prompt)
        (done,) = generate(engine, sequence, GREEDY, tokens=tokens, in_place=True, **options)
        release(engine, sequence)
        return done

    return generate_script


def test_a_step_ends_with_its_delimiter(say: Callable[..., Generated]):
    done = say("Tom starts\n\n", "He finds")
    assert (done.text, done.cause) == ("Tom starts\n\n", StopCause.DELIMITER)


def test_a_delimiter_made_of_two_tokens_ends_the_step(say: Callable[..., Generated]):
    done = say("Tom", "\n", "\n", "He")
    assert (done.text, done.cause) == ("Tom\n\n", StopCause.DELIMITER)


def test_a_single_newline_does_not_end_a_step(say: Callable[..., Generated]):
    assert say("Tom\nHe finds\n\n").text == "Tom\nHe finds\n\n"


def test_newlines_before_any_content_do_not_end_a_step(say: Callable[..., Generated]):
    done = say("\n\n", " \n\n", "Tom\n\n")
    assert (done.text, done.cause) == ("\n\n \n\nTom\n\n", StopCause.DELIMITER)


def test_a_delimiter_inside_a_longer_run_of_newlines_ends_the_step(say: Callable[..., Generated]):
    done = say("Tom", "\n", "\n\n", "He")
    assert (done.text, done.cause) == ("Tom\n\n\n", StopCause.DELIMITER)


def test_without_a_delimiter_blank_lines_do_not_end_a_step(say: Callable[..., Generated]):
    done = say("Tom\n\nHe\n\n", "<|im_end|>", delimiter="")
    assert (done.text, done.cause) == ("Tom\n\nHe\n\n", StopCause.EOS)


def test_an_end_of_sequence_ends_the_step_and_is_no_text(say: Callable[..., Generated]):
    done = say("Tom", "<|im_end|>", "He")
    assert (done.text, done.cause) == ("Tom", StopCause.EOS)
    assert done.token_ids[-1] == 2


def test_an_immediate_end_of_sequence_is_an_empty_step(say: Callable[..., Generated]):
    done = say("<|im_end|>")
    assert (done.text, done.token_ids, done.cause) == ("", [2], StopCause.EOS)


def test_other_special_tokens_and_padding_ids_are_no_text(say: Callable[..., Generated]):
    assert say("Tom", "<|im_start|>", 336, " coins\n\n").text == "Tom coins\n\n"


def test_a_step_stops_at_its_token_limit(say: Callable[..., Generated]):
    done = say("Tom starts with 38 coins", tokens=4)
    assert (len(done.token_ids), done.cause) == (4, StopCause.LENGTH)


def test_a_delimiter_on_the_last_allowed_token_is_a_delimiter(say: Callable[..., Generated]):
    done = say("38\n\n", tokens=3)
    assert (len(done.token_ids), done.cause) == (3, StopCause.DELIMITER)


def test_a_step_stops_where_the_models_context_ends(say: Callable[..., Generated]):
    done = say("Tom starts with 38 coins", prompt=509)
    assert (len(done.token_ids), done.cause) == (3, StopCause.CONTEXT)


def test_a_certain_step_has_log_probability_zero(say: Callable[..., Generated]):
    assert say("Tom\n\n").log_probability == pytest.approx(0.0, abs=1e-5)


def test_the_first_child_is_charged_for_the_shared_prompt(make_engine: Callable[..., Engine]):
    engine = make_engine("talker")
    sequence = engine.open(GENERATOR, [9] * 11)
    done = generate(engine, sequence, *[Sampling(key=k) for k in range(3)], tokens=5, delimiter="")
    assert [d.indices for d in done] == [(0,), (1,), (2,)]
    # the last sampled token is not computed until somebody continues from it
    assert [d.computed_tokens for d in done] == [11 + len(done[0].token_ids) - 1] + [
        len(d.token_ids) - 1 for d in done[1:]
    ]
    assert sum(d.computed_tokens for d in done) == engine.stats()["generator"].computed_tokens
    release(engine, sequence, *(d.sequence for d in done))


def test_what_a_sequence_draws_does_not_depend_on_its_company(make_engine: Callable[..., Engine]):
    def draws(engine: Engine, others: int, seed: int) -> list[tuple[list[int], float]]:
        order = np.random.default_rng(seed).permutation(others + 1)
        for i in order:
            sequence = engine.open(GENERATOR, [9 + int(i)] * (3 + int(i)))
            samplings = tuple(Sampling(top_p=1.0 if i % 2 == 0 else 0.7, key=100 * int(i) + k) for k in range(4))
            engine.submit(Generate(int(i), sequence, samplings, 20))
        mine = []
        done = drain(engine)
        for d in sorted((d for d in done if isinstance(d, Generated)), key=lambda d: d.indices):
            release(engine, d.sequence)
            if d.work.owner == 0:
                mine.append((d.token_ids, d.log_probability))
        release(engine, *{d.work.sequence for d in done})
        return mine

    alone = draws(make_engine("talker"), 0, 0)
    assert len({tuple(ids) for ids, _ in alone}) == 4
    assert draws(make_engine("talker"), 15, 1) == alone
    assert draws(make_engine("talker", max_batch_tokens=8, block_size=16), 15, 2) == alone


@pytest.mark.parametrize("temperature", [0.05, 0.3, 1.0])
@pytest.mark.parametrize("options", [{}, {"max_batch_tokens": 3}, {"block_size": 1}])
def test_samplings_share_what_they_draw_alike_and_are_otherwise_as_if_alone(
    temperature: float, options: dict, make_engine: Callable[..., Engine]
):
    samplings = [
        Sampling(temperature=temperature, top_k=20 * (key % 2), min_p=0.01 * (key % 3), key=key) for key in range(24)
    ]
    prompt, engine = [9, 30, 12, 9, 9], make_engine("talker", **options)
    sequence = engine.open(GENERATOR, prompt)
    together = generate(engine, sequence, *samplings, tokens=6)
    assert sorted(i for d in together for i in d.indices) == list(range(24))
    assert len({tuple(d.token_ids) for d in together}) == len(together), "what was drawn alike is one child"
    steps = {index: d for d in together for index in d.indices}
    for index, sampling in enumerate(samplings):
        alone = engine.open(GENERATOR, prompt)
        (d,) = generate(engine, alone, sampling, tokens=6, in_place=True)
        same = steps[index]
        assert (d.token_ids, d.text, d.log_probability, d.cause) == (
            same.token_ids,
            same.text,
            same.log_probability,
            same.cause,
        )
        release(engine, alone)
    beginnings = {tuple(d.token_ids[:end]) for d in together for end in range(1, len(d.token_ids) + 1)}
    assert sum(d.own_tokens for d in together) == len(beginnings)
    continued = {beginning[:-1] for beginning in beginnings} - {()}
    assert sum(d.computed_tokens for d in together) == len(prompt) + len(continued)
    if temperature == 0.05:
        assert len(beginnings) < sum(len(steps[i].token_ids) for i in range(24)) / 2
    release(engine, sequence, *(d.sequence for d in together))


def test_cancel_drops_an_owners_work_and_leaves_others_alone(make_engine: Callable[..., Engine]):
    engine = make_engine("talker", "classifier")
    samplings = tuple(Sampling(key=key) for key in range(6))
    going = {owner: engine.open(GENERATOR, [9] * 6) for owner in ("gone", "stays")}
    for owner, sequence in going.items():
        engine.submit(Generate(owner, sequence, samplings, 40, ""))
    engine.step()
    waiting = engine.open("verifier", [9] * 6)
    engine.submit(Score("gone", waiting, (5,), (0,)))
    late = engine.open(GENERATOR, [9] * 6)
    engine.submit(Generate("gone", late, samplings, 40))
    engine.cancel("gone")
    engine.check_integrity()
    done = drain(engine)
    assert {d.work.owner for d in done} == {"stays"}
    assert len(done) == 6
    release(engine, *(d.sequence for d in done if isinstance(d, Generated)), *going.values(), waiting, late)


def test_cancelling_a_generation_in_place_leaves_its_sequence_to_the_owner(make_engine: Callable[..., Engine]):
    engine = make_engine("talker")
    sequence = engine.open(GENERATOR, [9] * 6)
    engine.submit(Generate("me", sequence, (GREEDY,), 40, "", in_place=True))
    engine.step()
    engine.cancel("me")
    assert not engine.busy
    release(engine, sequence)


def test_a_cancelled_sequence_takes_new_work(make_engine: Callable[..., Engine]):
    engine = make_engine("talker")
    sequence = engine.open(GENERATOR, [9] * 6)
    engine.submit(Generate("first", sequence, (GREEDY,), 40))
    engine.cancel("first")
    assert len(generate(engine, sequence, GREEDY, tokens=2, in_place=True)) == 1
    release(engine, sequence)


@pytest.mark.parametrize(
    "wrong",
    [
        {"samplings": ()},
        {"samplings": (GREEDY, GREEDY), "in_place": True},
        {"samplings": (GREEDY,), "max_tokens": 0},
    ],
)
def test_generations_that_could_not_run_are_refused(wrong: dict, make_engine: Callable[..., Engine]):
    engine = make_engine("talker")
    sequence = engine.open(GENERATOR, [9])
    with pytest.raises(ValueError, match="Generate needs"):
        engine.submit(Generate(**{"owner": "me", "sequence": sequence, "max_tokens": 4, **wrong}))
    release(engine, sequence)


@pytest.mark.parametrize("score_positions", [(2,), (-1,)])
def test_scores_read_outside_their_tokens_are_refused(
    score_positions: tuple[int, ...], make_engine: Callable[..., Engine]
):
    engine = make_engine("talker")
    sequence = engine.open(GENERATOR, [9])
    with pytest.raises(ValueError, match="outside its own tokens"):
        engine.submit(Score("me", sequence, (5, 6), score_positions))
    release(engine, sequence)


def test_a_sequence_takes_one_piece_of_waiting_work_at_a_time(make_engine: Callable[..., Engine]):
    engine = make_engine("talker")
    sequence = engine.open(GENERATOR, [9])
    engine.submit(Score("me", sequence, (5,), ()))
    with pytest.raises(ValueError, match="one piece of work"):
        engine.submit(Score("me", sequence, (6,), ()))
    drain(engine)
    release(engine, sequence)


def test_a_sequence_that_is_generating_in_place_takes_no_other_work(make_engine: Callable[..., Engine]):
    engine = make_engine("talker")
    sequence = engine.open(GENERATOR, [9] * 3)
    engine.submit(Generate("me", sequence, (GREEDY,), 40, "", in_place=True))
    engine.step()
    try:
        with pytest.raises(ValueError, match="one piece of work"):
            engine.submit(Score("me", sequence, (6,), ()))
    finally:
        engine.cancel("me")
        release(engine, sequence)


@pytest.mark.parametrize("kind", ["generate", "score"])
def test_work_on_an_empty_sequence_is_refused(kind: str, make_engine: Callable[..., Engine]):
    engine = make_engine("talker")
    sequence = engine.open(GENERATOR, [])
    work = Score("me", sequence, (), ()) if kind == "score" else Generate("me", sequence, (GREEDY,), 4)
    try:
        with pytest.raises(ValueError):
            engine.submit(work)
    finally:
        engine.cancel("me")
        release(engine, sequence)


def test_scoring_is_not_starved_by_endless_generation(make_engine: Callable[..., Engine]):
    engine = make_engine("talker", "classifier")
    scored = engine.open("verifier", [9] * 6)
    engine.submit(Score("patient", scored, (5,), (0,)))
    prompt = engine.open(GENERATOR, [9] * 6)
    waits = True
    for key in range(200):  # some other search always has something to generate
        if not engine.schedulers[GENERATOR].busy:
            engine.submit(Generate("endless", prompt, (Sampling(key=key),), 8, ""))
        for done in engine.step():
            if isinstance(done, Generated):
                release(engine, done.sequence)
                engine.submit(Generate("endless", prompt, (Sampling(key=key),), 8, ""))
            else:
                waits = False
    engine.cancel("endless")
    drain(engine)
    release(engine, scored, prompt)
    assert not waits, "200 steps passed and the verifier had no turn"


def test_samplings_that_need_not_be_one_child_are_children_of_their_own_with_the_same_tokens(make_engine):
    samplings = [Sampling(temperature=0.0)] * 2 + [Sampling(key=key) for key in (5, 6)]
    drawn = {}
    for merge in (True, False):
        engine = make_engine()
        parent = engine.open("generator", [5] * 10)
        children = generate(engine, parent, *samplings, tokens=6, merge_equal=merge)
        drawn[merge] = {index: tuple(child.token_ids) for child in children for index in child.indices}
        if not merge:
            assert [child.indices for child in children] == [(0,), (1,), (2,), (3,)]
            assert all(child.own_tokens == len(child.token_ids) for child in children)
            pending = 10
            computed = [child.computed_tokens for child in children]
            assert computed == [pending + len(children[0].token_ids) - 1, *(len(c.token_ids) - 1 for c in children[1:])]
        release(engine, parent, *(child.sequence for child in children))
        engine.check_drained()
    assert drawn[True] == drawn[False]


@pytest.mark.parametrize("instead_of", [0, 1])
def test_appended_tokens_are_read_as_if_the_sequence_had_begun_with_them(
    instead_of: int, make_engine: Callable[..., Engine]
):
    engine = make_engine(prefix_cache=False)
    sequence = engine.open(GENERATOR, [9, 8, 7, 6, 5])
    (first,) = generate(engine, sequence, GREEDY, tokens=4, delimiter="")
    whole = [*engine.token_ids(first.sequence)[: 9 - instead_of], 11, 12]
    engine.append(first.sequence, [11, 12], instead_of)
    assert engine.token_ids(first.sequence) == whole
    again = engine.open(GENERATOR, whole)
    ((appended,), (opened,)) = (generate(engine, each, GREEDY, tokens=5) for each in (first.sequence, again))
    assert appended.token_ids == opened.token_ids
    assert appended.log_probabilities == pytest.approx(opened.log_probabilities)
    assert appended.computed_tokens == 1 - instead_of + 2 + instead_of + len(appended.token_ids) - 1
    release(engine, sequence, first.sequence, again, appended.sequence, opened.sequence)


def test_a_sequence_at_work_takes_no_tokens(make_engine: Callable[..., Engine]):
    engine = make_engine()
    sequence = engine.open(GENERATOR, [9, 8])
    engine.submit(Score("a", sequence, (), ()))
    with pytest.raises(MisuseError, match="one piece of work at a time"):
        engine.append(sequence, [7])
    drain(engine)
    release(engine, sequence)


def test_a_full_step_finishes_its_letter_within_what_it_may_overrun(say: Callable[..., Generated]):
    assert say("1€2", tokens=2, delimiter="").text == "1\ufffd"
    assert say("1€2", tokens=2, delimiter="", overrun=3).text == "1€"
    assert len(say("1€2", tokens=2, delimiter="", overrun=1).token_ids) == 3


def test_a_mark_ends_a_step_though_it_has_no_other_content(say: Callable[..., Generated]):
    done = say("\n", "<|im_start|>", "He", marks=StepMarks(end_ids=(1,)))
    assert (done.token_ids[-1], done.cause) == (1, StopCause.MARK)
    done = say("a </", "x", "> </", "t", ">", "He", marks=StepMarks(end_text="</t>"))
    assert (done.text, done.cause) == ("a </x> </t>", StopCause.MARK)


def test_a_mark_that_ends_sequences_elsewhere_is_a_mark(say: Callable[..., Generated]):
    done = say("Tom", "<|im_end|>", "He", marks=StepMarks(end_ids=(2,)))
    assert (done.text, done.cause) == ("Tom", StopCause.MARK)
