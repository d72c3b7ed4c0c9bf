"""What small runs under the virtual clock come to with one version of edgefl, compared with another version.

    python benchmarks/golden.py --edgefl old/bin/edgefl --record golden.json
    python benchmarks/golden.py --edgefl new/bin/edgefl --against golden.json [--only NAME…]

All of a `summary.json` is kept that does not differ from run to run. A run named "stopped …" is made again,
ended by Ctrl-C and then by kill -9, resumed after each, and must come to the same. A difference is a line
(run, field, was, is) and exit code 1. The bits depend on the processor and on torch: compare on one machine.
"""

import argparse
import json
import os
import shlex
import sys
import tempfile
import time
from itertools import product
from pathlib import Path
from signal import SIGINT, SIGKILL, Signals
from subprocess import PIPE, Popen

PHONE = """name = "A phone that gets hot and empty fast"
class = "budget"
cpu.rate_gflops.train = 0.8
battery = { capacity_mah = 3, voltage_v = 4, idle_ma = 50, radio_ma = 90, min_soc = 0.2, charge_w = 20 }
sources = { "cpu.rate_gflops.train" = "assumed", battery = "assumed", thermal = "assumed" }
thermal = { ambient_c = 25, r_c_per_w = 10, tau_s = 2, busy_w = 4, """
FILES = {
    "base.toml": """fleet = { devices = { pixel-4 = 5, pixel-3a = 4, moto-g4 = 3 }, join_spread_s = 0.5 }
data = { name = "digits", partition = "dirichlet", alpha = 0.5 }
model = { name = "mlp", flops_per_example = 2e7 }
training = { steps = 4, batch_size = 16, lr = 0.1 }
strategy = { name = "fedbuff", buffer_size = 3 }
clock = { kind = "virtual", workers = 2 }
stop = { versions = 20 }""",
    "hot.toml": 'id = "hot"\n' + PHONE + "trips = [{ temp_c = 45, freq_scale = 0.5 }] }",
    "off.toml": 'id = "off"\n' + PHONE + "off_c = 50, trips = [{ temp_c = 40, freq_scale = 0.9 }] }",
    "link.toml": """id = "link"
name = "A link that varies and breaks"
down = { rate_mbps = 2, delay_ms = 50, jitter_ms = 20, jitter_dist = "normal", loss_pct = 1 }
up = { rate_mbps = 1, jitter_ms = 9, jitter_dist = "exponential", loss_pct = 1, on_loss = "disconnect" }
sources = { down = "assumed", up = "assumed" }""",
    "times.json": '[{"intervals_s":[[1, 3], [4, 5]], "period_s": 7},{"intervals_s":[[2, 5]], "period_s": 6}]',
    "mine.py": """import dataclasses, math, pathlib, time
from torch import nn
from edgefl.strategies import Buffered
class Slow(nn.Linear):
    def forward(self, inputs):
        time.sleep(0.005)
        with pathlib.Path(__file__).with_name("steps").open("a") as steps:
            steps.write(".")
        return super().forward(inputs)
def make(input_shape, classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 24), nn.ReLU(), Slow(24, classes))
@dataclasses.dataclass(frozen=True, kw_only=True)
class ByLoss(Buffered):
    def weights(self, state, updates, view):
        return [math.exp(-update.loss) for update in updates]""",
}
LABELS = " data.partition=by-device data.labels={pixel-4=[0,1],pixel-3a=[2,3,4],moto-g4=[5,6,7,8,9]}"
CHURN = " fleet.churn={mean_online_s=5,mean_offline_s=2,die_per_trip=0.1} fleet.rejoin_s=1"
HOT = " fleet.devices={'./hot.toml'=5,'./off.toml'=3} fleet.battery=true"
SLOW = " model.name=mine:make checkpoint.every_s=0.001"
FAMILIES = {
    "round": "strategy={} training.epochs=1 strategy.name=fedavg|fedprox|fednova|fedyogi|fedadagrad" + LABELS,
    "pace": "strategy={} training.steps=1 strategy.name=asysg|fedasync|fedbuff|defedavg-iid|defedavg-niid",
    "stale": "strategy={buffer_size=3,concurrency=8,max_staleness=2} strategy.restart=immediate|new-version",
    "weigh": "strategy={name='fedstaleweight',form='algorithm-1'} strategy.average=cumulative|exponential",
    "come": "strategy={arrival_rate_per_s=9,normalize=true} strategy.arrival_process=constant|poisson",
    "hot": "fleet.charge=0.6 fleet.thermal=true|false fleet.on_leave=lose|finish" + HOT,
    "times": "fleet.availability=times.json fleet.on_leave=lose|finish",
    "churn": "fleet.on_leave=lose|finish data.partition=shards" + CHURN,
    "death": "fleet.on_death=drop fleet.churn.die_per_trip=0.05 fleet.network=lte",
    "link": "fleet.network=lte|lte-verizon-varying|edge-lossy|./link.toml data.partition=iid",
    "fleet": "fleet.devices=mixed-24|paper-fedstaleweight|{pixel-3a-overnight=9}|{paper-stragglers=9}",
    "format": "server.update_format=float16|bfloat16|int8 server.error_feedback=true|false",
    "model": "strategy={name='fedasync'} strategy.scaling=constant|hinge server.update_format=bfloat16|int8",
    "worker": "clock.workers=1|2|3 server.transport=shm|wire server.update_format=int8" + CHURN,
    "cnn": "model.name=cnn-fedbuff|cnn-groupnorm training.precision=float32|bfloat16 stop.versions=6",
    "layout": "model.name=cnn-celeba training.memory_format=contiguous|channels_last stop.versions=6",
    "mlp": "training={momentum=0.9,weight_decay=0.01,lr_normalization=true} server.backend=c|numba|reference",
    "stop": "stop={trips=70}|{emulated_s=6}|{accuracy=0.5} evaluation={every_versions=1,max_examples=99}",
    "stopped round": "strategy={cohort=5,over_selection=1.5} strategy.name=fedavgm|fedadam" + SLOW,
    "stopped int8": "server.update_format=int8 strategy.name=fedstaleweight|mine:ByLoss" + SLOW,
    "stopped wire": "server.transport=wire strategy={} strategy.name=favano|defedavg-niid" + SLOW,
    "stopped favano": "strategy={name='favano',interval_s=0.7,form='stochastic'}" + SLOW,
    "stopped private": "strategy.momentum=0.5 privacy={clip_norm=0.5,noise_multiplier=0.2,noise='seeded'}"
    + SLOW,
    "stopped hot": "fleet.thermal=true fleet.on_leave=finish" + HOT + SLOW,
}
"""What the runs of a family set; there is a run for each of a setting's values."""
CHANGES = {"wall_s", "seconds", "gbytes_per_s", "memory", "server", "server_time", "server_trip_us"}
"""Fields that differ between two runs of one version: time on the wall, and memory of the machine."""
COUNTS = ("aggregation", "incidents")
"""Fields that count what was done, also if it was done again after a run was resumed."""


