"""The laboratory: benchmarks, studies and the demo's recipe. For a checkout; no part of the wheel."""
