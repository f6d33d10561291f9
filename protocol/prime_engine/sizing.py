"""Calculates whether a model fits on given cards in bf16, and the engine settings that suit them.

Arithmetic from config.json alone: no weights, no torch, no GPU. Sizes are bytes.

    card │ context, sampling │ weights │ working memory │ key-value cache │
         └─ outside the share ┴──────── memory share ────────────────────┘
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prime_core.errors import UserError
from prime_engine.folder import ARCHITECTURES

WEIGHT_BYTES = 2
MEMORY_SHARE = 0.92
"""Share of a card that the engine uses. The rest holds the CUDA context and sampling."""
REPLAY_SHARE = 0.97
"""Share of a card that replays use. The rest holds the CUDA context."""
FIXED_BYTES = 500_000_000
"""Communication buffers and CUDA graphs."""
BATCHED_TOKENS = 2048
"""Tokens that one forward pass computes at most."""
CACHE_BLOCK = 16
"""Tokens of a block of the key-value cache."""
VOCABULARY_PADDING = 64
ROWS_AT_ONCE = 8
"""Full rows that an engine's cache should hold; with fewer, sequences wait for one another."""
USUAL_LENGTH = 32_768
SHM_MB_ALONE = 64
SHM_MB_TOGETHER = 1024
"""Shared memory (MiB) of an engine on one card, and of one whose cards exchange data through it."""
REPLAY_TOKENS = 8_192
"""Tokens of one prefill of a replay on a card, of one row or several."""
REPLAY_CHUNK = 2_048
"""Tokens of one prefill of a row that is longer than that: what a layer computes at once then does
not grow with the row."""
REPLAY_LOGITS = 1 << 25
"""float32 logits of a replay on a card that are held at once; about eight tensors of this size
exist together."""


@dataclass(frozen=True)
class Cards:
    """What a vLLM engine takes of this machine: `tensor_parallel` cards hold the model together (0:
    as many of this process's cards as the model can be split over, one on CPUs), `memory_share` of
    each, for rows of `max_length` tokens (0: what the cards hold). `rank` is set by `Ranks` only.
    """

    tensor_parallel: int = 0
    memory_share: float = MEMORY_SHARE
    max_length: int = 0
    rank: int = 0


