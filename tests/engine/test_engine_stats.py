"""What an engine counts of its steps."""

from collections.abc import Callable
from copy import deepcopy

import pytest
from engine_driver import drain, generate, release

from espalier.engine.engine import Engine
from espalier.engine.stats import Histogram
from espalier.engine.work import Sampling, Score

Make = Callable[..., Engine]


def test_a_histogram_includes_a_buckets_bound_and_keeps_its_copy_apart():
    values = Histogram((1, 10))
    for value in (0, 1, 2, 10, 11):
        values.add(value)
    copy = deepcopy(values)
    values.add(5)
    assert (copy.counts, copy.sum, copy.count) == ([2, 2, 1], 24, 5)
    assert (values.counts, values.count) == ([2, 3, 1], 6)


@pytest.mark.parametrize("ahead", [False, True])
def test_every_batch_is_counted_by_its_rows_its_tokens_and_its_time(ahead: bool, make_engine: Make):
    engine = make_engine("qwen2-untied", "qwen2-tied", launch_ahead=ahead)
    records = []
    engine.on_step = records.append
    sequence = engine.open("generator", [5, 6, 7])
    children = generate(engine, sequence, *(Sampling(key=key) for key in range(3)), tokens=4, delimiter="")
    read = engine.open("verifier", [9] * 5)
    engine.submit(Score("reader", read, (), ()))
    drain(engine)
    release(engine, sequence, read, *(child.sequence for child in children))
    for role, stats in engine.stats().items():
        mine = [record for record in records if record.role == role]
        seconds = sum(record.scheduling_seconds + record.computing_seconds for record in mine)
        assert stats.steps == stats.batch_rows.count == stats.step_seconds.count == len(mine) > 0
        assert stats.batch_rows.sum == sum(record.rows for record in mine)
        assert stats.batch_tokens.sum == stats.computed_tokens == sum(record.tokens for record in mine)
        assert stats.step_seconds.sum == pytest.approx(seconds)
    engine.check_drained()
