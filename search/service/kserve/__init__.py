"""The KServe v2 protocol, as Triton Inference Server speaks it, for searches: over gRPC and over HTTP."""
