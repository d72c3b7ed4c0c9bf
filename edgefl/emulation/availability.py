"""When the devices of a fleet are available, from a file: one entry a device, given out by the seed.

JSON: a list of ``{"intervals_s": [[0, 3600], [7200, 9000]], "period_s": 86400}``, times in emulated seconds,
as in a device profile's ``[availability]``. FedScale's availability traces say the same.
"""

from __future__ import annotations

import functools
from pathlib import Path

import msgspec

from edgefl.emulation.profile_checks import unfit_availability
from edgefl.emulation.schema import Availability
from edgefl.errors import ProfileError


@functools.cache
def read_availability(path: str) -> tuple[Availability, ...]:
    """The entries of such a file. `ProfileError`, one line, where it is not one."""
    try:
        entries = msgspec.json.decode(Path(path).read_bytes(), type=tuple[Availability, ...])
    except OSError as error:
        raise ProfileError(f"availability file {path!r} cannot be read: {error.strerror}") from None
    except (msgspec.DecodeError, RecursionError) as error:
        raise ProfileError(f"availability file {path!r}: {error}") from None
    if not entries:
        raise ProfileError(f"availability file {path!r}: got no entries; allowed: at least one")
    for at, entry in enumerate(entries):
        for key, got, allowed in unfit_availability(entry):
            where = f"availability file {path!r}: entry {at}: {key.removeprefix('availability.')}"
            raise ProfileError(f"{where}: got {got}; allowed: {allowed}")
    return entries
