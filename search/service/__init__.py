"""The gRPC service: an asyncio front, one thread that owns the orchestrator, and bounded queues between them.

Contract. Only the engine thread touches the orchestrator (`engine_thread`); only the event loop touches a call, its
event buffer and the admission count. Requests cross to the thread by a bounded queue, events cross back by
`loop.call_soon_threadsafe`. A search holds its admission slot until the orchestrator has ended it, also after its
client has gone. Every failure leaves through `errors`: a typed error becomes a status with details, anything else
becomes INTERNAL with an id and nothing more.
"""
