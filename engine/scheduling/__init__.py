"""What runs next: who is admitted, what a step computes, whose turn it is, who gives way."""
