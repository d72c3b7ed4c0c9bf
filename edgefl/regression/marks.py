"""What a mark ``edge_device(…)`` asks for, checked when tests are collected."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from edgefl.devices import load_device, load_network
from edgefl.errors import ConfigError, unknown
from edgefl.regression.device import DEFAULT_LIMIT_S, Wishes, least_repetitions
from edgefl.regression.verdict import BUDGETS

KEYS = ("repetitions", "network", "time_scale", "limit_s", *BUDGETS)
MOST_LIMIT_S = 86_400


def wishes(profiles: Sequence[Any], keys: Mapping[str, Any]) -> list[Wishes]:
    """One for each profile. ConfigError for a profile, a key or a value that is not allowed.

    >>> [one.profile for one in wishes(["pixel-3a", "pi-4"], {"seconds": 2.0})]
    ['pixel-3a', 'pi-4']
    >>> wishes(["pixel-3a"], {"second": 2.0})
    Traceback (most recent call last):
    edgefl.errors.ConfigError: edge_device key 'second' not found; did you mean 'seconds'? have: joules, \
limit_s, network, peak_mib, repetitions, seconds, sent_mib, time_scale
    """
    if not profiles:
        raise ConfigError('edge_device: no profile is named; name one or more: edge_device("pixel-3a")')
    for key in keys:
        if key not in KEYS:
            raise ConfigError(unknown("edge_device key", key, KEYS))
    for profile in profiles:
        if not isinstance(profile, str):
            raise ConfigError(f"edge_device: a profile is named by a string (got {profile!r})")
        load_device(profile)
    if len(set(profiles)) < len(profiles):
        raise ConfigError(f"edge_device: a profile is named twice: {', '.join(profiles)}")
    repetitions = keys.get("repetitions")
    network, time_scale = keys.get("network"), keys.get("time_scale")
    if network is not None:
        load_network(network)
    if time_scale is not None:
        _number("time_scale", time_scale)
    limit_s = keys.get("limit_s", DEFAULT_LIMIT_S)
    if not 0 < _number("limit_s", limit_s) <= MOST_LIMIT_S:
        raise ConfigError(
            f"edge_device: limit_s must be above 0 and at most {MOST_LIMIT_S} (got {limit_s!r})"
        )
    budgets = {name: _number(name, keys[name]) for name in BUDGETS if name in keys}
    return [
        Wishes(
            profile=profile,
            repetitions=None if repetitions is None else least_repetitions(repetitions),
            network=network,
            time_scale=time_scale,
            limit_s=limit_s,
            budgets=budgets,
        )
        for profile in profiles
    ]


def _number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise ConfigError(f"edge_device: {name} must be a finite number of at least 0 (got {value!r})")
    return float(value)
