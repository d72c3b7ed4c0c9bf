"""Sample messages of each kind in the protocol."""

from __future__ import annotations

from edgefl.devices.condition import Condition
from edgefl.devices.plan import End
from edgefl.run import messages

TIMES = messages.TripTimes(
    work_s=1.5, down=messages.Spent(1.0, 1.25), compute=messages.Spent(1.5, 1.5),
    up=messages.Spent(0.5, 0.75), delay=messages.Spent(0.25, 0.375), lateness_s=0.5, process_grew_mib=1.5,
    busy_s=1.25,
)  # fmt: skip
DONE = messages.TaskResult(
    task=40, trained_version=7, steps=5, loss=0.25, checksum=2**64 - 1, cpu_s=0.125, peak_mib=20.0,
    metrics={"epochs": 2.0}, counted=60, order=40, times=TIMES,
)  # fmt: skip
"""A client's result."""
SCORES = messages.ClientScores([3, 99_999], [0.5, -1e300], [0.0, 1.0], [0.25, 0.25], [])
FROM_CLIENT: list[messages.FromClient] = [
    messages.Ready(3, 1, "client", "word"),
    messages.Beat(),
    messages.Chunk(40, 2, 2**63 - 1),
    messages.Trained([DONE]),
    messages.Gone(3, 40, "cancelled, ü\n"),
    messages.Trained(
        [
            messages.TaskResult(40, 7, 5, 0.25, 2**64 - 1, 0.125, 20.0, {"ε": 0.5}),
            messages.TaskResult(41, 7, messages.MAX_COUNT, -1e300, 0, 0.0, 1e300, {}),
        ]
    ),
    messages.Assessed(7, 0.5, 0.25, [9, 0], [messages.MAX_COUNT, 0], {"mae": -1.5}, SCORES, "ü"),
]
FROM_SERVER: list[messages.FromServer] = [
    messages.Tasks(
        [
            messages.Task(
                3, 40, 4, 7, 1, 2, messages.Cut(End(0.5), 0.25, True), Condition(1.5, 44.0, 900.0, True)
            )
        ]
    ),
    messages.Tasks(
        [messages.Task(3, 40, 4, 7, 1, 2, None, None), messages.Task(4, 41, 0, 7, 1, 3, None, None)]
    ),
    messages.Withdraw([40, 41]),
    messages.Assess(7, 1),
    messages.Bye(),
]
ALL = [*FROM_CLIENT, *FROM_SERVER]
