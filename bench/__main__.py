"""`python -m bench NAME [--json] [--quick]`, `python -m bench list|report`.

`detection` also takes `--minutes M` (goes on where it stopped), `--model DIR` and `--costs` (these
rows alone, measured again); `proofs` takes `--minutes M` for its honest windows. Both take
`--device cpu|cuda:N`: where models generate and replay. What a GPU gives is a bench of another name
(`detection-cuda`), to be kept apart. `demo` takes `--only rest|busy|one-core`, `orchestrator` takes
`--only ROW`, `settling` takes `--files N`. `few` takes `--minutes M` and `--write`.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from bench.form import device_of, result, show
from prime_core.errors import PrimeError

BENCHES = {
    "learning": "Samples to a reward: synchronous, stale, with liars; and ablations (CPU hours)",
    "trainer": "Packing, overhead, tokens a second next to TRL, one gradient on any ranks",
    "researcher": "Whole GRPO steps of `trainer local` next to TRL's: time, memory, lines",
    "engine": "What proofs, lease slots and new policies cost an engine",
    "plan": "Memory of a training step as planned, over what a real one takes",
    "plan_qwq": "What `trainer plan` says of QwQ-32B on 8 to 64 cards (10 minutes)",
    "gpu": "Tokens a second and MFU of the trainer on one GPU, next to prime-rl's published figure",
    "environments": "Programs a second in the sandbox, graders",
    "file_times": "Files' times on a live devnet, one of its nodes slowed fourfold",
    "smol_network": "The whole network with SmolLM2-135M-Instruct: memory of each process",
    "smol_learning": "SmolLM2-135M-Instruct learns to use a tool on a network (half an hour)",
    "demo": "Nine whole demos from a clean checkout: at rest, on busy cores, on one core (an hour)",
    "gas": "Gas of each act in a pool of 400 nodes, next to the ancestor's",
    "detection": "What each lie costs to find, and what honest files cost to check",
    "few": "Limits of fewer than 8 replayed rows, and what they find of 8-bit weights",
    "margins": "After how many files sums of sampling margins find a node that proves honestly",
    "exact": "What proof passes of an exact class find, and what they do not",
    "proofs": "Cost and soundness of activation proofs",
    "multiturn": "What conversations cost to verify, and honest ones of which none is rejected",
    "attacks": "What attacks on the chain layer and on leases cost an honest party",
    "strangers": "What parties without stake cost an orchestrator and a fetch",
    "orchestrator": "What two API processes carry: heartbeats, files, verdicts, watchers, history",
    "settling": "One epoch of up to 1,000,000 files: settled, rebuilt, claimed (an hour)",
    "faults": "200 nodes under 20 faults of 18 kinds: throughput kept, what is lost (half an hour)",
    "population": "10,000 nodes for a simulated day: trainer, staleness, cheats, validators, pay",
    "cli": "CPU seconds of the commands that people and shells call often",
    "broadcast": "Weights to many machines, next to SHARDCAST: whole, by delta, through relays",
}


def _options(words: list[str]) -> tuple[list[str], dict[str, Any]]:
    """Words without the options of two benches, and these. An option without its value, or
    with one that is not a number, stays where it is and is refused as an unknown flag."""
    kinds: dict[str, Callable[[str], Any]] = {}
    if {"detection", "proofs", "few", "margins"} & {*words}:
        kinds["--minutes"] = float
    if {"detection", "proofs"} & {*words}:
        kinds["--device"] = str
    if "detection" in words:
        kinds["--model"] = Path
    if {"demo", "orchestrator"} & {*words}:
        kinds["--only"] = str
    if "settling" in words:
        kinds["--files"] = int
    rest, options = list(words), {}
    for option, kind in kinds.items():
        at = rest.index(option) if option in rest else -1
        if 0 <= at < len(rest) - 1:
            with suppress(ValueError):
                options[option[2:]] = kind(rest[at + 1])
                del rest[at : at + 2]
    if "detection" in words and "--costs" in rest:
        rest.remove("--costs")
        options["costs"] = True
    if "few" in words and "--write" in rest:
        rest.remove("--write")
        options["write"] = True
    return rest, options


def main(words: list[str]) -> int:
    """Exit code 0 only if every row with a bar is within it."""
    words, options = _options(words)
    names = [word for word in words if not word.startswith("--")]
    flags = {word for word in words if word.startswith("--")}
    if names == ["list"]:
        for name, what in BENCHES.items():
            print(f"{name:12} {what}")
        return 0
    if names == ["report"]:
        from bench.report import PAGE, write

        print(f"{PAGE}: {write()} benches")
        return 0
    if len(names) != 1 or names[0] not in BENCHES or flags - {"--json", "--quick"}:
        known = "|".join((*BENCHES, "list", "report"))
        print(f"usage: python -m bench {known} [--json] [--quick]", file=sys.stderr)
        return 64
    for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ.setdefault(variable, "1")  # before numpy is imported: one pinned thread
    module = importlib.import_module(f"bench.{names[0]}")
    quick = "--quick" in flags
    try:
        device = device_of(options.get("device", "cpu"))
        rows = module.run(quick, **options)
        found = result(names[0], rows, module.PACKAGES, quick, device)
    except PrimeError as error:
        print(f"bench: {error}", file=sys.stderr)
        return error.exit_code
    show(found, "--json" in flags)
    return 0 if found["ok"] else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
