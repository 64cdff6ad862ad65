"""Answers: extracted from texts, parsed, normalized and compared."""
