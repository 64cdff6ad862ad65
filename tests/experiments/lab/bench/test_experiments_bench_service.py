"""The benchmarks of a server, at their smallest."""

import pytest

from espalier.engine.errors import EspalierError
from espalier.experiments.lab.bench.service import remote_rollouts, scraped, soak
from espalier.experiments.lab.bench.service.server_process import serving


def test_a_server_that_cannot_start_is_told_at_once():
    with pytest.raises(EspalierError, match="ended before it was ready, with exit code 2"), serving("--no-such-option"):
        raise AssertionError


@pytest.mark.slow
def test_a_long_run_tells_how_all_calls_ended():
    rows, ratios, ended = soak.run(minutes=0.2)
    assert len(rows) == 20
    assert len(ratios) == 2
    assert set(ended) <= {"OK", "INVALID_ARGUMENT", "vanished"}
    assert min(ended.values()) > 0


@pytest.mark.slow
def test_scrapes_are_timed_beside_searches():
    rows, ratios = scraped.run(problems=8, callers=4, interval=0.01, repeats=1)
    nobody, often = rows
    assert nobody["scrapes"] is None
    assert often["scrapes"] > 1
    assert 0 < often["median ms"] <= often["99th percentile ms"]
    assert list(ratios) == ["problems/min, scraped/not"]


@pytest.mark.slow
def test_trees_of_a_server_are_timed_beside_those_of_one_process():
    rows, ratios = remote_rollouts.run(problems=4, in_flight=2, solutions=3, repeats=1)
    assert [row["way"] for row in rows] == ["one process", "gRPC"]
    assert all(row["tokens/s"] > 0 for row in rows)
    assert len(ratios) == 1
