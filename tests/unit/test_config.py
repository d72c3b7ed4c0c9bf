"""Reading an experiment: files, ``--set`` and arguments, their priority, and the text of each refusal."""

# ruff: noqa: E501 - a message in full is easier to check than one in pieces
from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
from tables import arrows

from edgefl import config
from edgefl.devices import load_fleet
from edgefl.devices.profiles import bundled_folder
from edgefl.errors import ConfigError, ProfileError, shortened
from edgefl.experiment import Clock, Data, Evaluation, Experiment, Fleet, Server, Stop, Training
from edgefl.results.store import Store
from edgefl.strategies import resolve

MINIMAL = """
[fleet]
devices = { pixel-3a = 8, pi-4 = 4 }
[stop]
versions = 10
"""


@pytest.fixture
def toml(tmp_path: Path) -> Path:
    path = tmp_path / "e.toml"
    path.write_text(MINIMAL)
    return path


def fault(path: Path, *overrides: str, **arguments: object) -> str:
    """Return the error message, which must be a single line."""
    with pytest.raises(ConfigError) as caught:
        config.load(path, overrides, **arguments)
    text = str(caught.value)
    assert "\n" not in text
    return text


def test_defaults_are_those_of_the_classes(toml: Path) -> None:
    found = config.load(toml)
    expected = Experiment(
        fleet=Fleet(devices={"pixel-3a": 8, "pi-4": 4}), stop=Stop(versions=10), training=Training(epochs=1)
    )
    assert found == expected
    assert config.validate(found) == found


def test_arguments_override_set_and_set_overrides_the_file(toml: Path) -> None:
    toml.write_text("seed = 1\nname = 'kept'\n" + MINIMAL + "[clock]\nkind = 'wall'\nworkers = 3")
    assert config.load(toml).seed == 1
    assert config.load(toml, ["seed=2"]).seed == 2
    assert config.load(toml, ["seed=2"], seed=3).seed == 3
    assert config.load(toml, ["clock.kind=wall"], clock="virtual").clock == Clock(kind="virtual", workers=3)
    assert config.load(toml, ["seed=2", "seed=4"]).seed == 4
    assert config.load(toml, seed=0).seed == 0
    assert config.load(toml, seed=3).name == "kept"


@pytest.mark.parametrize(
    ("override", "devices"),
    [
        ("fleet.devices.pi-4=300", {"pixel-3a": 8, "pi-4": 300}),
        ("fleet.devices={moto-g4=3}", {"moto-g4": 3}),
        ("fleet.devices = { moto-g4 = 3 } # ours", {"moto-g4": 3}),
        ('fleet.devices."pi-5"=1', {"pixel-3a": 8, "pi-4": 4, "pi-5": 1}),
    ],
)
def test_set_changes_a_key_in_a_table(toml: Path, override: str, devices: dict[str, int]) -> None:
    assert config.load(toml, [override]).fleet.devices == devices


@pytest.mark.parametrize(
    ("override", "value"),
    [
        ("strategy.x=fedbuff", "fedbuff"),
        ('strategy.x="fedbuff"', "fedbuff"),
        ("strategy.x=my_module:Mine", "my_module:Mine"),
        ("strategy.x=a=b", "a=b"),
        ("strategy.x=a#b", "a#b"),
        ("strategy.x=2020-01-01", "2020-01-01"),
        ("strategy.x=12:30:00", "12:30:00"),
        ("strategy.x=007", "007"),
        ("strategy.x=True", "True"),
        ("strategy.x=''", ""),
        ("strategy.x=true", True),
        ("strategy.x=3", 3),
        ("strategy.x=-1e-3", -0.001),
        ("strategy.x=0x10", 16),
        ("strategy.x=[1, 2]", [1, 2]),
        ("strategy.x=1\ny=2", "1\ny=2"),
        ("strategy.x=ü", "ü"),
    ],
)
def test_a_value_of_set_is_toml_or_else_a_string(toml: Path, override: str, value: object) -> None:
    found = config.load(toml, [override]).strategy
    assert found["x"] == value
    assert type(found["x"]) is type(value)
    assert set(found) - {"name"} == {"x"}


