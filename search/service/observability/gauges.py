"""Load in the names that gateways of inference servers read, as they scrape it many times a second."""

from espalier.search.service.engine_thread import EngineThread
from espalier.search.service.session import Session

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_NAMES = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
"""As vLLM has them, which llm-d reads unless it is told others."""


class Gauges:
    """Calls that run and wait, and the share of KV in use. It waits for nothing, so that a scrape takes no time.

    Calls are counted at this moment; what the engine holds is as it last reported, and it is asked for the next report.
    """

    def __init__(self, engine: EngineThread, session: Session, model_name: str) -> None:
        """Create gauges; used on the event loop."""
        self._engine = engine
        self._session = session
        label = model_name.replace("\\", r"\\").replace('"', r"\"")
        self._head = [f'# TYPE vllm:{name} gauge\nvllm:{name}{{model_name="{label}"}} ' for name in _NAMES]

    def render(self) -> bytes:
        """Return the gauges as Prometheus reads them."""
        held = self._engine.last_report
        self._engine.ask_report()
        waiting_for_memory, share = 0, 0.0
        if held is not None:
            waiting_for_memory = held.waiting
            if size := held.pools * self._engine.kv_memory_bytes:
                share = min(1.0, sum(each.live_bytes for each in held.stats.values()) / size)
        running = max(0, self._session.admitted_calls - waiting_for_memory)
        values = running, self._session.waiting_calls + waiting_for_memory, round(share, 6)
        return "".join(f"{head}{value}\n" for head, value in zip(self._head, values, strict=True)).encode()
