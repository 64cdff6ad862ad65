"""One model with several heads: it generates, and others read its hidden states, over the same sequences."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from espalier.engine.engine import Engine, EngineSettings
from espalier.engine.errors import MisuseError, NumericalError
from espalier.engine.roles import GENERATOR
from espalier.engine.work import Generate, Generated, Sampling, Score, Scored, StopCause

PROMPT = [5, 9, 2, 14, 3, 8, 11]


def sum_and_first(hidden: torch.Tensor) -> torch.Tensor:
    return torch.stack((hidden.sum(-1), hidden[:, 0]), dim=-1)


def largest(hidden: torch.Tensor) -> torch.Tensor:
    return hidden.amax(-1, keepdim=True)


@pytest.fixture
def engine(load_model) -> Engine:
    model = replace(load_model("talker"), other_heads={"value": sum_and_first, "largest": largest})
    return Engine({GENERATOR: model}, EngineSettings(2**21, block_size=4))


def drain(engine: Engine) -> list[Generated | Scored]:
    done: list[Generated | Scored] = []
    while engine.busy:
        done += engine.step()
    return done


def test_heads_read_the_same_hidden_states_beside_each_other_and_a_generation(engine: Engine):
    alone = engine.open(GENERATOR, PROMPT[:3], owner="a")
    engine.submit(Score("a", alone, tuple(PROMPT[3:]), (0, 3), head="value"))
    (first,) = drain(engine)
    assert first.values.shape == (2, 2)

    sequences = [engine.open(GENERATOR, PROMPT[:3], salt=b"other", owner="b") for _ in range(3)]
    for sequence, head in zip(sequences, ("value", "", "largest"), strict=True):
        engine.submit(Score("b", sequence, tuple(PROMPT[3:]), (0, 3), head=head))
    decoded = engine.open(GENERATOR, PROMPT, salt=b"other", owner="b")
    engine.submit(Generate("b", decoded, (Sampling(temperature=0.0),), max_tokens=3, delimiter=""))
    done = drain(engine)
    values = {work.work.head: work.values for work in done if isinstance(work, Scored)}
    (generated,) = [work for work in done if isinstance(work, Generated)]

    assert np.array_equal(values["value"], first.values)
    assert values["largest"].shape == (2, 1)
    # The model's own head gives logits: greedy decoding takes the largest of those at the prompt's last token.
    assert generated.token_ids[0] == int(values[""][1].argmax())


def test_a_step_is_read_on_the_sequence_that_was_generated(engine: Engine):
    """A verifier on the generator's own trunk: no second sequence, and no token is computed twice."""
    prompt = engine.open(GENERATOR, PROMPT, owner="a")
    engine.submit(Generate("a", prompt, (Sampling(key=1),), max_tokens=5, delimiter=""))
    (step,) = drain(engine)
    before = engine.stats()[GENERATOR].computed_tokens
    engine.submit(Score("a", step.sequence, (7,), (0,), head="value"))
    (scored,) = drain(engine)
    assert engine.stats()[GENERATOR].computed_tokens - before <= 2  # the last sampled token and the one that is read

    whole = engine.open(GENERATOR, PROMPT[:1], salt=b"other", owner="a")
    engine.submit(
        Score("a", whole, (*PROMPT[1:], *step.token_ids, 7), (len(PROMPT) - 1 + len(step.token_ids),), head="value")
    )
    (again,) = drain(engine)
    assert np.array_equal(scored.values, again.values)


def test_a_head_that_the_model_lacks_is_refused_by_name(engine: Engine):
    sequence = engine.open(GENERATOR, PROMPT, owner="a")
    with pytest.raises(MisuseError, match="no head 'values'; it has value, largest"):
        engine.submit(Score("a", sequence, (7,), (0,), head="values"))


def test_numbers_that_are_none_are_charged_to_the_owner_who_read_them(engine: Engine):
    model = replace(engine.model(GENERATOR), other_heads={"broken": lambda hidden: hidden[:, :1] * float("nan")})
    broken = Engine({GENERATOR: model}, EngineSettings(2**21, block_size=4))
    for owner, head in (("good", ""), ("bad", "broken")):
        sequence = broken.open(GENERATOR, PROMPT, owner=owner)
        broken.submit(Score(owner, sequence, (7,), (0,), head=head))
    with pytest.raises(NumericalError) as caught:
        drain(broken)
    assert caught.value.owners == {"bad"}


