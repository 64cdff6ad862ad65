"""One batch of one model: its tensors, the forward pass, the draws."""
