"""The server's decisions as pure functions of events: no clock, socket, file or arithmetic on models.

core            the state machine, which takes an event and returns actions
events          the core's input and output types; the journal stores the events unchanged
ledger          running tasks, held updates and counters; the View that strategies read
strategy_calls  calls a strategy's methods and validates their results
evaluations     selects the versions to evaluate; stops a run whose model no longer improves or changes
deaths          decides what happens to a dead client's task, and whether and when the client joins again
participation   limits how often each client takes part, for differential privacy; computes arrival times, for
                strategies with an arrival process
"""

from __future__ import annotations

from edgefl.core.core import Core

__all__ = ["Core"]
