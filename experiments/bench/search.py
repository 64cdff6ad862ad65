"""Problems a minute of beam search, one at a time and many at once."""

import statistics
import time
from typing import Any

from espalier.experiments.benchmarks import load_benchmark
from espalier.search.request import SearchRequest
from espalier.search.runtime import RuntimeSettings, load_orchestrator

IN_FLIGHT = (1, 8, 32)


def run(beam_width: int, expansion: int, problems: int, repeats: int) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """Search the same problems with 1, 8 and 32 in flight, in turn.

    Returns:
        Rows with the median problems a minute, and ratios `beam@F/1` of F in flight over one at a time.
    """
    texts = [p.problem for p in load_benchmark("demo")]
    texts = texts[:: max(1, len(texts) // problems)][:problems]
    rates: dict[int, list[float]] = {count: [] for count in IN_FLIGHT}
    for repeat in range(repeats + 1):
        for count in IN_FLIGHT:
            rate = _rate(texts, count, beam_width, expansion)
            if repeat:  # the first is the warm-up
                rates[count].append(rate)
    rows = [{"in flight": count, "problems/min": statistics.median(rates[count])} for count in IN_FLIGHT]
    ratios = {
        f"beam@{count}/1": statistics.median(a / b for a, b in zip(rates[count], rates[1], strict=True))
        for count in IN_FLIGHT[1:]
    }
    return rows, ratios


def _rate(texts: list[str], in_flight: int, beam_width: int, expansion: int) -> float:
    orchestrator = load_orchestrator(RuntimeSettings(max_running=in_flight))
    for text in texts:
        orchestrator.submit(SearchRequest(text, beam_width=beam_width, expansion=expansion))
    start = time.perf_counter()
    while orchestrator.busy:
        orchestrator.step()
    seconds = time.perf_counter() - start
    orchestrator.engine.check_drained()
    return 60 * len(texts) / seconds
