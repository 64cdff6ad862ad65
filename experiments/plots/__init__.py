"""Pictures, and what all of them have in common."""
