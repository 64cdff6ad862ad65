"""Drafts: whatever is proposed, a branch draws what it draws without; what was proposed in vain leaves nothing."""

from collections.abc import Callable

import numpy as np
import pytest
from engine_driver import drain, generate, release
from scripted_drafts import FixedLength, drafting

from espalier.engine.engine import Engine
from espalier.engine.guidance.compiled import GrammarCompiler
from espalier.engine.guidance.grammar import regex_grammar
from espalier.engine.models.model import Model
from espalier.engine.roles import GENERATOR
from espalier.engine.speculation.speculation import followers
from espalier.engine.work import Generate, Sampling

Make = Callable[..., Engine]
PROMPT = list(range(20, 41))


def step_of(engine: Engine, *samplings: Sampling, **how: object) -> list[tuple]:
    """The children of `PROMPT`: all that must not depend on drafts."""
    sequence = engine.open(GENERATOR, PROMPT)
    done = generate(engine, sequence, *samplings, **how)
    release(engine, sequence, *(one.sequence for one in done))
    return [
        (one.indices, one.token_ids, one.log_probabilities, one.cause, one.own_tokens, one.computed_tokens)
        for one in done
    ]


def steps(engine: Engine) -> int:
    return engine.stats()[GENERATOR].steps


def test_a_draft_that_is_right_takes_a_step_for_all_of_it(make_engine: Make):
    plain = make_engine()
    (expected,) = step_of(plain, Sampling(key=7), tokens=13, delimiter="")
    engine = drafting(make_engine, expected[1])
    assert step_of(engine, Sampling(key=7), tokens=13, delimiter="") == [expected]
    # 1 with the prompt, then 5, 5, and a draft is never longer than what may come before the last draw
    assert (steps(plain), steps(engine)) == (13, 4)
    stats = engine.stats()[GENERATOR]
    assert (stats.drafted_tokens, stats.accepted_tokens) == (9, 9)
    assert stats.computed_tokens == plain.stats()[GENERATOR].computed_tokens


@pytest.mark.parametrize("wrong", range(5))
def test_what_stands_behind_a_wrong_token_is_dropped(wrong: int, make_engine: Make):
    (expected,) = step_of(make_engine(), Sampling(key=7), tokens=8, delimiter="")
    text = list(expected[1])
    text[wrong] += 1
    engine = drafting(make_engine, text)
    assert step_of(engine, Sampling(key=7), tokens=8, delimiter="") == [expected]
    stats = engine.stats()[GENERATOR]
    assert stats.accepted_tokens < stats.drafted_tokens or not wrong  # the first token has the prompt's own step


@pytest.mark.parametrize("length", [1, 2, 5])
@pytest.mark.parametrize("temperature", [0.0, 0.3, 1.0])
def test_siblings_part_within_a_draft_as_they_do_without(length: int, temperature: float, make_engine: Make):
    samplings = [Sampling(temperature, key=key) for key in range(6)]
    expected = step_of(make_engine(), *samplings, tokens=9, delimiter="")
    for child in expected:
        assert step_of(drafting(make_engine, child[1], length), *samplings, tokens=9, delimiter="") == expected


def test_a_step_ends_where_it_does_without_drafts(make_engine: Make):
    stopped = set[str]()
    for key in range(12):
        how = {"tokens": 30, "delimiter": "\n\n"}
        (unbounded,) = step_of(make_engine("talker"), Sampling(key=key), tokens=40, delimiter="")
        (expected,) = step_of(make_engine("talker"), Sampling(key=key), **how)
        engine = drafting(make_engine, unbounded[1], 6, generator="talker")
        assert step_of(engine, Sampling(key=key), **how) == [expected]
        stopped.add(str(expected[3]))
    assert len(stopped) > 1