def test_set_is_utf_8_in_every_locale(toml: Path) -> None:
    as_ascii = "name=café".encode().decode("ascii", "surrogateescape")  # as Python passes it with LC_ALL=C
    assert config.load(toml, [as_ascii]).name == config.load(toml, ["name=café"]).name == "café"
    with pytest.raises(ConfigError, match="name: must be text that can be encoded as UTF-8"):
        config.load(toml, ["name=caf\udce9"])


def test_set_of_epochs_replaces_the_files_steps(toml: Path) -> None:
    toml.write_text(MINIMAL + "[training]\nsteps = 5\nlr = 0.5")
    assert config.load(toml, ["training.epochs=2"]).training == Training(epochs=2, lr=0.5)
    assert config.load(toml, ["training.steps=9"]).training == Training(steps=9, lr=0.5)


def test_set_of_one_interval_of_evaluations_replaces_the_files_other_one(toml: Path) -> None:
    """An interval in trips or seconds would take precedence over ``every_versions``."""
    toml.write_text(MINIMAL + "[evaluation]\nevery_s = 2\nmax_examples = 9")
    for change, every in (
        ("every_versions=5", Evaluation(every_versions=5, max_examples=9)),
        ("every_trips=5", Evaluation(every_trips=5, max_examples=9)),
    ):
        assert config.load(toml, [f"evaluation.{change}"]).evaluation == every
        assert config.change(config.load(toml), [f"evaluation.{change}"]).evaluation == every
    with pytest.raises(ConfigError, match="every_s=3: give only one of them"):
        config.load(toml, ["evaluation.every_versions=5", "evaluation.every_s=3"])


@pytest.mark.parametrize("other", ["every_trips = 7", "every_s = 2.0"])
def test_an_interval_in_versions_beside_another_one_is_refused(toml: Path, other: str) -> None:
    """``every_versions`` would have no effect. In the file of an older run it is reset to its default."""
    toml.write_text(f"{MINIMAL}[evaluation]\nevery_versions = 5\n{other}\n")
    name = other.split()[0]
    assert f"evaluation: give every_versions or {name}, not both; got every_versions = 5" in fault(toml)
    found = config.load(toml, recorded=True)
    assert found.evaluation.every_versions == Evaluation().every_versions
    assert getattr(found.evaluation, name) == float(other.split()[2])
    toml.write_text(config.dump(found))
    assert config.load(toml) == config.load(toml, recorded=True) == found


