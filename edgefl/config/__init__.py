"""From what the user says to one checked experiment, and back.

config   a TOML file, ``--set`` overrides and arguments to an `edgefl.Experiment`; an experiment to TOML
checks   what is allowed: types by the classes themselves, figures by one table of rules
fleet    the names in ``[fleet]`` to profiles that exist
"""

from __future__ import annotations

from edgefl.config.config import ONE_OF, dump, load, validate

__all__ = ["ONE_OF", "dump", "load", "validate"]
