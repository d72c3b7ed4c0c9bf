"""Tests of phones' inference times: counted work, priors for unknown phones, one measured network."""

from __future__ import annotations

import csv
import json
import math
import re
from pathlib import Path

import msgspec
import numpy as np
import pytest
from shell import Shell
from tables import arrows
from torch import nn

from edgefl.cli import main
from edgefl.config import validate
from edgefl.devices import check_file, load_device, load_fleet, phone_fit, phones, predict
from edgefl.devices.phone_estimate import Measured, estimated_profile, known_core, measured_work
from edgefl.devices.phone_file import table_text
from edgefl.devices.phone_layers import inference_layers
from edgefl.devices.phone_networks import Layer, Weights, counts, read_networks, weighted
from edgefl.devices.phone_profiles import TRANSFER
from edgefl.devices.phone_rows import PhoneRow, read_rows
from edgefl.devices.phones import About, PhoneTable
from edgefl.devices.profiles import phone_table
from edgefl.errors import ConfigError
from edgefl.experiment import Experiment, Fleet, Stop
from edgefl.lab.phone_truth import groups, judge
from edgefl.learning.benchmark_networks import NAMED
from tests.reports import read_json

TABLE = phone_table()
NUMBER = "must be a number above 0 and at most"
HEAD = "model,unit,core,max_ghz,ram_gib,network,first_ms,median_ms,p10_ms,p90_ms"


def layer(kind: str, side: int, inputs: int, outputs: int, kernel: int = 1, stride: int = 1) -> Layer:
    sizes = {"in_side": side * stride, "out_side": side, "in_channels": inputs, "out_channels": outputs}
    return msgspec.convert({"kind": kind, "kernel": kernel, "stride": stride, **sizes}, Layer)


def network(width: int, kernel: int = 3) -> tuple[Layer, ...]:
    return (
        layer("conv", 112, 3, width, 3, 2),
        layer("relu", 112, width, width),
        layer("depthwise", 56, width, width, kernel, 2),
        layer("conv", 56, width, 2 * width),
        layer("add", 56, 2 * width, 2 * width),
        layer("pool", 1, 2 * width, 2 * width, 56, 56),
        layer("conv", 1, 2 * width, 1000),
    )


NETWORKS = {str(at): network(8 + 4 * at + at % 3, 3 + 2 * (at % 3)) for at in range(9)} | {
    phone_fit.REFERENCE: network(64, 5)
}


def test_work_of_each_kind_of_layer() -> None:
    assert counts([layer("conv", 10, 3, 16, 3)]) == {
        "thin_flop": 2 * 100 * 3 * 16 * 9,
        "calls": 1,
        "conv_bytes": 4 * (300 + 1600 + 432),
    }
    assert counts([layer("depthwise", 10, 16, 16, 3, 2)]) == {
        "depthwise_flop": 2 * 1600 * 9,
        "strided": 2 * 1600 * 9,
        "depthwise_planes": 16,
        "calls": 1,
        "conv_bytes": 4 * (6400 + 1600 + 144),
    }
    assert counts([layer("relu", 10, 16, 16)]) == {}
    assert counts([layer("add", 10, 16, 16)]) == {"elementwise_bytes": 12 * 1600, "calls": 1}
    assert counts([layer("pool", 1, 16, 16, 10, 10)])["pool_bytes"] == 4 * (1600 + 16)


@pytest.mark.parametrize(
    ("side", "inputs", "outputs", "slow"),
    [
        (7, 64, 64, set()),
        (7, 66, 64, {"odd"}),
        (7, 48, 64, {"shallow"}),
        (7, 16, 64, {"few", "shallow"}),
        (7, 64, 32, {"narrow"}),
        (56, 64, 64, {"large"}),
    ],
)
def test_pointwise_convolutions_slow_in_tflite(side: int, inputs: int, outputs: int, slow: set[str]) -> None:
    found = counts([layer("conv", side, inputs, outputs)])
    assert set(found) - {"calls", "conv_bytes", "pointwise_flop", "outputs"} == slow
    plain = weighted(found, Weights())
    heavier = weighted(found, Weights(odd=1.0, large=1.0, shallow=1.0))
    assert (heavier.flop > plain.flop) == bool(slow & {"odd", "large", "shallow"})


def seconds(about: About) -> float:
    return phones.of_core(TABLE, about).seconds(TABLE.work(NETWORKS[phone_fit.REFERENCE]))


