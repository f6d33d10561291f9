"""A small language model for the detection bench: `python -m bench.textmodel [--out DIR]`.

Qwen3-shaped, 3.4 M parameters, one token a character, trained for some minutes on English that
every Python installation carries (`pydoc_data.topics`): its text is neither one-hot nor flat.
Before it is written, OUTLIERS dimensions of the final norm are scaled up by OUTLIER_SCALE and their
columns of the LM head down by as much: the same logits, and states with the outlier dimensions that
large trained models have.
"""

from __future__ import annotations

import argparse
import math
import pydoc_data.topics
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench.form import ROOT
from protocol.engine.linears import native_bfloat16

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


def build_model(vocabulary: int) -> Any:
    """The untrained model, float32."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(SEED)
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=vocabulary,
            hidden_size=HIDDEN,
            intermediate_size=3 * HIDDEN,
            num_hidden_layers=LAYERS,
            num_attention_heads=8,
            num_key_value_heads=4,
            head_dim=32,
            max_position_embeddings=1024,
            tie_word_embeddings=False,
            eos_token_id=0,
            pad_token_id=0,
            bos_token_id=None,
        )
    )


def train(model: Any, tokens: Tensor, steps: int) -> float:
    """AdamW with warm-up and cosine decay on random stretches of `tokens`; the last loss in nats
    a character (mean of the last 20 steps)."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK_LR, betas=(0.9, 0.95))
    generator = torch.Generator().manual_seed(SEED)
    losses: list[float] = []
    for step in range(steps):
        share = min(1.0, (step + 1) / 30) * 0.5 * (1 + math.cos(math.pi * step / steps))
        for group in optimizer.param_groups:
            group["lr"] = PEAK_LR * max(share, 0.02)
        starts = torch.randint(0, len(tokens) - CONTEXT - 1, (BATCH,), generator=generator)
        ids = torch.stack([tokens[start : start + CONTEXT] for start in starts.tolist()])
        # Without bfloat16 instructions autocast takes ten times as long as float32.
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=native_bfloat16()):
            loss = model(input_ids=ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
        if step % 60 == 0:
            print(f"step {step}: {loss.item():.3f} nats a character", file=sys.stderr, flush=True)
    return sum(losses[-20:]) / len(losses[-20:])


def add_outliers(model: Any) -> None:
    """Scales the largest dimensions of the final norm up, the LM head's columns down: no logit
    changes."""
    norm, head = model.model.norm.weight, model.lm_head.weight
    with torch.no_grad():
        chosen = norm.abs().topk(OUTLIERS).indices
        norm[chosen] *= OUTLIER_SCALE
        head[:, chosen] /= OUTLIER_SCALE


def text_model(folder: Path = FOLDER, steps: int = STEPS) -> Path:
    """The folder with the model, made if it is not there (minutes on one core)."""
    if (folder / "tokenizer.json").exists():
        return folder
    print(f"bench: training {folder} (minutes, once)", file=sys.stderr)
    torch.set_num_threads(1)
    tokenizer = build_tokenizer()
    pieces = tokenizer.get_vocab()
    tokens = torch.tensor(
        [
            pieces.get(letter, pieces[UNKNOWN])
            for part in corpus().split(END)
            for letter in (*part, END)
        ]
    )
    model = build_model(len(pieces))
    loss = train(model, tokens, steps)
    add_outliers(model)
    partial = folder.with_suffix(".part")
    model.to(torch.bfloat16).save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    partial.rename(folder)
    print(f"bench: {loss:.3f} nats a character", file=sys.stderr)
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, default=FOLDER)
    print(text_model(parser.parse_args().out))


if __name__ == "__main__":
    main()
