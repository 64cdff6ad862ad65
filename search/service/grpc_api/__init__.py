"""The gRPC transport: messages to requests, events to messages, errors to statuses; the rest is the session's."""