def test_drafts_are_shortened_to_what_a_step_has_room_for(make_engine: Make):
    (expected,) = step_of(make_engine(), Sampling(key=7), tokens=12, delimiter="")
    engine = drafting(make_engine, expected[1], 8, max_batch_tokens=3)
    most = []
    engine.on_step = lambda record: most.append(record.tokens)
    assert step_of(engine, Sampling(key=7), tokens=12, delimiter="") == [expected]
    assert max(most) == 3


@pytest.mark.parametrize("room", [4, 5, 7, 9])
def test_the_drafts_of_siblings_share_what_a_step_has_room_for_beside_a_prompt_that_is_read(
    room: int, make_engine: Make
):
    samplings, prompt = [Sampling(key=key) for key in range(3)], [7 + i % 60 for i in range(40)]
    expected = step_of(make_engine(), *samplings, tokens=9, delimiter="")
    engine = drafting(make_engine, expected[0][1], 8, max_batch_tokens=room)
    sizes = list[int]()
    engine.on_step = lambda record: sizes.append(record.tokens)
    sequence, beside = engine.open(GENERATOR, PROMPT), engine.open(GENERATOR, prompt)
    engine.submit(Generate("other", beside, (Sampling(key=9),), 2, ""))
    found = generate(engine, sequence, *samplings, tokens=9, delimiter="")
    assert [one.token_ids for one in found if one.work.owner == "sampler"] == [one[1] for one in expected]
    release(engine, sequence, beside, *(one.sequence for one in found))
    assert engine.stats()[GENERATOR].drafted_tokens > 0
    assert max(sizes) == room


def test_nobody_is_preempted_for_a_draft(make_engine: Make):
    engine = drafting(make_engine, [5] * 40, 8)
    block = engine.schedulers[GENERATOR].pools[0].layout.block_bytes
    engine = drafting(make_engine, [5] * 40, 8, kv_memory_bytes=7 * block, slab_bytes=block)  # 6 for all tokens
    expected = step_of(make_engine(), Sampling(key=7), tokens=3, delimiter="")
    assert step_of(engine, Sampling(key=7), tokens=3, delimiter="") == expected
    assert engine.stats()[GENERATOR].preemptions == 0


