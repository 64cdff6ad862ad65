"""Reads what a server shows to Prometheus."""

from collections.abc import Iterator

from prometheus_client import Metric
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text
from server_thread import ServerThread

from espalier.engine.stats import ROW_BOUNDS, SECOND_BOUNDS, TOKEN_BOUNDS, Histogram, RoleStats

OPENMETRICS = "application/openmetrics-text; version=1.0.0"


class Exposition:
    """One scrape, by name and labels."""

    def __init__(self, families: Iterator[Metric]) -> None:
        self.families = {family.name: family for family in families}
        self._values: dict[tuple[str, frozenset[tuple[str, str]]], float] = {}
        for family in self.families.values():
            for sample in family.samples:
                key = sample.name, frozenset(sample.labels.items())
                assert key not in self._values, f"{key} is there twice"
                self._values[key] = sample.value

    def value(self, name: str, **labels: str) -> float | None:
        """The value of one series, None if it is not there."""
        return self._values.get((name, frozenset(labels.items())))

    def number(self, name: str, **labels: str) -> float:
        """The value of one series, which is there."""
        value = self.value(name, **labels)
        assert value is not None, name
        return value

    def series(self, name: str, label: str) -> dict[str, float]:
        """The sums of a metric's series by one label."""
        found: dict[str, float] = {}
        for (of, labels), value in self._values.items():
            if of == name:
                key = dict(labels)[label]
                found[key] = found.get(key, 0.0) + value
        return found

    def samples(self) -> dict[str, set[str]]:
        """The labels of each metric that has series, by the name of its series."""
        found: dict[str, set[str]] = {}
        for name, labels in self._values:
            found.setdefault(name, set()).update(label for label, _ in labels)
        return found


def scrape(server: ServerThread, accept: str = "") -> Exposition:
    return read(*server.server.metrics.render(accept))


def read(text: bytes, content_type: str) -> Exposition:
    parse = parse_openmetrics if content_type.startswith("application/openmetrics-text") else parse_text
    return Exposition(iter(parse(text.decode())))


def some_stats() -> RoleStats:
    """Counters that differ from one another."""
    rows, tokens, seconds = Histogram(ROW_BOUNDS), Histogram(TOKEN_BOUNDS), Histogram(SECOND_BOUNDS)
    for row_count, token_count, took in ((1, 30, 0.002), (4, 4, 0.001), (5000, 20000, 60.0)):
        rows.add(row_count)
        tokens.add(token_count)
        seconds.add(took)
    return RoleStats(
        copied_blocks=11, live_blocks=0, cached_blocks=3, free_blocks=7,
        live_states=0, cached_states=2,
        live_bytes=0, cached_bytes=3 * 16384, free_bytes=7 * 16384, wasted_bytes=64, preemptions=12, cache_lookups=13,
        cache_hits=8, drafted_tokens=21, accepted_tokens=17,
        evicted_blocks=14, live_sequences=0, owned_slabs=1, bytes_per_token=1024, block_bytes=16384, batch_rows=rows,
        batch_tokens=tokens, step_seconds=seconds,
    )  # fmt: skip
