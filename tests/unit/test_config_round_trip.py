"""A written experiment is read back unchanged, and so is any data in TOML."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from edgefl import config, toml
from edgefl.errors import ConfigError
from edgefl.experiment import (
    MAX_FLOAT32,
    MIN_FLOAT32,
    Checkpoint,
    Clock,
    Data,
    Evaluation,
    Experiment,
    Fleet,
    MetricGoal,
    Model,
    Server,
    Stop,
    Training,
)

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
NUMBERS = st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False)
PLAIN = st.recursive(
    TEXT | NUMBERS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=8,
)
TABLES = st.dictionaries(TEXT, PLAIN, max_size=4)

COUNT = st.integers(1, 10**9)
POSITIVE = st.floats(min_value=0, exclude_min=True, allow_infinity=False)
NOT_NEGATIVE = st.floats(min_value=0, allow_infinity=False)
PROFILES = st.sampled_from(["pi-4", "pi-5", "pixel-3a", "moto-g4"])
NETWORKS = st.sampled_from(["wifi", "lte", "3g"])
PRINTED = st.characters(categories=["L", "N", "P", "S"], exclude_characters="/")
NAMES = st.text(PRINTED, min_size=1, max_size=20)


@st.composite
def fleets(draw: st.DrawFn) -> Fleet:
    devices = draw(st.dictionaries(PROFILES, st.integers(1, 20_000), min_size=1))
    per_device = st.fixed_dictionaries(dict.fromkeys(devices, NETWORKS))
    return Fleet(
        devices=devices,
        network=draw(NETWORKS | per_device),
        on_death=draw(st.sampled_from(["replace", "drop"])),
        rejoin_s=draw(NOT_NEGATIVE),
        memory=draw(st.sampled_from(["auto", "cgroup", "rlimit", "off"])),
        throttle=draw(st.sampled_from(["paced", "cgroup", "sigstop"])),
    )


@st.composite
def experiments(draw: st.DrawFn) -> Experiment:
    fleet = draw(fleets())
    labels = st.lists(st.integers(0, 9), min_size=1, unique=True)
    held = draw(st.dictionaries(st.sampled_from(sorted(fleet.devices)), labels, min_size=1))
    stop = {name: st.none() | COUNT for name in ("versions", "trips")}
    stop |= {name: st.none() | POSITIVE for name in ("emulated_s", "wall_s")}
    accuracy = st.none() | st.floats(0, 1, exclude_min=True)
    bounds = st.tuples(
        st.sampled_from(["at_least", "at_most"]), st.floats(allow_nan=False, allow_infinity=False)
    )
    metric = st.builds(lambda name, bound: MetricGoal(name=name, **dict([bound])), TEXT, bounds)
    steps = draw(st.booleans())
    return Experiment(
        fleet=fleet,
        name=draw(NAMES.filter(lambda name: not name.startswith(".") and name.isprintable())),
        seed=draw(st.integers(0, 2**63 - 1)),
        data=Data(
            name=draw(TEXT),
            partition=draw(st.sampled_from(["iid", "dirichlet", "shards", "by-device"])),
            alpha=draw(POSITIVE),
            classes_per_client=draw(COUNT),
            labels=held,
            test_fraction=draw(st.floats(0, 1, exclude_min=True, exclude_max=True)),
            max_examples=draw(st.none() | COUNT),
            validation_fraction=draw(st.floats(0, 1, exclude_max=True)),
            client_test_fraction=draw(st.floats(0, 1, exclude_min=True, exclude_max=True)),
        ),
        model=Model(name=draw(TEXT), args=draw(TABLES)),
        training=Training(
            steps=draw(COUNT) if steps else None,
            epochs=None if steps else draw(COUNT),
            batch_size=draw(COUNT),
            lr=draw(st.floats(min_value=MIN_FLOAT32, max_value=MAX_FLOAT32)),
            momentum=draw(st.floats(0, 1, exclude_max=True)),
            weight_decay=draw(st.floats(min_value=0, max_value=MAX_FLOAT32)),
            lr_normalization=draw(st.booleans()),
            loss=draw(TEXT),
        ),
        strategy=draw(TABLES) | {"name": draw(TEXT)},
        clock=Clock(
            kind=draw(st.sampled_from(["wall", "virtual"])),
            workers=draw(st.none() | st.integers(1, 256)),
            time_scale=draw(POSITIVE | st.just("auto")),
        ),
        server=Server(
            transport=draw(st.sampled_from(["shm", "wire"])), heartbeat_s=draw(st.floats(0.1, 86_400))
        ),
        evaluation=Evaluation(
            every_versions=draw(COUNT),
            max_examples=draw(st.none() | COUNT),
            function=draw(st.none() | TEXT),
            clients=draw(st.sampled_from(["none", "global", "personal"])),
            max_clients=draw(st.integers(1, 1000)),
        ),
        checkpoint=Checkpoint(every_s=draw(POSITIVE)),
        stop=draw(
            st.builds(Stop, **stop, accuracy=accuracy, metric=st.none() | metric).filter(
                lambda stop: stop != Stop()
            )
        ),
    )


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(experiment=experiments())
def test_a_dumped_experiment_is_loaded_unchanged(tmp_path: Path, experiment: Experiment) -> None:
    path = tmp_path / "e.toml"
    path.write_text(config.dump(experiment))
    assert config.load(path) == experiment
    assert config.validate(experiment) == experiment


@given(tables=TABLES)
def test_written_tables_are_parsed_unchanged(tables: dict[str, Any]) -> None:
    assert toml.parse(toml.write(tables), "text") == tables


@given(value=PLAIN)
def test_a_literal_is_read_by_set(value: object) -> None:
    assert toml.assignment(f"a.b={toml.literal(value)}") == (("a", "b"), value)


@given(text=TEXT)
def test_any_text_of_set_is_an_assignment_or_an_error_of_one_line(text: str) -> None:
    try:
        keys, _ = toml.assignment(text)
    except ConfigError as error:
        assert len(str(error).splitlines()) <= 1
    else:
        assert keys


@given(raw=st.binary(max_size=200) | TEXT.map(str.encode))
def test_any_file_is_tables_or_an_error(tmp_path_factory: pytest.TempPathFactory, raw: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "any.toml"
    path.write_bytes(raw)
    try:
        assert isinstance(toml.read(path), dict)
    except ConfigError as error:
        assert str(error).startswith(f"{path}: ")


def test_numbers_keep_their_bits() -> None:
    for value in (0.1, 5e-324, 1.7976931348623157e308, -0.0, 1e16, 1e22, float("inf"), float("-inf")):
        found = toml.parse(toml.write({"a": value}), "text")["a"]
        assert (found, math.copysign(1, found)) == (value, math.copysign(1, value))
    assert math.isnan(toml.parse(toml.write({"a": float("nan")}), "text")["a"])


def test_none_is_left_out_and_a_set_is_refused() -> None:
    assert toml.write({"a": None, "b": {"c": None, "d": {"e": None}}}) == "[b]\nd = {}\n"
    with pytest.raises(TypeError, match="a set has no TOML form"):
        toml.write({"a": {1}})


def test_a_dumped_file_has_readable_tables() -> None:
    experiment = Experiment(fleet=Fleet(devices={"pi-4": 2}), stop=Stop(versions=3))
    text = config.dump(experiment)
    assert text.startswith('name = "experiment"\nseed = 0\n\n[fleet]\ndevices = { pi-4 = 2 }\n')
    assert text.endswith("\n[stop]\nversions = 3\naccuracy_over = 1\nmin_improvement = 0.0\n")
