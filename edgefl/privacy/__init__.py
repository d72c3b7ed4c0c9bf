"""User-level differential privacy of the server's steps.

    tree.py        the noise of DP-FTRL: a binary tree over the versions
    accounting.py  the ε that a run has spent; needs `dp-accounting` (the extra ``edgefl[privacy]``)

The noise comes from the experiment's seed, so that a run can be repeated and verified. Whoever knows the
seed can take it away again: this measures what privacy costs in accuracy, it does not protect anybody.
"""
