"""The server's decisions, pure: no clock, socket, file or arithmetic on models.

core       the state machine: an event in, actions out
events     what it is told and what it answers; the journal holds the events as they are
ledger     its books: who trains what, which updates are held, and what a strategy sees
answers    what a strategy answers, as the core takes it
patience   early stopping, standstill; periods: which versions are measured
participation   limits on a client's part in a private run
arrivals   when clients come and ask, where a strategy says that they come by themselves
"""

from __future__ import annotations

from edgefl.core.core import Core

__all__ = ["Core"]
