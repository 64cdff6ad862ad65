"""How many modules one unary beam request crosses; `pytest -s` lists them with the functions that ran in each.

Counted are Espalier's modules of which a Python function runs between the receipt of a `SolveProblem` and its answer,
with the bundled pair: the service, the search, the engine, the kernels and the stubs. Not counted: the client, what
only loading or a process's first request runs, and functions that numba has compiled (no Python frame shows them).
"""

import sys
import threading
from collections import Counter
from collections.abc import Iterator
from types import FrameType

import pytest
from server_thread import ServerThread

from espalier.search.client import SearchClient
from espalier.search.request import SearchRequest
from espalier.search.run.load import load_orchestrator
from espalier.search.run.settings import RuntimeSettings
from espalier.search.service.settings import ServerSettings

MAX_MODULES = 68
"""One of them, `kernels.cpu.tiles`, on processors without AMX only."""
FIRST, SECOND = (
    SearchRequest(
        f"Tom has {n} coins. (a) He finds 31 more. (b) He loses 14. How many coins does he have now?",
        beam_width=2,
        expansion=2,
    )
    for n in (12, 25)
)


class Recorder:
    """Which functions run on the threads started after it was made, by module."""

    def __init__(self) -> None:
        self.on = False
        self.calls: Counter[tuple[str, str]] = Counter()

    def __call__(self, frame: FrameType, event: str, _: object) -> None:
        if self.on and event == "call":
            module = frame.f_globals.get("__name__", "")
            if module.startswith("espalier.") and not module.startswith("espalier.search.client."):
                self.calls[module, frame.f_code.co_qualname] += 1

    @property
    def modules(self) -> dict[str, dict[str, int]]:
        found: dict[str, dict[str, int]] = {}
        for (module, function), count in sorted(self.calls.items()):
            found.setdefault(module, {})[function] = count
        return found


@pytest.fixture
def recorder() -> Iterator[Recorder]:
    recorder = Recorder()
    threading.setprofile(recorder)  # the threads of the server and of the client start under it
    yield recorder
    threading.setprofile(None)  # pyright: ignore[reportArgumentType] - what takes it off


def test_one_unary_beam_request_crosses_few_modules(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("espalier.search.service.server._HEALTH_SECONDS", 600.0)  # not within the request
    assert sys.getprofile() is None
    server = ServerThread(
        lambda: load_orchestrator(RuntimeSettings(kv_memory=2**28, threads=1)), ServerSettings(port=0)
    )
    try:
        server.wait_loaded()
        with SearchClient(server.address) as client:
            client.solve(FIRST, timeout=60)  # what is compiled or opened once is behind it
            recorder.on = True
            result = client.solve(SECOND, timeout=60)
            recorder.on = False
    finally:
        server.close()
    assert result.answer
    for module, functions in recorder.modules.items():
        names = ", ".join(f"{name} ×{count}" for name, count in functions.items())
        print(f"{module}: {names}")
    print(f"{len(recorder.modules)} modules, {len(recorder.calls)} functions")
    layers = {module.split(".")[1] for module in recorder.modules}
    assert {"search", "prm", "engine", "kernels"} <= layers, "the recorder has lost part of the way"
    assert len(recorder.modules) <= MAX_MODULES, "\n".join(recorder.modules)
