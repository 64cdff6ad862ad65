"""Drawing tokens from logits: the torch reference and the choice of path."""

import torch

FILTERED = -1e30
"""Logit of a token that must not be drawn; finite, so that nothing depends on how infinities are treated."""


def draw_tokens_reference(
    logits: torch.Tensor, candidates: torch.Tensor, temperatures: torch.Tensor, draws: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw one token per row by inverting the cumulative distribution at the row's own draw.

    Args:
        logits: float32 `[B, vocabulary]`.
        candidates: the same, with `FILTERED` for tokens that must not be drawn.
        temperatures: float32 `[B]`; 0 takes the most likely token.
        draws: float64 `[B]` in [0, 1).

    Returns:
        Token ids int64 `[B]`, and their log-probabilities under `logits` as they are, float32 `[B]`.
    """
    token_ids = candidates.argmax(dim=-1)
    warm = (temperatures > 0).nonzero()[:, 0]
    cumulative = torch.softmax(candidates[warm] / temperatures[warm, None], dim=-1).double().cumsum(dim=-1)
    index = torch.searchsorted(cumulative, draws[warm, None] * cumulative[:, -1:], right=True)[:, 0]
    # Rounding can put the target on the total itself; step back to the last entry with any mass.
    last = (cumulative < cumulative[:, -1:]).sum(dim=-1)
    token_ids[warm] = torch.minimum(index, last)
    chosen = logits.gather(1, token_ids[:, None])[:, 0]
    return token_ids, chosen - torch.logsumexp(logits, dim=-1)


def draw_tokens(
    logits: torch.Tensor, candidates: torch.Tensor, temperatures: torch.Tensor, draws: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """`draw_tokens_reference` by the fastest path for the device; same arguments and result up to rounding."""
    if logits.device.type == "cpu":
        from espalier.kernels.cpu.sampling import draw_tokens_cpu  # numba takes half a second to import

        return draw_tokens_cpu(logits, candidates, temperatures, draws)
    return draw_tokens_reference(logits, candidates, temperatures, draws)
