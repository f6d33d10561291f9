"""Builds a run definition from a user's TOML; digests are computed from the installed packages."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from prime_core.errors import UserError
from prime_core.given import parse_toml, read_given
from prime_core.ids import Digest
from prime_core.known_cards import KNOWN
from prime_core.run import Conversation, EnvironmentPart, LengthBudgets, RunDefinition
from prime_envs.base import Environment
from prime_envs.chat import chat_from, special_tokens_in
from prime_envs.lengths import budgets_from
from prime_envs.registry import environment_class, environment_ref
from prime_envs.tools import hidden_calls, hidden_mark, load_tools

log = logging.getLogger(__name__)

PROMPT_SHARE = 20
"""A prompt's token is paid the price of a generated one divided by this, unless the TOML says."""
DEATH_SECONDS = 40
"""Four heartbeats of ten seconds: `death_seconds`, unless the TOML says that or the heartbeat."""
RISK_FACTOR_MICRO = 900_000
"""Share of its stake (in millionths) that a provider's work at risk may be worth, unless the TOML
says."""


def read_toml(source: Path) -> dict[str, Any]:
    """Reads a TOML file. Raises UserError if it cannot be read or parsed."""
    hint = "give the TOML file of a run; see docs/examples"
    return parse_toml(read_given(source, "run's TOML file", hint), source, hint)


def require_config(model: Path) -> None:
    """Raises UserError unless the folder holds a model's configuration."""
    if not (model / "config.json").is_file():
        raise UserError(
            f"{model} is not a model folder: it has no config.json",
            hint="name a Hugging Face folder with config.json, tokenizer and safetensors",
        )


def run_from(
    values: Mapping[str, Any], source: Path, model: Path, base_model: Digest
) -> RunDefinition:
    """Builds the run that `values`, read from the file `source`, describe.

    `model` is the base model's folder, whose chat template may be pinned; `base_model` is its
    digest. What `unsaid` returns is added. Warns of target lengths that no row can reach. Raises
    UserError naming the invalid value.
    """
    values = {**values, **unsaid(values)}
    _require_tables(values, source)
    try:
        shaped = budgets_from(values["budgets"])
        budgets = LengthBudgets.model_validate_json(json.dumps(shaped))
        wanted = values["environment"]
        parts = _parts(wanted.get("parts", ()))
        names = [part.name for part in parts] or [wanted["name"]]
        conversation = _conversation(values.get("conversation"), names)
        environment = environment_ref(
            wanted["name"],
            wanted.get("arguments", {}),
            budgets,
            train_size=wanted["train_size"],
            heldout_size=wanted["heldout_size"],
            conversation=conversation,
            parts=parts,
        )
        chat = chat_from(values.get("chat"), model, conversation)
        _require_visible_calls(conversation, model)
        whole = {
            **{name: value for name, value in values.items() if name != "chat"},
            "budgets": shaped,
            "environment": environment.model_dump(mode="json"),
            "base_model": base_model,
        }
        if chat is not None:
            whole |= {"chat": chat.model_dump(mode="json"), "schema_version": 2}
        if conversation is not None:
            whole["schema_version"] = 3 if conversation.gateway is None else 4
        if parts:
            whole["schema_version"] = 5
        if values.get("detailed_tables"):
            whole["schema_version"] = 6
        run = RunDefinition.model_validate_json(json.dumps(whole))
        _check_cards(run, source)
        if (longest := run.budgets.targets[-1]) > run.max_output_tokens:
            log.warning(
                "%s asks for lengths up to %d, but its rows end at max_output_tokens = %d",
                source, longest, run.max_output_tokens,
            )  # fmt: skip
        return run
    except KeyError as error:
        raise UserError(
            f"{source} does not say {error}", hint="see docs/examples/run.toml"
        ) from error
    except (ValidationError, TypeError) as error:
        raise UserError(
            f"{source} is not a run: {_first(error)}", hint="see docs/examples/run.toml"
        ) from error


def _require_tables(values: Mapping[str, Any], source: Path) -> None:
    """Raises UserError if a value that must be a table is something else."""
    tables = {
        name: values.get(name, {}) for name in ("environment", "budgets", "chat", "conversation")
    }
    if isinstance(tables["environment"], dict):
        tables["environment.arguments"] = tables["environment"].get("arguments", {})
    for name, value in tables.items():
        if not isinstance(value, dict):
            raise UserError(
                f"{source} is not a run: {name} is {value!r}, which is not a table",
                hint="see docs/examples/run.toml",
            )


def _require_visible_calls(conversation: Conversation | None, model: Path) -> None:
    """Raises UserError if the model's tokenizer hides the calls of the run's tools."""
    if conversation is None:
        return
    if hidden := hidden_mark(conversation, special_tokens_in(model)):
        raise UserError(
            f"{model} cannot be used: {hidden_calls(hidden, conversation)}",
            hint='set "special": false for it in tokenizer.json and tokenizer_config.json, or '
            "choose another conversation.calls",
        )


def _check_cards(run: RunDefinition, source: Path) -> None:
    """Raises UserError if the run asks for cards that no node could prove."""
    unknown = set(run.cards.kinds) - set(KNOWN) if run.cards is not None else ()
    if unknown:
        raise UserError(
            f"{source} asks for cards {', '.join(sorted(unknown))}, which are not in the table",
            hint=f"these are known: {', '.join(KNOWN)}",
        )


def unsaid(values: Mapping[str, Any]) -> dict[str, int]:
    """Returns what a TOML leaves out: the time until a silent node is dead and, if it pays for
    work, the price of prompts and the factor of work at risk. They are not defaults of the schema,
    so the digests of runs do not change."""
    price, stake = (values.get(name) for name in ("price_per_unit", "stake_per_seat"))
    chosen = {}
    if isinstance(price, int) and price >= PROMPT_SHARE:
        chosen["price_per_prompt_token"] = price // PROMPT_SHARE
    if isinstance(price, int) and isinstance(stake, int) and min(price, stake) > 0:
        chosen["risk_factor_micro"] = RISK_FACTOR_MICRO
    if "heartbeat_seconds" not in values:
        chosen["death_seconds"] = DEATH_SECONDS
    return {name: value for name, value in chosen.items() if name not in values}


def _parts(values: Sequence[Mapping[str, Any]]) -> tuple[EnvironmentPart, ...]:
    """Parses a TOML's `[[environment.parts]]`."""
    return tuple(EnvironmentPart.model_validate_json(json.dumps(one)) for one in values)


def _conversation(
    values: Mapping[str, Any] | None, environments: Sequence[str]
) -> Conversation | None:
    """Parses a TOML's `[conversation]`. Raises UserError if neither tools nor one of the
    environments would answer the model's turns."""
    if values is None:
        return None
    conversation = Conversation.model_validate_json(json.dumps(values))
    load_tools(conversation)
    classes = map(environment_class, environments)
    answers_itself = any(found.observe is not Environment.observe for found in classes)
    if not conversation.tools and not answers_itself:
        raise UserError(
            f"the environment {environments[0]!r} says nothing after a turn, and there are no "
            "tools",
            hint='name tools, as in tools = ["calculator-1"], or leave out [conversation]',
        )
    return conversation


def _first(error: Exception) -> str:
    if isinstance(error, ValidationError):
        first = error.errors()[0]
        return f"{'.'.join(str(part) for part in first['loc'])}: {first['msg']}"
    return str(error)
