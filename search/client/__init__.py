"""Clients of the gRPC service: one that blocks and one for asyncio, over the same translation.

    from espalier.search.client import SearchClient

    with SearchClient("127.0.0.1:50051") as client:
        print(client.solve("What is 6 * 7?", beam_width=4, expansion=4, seed=7).answer)

Contract. A call has one deadline, which its retries share. A call that ends early for any reason (a closed iterator, a
cancelled task, an interrupt, a closed client) ends its search on the server. A search may be retried safely: it changes
nothing on the server, and the same request with the same seed gives the same answer.
"""

from espalier.search.client.async_client import AsyncSearchClient
from espalier.search.client.connection import Tls
from espalier.search.client.errors import NO_RETRIES, ConnectionSettingsError, RetryPolicy, ServiceError
from espalier.search.client.search_client import SearchClient
from espalier.search.server_info import ServerInfo

__all__ = [
    "NO_RETRIES",
    "AsyncSearchClient",
    "ConnectionSettingsError",
    "RetryPolicy",
    "SearchClient",
    "ServerInfo",
    "ServiceError",
    "Tls",
]
