"""What operators see of a server: metrics, traces, and what to draw and to be warned of.

Contract. Observers hear of calls and searches that are over, on the event loop; they return at once and do not raise.
What only the engine thread knows is asked between two of its steps, at most once at a time and with a limit of time.
No text of problems or answers, and no request id, is in a metric; no text is in a trace.
"""
