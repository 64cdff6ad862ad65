"""The KServe v2 protocol, `inference`: what is offered of it, and the stubs made from that by `make proto`."""
