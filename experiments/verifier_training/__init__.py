"""Verifiers of your own: rollouts of a generator, labels from them, and a head that learns to predict the labels."""
