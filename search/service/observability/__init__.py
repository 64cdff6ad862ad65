"""Metrics and traces of a server, with a dashboard and alerts.

Contract. Observers are notified of ended calls and searches on the event loop; they do not block and do not raise.
What only the engine thread knows is asked between two of its steps, at most once at a time and with a limit of time.
No text of problems or answers, and no request id, is in a metric; no text is in a trace.
"""
