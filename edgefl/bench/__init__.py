"""Measurements, each beside its limit in the same run: ``edgefl bench``."""
