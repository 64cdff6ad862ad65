"""Who may call, as whom, and what is written down about it; the same for every door."""
