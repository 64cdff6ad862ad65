"""The gRPC service: an asyncio front end, one thread that owns the orchestrator, and bounded queues between them.

Contract. Only the engine thread touches the orchestrator (`engine_thread`); only the event loop touches a call
and the admission count. Requests go to the thread through a bounded queue; events come back through bounded buffers,
and the event loop is woken once for all those of a step. A search holds its admission slot until the orchestrator has
finished it, even if its client has disconnected. All errors pass `errors`: a typed error becomes a status with details,
any other becomes INTERNAL with an id.
"""
