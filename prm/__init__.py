"""What a step is worth: process-reward-model families and incremental scoring.

Contract. A family turns a problem and steps into token ids, says where to read, and turns what is read into a number.
Token ids are append-only: the ids of a path are the ids of its parent followed by those of the step.
"""
