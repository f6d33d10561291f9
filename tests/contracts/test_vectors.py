"""prime_core gives the digests, roots and leaves that the contracts are tested with."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import pytest
from forge_kit import ROOT
from programs import load_script

from prime_core import encoding
from prime_core.batch import BatchStatement
from prime_core.calibration import CalibrationStatement
from prime_core.checkpoint import PolicyStatement
from prime_core.draws import DrawCommitment
from prime_core.errors import UntrustedError
from prime_core.gateway import GatewayAnswered
from prime_core.ids import address, digest, signature
from prime_core.node import (
    HardwarePassport,
    Invite,
    MemoryPassport,
    NodeConsent,
    SessionGrant,
    SessionRevocation,
)
from prime_core.rollout import Receipt, Submission
from prime_core.settlement import RewardTable
from prime_core.signing import Domain, Statement
from prime_core.task import Lease
from prime_core.verdict import Law, Opinion

VECTORS: dict[str, Any] = json.loads((ROOT / "tests" / "vectors" / "eip712.json").read_text())
KINDS: dict[str, type[Statement]] = {
    kind.__name__: kind
    for kind in (
        NodeConsent, SessionGrant, SessionRevocation, Invite, PolicyStatement,
        Lease, Submission, Receipt, BatchStatement, DrawCommitment,
        CalibrationStatement, Opinion, Law, RewardTable, GatewayAnswered, HardwarePassport,
        MemoryPassport,
    )
}  # fmt: skip


def _statements_of_core() -> set[str]:
    return {
        kind.__name__
        for kind in Statement.__subclasses__()
        if kind.__module__.startswith("prime_core.")
    }


def _parse(kind: type[Statement], message: dict[str, str]) -> Statement:
    """A statement from the vector's camelCase members, numbers as decimal text."""
    types = kind.eip712_types()[kind.__name__]
    values: dict[str, Any] = {}
    for member, name in zip(types, kind.model_fields, strict=True):
        text = message[member["name"]]
        values[name] = int(text) if member["type"].startswith("uint") else text
    return kind(**values)


@pytest.mark.parametrize("name", KINDS)
def test_statements_digest_and_recover_as_the_vectors_say(name: str) -> None:
    for vector in VECTORS["statements"][name]:
        assert vector["contract"] == KINDS[name].CONTRACT
        statement = _parse(KINDS[name], vector["message"])
        contract = address(VECTORS["contracts"][vector["contract"]])
        domain = Domain(chain_id=VECTORS["chainId"], contract=contract)
        assert statement.digest(domain) == vector["digest"]
        signed = signature(vector["signature"])
        assert statement.recover(domain, signed) == VECTORS["signer"]
        elsewhere = Domain(chain_id=1, contract=contract)
        with contextlib.suppress(UntrustedError):  # recovering to no account is as good
            assert statement.recover(elsewhere, signed) != VECTORS["signer"]


def test_every_statement_has_vectors() -> None:
    assert _statements_of_core() == set(VECTORS["statements"]) == set(KINDS)


@pytest.mark.parametrize("tree", VECTORS["trees"], ids=lambda tree: len(tree["leaves"]))
def test_trees_give_the_vectors_roots_and_proofs(tree: dict[str, Any]) -> None:
    leaves = [digest(leaf) for leaf in tree["leaves"]]
    assert encoding.merkle_root(leaves) == tree["root"]
    for index, leaf in enumerate(leaves):
        proof = encoding.merkle_proof(leaves, index)
        assert proof == tree["proofs"][index]
        assert encoding.merkle_verify(digest(tree["root"]), leaf, proof)


@pytest.mark.parametrize("vector", VECTORS["rewards"], ids=lambda v: v["cumulative"])
def test_reward_leaves_are_the_vectors(vector: dict[str, str]) -> None:
    assert encoding.reward_leaf(vector["node"], int(vector["cumulative"])) == vector["leaf"]


def test_the_vectors_are_what_their_script_writes() -> None:
    module = load_script(ROOT / "scripts" / "make_vectors.py")
    assert module.text() == (ROOT / "tests" / "vectors" / "eip712.json").read_text()
