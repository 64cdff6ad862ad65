"""The engine, which computes tokens: KV pool, blocks, sequences, scheduler, model runner, sampling, weights.

Contract. `Engine.step()` is the only place that runs a model: one batch of one model, whose finished work it returns;
with `launch_ahead`, the work of the batch before: the next one, of either model, is launched before a batch's results
are known. `open`, `fork`, `submit` and `release` only change plain host data; `cancel`, `abandon` and `suspend` first
wait for all batches in flight. A `Sequence` handle belongs to the caller that opened, forked or was handed it, until
`release`; its blocks may be shared and are never written while shared. A call that breaks these rules is refused by a
typed error, and changes nothing. Nothing here knows what a search is.

Two engines in one process share no sequence, block, cache or setting. Only these belong to the whole process: the
worker threads of compiled CPU code and their number, torch's number of threads (`Engine.set_threads` sets both), the
folder in which numba keeps compiled code, and the process that renders chat templates.
"""
