"""Users of the layers below: the command line, benchmarks, evaluation, sweeps, reports, and the demo pair's recipe."""
