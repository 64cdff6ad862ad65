"""The benchmarks of a server, at their smallest."""

import pytest

from espalier.engine.errors import EspalierError
from espalier.experiments.bench.service import soak
from espalier.experiments.bench.service.server_process import serving


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