def test_set_of_both_steps_and_epochs_is_refused(toml: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        config.load(toml, ["training.steps=5", "training.epochs=2"])
    assert str(caught.value) == "--set training.steps=5 and --set training.epochs=2: give only one of them"


def test_another_strategy_drops_the_fields_that_it_lacks(
    toml: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    toml.write_text(
        MINIMAL + "[strategy]\nname = 'fedbuff'\nbuffer_size = 3\nserver_lr = 0.5\nconcurrency = 4"
    )
    found = config.load(toml, ["strategy.name=fedasync"]).strategy
    assert found == {"name": "fedasync", "server_lr": 0.5, "concurrency": 4}
    said = capsys.readouterr().err
    assert said.startswith("edgefl: --set strategy.name=fedasync: dropped strategy.buffer_size from")
    assert said.count("\n") == 1
    assert resolve(found).concurrency == 4  # type: ignore[attr-defined]


def test_another_strategy_keeps_its_fields_and_set_ones(
    toml: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    toml.write_text(MINIMAL + "[strategy]\nname = 'fedbuff'\nbuffer_size = 3")
    names = ["strategy.name=fedstaleweight", "strategy.name=fedbuff", "strategy.name=none:Such"]
    for name in names:
        assert config.load(toml, [name]).strategy["buffer_size"] == 3
    wrong = config.load(toml, ["strategy.buffer_size=7", "strategy.name=fedasync"]).strategy
    with pytest.raises(ConfigError, match="field of fedasync 'buffer_size' not found"):
        resolve(wrong)
    assert capsys.readouterr().err.count("\n") == 1


def test_unset_removes_a_key_of_the_file(toml: Path) -> None:
    toml.write_text(MINIMAL + "[training]\nsteps = 5\nlr = 0.5")
    assert config.load(toml, unset=["training.steps"]).training == Training(epochs=1, lr=0.5)
    assert config.load(toml, ["training.lr=0.1"], unset=["training"]).training == Training(epochs=1, lr=0.1)
    for key in ("training.momentum", "training.lr.x", "nowhere", "a..b", ""):
        with pytest.raises(ConfigError, match=f"^--unset {re.escape(key)}: .*toml does not set it$"):
            config.load(toml, unset=[key])


def test_a_strategy_without_a_name_is_fedbuff(toml: Path) -> None:
    assert config.load(toml, ["strategy.buffer_size=3"]).strategy == {"name": "fedbuff", "buffer_size": 3}
    assert config.load(toml, ["strategy={}"]).strategy == {"name": "fedbuff"}


WRONG = r"""
lr=3 -> unknown key 'lr'; did you mean 'training.lr'? allowed at the top level: checkpoin
training.learning_rate=3 -> unknown key 'training.learning_rate'; did you mean 'training.lr'? allowed i
stop.version=3 -> unknown key 'stop.version'; did you mean 'stop.versions'? allowed in [stop]
trainig.lr=3 -> unknown key 'trainig'; did you mean 'training'?
training=3 -> training: must be a table, got 3
fleet=x -> fleet: must be a [fleet] table with devices = { PROFILE = COUNT }, got 'x'
fleet={} -> fleet.devices: missing; must be a table { PROFILE = COUNT } or the name of
fleet.devices={} -> fleet.devices: must be a table { PROFILE = COUNT } or the name of a fleet f
fleet.devices.pi-4=0 -> fleet.devices.pi-4: must be a whole number from 1 to 10000000, got 0
fleet.devices.pi-4=1.5 -> fleet.devices.pi-4: must be a whole number from 1 to 10000000, got 1.5
fleet.devices.pi-4=10000000 -> fleet.devices: must have at most 10000000 clients in all, got 10000008
fleet.devices=3 -> fleet.devices: must be a table { PROFILE = COUNT } or the name of a fleet f
fleet.rejoin_s=-1 -> fleet.rejoin_s: must be a finite number of at least 0, got -1
fleet.join_spread_s=inf -> fleet.join_spread_s: must be a finite number of at least 0, got inf
fleet.throttle=nice -> fleet.throttle: must be 'cgroup' or 'paced' or 'sigstop', got 'nice'
fleet.memory=1 -> fleet.memory: must be 'auto' or 'cgroup' or 'off' or 'rlimit', got 1
fleet.device={pi-4=1} -> unknown key 'fleet.device'; did you mean 'fleet.devices'?
evaluation.often=1 -> unknown key 'evaluation.often'; allowed in [evaluation]
fleet.memory_limit=false -> unknown key 'fleet.memory_limit'; did you mean 'fleet.memory'?
fleet.availability="" -> fleet.availability: availability file '' cannot be read: No such file
fleet.charge=0.5 -> fleet.charge: has no effect without fleet.battery = true, got 0.5
fleet.on_leave=finish -> fleet.on_leave: has no effect if phones never leave; give fleet.
fleet.churn={mean_onlin_s=3} -> unknown key 'fleet.churn.mean_onlin_s'; did you mean 'fleet.churn.mean_onli
fleet.churn={online_s=3} -> unknown key 'fleet.churn.online_s'; did you mean 'fleet.churn.mean_o
fleet.die_per_trip=0.1 -> unknown key 'fleet.die_per_trip'; did you mean 'fleet.churn.die_per_trip'?
fleet.on_death=restart -> fleet.on_death: must be 'drop' or 'replace', got 'restart'
clock.kind=wal -> clock.kind: must be 'virtual' or 'wall', got 'wal'; did you mean 'wall'?
clock.time_scale=0 -> clock.time_scale: must be a finite number above 0 or 'auto', got 0
clock.time_scale=fast -> clock.time_scale: must be a finite number above 0 or 'auto', got 'fast'
clock.workers=0 -> clock.workers: must be a whole number from 1 to 256, got 0
clock.workers=257 -> clock.workers: must be a whole number from 1 to 256, got 257
data.alpha=0 -> data.alpha: must be a finite number above 0, got 0
data.test_fraction=1.0 -> data.test_fraction: must be a number above 0 and below 1, got 1.0
data.partition=by-device -> data.labels: missing; partition 'by-device' needs
data.partition=random -> data.partition: must be one of 'by-device', 'dirichlet', 'iid', 'natural',
data.partition="iid\u000a" -> data.partition: must be one of 'by-device', 'dirichlet', 'iid', 'natural',
data.labels={pi-5=[1]} -> data.labels.pi-5: is not in fleet.devices; did you mean 'pi-4'? available: pi-4,
data.labels={pi-4=[]} -> data.labels.pi-4: must be distinct labels of at least 0, got []
data.labels={pi-4=[-1]} -> data.labels.pi-4: must be distinct labels of at least 0, got [-1]
data.labels={pi-4=[1,'a']} -> data.labels.pi-4[1]: must be a whole number, got 'a'
data.growth={start=0} -> data.growth.start: must be a number above 0 and at most 1, got 0
data.growth={least_per_trip=0.1} -> data.growth.least_per_trip: must be at most data.growth.most_per_trip
training.lr=0 -> training.lr: must be a number from 1.2e-38 to 3e+38, got 0
model.args.hidden=[100000000000000000000] -> model.args.hidden[0]: must be a 64-bit integer, got 100000000000000000000
model.flops_per_example=1e308 -> model.flops_per_example: must be a number from 0 to 1e+18, got 1e+308
training.lr=1e-320 -> training.lr: must be a number from 1.2e-38 to 3e+38, got 1e-320
training.lr=inf -> training.lr: must be a number from 1.2e-38 to 3e+38, got inf
training.lr=1e39 -> training.lr: must be a number from 1.2e-38 to 3e+38, got 1e+39
training.steps=0 -> training.steps: must be a whole number from 1 to 1000000000, got 0
training={steps=1,epochs=1} -> training: give steps or epochs, not both; got steps = 1 and epochs = 1
training.momentum=1 -> training.momentum: must be a number of at least 0 and below 1, got 1
training.weight_decay=-1 -> training.weight_decay: must be a number from 0 to 3e+38, got -1
training={function="flower:app:app",momentum=0.9} -> training.momentum: is not sent to a Flower app (training.function), got 0.9
server.heartbeat_s=0.09 -> server.heartbeat_s: must be a number from 0.1 to 86400, got 0.09
server.heartbeat_s=1e6 -> server.heartbeat_s: must be a number from 0.1 to 86400, got 1000000.0
server.transport=tcp -> server.transport: must be 'shm' or 'wire', got 'tcp'
server.secure={kind="trusted",clip=0.1} -> server.secure.clip: has no effect without server.secure.kind = 'masks' or 'pairwise', got 0.1
server.secure={kind="trusted",holders=6} -> server.secure.holders: has no effect without server.secure.kind = 'masks', got 6
server.secure={kind="pairwise",recover=3} -> server.secure.recover: has no effect without server.secure.kind = 'masks', got 3
server.secure={kind="pairwise",private=2} -> server.secure.private: has no effect without server.secure.kind = 'masks', got 2
evaluation.every_versions=0 -> evaluation.every_versions: must be a whole number from 1
evaluation={every_trips=3,every_s=2.0} -> evaluation: give every_trips or every_s, not both
privacy={clip_norm=1.0,quantile_rate=0.5} -> privacy.quantile_rate: has no effect without privacy.quantile, got 0.5
privacy={clip_norm=1.0,mechanism="gaussian",honaker=true} -> privacy.honaker: has no effect without privacy.mechanism = 'tree', got true
checkpoint.every_s=0 -> checkpoint.every_s: must be a finite number above 0, got 0
stop={} -> stop: has no stopping condition; give at least one of: versions, trips, emulated_s, wall
stop={min_improvement=0.1} -> stop: has no stopping condition
stop={versions=1,min_improvement=0.1} -> stop.min_improvement: has no effect without stop.patience_evaluations
stop.accuracy_over=3 -> stop.accuracy_over: has no effect without stop.accuracy, got 3
stop.patience_evaluations=0 -> stop.patience_evaluations: must be a whole number from 1 to 1000000000, got 0
stop.versions=0 -> stop.versions: must be a whole number from 1 to 1000000000, got 0
stop.emulated_s=inf -> stop.emulated_s: must be a finite number above 0, got inf
stop.accuracy=1.01 -> stop.accuracy: must be a number above 0 and at most 1, got 1.01
stop.metric={name="mae"} -> stop.metric: give either at_least or at_most
stop.metric={name="mae",at_least=1,at_most=2} -> stop.metric: give either at_least or at_most
stop.metric={at_most=1} -> stop.metric.name: missing
stop.metric={name="accuracy",at_least=0.5} -> stop.metric.name: accuracy has a key of its own: use stop.accuracy
stop.metric={name="mae",at_most=nan} -> stop.metric.at_most: must be a finite number, got nan
data.evaluate_on=validation -> data.evaluate_on: 'validation' needs data.validation_fraction above 0
data.client_test_fraction=1 -> data.client_test_fraction: must be a number of at least 0 and below 1, got 1
evaluation.clients=all -> evaluation.clients: must be 'global' or 'none' or 'personal', got 'all'
evaluation.clients=global -> evaluation.clients: needs data.client_test_fraction above 0
evaluation.max_clients=1001 -> evaluation.max_clients: must be a whole number from 1 to 1000, got 1001
seed=9223372036854775808 -> seed: must be a whole number from 0 to 9223372036854775807, got 92233
seed.x=1 -> seed: must be a whole number from 0 to 9223372036854775807, got { x = 1 }
name=a/b -> name: must be 1 to 100 bytes of printable text
name="a\u0000" -> name: must be 1 to 100 bytes of printable text
name=3 -> name: must be a string, got 3
strategy={name=3} -> strategy.name: must be a string, such as 'fedbuff', got 3
strategy.x=[{y=2020-01-01}] -> strategy.x[0].y: must be a string, number, true or false, array or table, g
"""


@pytest.mark.parametrize(("override", "words"), arrows(WRONG))
def test_a_wrong_value_is_an_error_that_names_its_source(toml: Path, override: str, words: str) -> None:
    toml.write_text(MINIMAL.replace("versions = 10", "") if override == "stop.version=3" else MINIMAL)
    text = fault(toml, override)
    assert text.startswith(f"--set {override}: {words}".replace("\n", " ")), text


def test_keys_that_change_the_clients_examples_are_refused_with_a_flower_app(toml: Path) -> None:
    toml.write_text(MINIMAL + "[training]\nfunction = 'flower:app:app'\n")
    for key, value in (
        ("fleet.attackers", '{share=0.2,kind="label-flip"}'),
        ("data.growth", "{}"),
        ("data.client_test_fraction", "0.2"),
    ):
        assert "has no effect on a Flower app (training.function)" in fault(toml, f"{key}={value}")
    config.load(toml, ["fleet.attackers={share=0.2}", "training.lr=0.3"])


def test_an_error_names_the_file_or_the_option_at_fault(toml: Path) -> None:
    toml.write_text(MINIMAL + "[training]\nlr = 0\n")
    assert fault(toml, "seed=3").startswith(f"{toml}: training.lr: must be")
    toml.write_text(MINIMAL)
    kinds = "--clock: clock.kind: must be 'virtual' or 'wall', got 'sundial'"
    assert fault(toml, clock="sundial").startswith(kinds)
    assert fault(toml, seed=-4).startswith("--seed: seed: must be")
    assert "at most 100000 clients in all under the wall clock (each is a process), got 100008" in fault(
        toml, "fleet.devices.pi-4=100000", clock="wall"
    )


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("training.lr", "--set 'training.lr': expected KEY=VALUE, such as training.lr=0.1"),
        ("", "--set '': expected KEY=VALUE"),
        ("=3", "--set '=3': '' is not a key; expected names joined by dots"),
        ("a..b=3", "--set 'a..b=3': 'a..b' is not a key"),
        ("a b=3", "--set 'a b=3': 'a b' is not a key"),
        ("[a]\nb=3", "--set '[a]\\nb=3': '[a]\\nb' is not a key"),
        ("seed=", "--set 'seed=': the value is missing; for an empty string, write seed='\"\"'"),
        ("strategy.x=[1", "--set 'strategy.x=[1': "),
        ("strategy.x={a=", "--set 'strategy.x={a=': "),
        ("strategy.x='abc", '--set "strategy.x=\'abc": '),
        ("strategy.x=" + "[" * 5000, "--set 'strategy.x=[["),
        ("stop.versions.x=1", "--set stop.versions.x=1: stop.versions is 10, not a table"),
    ],
)
def test_wrong_syntax_of_set_is_refused(toml: Path, override: str, words: str) -> None:
    assert fault(toml, override).startswith(words)


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (b"", "fleet: missing; must be a [fleet] table with devices = { PROFILE = COUNT }"),
        (b"[fleet]\ndevices = ", "line 2: Invalid value"),
        (b"[fleet]\ndevices = ?\n", "line 2, column 11: Invalid value"),
        (b"a = 1\nb = 2\nb = 3\n", "line 3, column 6: Cannot overwrite a value"),
        (b"a = 1\nb = '\xff'\n", "line 2: not UTF-8: byte 0xff"),
        (b"\x00", "line 1"),
        (b"a = " + b"1" * 5000, "Exceeds the limit"),
        (b"a = " + b"[" * 5000, "arrays or tables are nested too deeply"),
        (b"#" * (1 << 20) + b"#", "cannot be read: longer than 1 MiB"),
        (b"a" + b".a" * 16_000 + b" = 1", "arrays or tables are nested too deeply"),
        (b"[" + b"'a' . " * 40 + b"a]", "arrays or tables are nested too deeply"),
        (b"a = " + b"{a = " * 300 + b"1" + b"}" * 300, "arrays or tables are nested too deeply"),
        (b"a = " + b"[" * 300 + b"]" * 300, "arrays or tables are nested too deeply"),
        (b"\x89PNG\r\n\x1a\n", "line 1: not UTF-8: byte 0x89"),
    ],
)
def test_a_file_that_is_no_experiment_is_refused(tmp_path: Path, raw: bytes, words: str) -> None:
    path = tmp_path / "e.toml"
    path.write_bytes(raw)
    assert fault(path).startswith(f"{path}: {words}")


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    assert fault(tmp_path / "none.toml") == f"{tmp_path}/none.toml: no such file"
    assert fault(tmp_path) == f"{tmp_path}: this is a folder; expected a TOML file"
    assert "cannot be read" in fault(Path("a\0b"))
    assert "cannot be read: Not a directory" in fault(Path("/dev/null/e.toml"))
    assert fault(Path("/dev/zero")) == "/dev/zero: cannot be read: not a regular file"


