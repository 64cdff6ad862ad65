"""The service under load: what it costs over searching in one process, how fair it is, and what a long run leaves."""
