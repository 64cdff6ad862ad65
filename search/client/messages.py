"""Messages of the clients, and the conversion of the responses."""

from grpc_health.v1 import health_pb2

from espalier.search.client.errors import ConnectionSettingsError
from espalier.search.request import SearchFields, SearchRequest, make_request
from espalier.search.result import SearchResult
from espalier.search.server_info import KvBlocks, Occupancy, ServerInfo
from espalier.search.service.access.calls import request_id_of
from espalier.search.service.grpc_api.convert import request_to_wire, result_from_wire
from espalier.v1 import search_pb2 as pb

HEALTH_REQUEST = health_pb2.HealthCheckRequest(service=pb.DESCRIPTOR.services_by_name["SearchService"].full_name)


def solve_message(
    request: SearchRequest | str, fields: SearchFields, include_nodes: bool, priority: int
) -> pb.SolveProblemRequest:
    """Return the message of a search.

    Raises:
        TypeError: `request` is neither a text nor a request.
        InvalidRequestError: a field is unknown, or its value cannot be sent; the server checks the rest.
    """
    if fields or not isinstance(request, SearchRequest):  # a whole one is checked by the server, with its limits
        request = make_request(request, fields)
    return request_to_wire(request, include_nodes, priority)


def stream_message(
    request: SearchRequest | str, fields: SearchFields, include_nodes: bool, priority: int
) -> pb.SolveProblemStreamRequest:
    """Return the message of a search that reports while it runs; see `solve_message`."""
    return pb.SolveProblemStreamRequest(request=solve_message(request, fields, include_nodes, priority))


def result_of(response: pb.SolveProblemResponse) -> SearchResult:
    """Return the result in a response.

    Raises:
        ValueError: an enum value is unknown to this version.
    """
    return result_from_wire(response.result)


def info_of(response: pb.GetServerInfoResponse) -> ServerInfo:
    """Return what a server says about itself."""
    blocks = {role: KvBlocks(each.live, each.cached, each.free) for role, each in response.kv_blocks.items()}
    return ServerInfo(
        version=response.version,
        models=dict(response.models),
        kv_memory_bytes=response.kv_memory_bytes,
        occupancy=Occupancy(response.running_searches, response.waiting_searches, blocks),
        admitted_calls=response.admitted_calls,
        waiting_calls=response.waiting_calls,
        max_searches=response.max_searches,
        max_queue=response.max_queue,
        model_names=dict(response.model_names),
    )


def serves(response: health_pb2.HealthCheckResponse) -> bool:
    """Return whether a server accepts searches."""
    return response.status == health_pb2.HealthCheckResponse.SERVING


def request_id_to_send(given: str | None) -> str:
    """Return the id of a call: the caller's, or a new one.

    Raises:
        ConnectionSettingsError: the caller's is not printable ASCII without spaces, of at most 128 characters.
    """
    used = request_id_of(given)
    if given is not None and used != given:
        raise ConnectionSettingsError("a request id must be printable ASCII without spaces, at most 128 characters")
    return used