def test_a_byte_order_mark_is_ignored(toml: Path) -> None:
    toml.write_bytes(b"\xef\xbb\xbf" + MINIMAL.encode())
    assert config.load(toml).stop.versions == 10


def test_a_fleet_profile_becomes_its_devices_and_networks(toml: Path) -> None:
    toml.write_text("[fleet]\ndevices = 'mixed-24'\n[stop]\nversions = 1")
    in_python = Experiment(fleet=Fleet(devices="mixed-24"), stop=Stop(versions=1))
    for fleet in (config.load(toml).fleet, config.validate(in_python).fleet):
        assert sum(fleet.devices.values()) == 24
        assert set(fleet.network) == set(fleet.devices)
    assert config.load(toml, ["fleet.network=lte"]).fleet.network == "lte"


NO_PROFILE = r"""
fleet.devices={pi4=1} -> fleet.devices: device profile 'pi4' not found; did you mean 'pi-4'? available:
fleet.devices=mixed24 -> fleet.devices: fleet profile 'mixed24' not found; did you mean 'mixed-24'?
fleet.devices=./none.toml -> fleet.devices: HERE/none.toml: no such file
fleet.devices={'a/b'=1} -> fleet.devices: HERE/a/b: no such file
fleet.devices="./a\u0000" -> fleet.devices: path contains a NUL byte
fleet.network="./a\u0000" -> fleet.network: path contains a NUL byte
fleet.network=/LONG -> fleet.network: /xxx
fleet.network=wfi -> fleet.network: network profile 'wfi' not found; did you mean 'wifi'? available:
fleet.network={pi-4='wifi'} -> fleet.network: has no entry for pixel-3a; give one for each device, or
fleet.network={pi-4='wifi',pixel-3a='lte',pi-5='lte'} -> fleet.network.pi-5: device in the fleet 'pi-5' not found; did you mean 'pi-4'? available: pi-4, pixel-3a
fleet.network={pi-4='wifi',pixel-3a='x'} -> fleet.network.pixel-3a: network profile 'x' not found;
"""


