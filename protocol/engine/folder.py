"""What a policy folder says about itself, for every engine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ARCHITECTURES = frozenset({"llama", "mistral", "qwen2", "qwen3"})
"""Families whose logits are exactly the LM head applied to the final norm's output."""


def end_tokens(folder: Path, config: Any) -> frozenset[int]:
    """End tokens of generation_config.json, else of config.json (a transformers config)."""
    path = folder / "generation_config.json"
    value = None
    if path.exists():
        value = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id")
    if value is None:
        value = config.eos_token_id
    if value is None:
        return frozenset()
    return frozenset(value if isinstance(value, list) else [value])
