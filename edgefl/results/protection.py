"""Cards of a report that state whom privacy noise and secure aggregation protect, and from whom."""

from __future__ import annotations

from typing import Any

import numpy as np

from edgefl.results import page
from edgefl.results.page import html_table
from edgefl.results.pictures import Curve, curves_picture
from edgefl.results.record import Record
from edgefl.results.spending import spending


def privacy_card(record: Record) -> list[str]:
    """Return the card with the ε of a private run; no card for any other run."""
    if (found := spending(record)) is None:
        return []
    made, curves = record.versions, []
    if len(made["version"]) and np.isfinite(found.epsilon[-1]):
        curves = [Curve("c1", "ε", made["at_s"], found.epsilon[made["version"]])]
    drawn = curves_picture(curves, "at_s", "ε", ends=True, share=False)
    return [page.figure("Privacy over emulated time", found.says, drawn, found.says)]


def secure_card(found: dict[str, Any] | None) -> list[str]:
    """Return the card that states whom secure aggregation protects, from whom, and at what cost."""
    if found is None:
        return []
    rows = [["Added to an upload", f"{found['share_bytes_per_trip']:,} bytes"]]
    about = f"The server learns weighted sums of at least {found['least_clients']} clients' updates but no "
    if found["kind"] == "trusted":
        about += "single update: a separate process decrypts the updates and releases their sum. "
    else:
        pairwise = found["kind"] == "pairwise"
        if pairwise:
            about += "single update; more than half of a round's clients unmask its sum together. "
        else:
            about += f"single update, even together with {found['private']} of {found['holders']} holders; "
            about += f"{found['recover']} of them unmask a sum. "
        about += (
            f"Elements are limited to ±{found['clip']:g} and rounded to multiples of {found['step']:.3g}, "
        )
        about += f"weights to 1/{found['resolution']} of the largest. "
        who = "A client that unmasks" if pairwise else "A holder"
        rows += [
            [f"{who} receives per update", f"{found['holder_bytes_per_update']:,} bytes"],
            [f"{who} sends per version", f"{found['holder_bytes_per_version']:,} bytes"],
        ]
        if "exchange_s" in found:
            rows.append(["Exchange that unmasks a sum, mean", f"{found['exchange_s']['mean']:.3g} s"])
    about += "Sums and models themselves are not protected."
    rows += [[f"Masking on {name}", f"{seconds:.3g} s"] for name, seconds in found["masking_s"].items()]
    return [page.card("Secure aggregation", about, html_table(["Cost", ">Amount"], rows), wide=False)]
