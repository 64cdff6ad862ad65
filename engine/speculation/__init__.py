"""Drafts: tokens proposed for branches, to be verified several in one step."""
