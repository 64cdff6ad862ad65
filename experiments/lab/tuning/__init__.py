"""A trunk's last layers, tuned to rank solutions."""