@dataclass(frozen=True)
class ModelShape:
    """The sizes in a model's config.json on which its memory depends."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    positions: int
    tied: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    head_norms: bool

    def parts(self) -> list[int]:
        """Returns the parameters of embedding, each layer, and final norm with head."""
        embedding = self.vocabulary * self.hidden
        last = self.hidden + (0 if self.tied else embedding)
        layer = (self.parameters() - embedding - last) // self.layers
        return [embedding, *[layer] * self.layers, last]

    def replay_bytes(self, tokens: int) -> int:
        """Returns what replays in float32 of rows of up to `tokens` tokens take on a card next to
        the weights: one layer in float32 and what it computes, or the head and logits, and
        FIXED_BYTES."""
        token = 3 * self.intermediate + 3 * self.hidden
        most = [REPLAY_TOKENS * (token + self.hidden) + self.parts()[1]]
        if tokens > REPLAY_TOKENS:  # in chunks: keys and values, also repeated for all heads
            attention = 2 * tokens * (self.kv_heads + self.heads) * self.head_dim
            masks = REPLAY_CHUNK * tokens + tokens * tokens // 8
            states = tokens * self.hidden
            most += [REPLAY_CHUNK * token + self.parts()[1] + attention + masks + states]
        states = 2 * max(tokens, REPLAY_TOKENS) * self.hidden
        most += [self.vocabulary * self.hidden + states + 8 * REPLAY_LOGITS]
        return 4 * max(most) + FIXED_BYTES

    def parameters(self, cards: int = 1) -> int:
        """Returns the parameters on each of `cards` cards. On one card: all of them."""
        heads, inner = self.heads // cards, self.intermediate // cards
        kv = max(1, self.kv_heads // cards)
        attention = (2 * heads + 2 * kv) * self.head_dim * self.hidden
        attention += self.qkv_bias * (heads + 2 * kv) * self.head_dim
        attention += self.output_bias * self.hidden
        attention += self.head_norms * 2 * self.head_dim
        mlp = 3 * self.hidden * inner + self.mlp_bias * (2 * inner + self.hidden)
        vocabulary = self.vocabulary if cards == 1 else self._padded_vocabulary // cards
        embeddings = vocabulary * self.hidden * (1 if self.tied else 2)
        return self.layers * (attention + mlp + 2 * self.hidden) + self.hidden + embeddings

    @property
    def _padded_vocabulary(self) -> int:
        return -(-self.vocabulary // VOCABULARY_PADDING) * VOCABULARY_PADDING

    def cache_bytes(self, cards: int) -> int:
        """Returns the bytes of key-value cache of one token on each of `cards` cards."""
        return 2 * self.layers * max(1, self.kv_heads // cards) * self.head_dim * WEIGHT_BYTES

    def working_bytes(self, cards: int) -> int:
        """Returns what a forward pass of BATCHED_TOKENS tokens takes on a card, and FIXED_BYTES."""
        token = 3 * self.intermediate // cards + 4 * self.hidden
        return BATCHED_TOKENS * token * WEIGHT_BYTES + FIXED_BYTES

    def split_problem(self, cards: int) -> str:
        """Returns why the model cannot be split over `cards` cards; empty if it can."""
        if self.heads % cards:
            return f"its {self.heads} attention heads cannot be split over {cards} cards"
        if self.kv_heads % cards and cards % self.kv_heads:
            return f"its {self.kv_heads} key-value heads cannot be split over {cards} cards"
        if self.intermediate % cards:
            return f"its {self.intermediate} MLP columns cannot be split over {cards} cards"
        if self._padded_vocabulary % cards:
            return f"its vocabulary of {self.vocabulary} cannot be split over {cards} cards"
        return ""


@dataclass(frozen=True)
class CardPlan:
    """How a model runs on `cards` cards of `card_bytes` each; sizes of one card in bytes."""

    cards: int
    card_bytes: int
    tensor_parallel: int
    engines: int
    """Engines of `tensor_parallel` cards each, one row belonging to one engine."""
    default_split: int
    """Cards of the one engine of an agent that has all `cards` and no setting `tensor_parallel`."""
    idle_cards: int
    parameters: int
    weights_per_card: int
    working_per_card: int
    cache_per_card: int
    cache_tokens: int
    """Tokens in the cache of all engines together."""
    longest_row: int
    """Tokens of the longest row that one engine's cache holds, at most the model's positions."""
    max_length: int
    """Suggested maximum row length."""
    rows_at_once: int
    """Rows of `max_length` that all engines hold at once."""
    memory_share: float
    shm_mb: int


def read_shape(model: Path) -> ModelShape:
    """Reads a config.json, or the one in a model folder. Raises UserError if it is missing, is no
    JSON object, lacks a size, or belongs to a family that no engine here runs."""
    path = model / "config.json" if model.is_dir() else model
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path} is not a readable config.json: {error}") from error
    family = config.get("model_type") if isinstance(config, dict) else None
    if family not in ARCHITECTURES:
        known = ", ".join(sorted(ARCHITECTURES))
        raise UserError(f"{path} describes a {family!r} model; the engines run {known}")

    def size(name: str, default: int | None = None) -> int:
        value = config.get(name)
        value = default if value is None else value
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise UserError(f"{path}: {name} is {value!r}, not a positive integer")
        return value

    heads, hidden = size("num_attention_heads"), size("hidden_size")
    biased = bool(config.get("attention_bias", False))
    return ModelShape(
        layers=size("num_hidden_layers"),
        hidden=hidden,
        intermediate=size("intermediate_size"),
        heads=heads,
        kv_heads=size("num_key_value_heads", heads),
        head_dim=size("head_dim", 128 if family == "qwen3" else hidden // heads),
        vocabulary=size("vocab_size"),
        positions=size("max_position_embeddings"),
        tied=bool(config.get("tie_word_embeddings", False)),
        qkv_bias=family == "qwen2" or (biased and family != "mistral"),
        output_bias=biased and family in ("llama", "qwen3"),
        mlp_bias=family == "llama" and bool(config.get("mlp_bias", False)),
        head_norms=family == "qwen3",
    )


def plan_cards(
    shape: ModelShape,
    cards: int,
    card_bytes: int,
    *,
    tensor_parallel: int = 0,
    length: int = 0,
    memory_share: float = MEMORY_SHARE,
) -> CardPlan:
    """Plans a model on `cards` equal cards, with engines of `tensor_parallel` cards each.

    With 0, takes the smallest number of cards with which an engine's cache holds ROWS_AT_ONCE rows
    of `length` tokens (0: the model's positions, at most USUAL_LENGTH), or else the number that
    holds most. Raises UserError with one sentence if the model does not fit or cannot be split.
    """
    if tensor_parallel > cards:
        raise UserError(f"tensor-parallel size {tensor_parallel} needs more than {cards} cards")
    if tensor_parallel and (problem := shape.split_problem(tensor_parallel)):
        raise UserError(f"the model cannot run with this tensor-parallel size: {problem}")
    wanted = min(length or USUAL_LENGTH, shape.positions)
    sizes = [tensor_parallel] if tensor_parallel else range(1, cards + 1)
    possible = [size for size in sizes if not shape.split_problem(size)]
    plans = [_planned(shape, cards, card_bytes, size, wanted, memory_share) for size in possible]
    fitting = [plan for plan in plans if plan.longest_row > 0]
    if not fitting:
        raise UserError(_why_not(shape, plans[-1], cards))
    for plan in fitting:
        if plan.cache_tokens // plan.engines >= ROWS_AT_ONCE * wanted:
            return plan
    return max(fitting, key=lambda plan: (plan.max_length, plan.cache_tokens))


@dataclass(frozen=True)
class ReplayPlan:
    """How a validator replays a model's files on `cards` cards that share its layers; sizes of one
    card in bytes."""

    cards: int
    card_bytes: int
    weights_per_card: int
    """Of one policy, on the card that has most."""
    working_per_card: int
    policies: int
    """Policies that are loaded at once; 0: none fits."""


def plan_replay(
    shape: ModelShape,
    cards: int,
    card_bytes: int,
    *,
    length: int = 0,
) -> ReplayPlan:
    """Plans replays, in float32 and bfloat16, of rows of `length` tokens (0: the model's positions,
    at most USUAL_LENGTH) of a model whose files are bfloat16."""
    parts = shape.parts()
    loads = [0] * cards
    for size, card in zip(parts, placed(parts, cards), strict=True):
        loads[card] += size * WEIGHT_BYTES
    working = shape.replay_bytes(min(length or USUAL_LENGTH, shape.positions))
    room = int(card_bytes * REPLAY_SHARE) - working
    return ReplayPlan(cards, card_bytes, max(loads), working, max(0, room // max(loads)))


def replay_sentence(plan: ReplayPlan) -> str:
    """Returns a replay plan in words."""
    sizes = (
        f"{plan.weights_per_card / 1e9:.1f} GB of weights a policy and "
        f"{plan.working_per_card / 1e9:.1f} GB of working memory a card"
    )
    cards = f"{plan.cards} x {plan.card_bytes / 1e9:g} GB"
    if not plan.policies:
        return f"files cannot be verified on {cards}: {sizes}"
    loaded = "1 policy" if plan.policies == 1 else f"{plan.policies} policies"
    return f"files can be verified on {cards}, with {loaded} loaded: {sizes}"


def placed(sizes: Sequence[int], devices: int) -> list[int]:
    """Divides consecutive parts of these sizes over `devices`, about equally. Returns the number of
    each part's device."""
    whole, before, found = max(1, sum(sizes)), 0, []
    for size in sizes:
        found.append(min(devices - 1, devices * (2 * before + size) // (2 * whole)))
        before += size
    return found


def largest_split(shape: ModelShape, cards: int) -> int:
    """Returns the most of `cards` cards over which the model can be split: what an engine takes by
    default, as it is the only one of its agent."""
    return max(size for size in range(1, cards + 1) if not shape.split_problem(size))


def _planned(
    shape: ModelShape, cards: int, card_bytes: int, size: int, wanted: int, share: float
) -> CardPlan:
    weights = shape.parameters(size) * WEIGHT_BYTES
    working = shape.working_bytes(size)
    cache = max(0, int(card_bytes * share) - weights - working)
    tokens = cache // shape.cache_bytes(size) // CACHE_BLOCK * CACHE_BLOCK
    engines = cards // size
    longest = min(tokens, shape.positions)
    length = min(longest, wanted)
    return CardPlan(
        cards=cards,
        card_bytes=card_bytes,
        tensor_parallel=size,
        engines=engines,
        default_split=largest_split(shape, cards),
        idle_cards=cards - engines * size,
        parameters=shape.parameters(),
        weights_per_card=weights,
        working_per_card=working,
        cache_per_card=cache,
        cache_tokens=tokens * engines,
        longest_row=longest,
        max_length=length,
        rows_at_once=tokens // length * engines if length else 0,
        memory_share=share,
        shm_mb=SHM_MB_ALONE if size == 1 else SHM_MB_TOGETHER,
    )


def _why_not(shape: ModelShape, best: CardPlan, cards: int) -> str:
    """One sentence on a model that does not fit even when split as far as possible."""
    usable = int(best.card_bytes * best.memory_share) - best.working_per_card
    words = (
        f"the model does not fit on {cards} x {best.card_bytes / 1e9:g} GB: with tensor-parallel "
        f"size {best.tensor_parallel} its weights take {best.weights_per_card / 1e9:.1f} GB of "
        f"each card, and {max(0, usable) / 1e9:.1f} GB are there for weights and cache"
    )
    if best.tensor_parallel < cards and (problem := shape.split_problem(cards)):
        words += f"; {problem}"
    return words


def card_set(text: str) -> tuple[int, int]:
    """Parses "4x24GB", "80GB" or "2x24GiB" into (cards, bytes a card). GB is 10^9 bytes. Raises
    UserError."""
    found = re.fullmatch(r"(?:(\d{1,3})\s*[xX×]\s*)?(\d{1,4}(?:\.\d+)?)\s*(GB|GiB)", text.strip())
    if found is None or int(found[1] or 1) < 1 or float(found[2]) <= 0:
        raise UserError(f"{text!r} names no cards", hint="write for example --gpus 4x24GB")
    return int(found[1] or 1), int(float(found[2]) * (10**9 if found[3] == "GB" else 2**30))


def _agents(plan: CardPlan) -> str:
    """How agents are started so that the plan's engines run."""
    own = f"without settings, one agent runs one engine on {plan.default_split} cards"
    if plan.engines > 1:
        cards = "one card" if plan.tensor_parallel == 1 else f"{plan.tensor_parallel} cards"
        return f"{plan.engines}, each with {cards} as its gpus; {own}"
    if plan.tensor_parallel != plan.default_split:
        return f"1, with tensor_parallel = {plan.tensor_parallel}; {own}"
    return "1, without settings"


def as_fields(plan: CardPlan) -> list[tuple[str, Any]]:
    """Returns a plan as names and values for people."""

    def gb(value: int) -> str:
        return f"{value / 1e9:.1f} GB"

    idle = f", {plan.idle_cards} idle" if plan.idle_cards else ""
    engines = "1 engine" if plan.engines == 1 else f"{plan.engines} engines"
    return [
        ("cards", f"{plan.cards} x {plan.card_bytes / 1e9:g} GB"),
        ("tensor-parallel size", f"{plan.tensor_parallel} ({engines}{idle})"),
        ("agents", _agents(plan)),
        ("parameters", f"{plan.parameters:,}"),
        ("weights", f"{gb(plan.weights_per_card)} a card"),
        ("working memory", f"{gb(plan.working_per_card)} a card"),
        ("key-value cache", f"{gb(plan.cache_per_card)} a card, {plan.cache_tokens:,} tokens"),
        ("longest row", f"{plan.longest_row:,} tokens"),
        ("max length", f"{plan.max_length:,} tokens, {plan.rows_at_once} rows at once"),
        ("memory share", plan.memory_share),
        ("shm_size", f"{plan.shm_mb} MiB"),
    ]
