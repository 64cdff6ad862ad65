"""A server process for tests: `serve_scripted.py DRAIN_SECONDS`; a line on stdin releases held searches.

Prints its addresses, and at its end what is left.
"""

import sys
import threading

from scripted_orchestrator import ScriptedOrchestrator

from espalier.search.service.server import serve
from espalier.search.service.settings import ServerSettings


def main() -> int:
    fake = ScriptedOrchestrator()
    loading = sys.argv[1] == "loading"

    def load() -> ScriptedOrchestrator:
        if loading:
            print("loading", flush=True)
            threading.Event().wait()
        return fake

    def release_on_input() -> None:
        if sys.stdin.readline():
            fake.release.set()

    threading.Thread(target=release_on_input, daemon=True).start()
    settings = ServerSettings(port=0, http_port=0, drain_seconds=0 if loading else float(sys.argv[1]))
    code = serve(load, settings, ready=lambda addresses: print(*addresses, flush=True))
    print(f"closed={fake.closed} live={fake.running} ended={fake.ended.qsize()}", flush=True)
    return code


if __name__ == "__main__":
    sys.exit(main())
