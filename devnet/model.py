"""The demo's small model, made on the spot: `python -m devnet.model --out DIR [--from-scratch]`.

A Qwen3-shaped decoder of 0.8 M parameters over single characters, warm-started by supervised
training in two stages so that reinforcement learning has something to improve:

1. reversal: write the word backwards after some number of dots (the dots are given, not learned)
2. the length format: first mostly as many dots as the prompt asks for, then seldom

It then answers held-out words right nine times in ten, but mostly with the wrong number of dots: a
mean reward near 0.43. Without `--from-scratch` the checkpoint committed next to this file is
copied. The words held out are never trained on here either.
"""

from __future__ import annotations

import argparse
import math
import random
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from prime_core.run import LengthBudgets
from prime_envs.environments.reverse import Reverse

COMMITTED = Path(__file__).parent / "model"
HELDOUT = 1024
"""Words kept from the warm start: at least as many as a run holds out."""
TARGETS = (2, 6, 10, 14)

CHARACTERS = "0123456789abcdefghijklmnopqrstuvwxyz|>.=\n ,:+-"
END = "\n"
SEED = 0
STAGE_1, STAGE_2 = 150, 190
"""Optimizer steps; the learning rate warms up and decays in each stage."""
BATCH = 128
PEAK_LR = 2e-3
TAUGHT, OBEYED = 0.8, 0.12
"""Share of the second stage's examples with exactly the dots asked for: in its first part, so that
the model can count, and after that, so that it seldom cares to."""
TAUGHT_STEPS = 110
SIGMA = 7.0
"""Standard deviation of the dots around the target in the others."""
IGNORED = -100


def build_tokenizer() -> Any:
    """One token a character; the newline ends an answer. A transformers fast tokenizer."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = {"eos_token": END, "pad_token": "<pad>", "unk_token": "<unk>"}
    pieces = [special["pad_token"], *CHARACTERS, special["unk_token"]]
    vocabulary = {piece: number for number, piece in enumerate(pieces)}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token=special["unk_token"]))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    core.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=core, **special)


def fresh_model(tokenizer: Any) -> Any:
    """An untrained Qwen3 of 0.8 M parameters; ties its embedding to its head."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(SEED)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
    )
    return Qwen3ForCausalLM(config)


def examples(
    words: list[str], tokenizer: Any, rng: random.Random
) -> Iterator[tuple[Tensor, Tensor]]:
    """A supervised batch for each step: inputs and labels, (BATCH, L) int64; prompts are not
    learned, and in stage 1 neither are the dots."""
    dot = tokenizer.convert_tokens_to_ids(".")
    for step in range(STAGE_1 + STAGE_2):
        inputs: list[list[int]] = []
        labels: list[list[int]] = []
        for _ in range(BATCH):
            word, target = rng.choice(words), rng.choice(TARGETS)
            wanted = dots(target, step, rng)
            prompt = tokenizer.encode(f"{target:02d}|{word}>", add_special_tokens=False)
            answer = f"{'.' * max(0, round(wanted))}={word[::-1]}{END}"
            output = tokenizer.encode(answer, add_special_tokens=False)
            learned = [IGNORED if step < STAGE_1 and t == dot else t for t in output]
            inputs.append(prompt + output)
            labels.append([IGNORED] * len(prompt) + learned)
        width = max(map(len, inputs))
        yield (
            torch.tensor([row + [0] * (width - len(row)) for row in inputs]),
            torch.tensor([row + [IGNORED] * (width - len(row)) for row in labels]),
        )


def dots(target: int, step: int, rng: random.Random) -> float:
    """How many dots an example of this step has; rounded and never below zero."""
    if step < STAGE_1:
        return rng.uniform(0, 18)
    exact = TAUGHT if step < STAGE_1 + TAUGHT_STEPS else OBEYED
    return target if rng.random() < exact else rng.gauss(target, SIGMA)


def warm_start(model: Any, tokenizer: Any, words: list[str], *, quiet: bool = False) -> None:
    """Trains `model` in place, about 90 s on one core; the same bits on the same machine."""
    from rich.console import Console
    from rich.progress import track

    rng = random.Random(SEED)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=PEAK_LR, betas=(0.9, 0.98), weight_decay=0.01
    )
    batches = track(
        examples(words, tokenizer, rng),
        "warm start",
        total=STAGE_1 + STAGE_2,
        console=Console(stderr=True),
        disable=quiet,
        transient=True,
    )
    for step, (inputs, labels) in enumerate(batches):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step)
        logits = model(input_ids=inputs[:, :-1]).logits
        loss = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORED
        )
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


def learning_rate(step: int) -> float:
    """Linear warm-up over 30 steps, then cosine decay to a twentieth, in each stage."""
    done, length = (step, STAGE_1) if step < STAGE_1 else (step - STAGE_1, STAGE_2)
    cosine = 0.5 * (1 + math.cos(math.pi * done / length))
    return PEAK_LR * min(1.0, (done + 1) / 30) * (0.05 + 0.95 * cosine)


def make(folder: Path, *, quiet: bool = False) -> None:
    """Trains the model and writes it, in bf16, as a Hugging Face folder."""
    torch.set_num_threads(1)
    tokenizer = build_tokenizer()
    model = fresh_model(tokenizer)
    words = training_words()
    warm_start(model, tokenizer, words, quiet=quiet)
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    for path in folder.iterdir():
        path.chmod(0o644)  # save_pretrained leaves the weights unreadable to others


def training_words() -> list[str]:
    """The environment's training problems: all but the last HELDOUT words."""
    environment = Reverse({}, LengthBudgets(targets=TARGETS, penalty_micro=0))
    return [environment.problem(i).prompt for i in range(len(environment) - HELDOUT)]


def main(argv: list[str] | None = None) -> int:
    """Exit code 0, or 64 if the folder is taken."""
    parser = argparse.ArgumentParser(prog="python -m devnet.model", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--from-scratch", action="store_true", help="train again (about 90 s)")
    options = parser.parse_args(argv)
    if options.out.exists() and any(options.out.iterdir()):
        print(f"{options.out} is not empty; name another folder.", file=sys.stderr)
        return 64
    if options.from_scratch:
        options.out.mkdir(parents=True, exist_ok=True)
        make(options.out)
    else:
        shutil.copytree(COMMITTED, options.out, dirs_exist_ok=True)
    print(options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
