"""The wire contract `espalier.v1`: `search.proto` and the stubs made from it by `make proto`."""
