"""The recipe of the demo pair: `python -m espalier.experiments.lab recipe STAGE`."""
