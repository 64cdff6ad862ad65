"""The search runtime: memory estimates, tree expansion, budgets, usage, and the orchestrator."""
