"""Local differential privacy: a client clips its update and adds noise to it before it sends anything."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from edgefl import kernels
from edgefl.errors import TrainingError
from edgefl.experiment import Experiment
from edgefl.kernels.arguments import Floats
from edgefl.privacy.source import Seeded, Source


@dataclass(frozen=True)
class LocalNoise:
    """Sends Δ·min(1, L/‖Δ‖) + N(0, (σL)²) instead of the update Δ, with a random stream per client and trip.

    Two updates that a client might send differ by at most 2L after clipping, so σ bounds how much one upload
    reveals about the client's data (`edgefl.privacy.accounting.local_epsilon`).
    """

    clip_norm: float
    """Clipping norm L."""
    noise_multiplier: float
    """Noise multiplier σ."""
    most_trips: int
    """Maximum number of trips per client; the client's declared ε is for this number."""
    source: Source

    @classmethod
    def of(cls, experiment: Experiment) -> LocalNoise | None:
        """Return the noise of an experiment's clients; None if they add none."""
        rules = experiment.privacy
        if rules is None or not rules.local_noise_multiplier or rules.max_participations is None:
            return None
        source = Seeded(experiment.seed)
        return cls(rules.clip_norm, rules.local_noise_multiplier, rules.max_participations, source)

    def protect(self, trained: Floats, base: Floats, client: int, trip: int) -> bool:
        """Change a trained model, in place, into what the client sends; ``base`` is the model it downloaded.

        An update that is not finite is replaced by zero plus noise; the result is then False. Raises
        `TrainingError` if the client has already made `most_trips` trips.
        """
        if trip >= self.most_trips:
            allowed = f"{self.most_trips} trips are allowed"
            raise TrainingError(f"privacy.max_participations: {allowed}, got one more")
        delta = trained - base
        sent = self.source.normal(delta.size, "local-privacy", client, trip)
        sent *= np.float32(self.noise_multiplier * self.clip_norm)
        square = kernels.sq_norm(delta)
        if finite := math.isfinite(square):
            delta *= np.float32(kernels.clip_factors([square], self.clip_norm)[0])
            sent += delta
        np.add(base, sent, out=trained)
        return finite
