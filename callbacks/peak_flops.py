"""The most floating-point operations a second that a card can do, from its maker's data sheet."""

from __future__ import annotations

import torch

# Part of the name that torch gives (lower case), in the order to look: 16-bit, TF32 and fp32 products in 1e12
# operations a second, dense (data sheets often print twice as much, for sparse matrices), with fp32 accumulation.
# None: the card has no such units. Sources: the NVIDIA data sheets of H200, H100, A100, A800, A40, A30, A10, L40S, L40,
# L4, T4, V100 and RTX A6000; NVIDIA's HGX B200 page; the Ada and Ampere GA102 white papers for RTX 4090 and 3090; AMD's
# MI300X data sheet. They leave no margin: no real program reaches them.
_CARDS: dict[str, tuple[float, float | None, float]] = {
    "b200": (2250.0, 1125.0, 75.0),
    "h200 nvl": (835.5, 417.5, 60.0),
    "h200": (989.4, 494.7, 66.9),
    "h100 nvl": (835.5, 417.5, 60.0),
    "h100 pcie": (756.0, 378.0, 51.2),
    "h100": (989.4, 494.7, 66.9),
    "h800": (989.4, 494.7, 66.9),
    "a100": (312.0, 156.0, 19.5),
    "a800": (312.0, 156.0, 19.5),
    "a6000": (154.8, 77.4, 38.7),
    "a40": (149.7, 74.8, 37.4),
    "a30": (165.0, 82.0, 10.3),
    "nvidia a10": (125.0, 62.5, 31.2),
    "l40s": (362.0, 183.0, 91.6),
    "l40": (181.0, 90.5, 90.5),
    "nvidia l4": (121.0, 60.0, 30.3),
    "tesla t4": (65.0, None, 8.1),
    "v100-sxm": (125.0, None, 15.7),
    "v100-pcie": (112.0, None, 14.0),
    "rtx 4090": (165.2, 82.6, 82.6),
    "rtx 3090": (71.0, 35.6, 35.6),
    "mi300x": (1307.4, 653.7, 163.4),
}
# Another card whose name contains one of the above, with other numbers.
_OTHERS = ("gb200", "a10g", "rtx 3090 ti", "rtx 4090 d", "v100s", "rtx 6000", "a100x")


def peak_flops(card: str, precision: str) -> float | None:
    """Operations per second of the card's fastest unit for a precision; ``None`` for one that is not known here.

    Args:
        card: As ``torch.cuda.get_device_name`` has it.
        precision: As ``Trainer(precision=...)``: 16-bit units for ``bf16-mixed``, ``16-true`` and the like; for
            ``32-true`` TF32 units where ``torch.set_float32_matmul_precision`` allows them, else fp32.

    Example::

        >>> peak_flops("NVIDIA H100 80GB HBM3", "bf16-mixed")
        989400000000000.0
    """
    name = card.lower()
    if any(other in name for other in _OTHERS):
        return None
    found = next((speeds for part, speeds in _CARDS.items() if part in name), None)
    if found is None or precision.startswith("64"):
        return None
    half, tf32, single = found
    if "16" in precision:
        return half * 1e12
    coarse = tf32 is not None and torch.get_float32_matmul_precision() != "highest"
    return (tf32 if coarse and tf32 is not None else single) * 1e12
