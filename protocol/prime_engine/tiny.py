"""A tiny policy folder with random weights, for tests and benchmarks: no download, half a second.

Qwen3-shaped, one token per character. The logits are scaled so that text is neither uniform nor
deterministic; the text is meaningless.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

CHARACTERS = "\n0123456789|>.=abcdefghijklmnopqrstuvwxyz +-*/()?:,"
END = "\n"


def character_tokenizer(
    characters: str = CHARACTERS, end: str = END, words: Sequence[str] = ()
) -> PreTrainedTokenizerFast:
    """One token per character and for each of `words`; unknown characters become "?"."""
    vocabulary = {text: i for i, text in enumerate([*characters, *words])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))  # noqa: S106
    split = "|".join([*map(re.escape, words), r"[\s\S]"])
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(split), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=end, pad_token=end)


def qwen3_shape(
    tokenizer: PreTrainedTokenizerFast, *, hidden: int, layers: int, positions: int, **changes: Any
) -> Qwen3Config:
    """A Qwen3 configuration for `tokenizer` with two key-value heads. `changes` are further fields
    of Qwen3Config and must include `num_attention_heads`."""
    values = {
        "vocab_size": len(CHARACTERS),
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_key_value_heads": 2,
        "head_dim": hidden // changes["num_attention_heads"],
        "max_position_embeddings": positions,
        "eos_token_id": tokenizer.eos_token_id,
        "bos_token_id": None,
        "pad_token_id": tokenizer.pad_token_id,
    }
    return Qwen3Config(**(values | changes))


def write_tiny_model(
    folder: Path,
    *,
    seed: int = 0,
    hidden: int = 64,
    layers: int = 2,
    logit_scale: float = 2.0,
    positions: int = 512,
) -> Path:
    """Writes config, tokenizer and bf16 weights drawn from `seed`; returns `folder`."""
    tokenizer = character_tokenizer()
    config = qwen3_shape(
        tokenizer, hidden=hidden, layers=layers, positions=positions, intermediate_size=2 * hidden,
        num_attention_heads=4, tie_word_embeddings=False,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(seed)
    model: Any = Qwen3ForCausalLM(config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() == 1:
                continue
            scale = logit_scale if "lm_head" in name else 1.0
            fan_in = 1.0 if "embed_tokens" in name else weight.shape[1]
            noise = torch.randn(weight.shape, generator=generator)
            weight.copy_(noise * (scale / fan_in**0.5))
    model.to(torch.bfloat16)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
