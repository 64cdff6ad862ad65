"""The gRPC door: messages to requests and events to messages, errors to statuses; everything else is the session's."""