def runs() -> dict[str, list[str]]:
    """The options of each run, which is named by its family and the values that are its own."""
    found = {}
    for family, settings in FAMILIES.items():
        pairs = [setting.split("=", 1) for setting in settings.split()]
        for values in product(*(several.split("|") for _, several in pairs)):
            own = [value for value, (_, several) in zip(values, pairs, strict=True) if value != several]
            given = [f"--set={key}={value}" for value, (key, _) in zip(values, pairs, strict=True)]
            found[" ".join([family, *own])] = given
    return found


def outcome(edgefl: list[str], options: list[str], *stops: Signals) -> dict[str, object]:
    """What a run comes to that is ended by each of ``stops``, about a third further on, and then resumed."""
    with tempfile.TemporaryDirectory() as folder:
        for name, text in FILES.items():
            Path(folder, name).write_text(text)
        steps, words = Path(folder, "steps"), ["run", f"{folder}/base.toml", f"--out={folder}/run", *options]
        for stop in (*stops, None):
            steps.write_bytes(b"")
            command = [*edgefl, *words, "--quiet", "--accept-invalid"]
            # In that folder: a package in this one would be imported.
            process = Popen(command, cwd=folder, stderr=PIPE, text=True, start_new_session=True)
            while stop and process.poll() is None and steps.stat().st_size < 110:  # of 260, and 26 trials
                time.sleep(0.01)
            if stop and process.returncode is None:
                os.killpg(process.pid, stop)
            _, said = process.communicate()
            if process.returncode != {None: 0, SIGINT: 130, SIGKILL: -9}[stop]:
                return {"exit code": f"{process.returncode}: {said}"}
            words = ["resume", f"{folder}/run"]
        text = Path(folder, "run/summary.json").read_text()
        return dict(json.loads(text, object_hook=lambda table: {k: table[k] for k in table.keys() - CHANGES}))


def differences(name: str, was: object, now: object) -> list[str]:
    """A line for each field in which two outcomes differ."""
    if isinstance(now, dict) and "exit code" in now:
        return [f"{name}: exit code {now['exit code']}"]
    if isinstance(was, dict) and isinstance(now, dict):
        fields = [(key, was.get(key, "absent"), now.get(key, "absent")) for key in sorted({**was, **now})]
        return [line for key, *values in fields for line in differences(f"{name}: {key}", *values)]
    return [f"{name}: was {was!r}, is {now!r}"] if was != now else []


def main() -> int:
    parser = argparse.ArgumentParser(description="Runs under the virtual clock, compared between versions.")
    parser.add_argument("--edgefl", default=f"{sys.executable} -m edgefl", help="the command, in shell words")
    parser.add_argument("--record", type=Path, metavar="FILE", help="write down what the runs come to")
    parser.add_argument("--against", type=Path, metavar="FILE", help="compare with what was written down")
    parser.add_argument("--only", nargs="+", metavar="NAME", default=[""], help="runs whose names begin so")
    given = parser.parse_args()
    before = json.loads(given.against.read_text()) if given.against else {}
    edgefl = [os.path.abspath(word) if os.path.exists(word) else word for word in shlex.split(given.edgefl)]
    found, different = {}, 0
    for name, options in runs().items():
        if name.startswith(tuple(given.only)):
            now = found[name] = outcome(edgefl, options)
            lines = differences(name, before.get(name, {}) if given.against else now, now)
            if name.startswith("stopped"):
                again = outcome(edgefl, options, SIGINT, SIGKILL)
                lines += differences(f"{name}, resumed", now, again | {key: now.get(key) for key in COUNTS})
            different += len(lines)
            print(*lines, sep="\n", end="\n" * bool(lines), flush=True)
    if given.record:
        given.record.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")
    print(f"{len(found)} runs, {different} differences", file=sys.stderr)
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
