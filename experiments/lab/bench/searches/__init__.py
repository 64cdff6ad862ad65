"""Whole searches: problems a minute, accuracy, and tokens."""
