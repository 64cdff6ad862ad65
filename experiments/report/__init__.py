"""Compares evaluation runs: tables, paired differences, plots, and a page."""
