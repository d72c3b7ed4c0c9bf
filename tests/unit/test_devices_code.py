"""Tests of the rates of code that does not use torch: names of cores, classes, threads, systems on a chip."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from edgefl.devices import device_names, load_device
from edgefl.devices.code import (
    CLASSES,
    CodeCluster,
    _socs,
    clusters_of,
    core_table,
    find_core,
    has_aes,
    known_core,
    lineages,
    rate,
    read_clusters,
    soc_cores,
    soc_in,
    throughput,
)
from edgefl.devices.fleet import masking_time_s
from edgefl.errors import ConfigError

PI_4 = CodeCluster("Cortex-A72", 1800.0, 4, aes=False)
PI_5 = CodeCluster("Cortex-A76", 2400.0, 4)
BIG, LITTLE = CodeCluster("Cortex-A76", 2400.0, 4), CodeCluster("Cortex-A55", 1800.0, 4)


@pytest.mark.parametrize(
    ("name", "core"),
    [
        *((name, "Cortex-A76") for name in ("cortex a76", "CORTEXA76", "Cortex-A76", "ARM Cortex-A76")),
        ("Kryo 999 Gold (Cortex-A76)", "Cortex-A76"),
        ("Kryo 485 Gold (Cortex-A76)", "Qualcomm Kryo 4XX Gold"),
    ],
)
def test_a_core_is_found_by_its_name_or_by_the_base_core_in_brackets(name: str, core: str) -> None:
    """Case, spaces, dashes and the maker do not matter."""
    assert find_core(name) == known_core(name) == core


def test_an_unknown_core_gives_a_one_line_error_with_the_nearest_name() -> None:
    assert known_core("Pentium") is None
    with pytest.raises(
        ConfigError, match=r"core 'Kryo 9XX Gold' not found; did you mean 'Qualcomm Kryo"
    ) as found:
        find_core("Kryo 9XX Gold")
    assert "\n" not in str(found.value)


@pytest.mark.parametrize("typed", ["a76", "A76"])
def test_a_core_whose_name_contains_what_was_typed_is_suggested(typed: str) -> None:
    """Mutant: the most similar of all names is suggested, which is ARM1176 for "a76"."""
    with pytest.raises(ConfigError, match=f"core '{typed}' not found; did you mean 'Cortex-A76'"):
        find_core(typed)


def test_every_core_of_every_profile_is_known() -> None:
    for name in device_names():
        device = load_device(name)
        if device.cpu is not None and device.cpu.clusters:
            assert len(clusters_of(device)) == len(device.cpu.clusters)


def test_every_core_has_rates_and_every_relative_is_a_core() -> None:
    assert core_table().cores.keys() == lineages().keys()
    for core in lineages().values():
        assert set(core.like) <= lineages().keys()


@pytest.mark.parametrize("code_class", CLASSES)
def test_a_rate_is_proportional_to_the_frequency(code_class: str) -> None:
    slow, fast = (rate(CodeCluster("Cortex-A55", mhz), code_class) for mhz in (900.0, 1800.0))  # type: ignore[arg-type]
    assert fast.value == pytest.approx(2 * slow.value)
    assert slow.low < slow.value < slow.high


def test_published_rates_of_the_raspberry_pis_are_within_their_intervals() -> None:
    """The values are those of ThomasKaiser/sbc-bench for one thread, in MIPS and MB/s."""
    for cluster, decompress, compress, aes in ((PI_4, 1884, 1598, 36.2), (PI_5, 3250, 3100, 1368)):
        for code_class, measured in (("integer", decompress), ("memory", compress), ("crypto", aes)):
            found = rate(cluster, code_class)  # type: ignore[arg-type]
            assert found.low < measured < found.high


def test_masking_an_update_takes_the_time_of_aes_and_of_memcpy_on_one_core() -> None:
    """Rates are in 10⁶ bytes per second. A memcpy of n bytes reads n bytes and writes n bytes."""
    device = load_device("pi-5")
    (cluster,) = clusters_of(device)
    encrypted_s, moved_s = 2e3 / rate(cluster, "crypto").value, 1.5e3 / rate(cluster, "copy").value
    for cipher, moved, expected_s in ((2, 0, encrypted_s), (0, 3, moved_s), (2, 3, encrypted_s + moved_s)):
        rules: Any = SimpleNamespace(cipher_bytes=cipher * 10**9, moved_bytes=moved * 10**9)
        assert masking_time_s(device, rules) == pytest.approx(expected_s)


def test_aes_instructions_decide_the_crypto_rate() -> None:
    with_aes = rate(PI_4._replace(aes=True), "crypto").value
    assert with_aes > 20 * rate(PI_4, "crypto").value
    old = CodeCluster("Cortex-A7", 1800.0)
    assert rate(old, "crypto") == rate(old._replace(aes=False), "crypto")


def test_a_measured_bandwidth_replaces_that_of_the_core() -> None:
    assert rate(PI_5._replace(copy_mb_s=5500.0), "copy").value == 5500.0


def test_32_bit_systems_change_the_rates_of_64_bit_cores_only() -> None:
    assert rate(PI_4._replace(system_bits=32), "integer").value > 1.1 * rate(PI_4, "integer").value
    assert rate(PI_5._replace(system_bits=32), "crypto") == rate(PI_5, "crypto")
    old = CodeCluster("Cortex-A7", 1200.0)
    assert rate(old._replace(system_bits=32), "integer") == rate(old, "integer")


def test_threads_are_placed_on_the_fastest_cores_first() -> None:
    for clusters in ((BIG, LITTLE), (LITTLE, BIG)):
        assert throughput(clusters, "integer", 1) == rate(BIG, "integer")
        assert throughput(clusters, "integer", 4) == throughput([BIG], "integer", 4)
    assert throughput([BIG, LITTLE], "integer", 5).value > throughput([BIG], "integer", 4).value
    assert throughput([BIG], "integer", 99) == throughput([BIG], "integer", 4)


def test_a_thread_is_slower_beside_others_and_more_so_beside_slow_cores() -> None:
    one, four = rate(BIG, "integer").value, throughput([BIG], "integer", 4).value
    assert 0.85 < four / (4 * one) <= 1
    both = throughput([BIG, LITTLE], "integer", 8).value
    assert both / (4 * one + 4 * rate(LITTLE, "integer").value) < four / (4 * one) - 0.03


def test_copies_share_the_memory_bandwidth() -> None:
    assert throughput([PI_5], "copy", 4).value < 2 * rate(PI_5, "copy").value


def test_errors_of_one_core_type_do_not_average_out() -> None:
    halves = [BIG._replace(cores=2), BIG._replace(cores=2)]
    assert throughput(halves, "crypto", 4).spread == pytest.approx(throughput([BIG], "crypto", 4).spread)


def test_errors_of_two_core_types_are_independent() -> None:
    """The three clusters are sorted by rate, so a Cortex-A72 is between two Cortex-A76."""
    fast, middle, slow = [
        CodeCluster(*each)
        for each in (("Cortex-A76", 2400.0), ("Cortex-A72", 2000.0), ("Cortex-A76", 1000.0))
    ]
    rates = [rate(each, "crypto") for each in (fast, middle, slow)]
    total = sum(one.value for one in rates)
    logs = [
        (rates[0].value + rates[2].value) / total * math.log(rates[0].spread),
        rates[1].value / total * math.log(rates[1].spread),
        math.log(core_table().parallel["crypto"].spread),
    ]
    found = throughput([fast, middle, slow], "crypto", 3)
    assert math.log(found.spread) == pytest.approx(math.hypot(*logs))


def test_the_interval_of_a_quotient_combines_both_intervals() -> None:
    both = rate(PI_5, "memory").over(rate(PI_4, "memory"))
    logs = [math.log(rate(each, "memory").spread) for each in (PI_5, PI_4)]
    assert math.log(both.spread) == pytest.approx(math.hypot(*logs))
    assert both.value == pytest.approx(rate(PI_5, "memory").value / rate(PI_4, "memory").value)


def test_clusters_are_read_from_text() -> None:
    assert read_clusters("Cortex A76@2400x4, Cortex-A55@1800.5x2,sifive,u74-mc@1500") == (
        CodeCluster("Cortex-A76", 2400.0, 4),
        CodeCluster("Cortex-A55", 1800.5, 2),
        CodeCluster("sifive,u74-mc", 1500.0, 1),
    )


@pytest.mark.parametrize(
    "text",
    ["", "Cortex-A76", "Cortex-A76@", "Cortex-A76@2.4x4", "Cortex-A76@2400x00", "Cortex-A76@2400y4", "@5,"],
)
def test_an_invalid_text_of_clusters_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^--cores .*CORE@MHZxCORES"):
        read_clusters(text)


def test_profiles_without_cores_have_no_rates() -> None:
    with pytest.raises(ConfigError, match=r"lists no cpu\.clusters"):
        clusters_of(load_device("tier-p50"))


def test_an_unknown_core_in_a_profile_is_an_error_that_names_the_device() -> None:
    device = load_device("pi-4")
    clusters = tuple(msgspec.structs.replace(one, uarch="Pentium") for one in device.clusters)
    own = msgspec.structs.replace(device, cpu=msgspec.structs.replace(device.cpu, clusters=clusters))
    with pytest.raises(ConfigError, match=r"^device 'pi-4': cpu\.clusters: core 'Pentium' not found"):
        clusters_of(own)


def test_the_soc_of_a_profile_sets_aes_and_its_memory_sets_the_copy_rate() -> None:
    (pi_4,), (pi_5,) = clusters_of(load_device("pi-4")), clusters_of(load_device("pi-5"))
    assert (pi_4.aes, pi_5.aes) == (False, True)
    assert pi_4.copy_mb_s == 2500.0


def test_socs_are_found_in_names() -> None:
    assert soc_in("Raspberry Pi 4 B (BCM2711)") == "BCM2711"
    assert soc_in("Orange Pi Zero 3 (Allwinner H618)") == "Allwinner H618"
    assert soc_in("Le Potato (Amlogic S905X)") == "S905X"
    assert (has_aes("S905"), has_aes("S905X"), has_aes("unknown")) == (False, True, True)


def test_cores_of_socs_are_known_core_types() -> None:
    for soc in _socs().cores:
        for core, count in soc_cores(soc):
            assert known_core(core) is not None, (soc, core)
            assert count >= 1
    assert set(_socs().without_aes) <= _socs().cores.keys()
