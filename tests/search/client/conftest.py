from collections.abc import Callable, Iterator
from typing import Any

import pytest
from both_clients import CLIENTS, AsyncInThread


@pytest.fixture(params=CLIENTS)
def connect(request: pytest.FixtureRequest) -> Iterator[Callable[..., Any]]:
    """Makes clients, blocking in one run of the test and of asyncio in the other; closes them after it."""
    made: list[Any] = []

    def make(endpoint: str, **arguments: Any) -> Any:
        made.append(CLIENTS[request.param](endpoint, **arguments))
        return made[-1]

    yield make
    for client in made:
        client.close()
        if isinstance(client, AsyncInThread):
            client.end()
