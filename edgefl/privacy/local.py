"""Local differential privacy: a client clips its update and adds noise to it before it sends anything."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from edgefl import kernels
from edgefl.errors import TrainingError
from edgefl.experiment import Experiment
from edgefl.kernels.arguments import Floats
from edgefl.privacy.mechanism import clip_factors
from edgefl.privacy.source import Seeded, Source


@dataclass(frozen=True)
class LocalNoise:
    """Replaces a client's update Δ by Δ·min(1, L/‖Δ‖) + N(0, (σL)²). Each trip of each client has its own
    random numbers.

    Two updates that a client might send differ by at most 2L after clipping, so σ bounds how much one upload
    reveals about the client's data (`edgefl.privacy.accounting.local_epsilon`).
    """

    clip_norm: float
    """L, the maximum L2 norm of an update after clipping."""
    noise_multiplier: float
    """σ, the standard deviation of the noise divided by L."""
    most_trips: int
    """Maximum number of trips of each client. The ε declared for a client holds for this number of trips."""
    source: Source

    @classmethod
    def of(cls, experiment: Experiment) -> LocalNoise | None:
        """Return the local noise of an experiment, or None if its clients add no noise."""
        rules = experiment.privacy
        if rules is None or not rules.local_noise_multiplier or rules.max_participations is None:
            return None
        source = Seeded(experiment.seed)
        return cls(rules.clip_norm, rules.local_noise_multiplier, rules.max_participations, source)

    def protect(self, trained: Floats, base: Floats, client: int, trip: int) -> bool:
        """Replace the model ``trained``, in place, with the model that the client sends: ``base``, the model
        that it downloaded, plus the clipped update and noise.

        If the update is not finite, it is replaced with zeros before noise is added, and the result is False;
        otherwise the result is True. A finite update that is too large to be clipped precisely
        (`clip_factors`) is also replaced with zeros. Raises `TrainingError` if the client has already made
        `most_trips` trips.
        """
        if trip >= self.most_trips:
            allowed = f"{self.most_trips} trips are allowed"
            raise TrainingError(f"privacy.max_participations: {allowed}, but the client started another trip")
        delta = trained - base
        sent = self.source.normal(delta.size, "local-privacy", client, trip)
        sent *= np.float32(self.noise_multiplier * self.clip_norm)
        square = kernels.sq_norm(delta)
        if finite := math.isfinite(square):
            delta *= np.float32(clip_factors([square], self.clip_norm)[0])
            sent += delta
        np.add(base, sent, out=trained)
        return finite