def test_speed_depends_on_core_clock_and_ram() -> None:
    slow, fast = seconds(About("Kryo 385 Gold", 1.8, 4.0)), seconds(About("Kryo 385 Gold", 2.8, 4.0))
    assert slow > 1.2 * fast
    assert seconds(About("Cortex-A53", 2.0, 4.0)) > 1.5 * seconds(About("Cortex-A76", 2.0, 4.0))
    assert seconds(About("Cortex-A53", 2.0, 1.0)) > seconds(About("Cortex-A53", 2.0, 4.0))
    assert About("Kryo 485").family == About("Cortex-A76").family == "A76"


def test_more_knowledge_of_a_phone_gives_a_narrower_interval() -> None:
    step = TABLE.work(NETWORKS["3"])
    reference = TABLE.work(NETWORKS[phone_fit.REFERENCE])
    about = About("Cortex-A76", 2.2, 6.0)
    by_core = phones.of_core(TABLE, about)
    by_one = phones.of_one_network(TABLE, about, reference, 0.030)
    new = phones.of_core(TABLE, About("Nobody's", 2.2, 6.0))
    assert by_one.error_factor_of(step) < by_core.error_factor_of(step) < new.error_factor_of(step)
    measured = next(each for each in TABLE.phones if len(each.units) > 1)
    unit = phones.of_measured(TABLE, measured, next(iter(measured.units)))
    assert unit.error_factor < phones.of_measured(TABLE, measured).error_factor


def test_one_measured_network_sets_the_speed() -> None:
    """Fails if the measured time is ignored, or if it changes only the prediction for the reference
    network."""
    reference, step = TABLE.work(NETWORKS[phone_fit.REFERENCE]), TABLE.work(NETWORKS["3"])
    about = About("Cortex-A76", 2.2, 6.0)
    models = [phones.of_one_network(TABLE, about, reference, s) for s in (0.02, 0.04)]
    assert models[1].seconds(reference) == pytest.approx(0.04, rel=0.1)
    assert 1.7 < models[1].seconds(step) / models[0].seconds(step) < 2.3


