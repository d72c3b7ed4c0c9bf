"""Speed of code that does not use torch, for each core type and class of code, from ``profiles/cores.toml``.

Each rate has a 90% interval. It is a constant of the core type multiplied by the clock frequency::

    rate(cluster, class) = per_mhz(core, class) · MHz

===========  =============================================================================================
integer      decompression by 7-zip, in MIPS
memory       compression by 7-zip, in MIPS
copy         memcpy, in MB/s (10⁶ bytes)
crypto       AES-256-CBC, in MB/s
division     searches per second for the primes up to 10,000 by 64-bit division (events of ``sysbench cpu``)
float        steps per second of the five-body problem in C
interpreter  steps per second of the five-body problem in CPython
simd         inference of MobileNet-v1 in fp32, in GFLOPS
===========  =============================================================================================

`edgefl.devices.code_fit` fits the rates.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from functools import cache
from itertools import groupby
from typing import Literal, NamedTuple, get_args

import msgspec

from edgefl.devices.profiles import bundled_folder, read_tables
from edgefl.devices.schema import MIN_MHZ, Device
from edgefl.errors import ConfigError, as_config_error, listed, nearest, shortened
from edgefl.host.calibration import Calibration
from edgefl.host.code_operations import NO_EXTENSION, SCALE_SPREADS

CodeClass = Literal["integer", "memory", "copy", "crypto", "division", "float", "simd", "interpreter"]
CLASSES: tuple[CodeClass, ...] = get_args(CodeClass)
UNITS: dict[str, str] = {
    "integer": "MIPS",
    "memory": "MIPS",
    "copy": "MB/s",
    "crypto": "MB/s",
    "division": "searches/s",
    "float": "steps/s",
    "simd": "GFLOPS",
    "interpreter": "steps/s",
}
MAX_MHZ = 1e5
_MAKERS = ("arm", "qualcomm", "nvidia", "ampere", "apple", "phytium", "hisilicon", "cavium", "intel", "amd")
_CLUSTER = re.compile(
    r"\s*(?P<core>[^@]+)@(?P<mhz>[0-9]+(?:\.[0-9]+)?)(?:[x×]0*(?P<cores>[0-9]+))?\s*(?:,|$)"
)


class CodeRate(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Rate per MHz of a core type; 90% of such cores are within a factor of ``spread`` of this rate."""

    per_mhz: float
    spread: float
    boards: int
    """Number of measured boards with this core type (for division, float, simd and interpreter: number of
    published values); 0 if the rate was derived from similar core types."""


