"""Names of the two models of an engine: the one that writes steps, and the one that scores them."""

GENERATOR, VERIFIER, DRAFT = "generator", "verifier", "draft"
