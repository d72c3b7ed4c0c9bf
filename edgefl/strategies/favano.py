"""FAVANO: at fixed intervals clients are taken wherever they are (Leconte et al. 2023, arXiv:2305.16099)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal

import numpy as np

from edgefl.errors import ConfigError
from edgefl.experiment import Count, Positive
from edgefl.strategies.base import Client, Step, Strategy, Until, View


@dataclass
class Polls:
    """The clients of each poll, drawn ahead, and the poll that each client's task ends with."""

    next: int = 1
    """The poll that is not made yet; poll k is at k · interval."""
    drawn: dict[int, frozenset[int]] = field(default_factory=dict)
    due: dict[int, int] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class FAVANO(Strategy):
    """w ← (w + Σ_{i∈S} u_i)/(s + 1) at k·``interval_s``, S a uniform sample of s clients (Algorithm 1).

    u_i = w_init + (y_i − w_init)/α_i is client i's model made unbiased: y_i is where it is after the E local
    steps since it was last taken, at most the K of ``training``; then it waits. A client that is taken starts
    again from the new model, the others train on. α_i is E[min(E, K)] (``deterministic``), or
    P(E > 0)·min(E, K) (``stochastic``), the expectation being over when the client is taken next: every poll
    takes it with probability s/n, and its steps take what its profile declares for its first trip.

    Samples are drawn ahead, so a task says when it ends, and a device's pace alone decides how far it gets.
    A client that is away when its turn comes is passed over.
    """

    upload: ClassVar[Literal["delta", "model"]] = "model"

    participants: Count | None = None
    """s; by default 10, or the whole fleet if that is smaller."""
    interval_s: Positive = 10.0
    """Emulated seconds between two polls."""
    form: Literal["deterministic", "stochastic"] = "deterministic"

    def size(self, clients: int) -> int:
        """s, for a fleet of so many clients."""
        return self.participants or min(10, clients)

    def check(self, clients: int) -> None:
        if self.size(clients) > clients:
            raise ConfigError(
                f"strategy.participants must be at most the fleet's {clients} clients, "
                f"got {self.participants}"
            )

    def slots(self, clients: int) -> int:
        """A client whose update is held does not train."""
        return clients

    @property
    def lockstep(self) -> bool:
        return True

    def begin(self, devices: Sequence[Client]) -> Polls:
        return Polls()

    def assign(self, state: Polls, view: View) -> Sequence[int]:
        waiting = {update.client for update in view.held}
        return [client for client in view.idle if client not in waiting]

    def until(self, state: Polls, client: int, view: View) -> Until:
        first = poll = max(state.next, math.floor(view.now_s / self.interval_s) + 1)
        while client not in self._sample(state, poll, view):
            poll += 1
        state.due[client] = poll
        alpha = self.alpha(view.devices[client], first * self.interval_s - view.now_s, len(view.devices))
        gain = 1.0 / alpha if alpha > 0.0 else 0.0
        return Until(poll * self.interval_s, gain, per_step=self.form == "stochastic")

    def alpha(self, device: Client, first_s: float, clients: int) -> float:
        """E[min(E, K)], or P(E > 0), of a client whose first chance to be taken is ``first_s`` from now.

        >>> FAVANO(participants=1, interval_s=2.0).alpha(Client(0, "pi-4", 60, steps=3), 2.0, clients=2)
        3.0
        >>> slow = Client(0, "pi-4", 60, steps=4, compute_s=8.0)
        >>> FAVANO(participants=1, interval_s=2.0).alpha(slow, 2.0, clients=2)  # 1/2 + 2/4 + 3/8 + 4/8
        1.875
        """
        chance = self.size(clients) / clients
        step_s = device.compute_s / max(1, device.steps)
        last = 0
        if chance < 1.0:
            # All K steps are done at the last chance looked at, or what is left out weighs less than 1e-12.
            busy_s = device.down_s + device.compute_s - first_s
            bound = math.ceil(math.log(1e-12) / math.log1p(-chance))
            last = min(max(0, math.ceil(busy_s / self.interval_s - 1e-9)), bound)
        at_s = first_s + self.interval_s * np.arange(last + 1) - device.down_s
        done = np.full(last + 1, device.steps) if step_s == 0.0 else np.floor(at_s / step_s + 1e-9)
        steps = np.clip(done, 0, device.steps)
        share = chance * (1.0 - chance) ** np.arange(last + 1)
        share[-1] = (1.0 - chance) ** last
        return float(share @ (steps if self.form == "deterministic" else steps > 0))

    def lost(self, state: Polls, client: int, view: View) -> None:
        state.due.pop(client, None)

    def step(self, state: Polls, view: View) -> Step | None:
        while state.next * self.interval_s <= view.now_s:
            drawn = self._sample(state, state.next, view)
            members = {client for client in drawn if state.due.get(client) == state.next}
            if any(client in view.running for client in members):
                return None
            held = (update for update in view.held if update.client in members)
            if updates := sorted(held, key=lambda update: update.client):
                share = 1.0 / (len(updates) + 1)
                return Step(updates, [share] * len(updates), base_scale=share)
            del state.drawn[state.next]
            state.next += 1
        return None

    def stepped(self, state: Polls, step: Step, view: View) -> None:
        del state.drawn[state.next]
        state.next += 1

    def wake_s(self, state: Polls, view: View) -> float | None:
        return state.next * self.interval_s

    def _sample(self, state: Polls, poll: int, view: View) -> frozenset[int]:
        """The clients that this poll takes. Polls are drawn one after the other, whoever asks first."""
        for number in range(max(state.drawn, default=state.next - 1) + 1, poll + 1):
            clients = len(view.devices)
            drawn = view.rng.choice(clients, self.size(clients), replace=False, shuffle=False)
            state.drawn[number] = frozenset(drawn.tolist())
        return state.drawn[poll]
