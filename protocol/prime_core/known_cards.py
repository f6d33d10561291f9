"""Known cards: names, memory, dense int8 rate; a node's claims are compared with them.

Rates are the vendor's dense int8 tensor operations per second, divided by two: a multiply-add is
two operations. Vendors quote them at boost clock, so no card runs much faster. How close the proof
of cards comes on each card is measured by the part `cards` of the GPU kit (scripts/gpu_kit.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from prime_core.errors import PolicyError
from prime_core.node import Gpu

FASTEST = 1.15
"""Most that a measured rate may be of the vendor's: boost clocks, and the subtracted round trip."""
MOST_MEMORY = 1.03
"""Most that a claimed memory may be of the known one; drivers and error correction take some."""
LEAST_MEMORY = 0.90
CPU = "CPU"
"""Model that a machine without cards claims."""


@dataclass(frozen=True)
class KnownCard:
    """`models` are names as NVML shows them; `memory_mb` in MiB, for GDDR6 without error
    correction, which takes a sixteenth; `tera` in 10¹² multiply-adds per second; `bandwidth` of the
    memory in 10⁹ bytes per second. A card that is not `judged` has no rate to compare with."""

    kind: str
    models: tuple[str, ...]
    memory_mb: int
    tera: float
    bandwidth: int
    source: str
    judged: bool = True


_HOPPER = "NVIDIA H100 data sheet, 2024"
_KNOWN = (
    KnownCard("a100-40gb", ("NVIDIA A100-SXM4-40GB", "NVIDIA A100-PCIE-40GB"), 40_960, 312.0, 1555,
              "NVIDIA A100 data sheet, 2022"),
    KnownCard("a100-80gb", ("NVIDIA A100-SXM4-80GB", "NVIDIA A100 80GB PCIe"), 81_920, 312.0, 1935,
              "NVIDIA A100 data sheet, 2022"),
    KnownCard("h100-sxm", ("NVIDIA H100 80GB HBM3",), 81_559, 989.5, 3350, _HOPPER),
    KnownCard("h100-pcie", ("NVIDIA H100 PCIe",), 81_559, 756.5, 2000, _HOPPER),
    KnownCard("h100-nvl", ("NVIDIA H100 NVL",), 95_830, 835.5, 3900, _HOPPER),
    KnownCard("h200", ("NVIDIA H200",), 143_771, 989.5, 4800, "NVIDIA H200 data sheet, 2024"),
    KnownCard("h200-nvl", ("NVIDIA H200 NVL",), 143_771, 835.5, 4800,
              "NVIDIA H200 data sheet, 2024"),
    KnownCard("b200", ("NVIDIA B200",), 183_359, 2250.0, 8000, "NVIDIA DGX B200 data sheet, 2024"),
    KnownCard("l4", ("NVIDIA L4",), 24_564, 121.0, 300, "NVIDIA L4 data sheet, 2023"),
    KnownCard("l40", ("NVIDIA L40",), 49_140, 181.0, 864, "NVIDIA L40 data sheet, 2023"),
    KnownCard("l40s", ("NVIDIA L40S",), 49_140, 366.5, 864, "NVIDIA L40S data sheet, 2023"),
    KnownCard("a40", ("NVIDIA A40",), 49_140, 149.7, 696, "NVIDIA A40 data sheet, 2021"),
    KnownCard("rtx-a6000", ("NVIDIA RTX A6000",), 49_140, 154.8, 768,
              "NVIDIA Ampere GA102 white paper, 2021"),
    KnownCard("rtx-6000-ada", ("NVIDIA RTX 6000 Ada Generation",), 49_140, 364.2, 960,
              "NVIDIA Ada architecture white paper, 2023"),
    KnownCard("rtx-3090", ("NVIDIA GeForce RTX 3090",), 24_576, 142.0, 936,
              "NVIDIA Ampere GA102 white paper, 2021"),
    KnownCard("rtx-4090", ("NVIDIA GeForce RTX 4090",), 24_564, 330.3, 1008,
              "NVIDIA Ada architecture white paper, 2023"),
    KnownCard("rtx-5090", ("NVIDIA GeForce RTX 5090",), 32_607, 419.0, 1792,
              "NVIDIA RTX Blackwell white paper, 2025"),
    KnownCard("cpu", (CPU,), 0, 0.05, 0, "only for trials: a processor's rate is not judged",
              judged=False),
)  # fmt: skip
KNOWN = {card.kind: card for card in _KNOWN}
FAMILIES = {
    "a100": ("a100-40gb", "a100-80gb"),
    "h100": ("h100-sxm", "h100-pcie", "h100-nvl"),
    "h200": ("h200", "h200-nvl"),
}
"""Kinds of cards that share limits of honest drift: one chip in several housings. A kind that is
not listed is a family of its own."""
_FAMILY_OF = {
    model: next((family for family, kinds in FAMILIES.items() if card.kind in kinds), card.kind)
    for card in _KNOWN
    for model in card.models
}


def family_of(device: str) -> str:
    """Returns the family of a device by its name, as files and NVML state it. A card that is not
    known, or a processor, is a family of its own: its name."""
    return _FAMILY_OF.get(device, device)


def is_gpu(device: str) -> bool:
    """Whether a device that a file or an engine names is a card: neither a processor nor a name
    that could be read as another one with the suffix of exact setups (replay_checks._named)."""
    words = device.lower().split()
    return bool(words) and words[-1] != "exact" and not words[0].startswith("cpu")


def known_card(cards: Sequence[Gpu]) -> KnownCard:
    """Returns what all of the claimed cards are. Raises PolicyError if there is none, they differ,
    one is not known, or one claims memory that such a card does not have."""
    models = sorted({card.model for card in cards})
    if len(models) != 1:
        found = ", ".join(models) or "none"
        raise PolicyError(f"a proof of cards takes cards of one model, and these are {found}")
    known = next((one for one in KNOWN.values() if models[0] in one.models), None)
    if known is None:
        raise PolicyError(
            f"the card {models[0]!r} is not in the table of known cards, so its rate cannot be "
            "judged: ask the pool's operator to add it"
        )
    least, most = LEAST_MEMORY * known.memory_mb, MOST_MEMORY * known.memory_mb
    for card in cards:
        if known.judged and not least <= card.memory_mb <= most:
            raise PolicyError(
                f"a card {card.model} has {known.memory_mb} MiB of memory, and this one claims "
                f"{card.memory_mb} MiB"
            )
    return known


def check_rate(known: KnownCard, cards: int, tera: float, least_share: float) -> None:
    """Compares a measured rate, in 10¹² multiply-adds per second and card, with the known one.

    Raises PolicyError with the numbers if it is below `least_share` of the vendor's or above
    FASTEST times it.
    """
    if not known.judged:
        return
    least, most = least_share * known.tera, FASTEST * known.tera
    named = f"{cards} x {known.kind}" if cards > 1 else known.kind
    numbers = (
        f"the proof of {named} measured {tera:.1f} tera multiply-adds a second on each card, and "
        f"this pool expects {least:.1f} to {most:.1f} of such a card"
    )
    if tera < least:
        raise PolicyError(
            f"{numbers}: there are fewer or slower cards than claimed, other work runs on them, or "
            "they are throttled; stop other work, and prove them again"
        )
    if tera > most:
        raise PolicyError(f"{numbers}: it is another card than claimed; name the one there is")