class Core(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Rates of a core type for each class of code."""

    integer: CodeRate
    memory: CodeRate
    copy: CodeRate
    crypto: CodeRate
    """Rate with AES instructions if the core type can have them, otherwise without them."""
    crypto_without_aes: CodeRate
    division: CodeRate
    float: CodeRate
    simd: CodeRate
    interpreter: CodeRate


class Parallel(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Slowdown of n busy threads, relative to the sum of their cores' single-thread rates.

    The sum is multiplied by exp(min(0, ``alone + mixed · unevenness + doubling · log2(n)``)), where
    `unevenness` measures how much the cores differ in speed.
    """

    alone: float
    mixed: float
    doubling: float
    spread: float


class CoreTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Contents of ``cores.toml``."""

    source: str
    cores: dict[str, Core]
    parallel: dict[CodeClass, Parallel]
    arm32: dict[str, CodeRate]
    """Rates of 32-bit code on a 64-bit core, relative to 64-bit code; ``per_mhz`` is the ratio."""


# ---- names ---------------------------------------------------------------------------------------


class Lineage(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An entry of ``lineage.toml``: properties of a core type, and the core types that are similar to it."""

    names: tuple[str, ...] = ()
    like: tuple[str, ...] = ()
    """Similar core types, called relatives. The expected rate of this core type is ``factor`` times the mean
    rate of its relatives."""
    factor: float = 1.0
    spread: float = 1.3
    bits: int = 64
    """32 if the core only runs 32-bit code, otherwise 64."""
    aes: bool = True
    """False if the core type never has AES instructions."""


@cache
def lineages() -> dict[str, Lineage]:
    """Load the bundled ``lineage.toml``."""
    return msgspec.convert(
        read_tables(bundled_folder() / "code" / "lineage.toml")["cores"], dict[str, Lineage]
    )


def find_core(name: str) -> str:
    """Return the core type with this name, ignoring case, spaces, dashes and the maker's name.

    Raises `ConfigError` with a similar name as a suggestion if no core type has this name.

    >>> find_core("cortex a76"), find_core("Kryo 485 Gold (Cortex-A76)")
    ('Cortex-A76', 'Qualcomm Kryo 4XX Gold')
    >>> find_core("Cortex-A79")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    edgefl.errors.ConfigError: core 'Cortex-A79' not found; did you mean 'Cortex-A9'? available: ...
    """
    found = known_core(name)
    if found is None:
        similar = nearest(reduced(name), _index(), least=0.0)
        hint = f" did you mean {_index()[similar]!r}?" if similar else ""
        raise ConfigError(
            f"core {shortened(name)!r} not found;{hint} available: {listed(sorted(lineages()))}"
        )
    return found


def known_core(name: str) -> str | None:
    """Return the core type with this name, matched as in `find_core`; None if no core type matches."""
    inner = re.search(r"\((.+)\)", name)
    tried = [name.partition("(")[0], *([inner[1]] if inner else [])]
    return next((_index()[reduced(one)] for one in tried if reduced(one) in _index()), None)


def reduced(name: str) -> str:
    """Return the letters and digits of a core's name, in lower case, without the maker's name.

    >>> reduced("ARM Cortex A76"), reduced("Qualcomm Kryo 4XX Gold")
    ('cortexa76', 'kryo4xxgold')
    """
    plain = re.sub(r"[^a-z0-9]", "", name.lower())
    for maker in _MAKERS:
        if plain.startswith(maker) and not plain.startswith("arm1"):
            return plain.removeprefix(maker)
    return plain


@cache
def _index() -> dict[str, str]:
    return {reduced(name): key for key, core in lineages().items() for name in (*core.names, key)}


# ---- rates ---------------------------------------------------------------------------------------


@cache
def core_table() -> CoreTable:
    """Load the bundled ``cores.toml``."""
    return msgspec.convert(read_tables(bundled_folder() / "cores.toml"), CoreTable)


class CodeCluster(NamedTuple):
    """A group of cores with the same type and clock frequency."""

    core: str
    """The core type; may be any name that `find_core` accepts."""
    mhz: float
    cores: int = 1
    aes: bool = True
    """False if the SoC has neither ARMv8's AES instructions nor AES-NI."""
    copy_mb_s: float | None = None
    """Measured memcpy bandwidth of one thread, if known."""
    system_bits: int = 64
    """Word size of the system: 32 or 64 bits."""


class Rate(NamedTuple):
    """A rate and its 90% interval."""

    value: float
    low: float
    high: float

    @classmethod
    def within(cls, value: float, spread: float) -> Rate:
        """Return a rate with the interval from value/spread to value·spread."""
        return cls(value, value / spread, value * spread)

    @property
    def spread(self) -> float:
        """Factor between the rate and each end of its interval."""
        return math.sqrt(self.high / self.low)

    def times(self, other: Rate) -> Rate:
        """Return the product of this rate and another; their errors are assumed to be independent."""
        logs = math.hypot(math.log(self.spread), math.log(other.spread))
        return Rate.within(self.value * other.value, math.exp(logs))

    def over(self, other: Rate) -> Rate:
        """Return the ratio of this rate to another; their errors are assumed to be independent."""
        return self.times(Rate.within(1 / other.value, other.spread))


MEASURED_COPY_SPREAD = 1.25
"""Error factor of a measured memcpy bandwidth: boards with the same SoC have different memory chips."""


def core_rate(cluster: CodeCluster, code_class: CodeClass, table: CoreTable) -> CodeRate:
    """Return the rate per MHz of a cluster's cores.

    The rate of ``crypto`` depends on whether the cores have AES instructions.
    """
    key = find_core(cluster.core)
    without = code_class == "crypto" and not (cluster.aes and lineages()[key].aes)
    found: CodeRate = getattr(table.cores[key], "crypto_without_aes" if without else code_class)
    return found


def rate(cluster: CodeCluster, code_class: CodeClass, table: CoreTable | None = None) -> Rate:
    """Return the rate of one thread on one core of the cluster, in the unit that `UNITS` lists for the class.

    Raises `ConfigError` for an unknown core.

    >>> pi_4 = CodeCluster("cortex a72", 1800.0, 4)
    >>> 1800 < rate(pi_4, "integer").value < 2050
    True
    """
    table = table or core_table()
    if code_class == "copy" and cluster.copy_mb_s is not None:
        return Rate.within(cluster.copy_mb_s, MEASURED_COPY_SPREAD)
    known = core_rate(cluster, code_class, table)
    found = Rate.within(known.per_mhz * cluster.mhz, known.spread)
    return found.times(_narrow(cluster, known, code_class, table))


def _narrow(cluster: CodeCluster, known: CodeRate, code_class: CodeClass, table: CoreTable) -> Rate:
    """Return the rate of 32-bit code relative to that of 64-bit code.

    The ratio is 1 unless the cluster runs 32-bit code on 64-bit cores.
    """
    key = find_core(cluster.core)
    without = known is table.cores[key].crypto_without_aes
    law = table.arm32.get("crypto_without_aes" if without else code_class)
    if law is None or cluster.system_bits >= lineages()[key].bits:
        return Rate.within(1.0, 1.0)
    return Rate.within(law.per_mhz, law.spread)


def throughput(
    clusters: Sequence[CodeCluster],
    code_class: CodeClass,
    threads: int,
    table: CoreTable | None = None,
) -> Rate:
    """Return the total rate of ``threads`` busy threads, placed on the fastest cores first.

    More threads than cores do not increase the rate. Raises `ConfigError` if ``clusters`` is empty.
    """
    if not clusters:
        raise ConfigError("no cores: the profile lists no cpu.clusters")
    table = table or core_table()
    placed = _placed([(rate(each, code_class, table), each) for each in clusters], threads)
    n = sum(count for _, _, count in placed)
    if n == 1:
        return placed[0][0]
    total = sum(one.value * count for one, _, count in placed)
    mixed = unevenness([(one.value, count) for one, _, count in placed])
    law = table.parallel[code_class]
    shift = min(0.0, law.alone + law.mixed * mixed + law.doubling * math.log2(n))
    spread = _joint_spread(placed, total)
    joint = math.hypot(math.log(spread), math.log(law.spread))
    return Rate.within(total * math.exp(shift), math.exp(joint))


def unevenness(rates: Sequence[tuple[float, int]]) -> float:
    """Return the logarithm of the ratio of the arithmetic to the harmonic mean of the cores' rates.

    The result is 0 if all cores are equal. ``rates`` has a pair (rate of a core, number of cores) for each
    cluster.

    >>> unevenness([(2.0, 4)]), round(unevenness([(2.0, 4), (1.0, 4)]), 3)
    (0.0, 0.118)
    """
    n = sum(count for _, count in rates)
    total = math.fsum(value * count for value, count in rates)
    return math.log(total / n * math.fsum(count / value for value, count in rates) / n)


_Placed = tuple[Rate, CodeCluster, int]


def _placed(rated: Sequence[tuple[Rate, CodeCluster]], threads: int) -> list[_Placed]:
    """Return the clusters in use, the fastest first, each with its rate and its number of busy cores."""
    placed, left = [], max(1, threads)
    for one, cluster in sorted(rated, key=lambda pair: -pair[0].value):
        used = min(cluster.cores, left)
        left -= used
        placed += [(one, cluster, used)] if used else []
    return placed


def _joint_spread(placed: Sequence[_Placed], total: float) -> float:
    """Return the error factor of a sum of rates.

    Errors are assumed to be identical for cores of one type, and independent between core types.
    """
    by_core = sorted(placed, key=lambda item: find_core(item[1].core))
    logs = [
        sum(one.value * count / total * math.log(one.spread) for one, _, count in group)
        for _, group in groupby(by_core, key=lambda item: find_core(item[1].core))
    ]
    return math.exp(math.hypot(*logs))


def read_clusters(text: str, aes: bool = True) -> tuple[CodeCluster, ...]:
    """Parse clusters such as ``Cortex-A76@2400x4,Cortex-A55@1800x4``: core type, MHz and number of cores.

    The number of cores defaults to 1. Raises `ConfigError` if the text does not have this form or if a core
    is unknown.

    >>> [(c.mhz, c.cores) for c in read_clusters("Cortex-A76@2400x4,sifive,u74-mc@1500")]
    [(2400.0, 4), (1500.0, 1)]
    """
    clusters: list[CodeCluster] = []
    at = 0
    while at < len(text) or not clusters:
        found = _CLUSTER.match(text, at)
        if found is None or not MIN_MHZ <= float(found["mhz"]) <= MAX_MHZ or found["cores"] == "0":
            allowed = (
                "CORE@MHZ or CORE@MHZxCORES, joined by commas, such as Cortex-A76@2400x4,Cortex-A55@1800x4, "
                f"with MHZ from {MIN_MHZ:g} to {MAX_MHZ:g}"
            )
            raise ConfigError(f"--cores {shortened(text)!r}: must be {allowed}")
        core = find_core(found["core"])
        clusters.append(CodeCluster(core, float(found["mhz"]), int(found["cores"] or 1), aes))
        at = found.end()
    return tuple(clusters)


def clusters_of(device: Device) -> tuple[CodeCluster, ...]:
    """Return a device profile's clusters. Raises `ConfigError` if it lists none or if a core is unknown."""
    if not device.clusters:
        raise ConfigError(
            f"device {device.id!r}: its profile lists no cpu.clusters, so its cores are unknown"
        )
    bandwidth = None if device.memory is None else device.memory.bandwidth_gbytes_per_s
    aes = has_aes(device.soc or "")
    with as_config_error(f"device {device.id!r}: cpu.clusters", ConfigError):
        return tuple(
            CodeCluster(
                find_core(each.uarch),
                each.max_mhz,
                each.cores,
                aes,
                None if bandwidth is None else 1e3 * bandwidth,
            )
            for each in device.clusters
        )


# ---- this host -----------------------------------------------------------------------------------


def host_rate(host: Calibration, code_class: CodeClass) -> Rate:
    """Return the rate of one thread on a calibrated host.

    The rate's interval accounts for errors in unit conversion (`SCALE_SPREADS`) and for noise. Raises
    `ConfigError` if edgefl was installed without the C extension that measures the class.
    """
    found = host.measured.code.get(code_class)
    if found is None:
        raise ConfigError(f"this host's rate of {code_class} code is unknown: {NO_EXTENSION}")
    logs = math.hypot(math.log(SCALE_SPREADS[code_class]), 1.645 * found.cv)
    return Rate.within(found.median, math.exp(logs))


def relative(clusters: Sequence[CodeCluster], code_class: CodeClass, threads: int, host: Calibration) -> Rate:
    """Return the speed of ``threads`` threads on a device, relative to one thread of this host.

    This is the ratio of the host's time to the device's time for the same code of this class. Raises
    `ConfigError` in the same cases as `throughput` and `host_rate`.
    """
    return throughput(clusters, code_class, threads).over(host_rate(host, code_class))


# ---- systems on a chip ---------------------------------------------------------------------------


class _Socs(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    source: str
    without_aes: tuple[str, ...]
    cores: dict[str, str]


@cache
def _socs() -> _Socs:
    return msgspec.convert(read_tables(bundled_folder() / "code" / "socs.toml"), _Socs)


def soc_in(text: str) -> str | None:
    """Return the known SoC named in ``text``, the name of a board or SoC; None if no known SoC is named.

    >>> soc_in("Radxa ROCK 5C (RK3588S2)"), soc_in("my board")
    ('RK3588', None)
    """
    found = [name for name in _socs().cores if _pattern(name).search(text.lower())]
    return max(found, key=len, default=None)


def has_aes(text: str) -> bool:
    """Return False if the text names an SoC that is known to lack AES instructions."""
    return soc_in(text) not in _socs().without_aes


def soc_cores(soc: str) -> tuple[tuple[str, int], ...]:
    """Return the core types of an SoC, each with its number of cores, ordered by CPU id.

    >>> soc_cores("RK3399")
    (('Cortex-A53', 4), ('Cortex-A72', 2))
    """
    found = re.findall(r"(.+?)x(\d+)(?: |$)", _socs().cores[soc])
    return tuple((name, int(count)) for name, count in found)


@cache
def _pattern(soc: str) -> re.Pattern[str]:
    """Return a pattern that matches the words of the SoC's name if they occur consecutively.

    The last word may have a suffix that does not start with a digit.
    """
    words = re.findall(r"[a-z0-9]+", soc.lower())
    return re.compile(rf"(?<![a-z0-9]){'[^a-z0-9]+'.join(words)}(?![0-9])")