@pytest.mark.parametrize(("override", "words"), arrows(NO_PROFILE))
def test_a_missing_profile_is_refused(toml: Path, override: str, words: str) -> None:
    override, words = override.replace("LONG", "x" * 5000), words.replace("HERE", str(Path.cwd()))
    with pytest.raises(ProfileError) as caught:
        config.load(toml, [override])
    assert str(caught.value).startswith(f"--set {shortened(override)}: {words}")
    assert len(str(caught.value)) < 300


def test_paths_start_at_the_file_or_the_home_folder(
    toml: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = (bundled_folder() / "devices" / "pi-4.toml").read_text().replace('id = "pi-4"', 'id = "mine"')
    (tmp_path / "mine.toml").write_text(own)
    (tmp_path / "data").mkdir()
    toml.write_text(
        "[fleet]\ndevices = { './mine.toml' = 2, pi-4 = 1 }\n"
        "network = { './mine.toml' = 'lte', pi-4 = 'wifi' }\n"
        "[data]\npath = 'data'\npartition = 'by-device'\n"
        "labels = { 'pi-4' = [1], './mine.toml' = [0] }\n"
        "[stop]\nversions = 1\n"
    )
    monkeypatch.chdir("/")
    found = config.load(toml)
    mine = str(tmp_path / "mine.toml")
    assert found.fleet.devices == {mine: 2, "pi-4": 1}
    assert found.fleet.network == {mine: "lte", "pi-4": "wifi"}
    assert found.data.labels == {mine: [0], "pi-4": [1]}
    assert found.data.path == str(tmp_path / "data")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert config.load(toml, ["data.path='~/images'"]).data.path == str(tmp_path / "images")


def test_one_profile_file_under_two_names_is_refused(toml: Path, tmp_path: Path) -> None:
    """Otherwise, the clients under one name would replace those under the other."""
    own = (bundled_folder() / "devices" / "pi-4.toml").read_text().replace('id = "pi-4"', 'id = "mine"')
    (tmp_path / "mine.toml").write_text(own)
    toml.write_text("[fleet]\ndevices = { 'mine.toml' = 3, './mine.toml' = 2 }\n[stop]\nversions = 1\n")
    says = (
        f"fleet.devices: './mine.toml' is a second name for {tmp_path / 'mine.toml'}; name each profile once"
    )
    with pytest.raises(ConfigError, match=re.escape(says)):
        config.load(toml)
    fleet = tmp_path / "fleet.toml"
    head = "id = 'fleet'\nname = 'A fleet'\nsource = 'mine'\nnetwork = 'lte'\n"
    fleet.write_text(f"{head}[devices]\n'mine.toml' = 3\n'./mine.toml' = 2\n")
    with pytest.raises(ProfileError, match="devices: a profile is listed under two names"):
        load_fleet(fleet)


def test_two_profiles_of_one_id_are_refused(toml: Path, tmp_path: Path) -> None:
    """Results name profiles by their ids and would merge the two."""
    (tmp_path / "pi-4.toml").write_text((bundled_folder() / "devices" / "pi-4.toml").read_text())
    toml.write_text("[fleet]\ndevices = { pi-4 = 3, './pi-4.toml' = 2 }\n[stop]\nversions = 1\n")
    with pytest.raises(ConfigError, match=r"pi-4\.toml: the id 'pi-4' is also that of 'pi-4'; rename"):
        config.load(toml)


def test_the_experiment_file_of_a_run_may_be_longer_than_that_of_a_user(tmp_path: Path) -> None:
    """A strategy passed from Python may hold a number for each client, and its run must remain resumable."""
    path = tmp_path / "experiment.toml"
    path.write_text(MINIMAL + "#" * 2**20)
    assert config.load(path, recorded=True).stop == Stop(versions=10)
    with pytest.raises(ConfigError, match="longer than 1 MiB"):
        config.load(path)


def test_removed_keys_are_ignored_only_at_their_defaults_in_a_runs_file(tmp_path: Path) -> None:
    """At their defaults these keys have no effect. Other values ask for features that no longer exist."""
    path = tmp_path / "experiment.toml"
    path.write_text(MINIMAL + '[server]\ndurability = "memory"\npartial_sums = false\n')
    assert config.load(path, recorded=True).server == Server()
    with pytest.raises(ConfigError, match=r"unknown key .server.durability."):
        config.load(path)
    path.write_text(MINIMAL + "[server]\npartial_sums = true\n")
    with pytest.raises(ConfigError, match=r"unknown key .server.partial_sums."):
        config.load(path, recorded=True)


@pytest.mark.parametrize("run", [".", "runs/fedbuff-seed-1"])
def test_the_arrays_of_a_run_are_found_if_its_folder_or_its_sweep_was_moved(tmp_path: Path, run: str) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    (old / run).mkdir(parents=True)
    (old / "data-0123.safetensors").touch()
    text = f"{MINIMAL}[data]\nname = 'arrays'\npath = '{old}/data-0123.safetensors'\n"
    (old / run / "experiment.toml").write_text(text)

    def path(folder: Path, *, recorded: bool = False) -> str | None:
        return config.load(folder / run / "experiment.toml", recorded=recorded).data.path

    assert path(old, recorded=True) == f"{old}/data-0123.safetensors"
    shutil.copytree(old, copy := tmp_path / "copy")
    assert path(copy, recorded=True) == f"{copy}/data-0123.safetensors"
    old.rename(new)
    assert path(new, recorded=True) == f"{new}/data-0123.safetensors"
    assert path(new) == f"{old}/data-0123.safetensors"


def test_files_of_a_run_that_were_moved_with_it_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside the run's experiment.toml, or where the command is started; not in other files than a run's."""
    old, new = tmp_path / "old", tmp_path / "new"
    (old / "runs" / "one").mkdir(parents=True)
    pi = (bundled_folder() / "devices" / "pi-4.toml").read_text()
    (old / "own.toml").write_text(pi.replace('id = "pi-4"', 'id = "own"'))
    (old / "mine.safetensors").touch()
    given = Experiment(
        fleet=Fleet(devices={"./own.toml": 2}),
        data=Data(name="arrays", path="mine.safetensors", partition="by-device", labels={"./own.toml": [0]}),
        stop=Stop(versions=1),
    )
    text = config.dump(config.validate(given, old))
    (old / "runs" / "one" / "experiment.toml").write_text(text)
    with Store(old / "runs" / "one") as store:
        store.set_meta(base=str(old))

    def found_in(folder: Path) -> Experiment:
        return config.load(folder / "runs" / "one" / "experiment.toml", recorded=True)

    def text_in(folder: Path) -> str:
        return text.replace(str(old), str(folder))

    assert config.dump(found_in(old)) == text
    old.rename(new)
    with pytest.raises(ConfigError, match=f"{old}/own.toml"):
        found_in(new)
    monkeypatch.chdir(new)
    assert config.dump(found_in(new)) == text_in(new)
    with pytest.raises(ConfigError, match=f"{old}/own.toml"):
        config.load(new / "runs" / "one" / "experiment.toml")
    for name in ("own.toml", "mine.safetensors"):
        shutil.copy(new / name, new / "runs" / "one")
    assert config.dump(found_in(new)) == text_in(new / "runs" / "one")
