"""Differential privacy of published versions, and of clients against the server (docs/privacy.md).

source.py       normal random numbers, from a secret key or the seed
tree.py         DP-FTRL noise: a binary tree over the versions
mechanism.py    clipping and noise of a step, and the clipping norm of the next one
local.py        the noise that each client adds to its own update
accounting.py   the ε spent by the versions so far, or by a client's trips
"""