def measured(table: PhoneTable, units: int = 12, noise: float = 0.01) -> list[PhoneRow]:
    """Return rows of phones with three types of core; their speed is proportional to the clock frequency."""
    rng, rows = np.random.default_rng(0), []
    for at in range(units):
        core, factor = (("A", 1.0), ("B", 2.0), ("C", 4.0))[at % 3]
        ghz = 1.0 + 0.3 * (at // 3)
        about = About(core, ghz, 4.0, f"model-{at}", f"unit-{at}")
        for name, layers in NETWORKS.items():
            flop = weighted(counts(layers), table.weights).flop
            took = 1e-9 * factor / ghz * flop * math.exp(noise * rng.normal())
            rows.append(PhoneRow(about=about, network=name, seconds=took, keys={"unit": about.unit}))
    return rows


def test_a_fit_predicts_unseen_phones_and_networks() -> None:
    """Fails if the clock, the core or the reference network is ignored."""
    rows = measured(TABLE)
    kept = [row for row in rows if row.about.model != "model-7" and row.network != "4"]
    table = phone_fit.fit(kept, NETWORKS, "made up")
    works = {name: table.work(layers) for name, layers in NETWORKS.items()}
    judged = list(judge(table, rows, works))
    errors = {group["basis"]: group for group in groups(judged)}
    assert errors["profile"]["rows"] == 11 * 10
    assert errors["core"]["rows"] == 10
    assert errors["one-network"]["rows"] == 9
    assert errors["profile"]["median"] < 0.03
    assert errors["core"]["median"] < 0.25
    assert errors["one-network"]["median"] < 0.06
    assert all(0 < row["low"] < row["predicted"] < row["high"] for row in judged)


def test_a_networks_measured_time_is_not_used_for_its_own_prediction() -> None:
    """Predictions may use only the measured time of the reference network."""
    rows = [
        msgspec.structs.replace(row, about=row.about._replace(model="new", unit="new"))
        for row in measured(TABLE, 1)
    ]
    works = {name: TABLE.work(layers) for name, layers in NETWORKS.items()}

    def predictions(changed: str) -> dict[tuple[str, str], float]:
        other = [
            msgspec.structs.replace(row, keys={**row.keys, "network": row.network},
                                    seconds=row.seconds * (2.0 if row.network == changed else 1.0))
            for row in rows
        ]  # fmt: skip
        return {(row["basis"], row["network"]): row["predicted"] for row in judge(TABLE, other, works)}

    plain = predictions("")
    assert predictions("4") == plain
    moved = predictions(phone_fit.REFERENCE)
    assert all((moved[key] != plain[key]) == (key[0] == "one-network") for key in plain)
    assert ("one-network", phone_fit.REFERENCE) not in plain


def test_the_command_compares_predictions_with_a_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = list(Layer.__struct_fields__)
    with (tmp_path / "networks.csv").open("w", newline="") as file:
        lines = [[net, at, *(getattr(each, name) for name in names)]
                 for net, layers in NETWORKS.items() for at, each in enumerate(layers)]  # fmt: skip
        csv.writer(file).writerows([["network", "layer", *names], *lines])
    rows = [f"{model},{model}_0,Cortex-A76,2.2,6,{net},9,30,n/a,31"
            for model in ("HD1901", "new") for net in ("1", phone_fit.REFERENCE)]  # fmt: skip
    (tmp_path / "rows.csv").write_text("\n".join([HEAD, *rows]) + "\n")
    files = [str(tmp_path / name) for name in ("rows.csv", "networks.csv", "out.json")]
    command = ["bench", "truth", "--phones", files[0], "--networks", files[1]]
    assert main([*command, "--json", files[2]]) == 0
    assert "one-network" in capsys.readouterr().out
    judged = read_json(Path(files[2]))["phones"]
    bases = [(row["model"], row["network"], row["basis"]) for row in judged]
    assert bases == [
        *(("HD1901", net, "profile") for net in ("1", phone_fit.REFERENCE)),
        *(("new", net, "core") for net in ("1", phone_fit.REFERENCE)),
        ("new", "1", "one-network"),
    ]
    assert {*HEAD.split(","), "quantity", "measured", "predicted", "low", "high"} <= judged[0].keys()
    assert judged[0]["measured"] == 0.03
    assert (judged[0]["p10_ms"], judged[0]["p90_ms"]) == ("n/a", 31.0)
    (tmp_path / "networks.csv").write_text((tmp_path / "networks.csv").read_text().replace("\n1,", "\nx,"))
    assert main(command) == 2
    assert "no layers of network '1'" in capsys.readouterr().err


def test_the_table_is_written_and_read_without_loss() -> None:
    assert msgspec.convert(phones.toml.parse(table_text(TABLE), "table"), PhoneTable) == TABLE


def test_phones_of_the_table_have_profiles() -> None:
    phone = load_device("oneplus-7t")
    assert phone.default_runtime == "mnn"
    assert set(phone.runtime) == {"mnn", "tflite"}
    bridge = load_device("pixel-4")
    assert phone.runtime["mnn"].error_factor > max(bridge.runtime["mnn"].error_factor, TRANSFER)
    assert len(phone.units) == 2
    assert math.prod(phone.units.values()) == pytest.approx(1.0, abs=0.01)
    assert load_device("moto-g3").train_flop_per_s < load_device("oneplus-7t").train_flop_per_s / 5


def test_layers_of_a_module_are_found() -> None:
    """Fails if a depthwise convolution counts as a dense one, or a ReLU as an addition."""
    module = nn.Sequential(
        nn.Conv2d(3, 16, 3, 2, 1), nn.BatchNorm2d(16), nn.ReLU6(), nn.Conv2d(16, 16, 5, 1, 2, groups=16),
        nn.Conv2d(16, 24, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(24, 10),
    )  # fmt: skip
    kinds = [layer("conv", 112, 3, 16, 3, 2), layer("depthwise", 112, 16, 16, 5), layer("conv", 112, 16, 24)]
    pool = msgspec.structs.replace(layer("pool", 1, 24, 24), in_side=112)
    found = inference_layers(module, (3, 224, 224), np.float32)
    assert list(found) == [*kinds, pool, layer("conv", 1, 24, 10)]
    assert module[0].weight.device.type == "cpu"


@pytest.mark.parametrize(
    ("module", "shape", "products"),
    [
        (nn.ConvTranspose2d(64, 32, 2, 2), (64, 28, 28), 28 * 28 * 64 * 32 * 4),
        (nn.ConvTranspose2d(64, 64, 4, 2, 1, groups=4), (64, 28, 28), 28 * 28 * 64 * 16 * 16),
        (nn.ConvTranspose2d(8, 8, 3, 2, 1, groups=8), (8, 14, 14), 14 * 14 * 8 * 9),
        (nn.Conv2d(64, 64, (1, 7), padding=(0, 3)), (64, 17, 17), 17 * 17 * 64 * 64 * 7),
        (nn.Conv1d(8, 16, 5, padding=2), (8, 50), 50 * 8 * 16 * 5),
        (nn.Linear(12, 6), (3, 12), 3 * 12 * 6),
    ],
)
def test_the_operations_of_a_layer_are_those_of_its_products(
    module: nn.Module, shape: tuple[int, ...], products: int
) -> None:
    """A transposed convolution multiplies each input element by the whole kernel. Some of the kernels are not
    square."""
    found = counts(inference_layers(module, shape, np.float32))
    assert sum(amount for name, amount in found.items() if name.endswith("_flop")) == 2 * products


def test_the_inference_time_of_a_module_on_a_phone_is_predicted() -> None:
    make, shape = NAMED["mobilenet_v2"]
    fast, slow = (
        predict(make(), 1, device=name, input_shape=shape, runtime="tflite", inference=True)
        for name in ("oneplus-7t", "moto-g3")
    )
    assert 5 < slow.seconds / fast.seconds < 20
    assert 0.01 < fast.seconds < 0.06
    many = predict(make(), 8, device="oneplus-7t", input_shape=shape, runtime="tflite", inference=True)
    assert many[:3] == pytest.approx([8 * each for each in fast[:3]])  # TFLite runs them one by one
    assert many.parts == pytest.approx({name: 8 * part for name, part in fast.parts.items()})
    with pytest.raises(ConfigError, match="'tflite' has only inference times; add --inference"):
        predict(make(), 1, device="oneplus-7t", input_shape=shape, runtime="tflite")


def test_one_measured_time_sets_the_speed_of_a_profile_and_narrows_its_interval(tmp_path: Path) -> None:
    step = measured_work("mobilenet_v2")
    models = []
    for at, number in enumerate((None, Measured("mobilenet_v2", step, 0.023))):
        path = tmp_path / f"mine-{at}.toml"
        path.write_text(estimated_profile("cortex-a76", 2200.0, 6.0, number, path.stem))
        assert check_file(path) == []
        models.append(load_device(path).runtime)
    alone, known = (model["tflite"] for model in models)
    assert known.seconds(step) == pytest.approx(0.023, rel=0.1)
    assert alone.error_factor_of(step) > 1.2 * known.error_factor_of(step)
    assert models[0]["mnn"].error_factor > models[1]["mnn"].error_factor > TRANSFER
    assert "6 GiB and 23 ms of mobilenet_v2" in load_device(path).sources["runtime.tflite"]


def test_any_error_of_a_module_while_its_layers_are_listed_is_one_line() -> None:
    class Broken(nn.Module):
        def forward(self, images: object) -> None:
            raise IndexError

    with pytest.raises(ConfigError, match=r"layers cannot be listed: IndexError$"):
        inference_layers(Broken(), (3, 28, 28), np.float32)


@pytest.mark.parametrize(
    ("given", "core", "family"),
    [
        ("kryo-485", "Kryo 485", "A76"),
        ("Kryo 485 Gold (Cortex-A76)", "Kryo 485", "A76"),  # as in the profile of the Pixel 4
        ("Qualcomm Kryo 585 Prime", "Kryo 585", "A77"),
        ("kryo 470 gold", "Kryo 470 Gold", "A76"),
        ("kryo 495 gold", "Qualcomm Kryo 4XX Gold", "A76"),
        ("cortex a55", "Cortex-A55", "A55"),
    ],
)
def test_a_core_of_any_spelling_is_that_of_the_measured_phones(given: str, core: str, family: str) -> None:
    """Mutant: a prediction for one of these spellings ignores the measured phones with the same core."""
    assert known_core(TABLE, given) == core
    assert About(core).family == family


def test_the_name_of_an_estimated_profile_is_valid_for_every_core() -> None:
    assert 'id = "qualcomm-falkor-v1-kryo-2200"\n' in estimated_profile("falkor", 2200.0)


def test_an_estimated_profile_with_little_memory_is_valid(tmp_path: Path) -> None:
    path = tmp_path / "watch.toml"
    path.write_text(estimated_profile("cortex-a7", 1000.0, 0.2, name="watch"))
    assert check_file(path) == []


def test_clients_do_not_train_in_a_runtime_that_has_only_inference_times() -> None:
    fleet = Fleet(devices={"oneplus-7t": 20}, runtime="tflite")
    with pytest.raises(ConfigError, match="oneplus-7t would use 'tflite', which has only inference times"):
        validate(Experiment(fleet=fleet, stop=Stop(versions=1)))


PHONE = ("profiles", "from", "--core", "cortex-a76", "--mhz", "2200", "--network", "mobilenet_v2")


@pytest.mark.parametrize("ms", ["0.023", "23000"])  # 23 ms in seconds and in microseconds
def test_a_measured_time_that_is_impossible_for_the_core_is_refused(edgefl: Shell, ms: str) -> None:
    expected = r"[\d.]+ to [\d.]+ milliseconds are expected of Cortex-A76, 2200 MHz"
    said = rf"--ms: must be from .* for mobilenet_v2 \({expected}\), got "
    assert re.match(said, edgefl.refuses(2, *PHONE, "--ms", ms))


@pytest.mark.parametrize("ms", ["20", "300"])
def test_a_measured_time_that_is_possible_for_the_core_is_accepted(ms: str) -> None:
    assert main((*PHONE, "--ms", ms)) == 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("profiles", "from", "--core", "toaster", "--mhz", "2000"), "'toaster'"),
        (("profiles", "from", "--core", "cortex-a53", "--mhz", "2000", "--ms", "3"), "needed together"),
        (("profiles", "--year", "2019", "check", "x.toml"), "cannot be combined with a search"),
        (("bench", "truth", "--phones", "x.csv"), "--networks FILE are needed together"),
        (["bench", "truth", "--phones", "x", "--networks", "y", "--boards", "z"], "cannot be combined"),
    ],
)
def test_invalid_arguments_are_refused(edgefl: Shell, arguments: tuple[str, ...], said: str) -> None:
    assert said in edgefl.refuses(2, *arguments)


