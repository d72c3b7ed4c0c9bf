"""A paper's claims, run here: its settings as TOML, several seeds, the paper's figure beside ours, a verdict.

study        what a reproduction consists of: settings, arms, seeds, and how its claims are judged
running      one run an arm and seed, each a run's folder; what is there already is not run again
curves       what the claims are read off: accuracy over trips and time, weights, staleness
findings     a claim with its evidence and verdict
page         the table, the page and summary.json
fedbuff fedstaleweight defedavg theory       one paper each
"""

from __future__ import annotations

PAPERS = ("fedbuff", "fedstaleweight", "defedavg", "theory")
"""What ``edgefl reproduce`` knows; each is a module here with ``study`` or, for theory, ``findings``."""
