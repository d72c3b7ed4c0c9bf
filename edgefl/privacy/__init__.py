"""Central and local differential privacy (docs/privacy.md).

Central: the server adds noise to the model, which protects clients from anyone who sees a published version.
Local: each client adds noise to its update, which also protects the client from the server.

source.py       normal random numbers, generated from a secret key or from the experiment's seed
tree.py         DP-FTRL noise, which is organised as a binary tree over the versions
mechanism.py    clipping and noise in a server step, and the clipping norm of the next step
local.py        the noise that each client adds to its own update
accounting.py   the ε spent by the versions so far, or by the trips of a client
"""
