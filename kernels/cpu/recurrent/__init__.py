"""Recurrent layers on CPU."""
