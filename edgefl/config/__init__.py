"""Convert a TOML file, ``--set`` overrides and arguments into one validated experiment, and back into TOML.

config   load, change, validate and dump an `edgefl.Experiment`
objects  replace Python objects with names that an experiment file can hold and a process can import
keys     list every key with its default and meaning
checks   validate keys that depend on each other or on profiles
"""

from __future__ import annotations

from edgefl.config.config import ONE_OF, change, dump, load, plain, validate

__all__ = ["ONE_OF", "change", "dump", "load", "plain", "validate"]
