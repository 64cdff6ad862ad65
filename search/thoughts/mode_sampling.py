"""Sampling parameters of both modes, thinking and answering at once, where generation_config.json has those of one.

A file holds one set, and makers of models that can do both publish another for the other mode. A set of the file that
is one of a published pair gives way to its other half in the other mode; whatever else a file holds is used in both.
"""

from collections.abc import Mapping

Parameters = Mapping[str, float]
"""`temperature`, `top_k` and `top_p`."""
_PAIRS: tuple[tuple[Parameters, Parameters], ...] = (
    # Qwen3's model cards, "Best Practices"
    ({"temperature": 0.6, "top_k": 20, "top_p": 0.95}, {"temperature": 0.7, "top_k": 20, "top_p": 0.8}),
)
"""Those for thinking, and those without."""


def sampling_for(configured: Parameters, thinks: bool) -> Parameters:
    """The parameters of a mode that differ from those in the file; empty where the file's are used.

    Args:
        configured: those of the file, others are ignored; of a checkpoint that can think and be kept from it.
        thinks: whether the model thinks in this mode.
    """
    for pair in _PAIRS:
        if any(all(configured.get(name) == value for name, value in each.items()) for each in pair):
            return {name: value for name, value in pair[not thinks].items() if configured[name] != value}
    return {}