def test_devices_are_found_by_words_year_and_memory(edgefl: Shell) -> None:
    def found(*options: str) -> list[str]:
        return list(json.loads(edgefl.shows("profiles", "--json", *options))["devices"])

    assert "oneplus-7t" in found("--find", "Kryo 485 oneplus")
    assert found("--find", "exynos 9611") == ["galaxy-m30s"]
    assert set(found("--year", "2013", "--ram-gib", "2")) == {"nexus-5"}
    listed = edgefl.shows("profiles", "--find", "oneplus", "--sort", "step")
    steps = [float(line.split()[3]) for line in listed.splitlines() if line.startswith("oneplus")]
    assert len(steps) > 5
    assert steps == sorted(steps)


INVALID = rf"""
-> the column model is missing
model,unit\na,b\n -> the column core is missing
{HEAD}\n -> no lines of data
{HEAD}\nm,u,c,fast,2,0,1,1,1,1\n -> line 2: max_ghz {NUMBER} 100, or empty, got 'fast'
{HEAD}\n\nm,u,c,fast,2,0,1,1,1,1\n -> line 3: max_ghz
{HEAD}\nm,u,c,2,2,0,1,-1,1,1\n -> line 2: median_ms {NUMBER} .*, got '-1'
{HEAD}\nm,u,c,2,2,0,1,1e300,1,1\n -> line 2: median_ms {NUMBER}
{HEAD}\nm,u,c,2,2,0,1,1e-9,1,1\n -> line 2: median_ms must be a number from 0.001 to .*, got '1e-9'
{HEAD}\nm,u,c,2,1e9,0,1,1,1,1\n -> line 2: ram_gib {NUMBER} 1024
{HEAD}\nm,0,c,2,2,0,1,1,1,1\nn,0,c,2,2,0,1,1,1,1\n -> line 3: unit '0' names two phones, 'n' and 'm'
{HEAD}\nm,0,c,2,2,0,1,1,1,1\nm,0,c,2,3,0,1,1,1,1\n -> same model, core, clock and RAM
"""


