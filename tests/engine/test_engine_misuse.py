"""What an engine refuses: each with a typed error, and with nothing changed."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from engine_driver import drain, read, release

from espalier.engine.engine import Engine
from espalier.engine.errors import EspalierError, MisuseError, NoEmbeddingError
from espalier.engine.memory.sequences import KVSequence
from espalier.engine.models.model import Model
from espalier.engine.roles import GENERATOR, VERIFIER
from espalier.engine.work import Generate, Sampling, Score

Make = Callable[..., Engine]
GREEDY = Sampling(temperature=0.0)


def state(engine: Engine) -> tuple:
    """All that a refused call might have changed."""
    held = [
        (s.role, s.row, s.released, scheduler.table.token_ids(s), scheduler.table.block_table(s).tolist())
        for scheduler in engine.schedulers.values()
        for owner in sorted(scheduler.table.owners(), key=repr)
        for s in scheduler.table.of_owner(owner)
    ]
    waiting = [(scheduler.waiting_tokens(), scheduler.running_branches) for scheduler in engine.schedulers.values()]
    return held, waiting, engine.stats(), engine.busy


@contextmanager
def refused(engine: Engine, why: str, error: type[EspalierError] = MisuseError) -> Iterator[None]:
    before = state(engine)
    with pytest.raises(error, match=why):
        yield
    assert state(engine) == before
    engine.check_integrity()


@pytest.fixture
def engine(make_engine: Make) -> Engine:
    return make_engine("talker", "classifier")


@pytest.fixture
def sequence(engine: Engine) -> Iterator[KVSequence]:
    opened = engine.open(GENERATOR, [9, 10, 11], owner="me")
    yield opened
    engine.cancel("me")
    if not opened.released:
        release(engine, opened)


def generate(sequence: KVSequence, tokens: int = 40, **work: object) -> Generate:
    return Generate("me", sequence, (GREEDY,), tokens, "", **work)  # type: ignore[arg-type]


def test_releasing_twice_is_refused(engine: Engine, sequence: KVSequence):
    release(engine, sequence)
    with refused(engine, "already released"):
        engine.release(sequence)


@pytest.mark.parametrize("steps", [0, 1, 2])
def test_releasing_under_work_is_refused_until_its_owner_is_cancelled(steps: int, make_engine: Make):
    """While it waits, between two chunks, and while it is generated in place."""
    engine = make_engine("talker", max_batch_tokens=2)
    sequence = engine.open(GENERATOR, [9, 10, 11], owner="me")
    engine.submit(generate(sequence, in_place=True))
    for _ in range(steps):
        engine.step()
    with refused(engine, "work waits or runs"):
        engine.release(sequence)
    engine.cancel("me")
    release(engine, sequence)


def test_releasing_under_a_score_is_refused_and_its_values_come_as_ever(engine: Engine):
    sequence, other = (engine.open(VERIFIER, [9, 10], owner="me") for _ in range(2))
    engine.submit(Score("me", sequence, (5, 6), (1,)))
    with refused(engine, "work waits or runs"):
        engine.release(sequence)
    (done,) = drain(engine)
    assert done.values.tobytes() == read(engine, other, [5, 6], [1]).tobytes()  # type: ignore[union-attr]
    release(engine, sequence, other)


def test_a_sequence_whose_children_are_on_their_own_may_go(engine: Engine, sequence: KVSequence):
    engine.submit(Generate("me", sequence, (GREEDY,), 5, ""))
    engine.step()
    release(engine, sequence)
    (done,) = drain(engine)
    assert len(done.token_ids) == 5  # type: ignore[union-attr]
    release(engine, done.sequence)  # type: ignore[union-attr]


@pytest.mark.parametrize("ended", ["score", "in place", "cancelled"])
def test_a_sequence_takes_new_work_once_the_last_has_ended(ended: str, engine: Engine, sequence: KVSequence):
    work = Score("me", sequence, (5,), ()) if ended == "score" else generate(sequence, 3, in_place=True)
    engine.submit(work)
    if ended == "cancelled":
        engine.step()
        engine.cancel("me")
    drain(engine)
    engine.submit(Score("me", sequence, (5,), ()))
    assert len(drain(engine)) == 1


@pytest.mark.parametrize("use", ["fork", "length", "token_ids", "footprint", "score", "generate"])
@pytest.mark.parametrize("whose", ["released", "of another engine", "of another role's engine"])
def test_a_handle_that_is_not_alive_here_is_of_no_use(use: str, whose: str, make_engine: Make):
    engine = make_engine("talker")
    other = engine if whose == "released" else make_engine("talker", "classifier")
    mine = engine.open(GENERATOR, [7, 8])
    sequence = other.open(VERIFIER if "role" in whose else GENERATOR, [9, 10])
    if other is engine:
        release(engine, sequence)
    uses: dict[str, Callable[[], object]] = {
        "fork": lambda: engine.fork(sequence, 1),
        "length": lambda: engine.length(sequence),
        "token_ids": lambda: engine.token_ids(sequence),
        "footprint": lambda: engine.footprint([mine, sequence]),
        "score": lambda: engine.submit(Score("me", sequence, (5,), (0,))),
        "generate": lambda: engine.submit(generate(sequence)),
    }
    if not (use == "footprint" and "role" in whose):  # it asks each role for its own
        with refused(engine, "already released" if other is engine else "another engine"):
            uses[use]()
    release(engine, mine)
    if other is not engine:
        with refused(engine, "another engine"):
            engine.release(sequence)
        release(other, sequence)


def test_a_handle_whose_row_was_taken_again_is_of_no_use(engine: Engine, sequence: KVSequence):
    release(engine, sequence)
    heir = engine.open(GENERATOR, [9, 10], owner="me")
    assert heir.row == sequence.row
    with refused(engine, "already released"):
        engine.release(sequence)
    release(engine, heir)


@pytest.mark.parametrize("score_positions", [(1, 0), (0, 0), (0, 2, 1), (-1,), (-1, 1), (3,), (0, 3), (2, 3, 1)])
def test_reads_that_do_not_ascend_within_the_tokens_are_refused(score_positions: tuple[int, ...], engine: Engine):
    sequence = engine.open(VERIFIER, [9])
    with refused(engine, "Score reads"):
        engine.submit(Score("me", sequence, (5, 6, 7), score_positions))
    release(engine, sequence)


@pytest.mark.parametrize("targets", [(5,), (5, 6, 7)])
def test_targets_of_another_number_than_the_reads_are_refused(targets: tuple[int, ...], engine: Engine):
    sequence = engine.open(VERIFIER, [9])
    with refused(engine, "a target for each of its reads"):
        engine.submit(Score("me", sequence, (5, 6, 7), (0, 2), targets))
    release(engine, sequence)


@pytest.mark.parametrize("where", ["open", "score", "targets"])
@pytest.mark.parametrize(("token", "error"), [(-1, MisuseError), ("rows", NoEmbeddingError), (2**40, NoEmbeddingError)])
def test_tokens_outside_the_embedding_are_refused(where: str, token: int | str, error: type, engine: Engine):
    token_id = engine.model(VERIFIER).config.vocab_size if isinstance(token, str) else token
    sequence = engine.open(VERIFIER, [9])
    with refused(engine, "negative" if error is MisuseError else str(token_id), error):
        if where == "open":
            engine.open(VERIFIER, [9, token_id, 10])
        elif where == "score":
            engine.submit(Score("me", sequence, (5, token_id), (0,)))
        else:
            engine.submit(Score("me", sequence, (5, 6), (0,), (token_id,)))
    release(engine, sequence)


def test_the_last_token_of_the_embedding_is_taken(engine: Engine):
    last = engine.model(VERIFIER).config.vocab_size - 1
    sequence = engine.open(VERIFIER, [last])
    assert read(engine, sequence, [last]).shape == (1, 1)
    release(engine, sequence)


def test_sequences_end_at_the_models_context(engine: Engine, load_model: Callable[[str], Model]):
    context = load_model("talker").config.max_positions
    with refused(engine, f"context of {context}"):
        engine.open(GENERATOR, [9] * (context + 1))
    full, nearly = engine.open(GENERATOR, [9] * context), engine.open(GENERATOR, [9] * (context - 1))
    with refused(engine, f"a sequence of {context + 1} tokens"):
        engine.submit(generate(full))
    with refused(engine, f"a sequence of {context + 1} tokens"):
        engine.submit(Score("me", nearly, (5, 6), ()))
    engine.submit(Score("me", full, (), ()))
    engine.submit(generate(nearly, 5, in_place=True))
    assert sorted(len(getattr(done, "token_ids", ())) for done in drain(engine)) == [0, 1]
    assert engine.length(nearly) == context
    release(engine, full, nearly)


def test_a_role_without_a_model_and_less_than_no_forks_are_refused(make_engine: Make):
    engine = make_engine("talker")
    with refused(engine, "no verifier"):
        engine.open(VERIFIER, [9])
    sequence = engine.open(GENERATOR, [9])
    with refused(engine, "-1 forks"):
        engine.fork(sequence, -1)
    release(engine, sequence)


def test_abandoning_takes_an_owners_work_and_sequences_and_nobody_elses(engine: Engine):
    mine = [engine.open(role, [9, 10], owner="me") for role in (GENERATOR, VERIFIER) for _ in range(3)]
    theirs = engine.open(GENERATOR, [9, 10], owner="they")
    engine.submit(generate(mine[0], in_place=True))
    engine.submit(Generate("me", mine[1], (GREEDY, Sampling(key=3)), 30, ""))
    engine.submit(Score("me", mine[3], (5,), (0,)))
    engine.submit(Generate("they", theirs, (GREEDY,), 4, "", in_place=True))
    for _ in range(3):
        engine.step()
    engine.abandon("me")
    assert all(sequence.released for sequence in mine)
    (done,) = drain(engine)
    assert (done.work.owner, engine.stats()[GENERATOR].live_sequences) == ("they", 1)
    release(engine, theirs)