def test_what_was_proposed_in_vain_holds_no_block(make_engine: Make):
    engine = drafting(make_engine, [5] * 40, 8)
    sequence = engine.open(GENERATOR, PROMPT)
    engine.submit(Generate("sampler", sequence, (Sampling(key=7), Sampling(key=8)), 12, ""))
    table, done = engine.schedulers[GENERATOR].table, []
    while engine.busy:
        done += engine.step()
        for live in table.of_owner(None):
            assert table.num_blocks[live.row] == -(-table.computed[live.row] // 4)
    assert engine.stats()[GENERATOR].drafted_tokens > 20
    release(engine, sequence, *(one.sequence for one in done))


def test_tokens_that_the_model_does_not_have_end_a_draft(make_engine: Make):
    (expected,) = step_of(make_engine(), Sampling(key=7), tokens=8, delimiter="")
    engine = drafting(make_engine, [expected[1][0], expected[1][1], 10**6, -1])
    assert step_of(engine, Sampling(key=7), tokens=8, delimiter="") == [expected]
    assert engine.stats()[GENERATOR].drafted_tokens == 1


def test_a_model_with_states_that_cannot_go_back_drafts_nothing(make_engine: Make, tmp_path, caplog):
    import torch
    from zoo_models import write_checkpoint

    from espalier.engine.models.checkpoint import Checkpoint
    from espalier.engine.models.model import load_generator

    model: Model = load_generator(Checkpoint(write_checkpoint(tmp_path, "qwen3_next")), torch.float32, "cpu")
    with caplog.at_level("INFO", "espalier.engine"):
        engine = make_engine(model, draft_tokens=4, kv_memory_bytes=2**24)
    assert "no tokens are drafted: the recurrent state of the generator cannot go back" in caplog.text
    assert engine.schedulers[GENERATOR].speculation is None


def test_what_was_said_before_is_proposed(make_engine: Make):
    """A greedy sibling of a finished step says the same, and is done in a fraction of the steps."""
    engine = make_engine(draft_tokens=6)
    speculation = engine.schedulers[GENERATOR].speculation
    speculation.lengths, speculation.length = FixedLength(6), 6
    sequence = engine.open(GENERATOR, PROMPT, owner="search")
    taken, texts, children = [], [], []
    for _ in range(2):
        before = steps(engine)
        engine.submit(Generate("search", sequence, (Sampling(temperature=0.0),), 24, ""))
        (done,) = drain(engine)
        taken.append(steps(engine) - before)
        texts.append(done.token_ids)
        children.append(done.sequence)
    assert texts[0] == texts[1]
    assert taken[1] <= 8 < taken[0]
    release(engine, sequence, *children)
    engine.schedulers[GENERATOR].speculation.drafter.learn([])
    other = engine.open(GENERATOR, PROMPT, owner="other")  # who never sees what another owner said
    before = steps(engine)
    engine.submit(Generate("other", other, (Sampling(temperature=0.0),), 24, ""))
    (done,) = drain(engine)
    assert (done.token_ids, steps(engine) - before) == (texts[0], taken[0])
    release(engine, other, done.sequence)


@pytest.mark.parametrize(
    ("text", "last", "most", "expected"),
    [
        ([1, 2, 3, 4, 1, 2], [1, 2], 3, [3, 4, 1]),
        ([1, 2, 3, 9, 2, 4, 1, 2], [1, 2], 1, [3]),  # the longest before the latest
        ([1, 2, 3, 1, 2, 4, 1, 2], [1, 2], 2, [4, 1]),  # the latest of the longest
        ([1, 2, 3, -1, 1, 2], [1, 2], 4, [3]),
        ([1, 2, -1, 5, 1, 2], [1, 2], 4, []),  # the text ends there
        ([7, 2, 3, 1, 2], [1, 2], 4, []),  # one token says too little
        ([1, 2], [1, 2], 4, []),
    ],
)
def test_what_followed_the_longest_match_is_found(text: list[int], last: list[int], most: int, expected: list[int]):
    found = followers(np.array(text, dtype=np.int32), np.array(last, dtype=np.int32), most)
    assert found == expected


def drafted_by_a_model(make_engine: Make, draft: str, length: int = 4, sure: float = 0.0, **options: object) -> Engine:
    """An engine whose drafts are as long as they may be, or end where the draft model is not `sure`."""
    engine = make_engine(draft=draft, draft_tokens=length, **options)
    engine.schedulers[GENERATOR].speculation.drafter.sure = sure
    engine.schedulers[GENERATOR].speculation.lengths = FixedLength(length)
    engine.schedulers[GENERATOR].speculation.length = length
    return engine


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_same_model_as_draft_is_always_right(temperature: float, make_engine: Make):
    """Also where it is fed other tokens than a step has: it uses the number of the branch's own draw."""
    samplings = [Sampling(temperature, key=key, top_p=0.9) for key in range(3)]
    plain = make_engine()
    expected = step_of(plain, *samplings, tokens=16, delimiter="")
    engine = drafted_by_a_model(make_engine, "qwen2-untied")
    assert step_of(engine, *samplings, tokens=16, delimiter="") == expected
    stats = engine.stats()[GENERATOR]
    assert stats.drafted_tokens - stats.accepted_tokens <= 4 * (len(expected) - 1)  # where siblings part
    assert stats.accepted_tokens >= 0.7 * sum(own for *_, own, _ in expected)
    assert steps(engine) < steps(plain) / 2


def test_a_draft_ends_where_its_model_is_not_sure(make_engine: Make):
    """With that token, as it may be right; all of them are, as the model is the generator."""
    sampling = Sampling(key=1)
    expected = step_of(make_engine(), sampling, tokens=41, delimiter="")
    drafted = {}
    for sure in (0.0, 0.0003, 1.0):
        engine = drafted_by_a_model(make_engine, "qwen2-untied", 3, sure)
        assert step_of(engine, sampling, tokens=41, delimiter="") == expected
        stats = engine.stats()[GENERATOR]
        assert stats.drafted_tokens == stats.accepted_tokens
        drafted[sure] = stats.drafted_tokens
    assert drafted[0.0] == 3 * 10  # of the 40 tokens behind the first one, one a step is not drafted
    assert drafted[1.0] == 20
    assert 20 < drafted[0.0003] < 30


@pytest.mark.parametrize("draft", ["talker", "mistral-window", "qwen3-mixed-window"])
def test_another_model_as_draft_changes_nothing(draft: str, make_engine: Make):
    samplings = [Sampling(key=key) for key in range(3)]
    expected = step_of(make_engine(), *samplings, tokens=40, delimiter="")
    for length in (1, 5):
        engine = drafted_by_a_model(make_engine, draft, length)
        assert step_of(engine, *samplings, tokens=40, delimiter="") == expected
        assert engine.stats()[GENERATOR].drafted_tokens > 0


def test_a_draft_model_reads_a_path_once(make_engine: Make):
    """Children go on from the KV of the draft model's sequence beside their parent's."""
    engine = drafted_by_a_model(make_engine, "talker", 2, prefix_cache=False)
    sequence = engine.open(GENERATOR, PROMPT)
    for key in range(4):
        engine.submit(Generate("sampler", sequence, (Sampling(key=key), Sampling(key=key + 9)), 6, ""))
        done = drain(engine)
        release(engine, sequence, *(one.sequence for one in done[1:]))
        sequence = done[0].sequence
    length = engine.length(sequence)
    release(engine, sequence)
    assert engine.stats()["draft"].computed_tokens < 8 * length / 2


def test_kv_of_drafts_gives_way_before_anybody_elses(make_engine: Make):
    block = make_engine().schedulers[GENERATOR].pools[0].layout.block_bytes
    engine = drafted_by_a_model(make_engine, "qwen2-untied", kv_memory_bytes=27 * block, slab_bytes=block)
    expected = step_of(make_engine(), *(Sampling(key=key) for key in range(3)), tokens=20, delimiter="")
    assert step_of(engine, *(Sampling(key=key) for key in range(3)), tokens=20, delimiter="") == expected
    stats = engine.stats()
    assert stats[GENERATOR].preemptions == 0
    assert stats["draft"].computed_tokens > 21 + 2 * 60  # once more than without giving way


def test_a_result_counts_what_was_drafted_for_it(make_engine: Make):
    engine = drafted_by_a_model(make_engine, "qwen2-untied", 3)
    sequence = engine.open(GENERATOR, PROMPT)
    (one,) = generate(engine, sequence, Sampling(key=1), tokens=14, delimiter="")
    assert (one.drafted_tokens, one.accepted_tokens) == (9, 9)  # 1, 4, 4, 4 tokens and a last one
    release(engine, sequence, one.sequence)


@pytest.mark.parametrize("wrong", [None, 1, 3, 6])
def test_a_guided_branch_is_the_same_with_drafts_that_are_cut_where_its_matcher_ends_them(
    wrong: int | None, make_engine: Make, load_model: Callable[[str], Model]
):
    matcher = GrammarCompiler(load_model("talker")).compile(regex_grammar(r"(ab|cd)[0-9]{2,20}"))
    samplings = [Sampling(2.0, key=key) for key in range(4)]
    how = {"tokens": 14, "delimiter": "", "matcher": matcher}
    expected = step_of(make_engine("talker"), *samplings, **how)
    for child in expected:
        text = list(child[1])
        if wrong is not None and wrong < len(text):
            text[wrong] = 5
        engine = drafting(make_engine, text, generator="talker")
        assert step_of(engine, *samplings, **how) == expected
        stats = engine.stats()[GENERATOR]
        assert stats.accepted_tokens > 0 or wrong == 1
        assert matcher.error == ""
