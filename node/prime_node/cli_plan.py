"""`prime-node plan`: which cards hold a model."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from prime_core.command_line import Json
from prime_core.errors import UserError
from prime_node.cli_common import print_fields, print_json


def plan(
    model: Annotated[Path, typer.Option(help="Model folder, or its config.json.")],
    gpus: Annotated[
        list[str] | None,
        typer.Option(help="Cards, such as 4x24GB; repeat for more sets. Default: this machine's."),
    ] = None,
    tensor_parallel: Annotated[
        int, typer.Option(min=0, help="Cards of one engine; 0 chooses.")
    ] = 0,
    length: Annotated[
        int,
        typer.Option(min=0, help="Longest row in tokens; 0: the model's, at most 32,768."),
    ] = 0,
    as_json: Json = False,
) -> None:
    """Say whether a model fits on cards in bf16, and with which settings. Needs no card.

    Exit status 64 if it fits on none of them.
    """
    from prime_engine.sizing import as_fields, plan_cards, read_shape

    shape = read_shape(model)
    found, fitting = [], 0
    for cards, size in _sets(gpus or []):
        try:
            planned = plan_cards(shape, cards, size, tensor_parallel=tensor_parallel, length=length)
        except UserError as error:
            found.append({"cards": cards, "card_bytes": size, "fits": False, "why": str(error)})
            if not as_json:
                typer.echo(str(error))
            continue
        fitting += 1
        found.append(asdict(planned) | {"fits": True})
        if not as_json:
            print_fields(str(model), as_fields(planned))
    if as_json:
        print_json(found)
    if not fitting:
        raise typer.Exit(UserError.exit_code)


def _sets(texts: list[str]) -> list[tuple[int, int]]:
    """Returns (cards, bytes a card) of each set; without any, this machine's cards, each counted
    with the memory of the smallest. Raises UserError if there are none."""
    from prime_engine.sizing import card_set
    from prime_node.fingerprint import MIB, read_gpus

    if texts:
        return [card_set(text) for text in texts]
    own = read_gpus()
    if not own:
        raise UserError("this machine shows no GPU", hint="name cards: --gpus 4x24GB")
    return [(len(own), min(card.memory_mb for card in own) * MIB)]
