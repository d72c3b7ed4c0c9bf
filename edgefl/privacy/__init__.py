"""User-level differential privacy of the versions (docs/privacy.md).

source.py       normal numbers: of a secret key, or of the seed
tree.py         DP-FTRL's noise, a binary tree over the versions
mechanism.py    a step's clipping, its noise, and the clipping norm of the next
accounting.py   the ε that versions have spent, by formulas
"""
