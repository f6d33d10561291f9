"""Facts about a policy folder, shared by all engines."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

ARCHITECTURES = frozenset({"llama", "mistral", "qwen2", "qwen3"})
"""Model families whose logits are exactly the LM head applied to the final norm's output."""


def not_run(engine: str, family: str) -> str:
    """The sentence that refuses a model of another family."""
    return f"the {engine} engine does not run {family!r}, only {', '.join(sorted(ARCHITECTURES))}"


def end_tokens(folder: Path, config: Any) -> frozenset[int]:
    """End tokens from generation_config.json, or else from config.json (a transformers config)."""
    path = folder / "generation_config.json"
    value = None
    if path.exists():
        value = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id")
    if value is None:
        value = config.eos_token_id
    if value is None:
        return frozenset()
    return frozenset(value if isinstance(value, list) else [value])


def text_digest(folder: Path) -> str:
    """SHA-256 (hex) of a policy folder's files but its weights, their index and its manifest:
    configuration, tokenizer, chat template."""
    hashed = hashlib.sha256()
    for path in sorted(folder.iterdir()):
        if path.is_file() and path.suffix != ".safetensors" and path.name not in _OF_WEIGHTS:
            hashed.update(path.name.encode() + b"\0" + hashlib.sha256(path.read_bytes()).digest())
    return hashed.hexdigest()


_OF_WEIGHTS = ("manifest.json", "model.safetensors.index.json")


class PolicyFacts:
    """Properties of the loaded policy (prime_engine.base.Engine); engines set them."""

    dtype: str
    vocabulary: int
    hidden_size: int
    positions: int
    end_tokens: frozenset[int]
    tokenizer: Any
