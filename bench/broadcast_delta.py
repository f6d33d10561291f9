"""Deltas between consecutive policies: how small, how fast, against what their entropy allows.

The made-up model has 100 M parameters drawn from N(0, 0.02) with fp32 masters; ten AdamW steps with
noise gradients warm its moments up, the policy is published in bf16, one more step follows, and the
policy is published again. The noise makes every number move by its full learning rate times a
normal variable of spread 0.32: real gradients, which are zero in many places, change fewer.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bench.broadcast_parts import Child, Stage, settle
from bench.broadcast_whole import FILE, require_same
from prime_broadcast.files import open_regular, read_at
from prime_broadcast.tensors import read_tensors
from prime_verify.proofs.sketch import float_to_bf16

RATES = (1e-6, 3e-6, 1e-5)
WARM_UP = 10
BETA_1, BETA_2, EPSILON, DECAY = 0.9, 0.999, 1e-8, 0.01
"""AdamW (Loshchilov and Hutter, arXiv 1711.05101) with its usual constants."""
Floats = NDArray[np.float32]


def shapes(scale: int) -> dict[str, tuple[int, ...]]:
    """Tensors of a transformer of 100.6 M parameters (`scale` 1), or about 1/scale² of that."""
    hidden, inner, layers, words = 768 // scale, 2048 // scale, 12, 20480 // scale
    found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (words, hidden)}
    for layer in range(layers):
        at = f"model.layers.{layer}"
        for name in ("q", "k", "v", "o"):
            found[f"{at}.self_attn.{name}_proj.weight"] = (hidden, hidden)
        for name in ("gate", "up"):
            found[f"{at}.mlp.{name}_proj.weight"] = (inner, hidden)
        found[f"{at}.mlp.down_proj.weight"] = (hidden, inner)
    return found


def adamw_pair(masters: Floats, gradients: Iterator[Floats], rate: float) -> tuple[Floats, Floats]:
    """fp32 masters (n,) → those after WARM_UP steps and those one step later."""
    weights, first, second = masters.copy(), np.zeros_like(masters), np.zeros_like(masters)
    before = weights
    for step, gradient in enumerate(gradients, start=1):
        if step == WARM_UP + 1:
            before = weights.copy()
        first += np.float32(1 - BETA_1) * (gradient - first)
        second += np.float32(1 - BETA_2) * (gradient * gradient - second)
        size = np.float32(rate / (1 - BETA_1**step))
        spread = np.sqrt(second / np.float32(1 - BETA_2**step)) + np.float32(EPSILON)
        weights *= np.float32(1 - rate * DECAY)
        weights -= size * first / spread
    return before, weights


def write_pair(folder: Path, rate: float, scale: int) -> tuple[Path, Path]:
    """Two checkpoint folders, one AdamW step apart, as safetensors in bf16. The same seed for all
    rates: the same weights and gradients."""
    old, new = folder / "old", folder / "new"
    layout = shapes(scale)
    header, position = {}, 0
    for name, shape in layout.items():
        end = position + 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [position, end]}
        position = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    for path in (old, new):
        path.mkdir(parents=True)
        (path / "config.json").write_text(json.dumps({"hidden_size": 768 // scale}) + "\n")
    with (old / FILE).open("wb") as first, (new / FILE).open("wb") as second:
        for file in (first, second):
            file.write(len(text).to_bytes(8, "little") + text)
        for number, shape in enumerate(layout.values()):
            rng = np.random.default_rng([5, number])
            count = math.prod(shape)
            masters = rng.standard_normal(count, np.float32) * np.float32(0.02)
            noise = (rng.standard_normal(count, np.float32) for _ in range(WARM_UP + 1))
            before, after = adamw_pair(masters, noise, rate)
            first.write(float_to_bf16(before).tobytes())
            second.write(float_to_bf16(after).tobytes())
    return old, new


def entropy_bytes(old: Path, new: Path) -> float:
    """What positions and differences of the changed words need at least, if they are independent:
    per tensor pair n·H(share changed) + changed·H(differences), in bytes."""
    bits = 0.0
    with open_regular(old) as a, open_regular(new) as b:
        known = {tensor.name: tensor for tensor in read_tensors(a)}
        for tensor in read_tensors(b):
            base = known.get(tensor.name)
            if base is None or (base.dtype, base.shape) != (tensor.dtype, tensor.shape):
                bits += 8 * tensor.size
                continue
            word = np.dtype(f"<u{tensor.width}")
            before = np.frombuffer(read_at(a, base.offset, base.size), word)
            after = np.frombuffer(read_at(b, tensor.offset, tensor.size), word)
            changed = np.flatnonzero(before != after)
            bits += _bits(np.array([changed.size, before.size - changed.size]))
            bits += _bits(np.unique(after[changed] - before[changed], return_counts=True)[1])
    return bits / 8


def _bits(counts: NDArray[np.int64]) -> float:
    """Bits to write as many symbols as `counts` sums to, each at its own rate."""
    counts = counts[counts > 0]
    total = counts.sum()
    return float(-(counts * np.log2(counts / total)).sum()) if total else 0.0


@dataclass
class Measured:
    """One pair of policies. Rates in bytes of weights a second, one a repetition."""

    weights: int
    delta: int
    entropy: float
    encode: list[float] = field(default_factory=list)
    apply: list[float] = field(default_factory=list)

    @property
    def ratio(self) -> float:
        return self.weights / self.delta

    def rates(self) -> tuple[float, float]:
        """(encode, apply), medians."""
        return statistics.median(self.encode), statistics.median(self.apply)


def measure(
    stage: Stage, trainer: Child, node: Child, old: Path, new: Path, repeats: int
) -> Measured:
    """Encodes in `trainer`, applies in `node`, `repeats` times each, and compares every bit."""
    names = sorted(path.name for path in new.iterdir())
    weights = sum((new / name).stat().st_size for name in names)
    entropy = sum(
        entropy_bytes(old / name, new / name) for name in names if name.endswith(".safetensors")
    )
    found = Measured(weights, 0, entropy)
    for _ in range(repeats):
        path, into = stage.fresh("delta"), stage.fresh("applied")
        settle(2 * weights)
        made = trainer.ask(do="encode", base=str(old), new=str(new), into=str(path))
        settle(2 * weights)
        done = node.ask(
            do="apply", base=str(old), new=str(new), delta_path=str(path), into=str(into)
        )
        for name in names:
            require_same(new / name, into / name)
            (into / name).unlink()
        into.rmdir()
        path.unlink()
        found.delta = int(made["bytes"])
        found.encode.append(weights / made["seconds"])
        found.apply.append(weights / done["seconds"])
    return found
