"""A trip that is under way under the virtual clock."""

from __future__ import annotations

from typing import NamedTuple

from edgefl.emulation.plan import TripPlan
from edgefl.messages import wire


class Trip(NamedTuple):
    """What a task is, where its update goes, and what its parts take: decided the moment it starts."""

    task: wire.Task
    plan: TripPlan
    took: tuple[float, float] | None = None
    """Seconds of download and upload where they were not known at the start: links are shared."""

    def done(self, result: wire.Result, examples: int) -> wire.Done:
        """What the phone itself would say at its end; nothing waited, so every part took what it takes."""
        task, plan = self.task, self.plan
        (down_s, up_s), compute_s = self.took or (plan.down_s, plan.up_s), plan.compute_s
        total_s = down_s + compute_s + up_s
        return wire.Done(
            client=task.client,
            epoch=0,
            task=task.task,
            slot=task.slot,
            trained_version=result.trained_version,
            examples=examples,
            steps=result.steps,
            loss=result.loss,
            checksum=result.checksum,
            flops=plan.flops,
            trip=wire.Spent(total_s, total_s),
            down=wire.Spent(down_s, down_s),
            compute=wire.Spent(compute_s, compute_s),
            up=wire.Spent(up_s, up_s),
            lateness_s=0.0,
            cpu_s=result.cpu_s,
            peak_mib=result.peak_mib,
            delay=wire.Spent(plan.down.lead_s + plan.up.lead_s, plan.down.lead_s + plan.up.lead_s),
        )
