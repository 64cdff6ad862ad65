"""Test-time search: request and result types, algorithms, voting, and the orchestrator that runs many searches.

Contract. Algorithms are pure (`algorithms.base`): they see nodes and scores, never a device, a clock or a file. Only
the orchestrator talks to the engine; it holds the KV sequences of every node and releases them.
"""
