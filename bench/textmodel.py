"""A small language model for the detection bench: `python -m bench.textmodel [--out DIR]`.

Qwen3-shaped, 3.4 M parameters, one token a character, trained for some minutes on English that
every Python installation carries (`pydoc_data.topics`): its text is neither one-hot nor flat.
Before it is written, OUTLIERS dimensions of the final norm are scaled up by OUTLIER_SCALE and their
columns of the LM head down by as much: the same logits, and states with the outlier dimensions that
large trained models have.
"""

from __future__ import annotations

import argparse
import copy
import math
import pydoc_data.topics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench.form import ROOT
from prime_engine.linears import native_bfloat16

FOLDER = ROOT / "var" / "bench" / "textmodel"
END = "<end>"
UNKNOWN = "<unk>"
HIDDEN, LAYERS = 256, 4
CONTEXT, BATCH, STEPS = 192, 24, 360
PEAK_LR = 3e-3
OUTLIERS, OUTLIER_SCALE = 3, 16.0
SEED = 0


def corpus() -> str:
    """The text, topic by topic."""
    topics: dict[str, str] = pydoc_data.topics.topics
    return END.join(text.encode("ascii", "replace").decode() for text in topics.values())


def build_tokenizer() -> Any:
    """One token a printable character. A transformers fast tokenizer."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    pieces = [END, UNKNOWN, "\n", *map(chr, range(32, 127))]
    core = Tokenizer(models.WordLevel({p: i for i, p in enumerate(pieces)}, unk_token=UNKNOWN))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    core.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token=END, pad_token=END, unk_token=UNKNOWN
    )


def build_model(
    vocabulary: int, hidden: int = HIDDEN, layers: int = LAYERS, ends: Sequence[int] = (0,)
) -> Any:
    """The untrained model, float32; it ends at the first of `ends`."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(SEED)
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=vocabulary,
            hidden_size=hidden,
            intermediate_size=3 * hidden,
            num_hidden_layers=layers,
            num_attention_heads=hidden // 32,
            num_key_value_heads=hidden // 64,
            head_dim=32,
            max_position_embeddings=1024,
            tie_word_embeddings=False,
            eos_token_id=ends[0] if len(ends) == 1 else list(ends),
            pad_token_id=ends[0],
            bos_token_id=None,
        )
    )


def adamw(model: Any, rate: float) -> torch.optim.AdamW:
    """The optimizer of this script, for all of `model`."""
    return torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.95))


def draws(seed: int = SEED) -> torch.Generator:
    """What stretches of text are drawn by."""
    return torch.Generator().manual_seed(seed)


def step(
    model: Any, optimizer: torch.optim.Optimizer, tokens: Tensor, by: torch.Generator
) -> float:
    """One optimizer step on BATCH random stretches of `tokens`; the loss before it."""
    starts = torch.randint(0, len(tokens) - CONTEXT - 1, (BATCH,), generator=by)
    ids = torch.stack([tokens[start : start + CONTEXT] for start in starts.tolist()])
    # Without bfloat16 instructions autocast takes ten times as long as float32.
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=native_bfloat16()):
        loss = model(input_ids=ids, labels=ids).loss
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return float(loss.item())


def train(model: Any, tokens: Tensor, steps: int) -> float:
    """AdamW with warm-up and cosine decay on random stretches of `tokens`; the last loss in nats
    a token (mean of the last 20 steps)."""
    optimizer, by = adamw(model, PEAK_LR), draws()
    losses: list[float] = []
    for number in range(steps):
        share = min(1.0, (number + 1) / 30) * 0.5 * (1 + math.cos(math.pi * number / steps))
        for group in optimizer.param_groups:
            group["lr"] = PEAK_LR * max(share, 0.02)
        losses.append(step(model, optimizer, tokens, by))
        if number % 60 == 0:
            print(f"step {number}: {losses[-1]:.3f} nats a token", file=sys.stderr, flush=True)
    return sum(losses[-20:]) / len(losses[-20:])


def add_outliers(model: Any) -> None:
    """Scales the largest dimensions of the final norm up, the LM head's columns down: no logit
    changes."""
    norm, head = model.model.norm.weight, model.lm_head.weight
    with torch.no_grad():
        chosen = norm.abs().topk(OUTLIERS).indices
        norm[chosen] *= OUTLIER_SCALE
        head[:, chosen] /= OUTLIER_SCALE


def encoded(tokenizer: Any, end: int) -> Tensor:
    """The corpus as one row of tokens, `end` after each topic."""
    rows = (tokenizer.encode(part, add_special_tokens=False) for part in corpus().split(END))
    return torch.tensor([token for row in rows for token in (*row, end)])


def save(model: Any, tokenizer: Any, folder: Path) -> None:
    """Writes a policy folder in bfloat16, whole or not at all; `model` stays as it is."""
    partial = folder.with_suffix(".part")
    copy.deepcopy(model).to(torch.bfloat16).save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    partial.rename(folder)


def text_model(folder: Path = FOLDER, steps: int = STEPS) -> Path:
    """The folder with the model, made if it is not there (minutes on one core)."""
    if (folder / "tokenizer.json").exists():
        return folder
    print(f"bench: training {folder} (minutes, once)", file=sys.stderr)
    torch.set_num_threads(1)
    tokenizer = build_tokenizer()
    pieces = tokenizer.get_vocab()
    model = build_model(len(pieces))
    loss = train(model, encoded(tokenizer, pieces[END]), steps)
    add_outliers(model)
    save(model, tokenizer, folder)
    print(f"bench: {loss:.3f} nats a character", file=sys.stderr)
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, default=FOLDER)
    print(text_model(parser.parse_args().out))


if __name__ == "__main__":
    main()
