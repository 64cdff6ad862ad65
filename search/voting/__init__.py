"""From candidates to an answer: answers are extracted, normalized, compared and voted on."""
