"""Predicts networks of timm on this host by a fit to the measuring kit's parts, and measures them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import msgspec

from edgefl.devices.fit import HeldOutPrediction, Row, predicted
from edgefl.devices.kit_result import KitResult, fit_kit
from edgefl.devices.measurements import IMAGE
from edgefl.learning.timm_networks import timm_network
from edgefl.learning.work import step_work
from edgefl.measure import kit

BATCH: Final = 4
NETWORK_S: Final = 8.0
"""Maximum seconds of a network's repeated steps."""
NETWORKS: Final = (
    "resnet18", "resnet50", "resnext50_32x4d", "vgg11", "densenet121", "inception_v3", "dla34", "repvgg_a0",
    "mobilenetv2_100", "mobilenetv3_large_100", "efficientnet_b0", "tf_efficientnetv2_b0", "mnasnet_100",
    "ghostnet_100", "ghostnetv2_100", "regnetx_008", "regnety_016", "lcnet_100", "convnext_atto",
    "convnext_tiny", "inception_next_tiny", "vit_tiny_patch16_224", "vit_small_patch16_224",
    "swin_tiny_patch4_window7_224", "mixer_s16_224", "resmlp_12_224", "poolformer_s12", "mobilevit_s",
    "mobilevitv2_100", "fastvit_t8", "edgenext_small", "levit_128", "pvt_v2_b0",
)  # fmt: skip


def measure(
    threads: int = 1,
    networks: Sequence[str] = NETWORKS,
    tell: Callable[[str], None] = lambda line: None,
) -> list[HeldOutPrediction]:
    """Measure the kit and the networks here on ``threads`` threads of torch; one thread: by CPU time.

    Returns each network with its prediction by a fit to the kit's parts.
    """
    result = kit.measure(kit.MINUTES, threads, tell)
    found = fit_kit(msgspec.convert(result, KitResult).rows())
    unseen = []
    for network in networks:
        row = network_row(network, threads)
        unseen.append(predicted(found.model, row))
        tell(f"{network}: {row.seconds:.3f} s, predicted ÷ measured {unseen[-1].factor:.2f}")
    return unseen


def network_row(network: str, threads: int) -> Row:
    """Return the work of a timm network's training step, and its seconds here."""
    module = timm_network(network, IMAGE, 1000)
    part = kit.Part(lambda: module, IMAGE, BATCH)
    took = kit.timed(kit.stepper(part), NETWORK_S)
    work = step_work(module, IMAGE, BATCH, loss=kit.loss)
    return Row(network=network, work=work, seconds=took["cpu_s" if threads == 1 else "wall_s"])
