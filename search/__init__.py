"""What to grow: the tree, the algorithms, aggregation, answers, budgets and the orchestrator that runs many searches.

Contract. Algorithms are pure (`algorithms.base`): they see nodes and scores, never a device, a clock or a file. The
orchestrator alone talks to the engine, holds the sequences of every node, and releases them.
"""
