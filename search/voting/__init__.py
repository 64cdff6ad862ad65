"""From candidates to an answer: how answers are read, compared and elected."""
