"""Thoughts of models that think before they answer: their marks, their budget, and what of a path is thought."""
