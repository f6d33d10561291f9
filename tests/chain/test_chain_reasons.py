"""Every refusal of the contracts has a sentence that fits its fields."""

from __future__ import annotations

import json
from importlib import resources
from string import Formatter
from typing import Any

import pytest

from prime_chain.amounts import ETHER
from prime_chain.client import all_artifacts
from prime_chain.codec import decode_revert
from prime_chain.errors import ChainRevertedError
from prime_chain.reasons import SENTENCES, sentence

DEFECTS = {
    "AlreadyWired", "EmptyRoot", "ReserveExceeded", "TokenNotPlain",
    "UnbondingTooShort", "ZeroAddress", "ZeroAmount", "ZeroCapacity", "ZeroDigest",
    "ZeroPeriod",
}  # fmt: skip
"""What a person does not meet through our programs, or whose name says it all."""


def known() -> dict[str, list[str]]:
    """Names of all errors that our contracts can raise, with their fields."""
    found = {
        item.name: [str(entry["name"]) for entry in item.inputs]
        for artifact in all_artifacts()
        for item in artifact.errors.values()
    }
    file = resources.files("prime_chain").joinpath("abi", "Errors.json")
    for entry in json.loads(file.read_text())["abi"]:
        found.setdefault(entry["name"], [one["name"] for one in entry["inputs"]])
    return found


def test_every_error_that_people_meet_has_a_sentence() -> None:
    ours = json.loads(resources.files("prime_chain").joinpath("abi", "Errors.json").read_text())[
        "abi"
    ]
    assert {entry["name"] for entry in ours} - set(SENTENCES) == DEFECTS


@pytest.mark.parametrize("name", sorted(SENTENCES))
def test_a_sentence_names_only_fields_that_its_error_has(name: str) -> None:
    used = {field for _, field, _, _ in Formatter().parse(SENTENCES[name]) if field}
    assert used <= set(known()[name])


def test_amounts_are_stated_in_tokens_and_times_are_left_out() -> None:
    assert sentence("StakeNotFree", {"available": 0, "asked": ETHER}) == (
        "only 0 PRIME is free: seats need or slashes hold the rest"
    )
    assert sentence("WrongVersion", {"expected": 2, "given": 1}) == "policy 2 is next, not 1"
    assert sentence("Unheard", {"of": 1}) == ""
    assert sentence("UnknownPool", {"number": 1}) == "", "another contract's error of that name"


def test_the_error_carries_name_fields_and_sentence() -> None:
    arguments: dict[str, Any] = {"pool": 7}
    error = ChainRevertedError("UnknownPool", arguments, "end pool 7")
    assert str(error) == (
        "end pool 7 is refused by the contract: UnknownPool(pool=7): there is no pool 7:"
        " check --pool and --deployment"
    )
    plain = decode_revert(b"", [], "reading")
    assert str(plain) == "reading is refused by the contract: Unknown()"
