"""The recipe of the demo pair: `python -m espalier.experiments.demo.recipe STAGE`."""
