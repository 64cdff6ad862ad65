"""Votes: from candidates to an answer."""
