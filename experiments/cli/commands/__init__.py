"""One file for each command that is more than a few lines."""
