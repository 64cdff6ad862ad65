"""The device operations, behind one `Backend` for each kind of device; see README.md.

Contract. Operations work in place on the tensors they are given and keep no state. The address of a token's key or
value follows from its block id by arithmetic (`layout.KVLayout`), so no operation takes more than a block table to find
it.
"""
