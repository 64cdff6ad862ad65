"""Notation of answers: LaTeX, numbers, units, and the words and marks around them."""
