"""The runs of a study: one folder each, and none twice."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from edgefl import config
from edgefl.errors import ConfigError
from edgefl.experiment import Experiment
from edgefl.lab.curves import Curves
from edgefl.lab.study import Arm, Study
from edgefl.results.record import Record
from edgefl.results.run_folder import EXPERIMENT_FILE, Result
from edgefl.run import supervisor

Say = Callable[[str], None]


def run(study: Study, out: Path, *, quick: bool, say: Say) -> Curves:
    """Make every run that is not in ``out`` yet; returns what they recorded.

    Raises `ConfigError` where the data is not there, `RunError` where a run could not go on, and
    KeyboardInterrupt after Ctrl-C: the same command then goes on from there.
    """
    records: dict[str, list[Record]] = {}
    total, number = len(study.arms) * len(study.seeds), 0
    for seed in study.seeds:
        for arm in study.arms:
            number += 1
            wanted = study.experiment(arm, seed, quick=quick)
            folder = out / "runs" / f"{slug(arm)}-{seed}"
            result = _one(wanted, folder, study.file(quick).parent)
            figures = result.summary()
            accuracy = figures["accuracy"]
            found = "no accuracy" if accuracy is None else f"accuracy {accuracy:.1%}"
            say(
                f"{number:>3} of {total}  {arm.label}, seed {seed}: {found}, "
                f"{figures['client_trips']:,} trips, {figures['wall_s']:.0f} s"
            )
            records.setdefault(arm.label, []).append(Record(folder))
    return Curves(records)


def slug(arm: Arm) -> str:
    """The arm's name as a folder's.

    >>> slug(Arm("FedBuff, K = 10", ()))
    'fedbuff-k-10'
    """
    return "-".join("".join(c if c.isalnum() else " " for c in arm.label.lower()).split())


def _one(wanted: Experiment, folder: Path, base: Path) -> Result:
    """The finished run of an experiment in ``folder``: as it is there, resumed, or made."""
    file = folder / EXPERIMENT_FILE
    checked = config.validate(wanted, base)
    if file.is_file():
        if config.dump(config.load(file)) != config.dump(checked):
            raise ConfigError(f"{folder} holds a run with other settings; give another --out, or remove it")
        if _done(folder):
            return Result(folder)
        return supervisor.resume(folder, quiet=True)
    return supervisor.run(wanted, folder, quiet=True, base=base)


def _done(folder: Path) -> bool:
    try:
        with Record(folder) as record:
            return record.meta.status == "done"
    except ConfigError:  # killed before its record was whole
        return False