@pytest.mark.parametrize(("text", "said"), arrows(INVALID))
def test_an_error_names_the_invalid_line(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "rows.csv"
    path.write_text(text)
    with pytest.raises(ConfigError, match=said):
        read_rows(path)


def test_invalid_files_of_networks_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "networks.csv"
    names = ["network", "layer", *Layer.__struct_fields__]
    for values, said in (([], "no lines of data"), (["0", "0", "pond", *"111111"], "line 2.*pond")):
        with path.open("w", newline="") as file:
            csv.writer(file).writerows([names, *([values] if values else [])])
        with pytest.raises(ConfigError, match=said):
            read_networks(path)


def test_a_fleet_is_drawn_from_the_table_of_phones_by_seed_and_weights() -> None:
    file = load_fleet("phones-2020")
    assert set(file.devices) == {phone.id for phone in TABLE.phones}
    assert file.devices["redmi-note-5-pro"] == 5

    def drawn(seed: int) -> dict[str, int]:
        found = validate(Experiment(fleet=Fleet(devices="phones-2020"), stop=Stop(versions=1), seed=seed))
        assert found.fleet.network == "lte"
        return found.fleet.devices

    assert drawn(1) == drawn(1) != drawn(2)
    assert sum(drawn(1).values()) == sum(drawn(2).values()) == file.clients == 100
    many = msgspec.structs.replace(file, draw=20_000).drawn(3)
    assert many["redmi-note-5-pro"] == pytest.approx(20_000 * 5 / 73, rel=0.1)
