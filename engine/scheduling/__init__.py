"""Scheduling: admission, the plan of each step, turns of the two models, preemption."""
