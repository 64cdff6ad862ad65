"""How tokens are computed: arena, blocks, sequences, scheduler, model runner, sampling, weights.

Contract. `Engine.step()` is the only place that touches the device: it runs one batch on one model and returns finished
work; with `launch_ahead`, the work of the batch before. A batch is launched without waiting for the device, and what it
sampled is not needed before it is collected: one batch of each model may be in flight. `open`, `fork`, `submit` and
`release` only change plain host data. A `Sequence` handle belongs to whoever opened, forked or was handed it, until
`release`; the blocks behind it may be shared and are never written while shared. Nothing here knows what a search is,
and no state is process-global: two engines in one process do not meet.
"""
