"""Differential privacy: of the published versions of the model, and of each client against the server
(docs/privacy.md).

source.py       normal random numbers, generated from a secret key or from the experiment's seed
tree.py         DP-FTRL noise, which is organised as a binary tree over the versions
mechanism.py    clipping and noise in a step of the server, and the clipping norm of the next step
local.py        the noise that each client adds to its own update
accounting.py   the ε that the versions so far, or the trips of a client, have spent
"""
