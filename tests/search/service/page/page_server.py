"""A small server of the page: it sends its files as a real one has to, and plays recorded searches."""

import json
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from espalier.search.request import AlgorithmName
from espalier.search.service.page.files import CONTENT_SECURITY_POLICY, page_files

HERE = Path(__file__).parent
PATIENCE = 10.0
SERVED: dict[str, Any] = {
    "model_names": {"generator": "talker", "verifier": "judge"},
    "searches": list(AlgorithmName),
    "default_search": "beam",
    "notice": "",
    "examples": True,
}


def recorded(name: str) -> list[str]:
    """The events of a recorded search, each as it goes over the wire."""
    return [f"{event}\n\n" for event in (HERE / f"{name}.events").read_text().split("\n\n") if event]


def data_of(event: str) -> dict[str, Any]:
    return json.loads(event.partition("data: ")[2])


@dataclass
class Call:
    """One search that the page asked for.

    Attributes:
        left: set once the page has closed the connection before the end.
    """

    body: dict[str, Any]
    headers: dict[str, str]
    left: threading.Event = field(default_factory=threading.Event)


class PageServer(ThreadingHTTPServer):
    """Plays the events of `plays` by algorithm, at once or as far as `go_on` allows.

    Attributes:
        calls: every search that was asked for.
        served: what it says of itself.
        refusal: status and error with which searches are answered instead.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.files = page_files()
        self.plays = {name: recorded(name) for name in ("beam", "best-of-n")}
        self.calls: list[Call] = []
        self.served = SERVED
        self.refusal: tuple[int, dict[str, Any]] | None = None
        self._allowed: float = float("inf")
        self._changed = threading.Condition()
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/"

    def hold(self) -> None:
        """Send no event from now on without leave."""
        self._allowed = 0

    def go_on(self, events: float = float("inf")) -> None:
        """Let every search send this many more events."""
        with self._changed:
            self._allowed += events
            self._changed.notify_all()

    def may_send(self, number: int) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: number < self._allowed, timeout=0.05)

    def wait_for_calls(self, count: int) -> list[Call]:
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.calls) >= count, timeout=PATIENCE)
        return self.calls

    def note(self, call: Call) -> None:
        with self._changed:
            self.calls.append(call)
            self._changed.notify_all()


class _Handler(BaseHTTPRequestHandler):
    server: PageServer  # pyright: ignore[reportIncompatibleVariableOverride]

    def do_GET(self) -> None:
        if self.path == "/v1/server":
            self._begin(200, "application/json")
            self.wfile.write(json.dumps(self.server.served).encode())
            return
        file = self.server.files.get(self.path)
        self.send_response(200 if file else 404)
        self.send_header("Content-Security-Policy", CONTENT_SECURITY_POLICY)
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Content-Type", file.media_type if file else "text/plain")
        self.end_headers()
        self.wfile.write(file.content if file else b"not found")

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        call = Call({"path": self.path, **body}, {name.lower(): value for name, value in self.headers.items()})
        self.server.note(call)
        if self.server.refusal:
            status, error = self.server.refusal
            self._begin(status, "application/json")
            self.wfile.write(json.dumps({"error": error}).encode())
            return
        self._begin(200, "text/event-stream")
        for number, event in enumerate(self.server.plays[body["algorithm"]]):
            while not self.server.may_send(number):
                if not self._send(call, ": nothing new\n\n"):
                    return
            if not self._send(call, event):
                return

    def _begin(self, status: int, media_type: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", media_type)
        self.end_headers()

    def _send(self, call: Call, text: str) -> bool:
        """Send a piece of the stream; False once the page has left."""
        try:
            self.wfile.write(text.encode())
            self.wfile.flush()
        except OSError:
            call.left.set()
            return False
        return True

    def log_message(self, format: str, *args: object) -> None:
        """Keep quiet."""
