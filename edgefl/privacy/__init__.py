"""User-level differential privacy of published versions (docs/privacy.md).

source.py       normal random numbers, from a secret key or the seed
tree.py         DP-FTRL noise: a binary tree over the versions
mechanism.py    clipping and noise of a step, and the clipping norm of the next one
accounting.py   the ε spent by the versions so far
"""
