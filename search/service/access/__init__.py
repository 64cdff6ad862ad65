"""Authentication, quotas and the access log, shared by all transports."""
