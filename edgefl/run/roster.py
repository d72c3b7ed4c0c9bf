"""What happens to peers that are silent, send what is no message, or die: counted, and replaced or let go."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from edgefl.experiment import Experiment
from edgefl.limits.capacity import usable_cores
from edgefl.results.store import Store
from edgefl.run import control
from edgefl.run.channel import Channel
from edgefl.run.clock import Alarms, WallClock
from edgefl.run.peers import Peer, Peers
from edgefl.run.progress import Gauge

MOST_DEATHS_IN_A_ROW = 5
"""A peer whose process dies so often without finishing anything is given up."""
BUSY_S = 120.0
"""How long the evaluator may be silent over one version."""


class Roster:
    """Looks after the peers of one run."""

    def __init__(
        self,
        peers: Peers,
        experiment: Experiment,
        store: Store,
        gauge: Gauge,
        clock: WallClock,
        alarms: Alarms,
        channel: Channel[Any],
    ) -> None:
        self._peers, self._experiment = peers, experiment
        self._store, self._gauge = store, gauge
        self._clock, self._alarms, self._channel = clock, alarms, channel
        self.look_every_s = max(0.1, experiment.server.heartbeat_s / 4)
        """How often `find_silent` is to be called."""
        self.returning = 0
        """Peers that are dead and will be started again."""

    def find_silent(self, slowest_step_s: float) -> None:
        """Expel who was not heard for too long; a client is silent during a step, so it may take one."""
        seconds = max(self._experiment.server.heartbeat_s, 3 * slowest_step_s)
        for peer, silent_s in self._peers.look(seconds, self.look_every_s):
            if peer.role == control.EVALUATOR and peer.ready and silent_s < BUSY_S:
                continue
            self.expel(peer, "hang", f"not heard for {silent_s:.1f} s")

    def expel(self, peer: Peer, kind: str, detail: str) -> None:
        """Have a peer's process ended, once."""
        if not peer.expelled:
            peer.expelled = True
            self._note(peer, kind, detail)
            self._channel.send(control.Expel(peer.role, peer.number, peer.epoch))

    def departed(
        self, message: control.Departed, left: Callable[[int, str], None], given_up: Callable[[Peer], None]
    ) -> None:
        """A process ended: tell ``left`` of its client; start it again, or tell ``given_up``."""
        peer = self._peers.remove(message.role, message.peer, message.epoch)
        if peer is None:
            return
        if not peer.expelled:
            self._note(
                peer, "oom" if message.reason.startswith(control.OUT_OF_MEMORY) else "death", message.reason
            )
        client = peer.role == control.CLIENT
        if client:
            left(peer.number, message.reason)
        deaths = peer.deaths_in_a_row + 1
        if client and self._experiment.fleet.on_death == "drop":
            given_up(peer)
        elif deaths >= MOST_DEATHS_IN_A_ROW:
            self._note(peer, "gave-up", f"died {deaths} times in a row")
            given_up(peer)
        else:
            self.returning += 1
            rejoin_s = self._experiment.fleet.rejoin_s * self._clock.time_scale if client else 0.0
            self._alarms.after(rejoin_s, lambda: self._replace(peer, deaths))

    def _replace(self, peer: Peer, deaths: int) -> None:
        self.returning -= 1
        again = self._peers.expect(peer.role, peer.number, peer.epoch + 1, deaths)
        self._channel.send(control.Replace(again.role, again.number, again.epoch))

    def _note(self, peer: Peer, kind: str, detail: str) -> None:
        client = peer.number if peer.role == control.CLIENT else None
        self._store.incident(self._clock.now_s(), client, kind, detail[:MOST_DETAIL])
        self._gauge.incidents[kind] += 1


def slowest_step_s(plan: control.Serve, active: int) -> float:
    """Wall seconds that a client's training step may take, with so many training: until then it is silent."""
    prepared = plan.prepared
    seconds = prepared.host_step_s * max(1.0, active / usable_cores())
    if plan.experiment.fleet.throttle == "paced":
        return seconds
    # A phone is not heard while its process is stopped: its step takes as long as the device's.
    steps = zip(prepared.emulated_compute_s, prepared.steps, strict=True)
    return max(seconds, plan.time_scale * max(compute_s / count for compute_s, count in steps))


MOST_DETAIL = 500
"""Characters of what a peer says about itself that go on record."""
