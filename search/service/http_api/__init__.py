"""The HTTP transport: JSON to requests, events to JSON, failures to statuses; everything else is the session's."""
