"""From what the user says to one checked experiment, and back.

config   a TOML file, ``--set`` overrides and arguments to an `edgefl.Experiment`; an experiment to TOML
objects  Python objects, as what a file says of them
keys     every key with its default and meaning
checks   keys that depend on each other, and on the profiles that they name
"""

from __future__ import annotations

from edgefl.config.config import ONE_OF, change, dump, load, validate

__all__ = ["ONE_OF", "change", "dump", "load", "validate"]