class TestStatesDrawnFrom:
    """A head that a generation reads at the state that each child's last token is drawn from."""

    DRAWS = tuple(Sampling(key=key) for key in range(12))

    @pytest.mark.parametrize("launch_ahead", [False, True])
    @pytest.mark.parametrize("merge_equal", [False, True])
    def test_they_are_those_of_the_whole_text_and_cost_no_token(
        self, launch_ahead: bool, merge_equal: bool, load_model
    ):
        model = replace(load_model("talker"), other_heads={"value": sum_and_first, "largest": largest})
        engine = Engine({GENERATOR: model}, EngineSettings(2**22, block_size=4, launch_ahead=launch_ahead))
        done: dict[str, list[Generated]] = {}
        for head in ("", "value"):
            prompt = engine.open(GENERATOR, PROMPT, salt=head.encode(), owner=head)
            engine.submit(Generate(head, prompt, self.DRAWS, max_tokens=6, head=head, merge_equal=merge_equal))
            if not head:
                done[head] = [one for one in drain(engine) if isinstance(one, Generated)]
        other = engine.open(GENERATOR, PROMPT[:4], owner="other")  # beside it, with another head
        engine.submit(Generate("other", other, self.DRAWS[:3], max_tokens=9, delimiter="", head="largest"))
        once = engine.open(GENERATOR, PROMPT[:6], owner="once")  # drawn from the prompt's last state
        engine.submit(Generate("once", once, self.DRAWS[:3], max_tokens=1, head="value"))
        alone = engine.open(GENERATOR, PROMPT[:5], owner="in place")
        engine.submit(Generate("in place", alone, self.DRAWS[:1], 4, delimiter="", in_place=True, head="value"))
        mixed = [one for one in drain(engine) if isinstance(one, Generated)]
        done["value"] = [one for one in mixed if one.work.owner == "value"]

        assert [one.values for one in done[""]] == [None] * len(done[""])
        by_draw = {one.indices: one for one in done[""]}
        assert {one.indices: (one.token_ids, one.computed_tokens) for one in done["value"]} == {
            indices: (one.token_ids, one.computed_tokens) for indices, one in by_draw.items()
        }
        assert len({one.cause for one in done["value"]}) > 1
        for one in mixed:
            ids = engine.token_ids(one.sequence)[:-1]  # the state that the last token was drawn from
            whole = engine.open(GENERATOR, ids[:1], salt=b"whole", owner="check")
            engine.submit(Score("check", whole, tuple(ids[1:]), (len(ids) - 2,), head=one.work.head))
            (again,) = drain(engine)
            assert np.array_equal(again.values[0], one.values)
            engine.release(whole)

    def test_a_step_in_flight_for_branches_that_have_all_stopped_is_dropped(self, load_model):
        model = replace(load_model("talker"), other_heads={"value": sum_and_first})
        engine = Engine({GENERATOR: model}, EngineSettings(2**21, block_size=4, launch_ahead=True))
        causes = set()
        for draw in self.DRAWS:
            prompt = engine.open(GENERATOR, PROMPT, owner="a")
            engine.submit(Generate("a", prompt, (draw,), max_tokens=40, in_place=True, head="value"))
            (done,) = drain(engine)
            causes.add(done.cause)
            ids = engine.token_ids(prompt)[:-1]
            whole = engine.open(GENERATOR, ids[:1], salt=b"whole", owner="check")
            engine.submit(Score("check", whole, tuple(ids[1:]), (len(ids) - 2,), head="value"))
            (again,) = drain(engine)
            assert np.array_equal(again.values[0], done.values)
            engine.release(prompt)
            engine.release(whole)
        assert causes & {StopCause.EOS, StopCause.DELIMITER}, "none stops before the step after it is launched"
        engine.check_drained()

    def test_a_preempted_branch_reads_the_same(self, engine: Engine):
        values = []
        for drop in (False, True):
            prompt = engine.open(GENERATOR, PROMPT, owner="a")
            engine.submit(Generate("a", prompt, self.DRAWS[:2], max_tokens=6, delimiter="", head="value"))
            engine.step()
            engine.step()
            if drop:
                engine.suspend("a")
                engine.resume_owner("a")
            values.append({one.indices: one.values.tolist() for one in drain(engine) if isinstance(one, Generated)})
        assert values[0] == values[1]

    def test_what_is_no_number_is_charged_to_the_owner_who_read_it(self, engine: Engine):
        heads = {"broken": lambda hidden: hidden[:, :1] * float("nan"), "value": sum_and_first}
        broken = Engine({GENERATOR: replace(engine.model(GENERATOR), other_heads=heads)}, EngineSettings(2**21))
        for owner, head in (("none", ""), ("good", "value"), ("bad", "broken")):
            sequence = broken.open(GENERATOR, PROMPT, owner=owner)
            broken.submit(Generate(owner, sequence, self.DRAWS[:2], max_tokens=3, head=head))
        with pytest.raises(NumericalError) as caught:
            drain(broken)
        assert caught.value.owners == {"bad"}
        broken.cancel("bad")
        assert {one.work.owner for one in drain(broken)} == {"none", "good"}

    def test_a_head_that_the_model_lacks_is_refused(self, engine: Engine):
        sequence = engine.open(GENERATOR, PROMPT, owner="a")
        with pytest.raises(MisuseError, match="no head 'values'"):
            engine.submit(Generate("a", sequence, self.DRAWS[:1], max_tokens=3, head="values"))
