"""Relatives of a policy that a liar may run in its place, trained by the script that trains the
text model (textmodel.py), on the same text and with the policy's own tokenizer.

    stepped   the policy after real optimizer steps, and the older one that it came from
    smaller   a model of an eighth of the text model's size, trained from nothing

Kept under var/bench/kin by the policy's weights; made at the first call (minutes on one core).
"""

from __future__ import annotations

import copy
import json
import sys
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench.form import ROOT
from bench.textmodel import STEPS, adamw, build_model, draws, encoded, save, step, train
from prime_core.errors import UnavailableError
from prime_engine.folder import end_tokens

KIN = ROOT / "var" / "bench" / "kin"
OLDER = "older"
AGES, EXPONENTS = (1, 4, 10), (4, 5, 6)
"""Steps, and their rates 1e-4, 1e-5, 1e-6."""
SETTLING = 40
"""Steps at 1e-4 from the given weights to the older policy: AdamW's moments are then those of a
run under way, and the float32 weights lie between the values that bfloat16 has."""
SMALL_HIDDEN, SMALL_LAYERS = 128, 2


def weights_digest(folder: Path) -> str:
    """SHA-256 of a policy folder's weights."""
    digest = sha256()
    for path in sorted(folder.glob("*.safetensors")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _sibling(folder: Path) -> Path:
    found = KIN / weights_digest(folder)[:12]
    found.mkdir(parents=True, exist_ok=True)
    return found


def _read(folder: Path) -> tuple[Any, Any, frozenset[int]]:
    """(config, tokenizer, end tokens) of a policy folder. Raises UnavailableError without any."""
    from transformers import AutoConfig, AutoTokenizer

    config = AutoConfig.from_pretrained(folder, local_files_only=True)
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    ends = end_tokens(folder, config)
    if not ends:
        raise UnavailableError(f"{folder} names no end token: what is trained on would never end")
    return config, tokenizer, ends


def stepped(folder: Path) -> Path:
    """The folder with `older` and, for each age and rate, `1_1e4` to `10_1e6`: the policy so many
    optimizer steps later, all of them from `older` on the same text."""
    root = _sibling(folder)
    done = root / "steps.json"
    if done.exists():
        return root
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    print(f"bench: optimizer steps from {folder} (minutes, once)", file=sys.stderr, flush=True)
    torch.set_num_threads(1)
    _, tokenizer, ends = _read(folder)
    tokens = encoded(tokenizer, min(ends))
    model: Any = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, local_files_only=True, use_safetensors=True
    )
    by = draws(1)
    settled = adamw(model, 1e-4)
    losses = [step(model, settled, tokens, by) for _ in range(SETTLING)]
    _fresh(model, tokenizer, root / OLDER)
    moved: dict[str, float] = {}
    for exponent in EXPONENTS:
        later, order = copy.deepcopy(model), torch.Generator()
        order.set_state(by.get_state())
        optimizer = adamw(later, 1e-4)
        optimizer.load_state_dict(copy.deepcopy(settled.state_dict()))
        for group in optimizer.param_groups:
            group["lr"] = 10.0**-exponent
        for age in range(1, max(AGES) + 1):
            step(later, optimizer, tokens, order)
            if age in AGES:
                name = f"{age}_1e{exponent}"
                _fresh(later, tokenizer, root / name)
                moved[name] = _distance(model, later)
    done.write_text(json.dumps({"loss": losses[-1], "mean_move": moved}))
    return root


def _fresh(model: Any, tokenizer: Any, folder: Path) -> None:
    if not folder.exists():  # of a run that was cut off
        save(model, tokenizer, folder)


def _distance(one: Any, other: Any) -> float:
    """Mean change of a weight."""
    pairs: list[tuple[Tensor, Tensor]] = list(
        zip(one.parameters(), other.parameters(), strict=True)
    )
    moved = sum(float((a - b).detach().abs().sum()) for a, b in pairs)
    return moved / sum(a.numel() for a, _ in pairs)


def smaller(folder: Path, steps: int = STEPS) -> Path:
    """The folder of a small model for the tokenizer and end tokens of `folder`'s."""
    root = _sibling(folder) / "small"
    if not root.exists():
        print(f"bench: training {root} (minutes, once)", file=sys.stderr, flush=True)
        torch.set_num_threads(1)
        config, tokenizer, ends = _read(folder)
        model = build_model(config.vocab_size, SMALL_HIDDEN, SMALL_LAYERS, sorted(ends))
        loss = train(model, encoded(tokenizer, min(ends)), steps)
        save(model, tokenizer, root)
        print(f"bench: {loss:.3f} nats a token", file=sys.stderr)
    return root
