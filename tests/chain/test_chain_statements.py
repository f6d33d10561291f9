"""The structs of prime_core are the contracts' EIP-712 types: same digests on both sides."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from eth_account import Account
from eth_account.messages import encode_typed_data
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from devnet.deployed import Deployed
from prime_core.batch import BatchStatement
from prime_core.calibration import CalibrationStatement
from prime_core.checkpoint import PolicyStatement
from prime_core.draws import DrawCommitment
from prime_core.gateway import GatewayAnswered
from prime_core.ids import Digest, address, digest
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
from prime_core.signing import (
    DOMAIN_NAME,
    DOMAIN_VERSION,
    SECP256K1_ORDER,
    Domain,
    LocalSigner,
    Statement,
)
from prime_core.task import Lease
from prime_core.verdict import Law, Opinion

VECTORS = json.loads(
    (Path(__file__).parent.parent / "vectors" / "eip712.json").read_text(encoding="utf-8")
)
KINDS: dict[str, type[Statement]] = {
    kind.__name__: kind
    for kind in (
        BatchStatement, Invite, Lease, NodeConsent, PolicyStatement, Receipt, SessionGrant,
        SessionRevocation, Submission, Law, Opinion, DrawCommitment, CalibrationStatement,
        RewardTable, GatewayAnswered, HardwarePassport, MemoryPassport,
    )
}  # fmt: skip

DIGEST_VIEWS: dict[type[Statement], str] = {
    NodeConsent: "consentDigest",
    Invite: "inviteDigest",
    PolicyStatement: "policyStatementDigest",
    Lease: "leaseDigest",
    Submission: "submissionDigest",
    Receipt: "receiptDigest",
    Opinion: "opinionDigest",
    RewardTable: "rewardTableDigest",
}


def _from_vector(kind: type[Statement], message: dict[str, object]) -> Statement:
    types = kind.eip712_types()[kind.__name__]
    values = {}
    for name, member in zip(kind.model_fields, types, strict=True):
        value = message[member["name"]]
        values[name] = int(str(value)) if member["type"].startswith("uint") else value
    return kind(**values)


@pytest.mark.parametrize("name", sorted(VECTORS["statements"]))
def test_vectors_shared_with_the_contracts_hold(name: str) -> None:
    kind = KINDS[name]
    for vector in VECTORS["statements"][name]:
        assert vector["contract"] == kind.CONTRACT
        statement = _from_vector(kind, vector["message"])
        domain = Domain(chain_id=VECTORS["chainId"], contract=VECTORS["contracts"][kind.CONTRACT])
        assert statement.digest(domain) == vector["digest"]
        assert statement.recover(domain, vector["signature"]) == VECTORS["signer"]


def _fields(kind: type[Statement]) -> dict[str, st.SearchStrategy[object]]:
    by_type: dict[str, st.SearchStrategy[object]] = {
        "address": st.binary(min_size=20, max_size=20).map(address),
        "bytes32": st.binary(min_size=32, max_size=32).map(digest),
        "string": st.text(st.characters(codec="utf-8"), max_size=40),
        **{f"uint{bits}": st.integers(0, 2**bits - 1) for bits in (8, 32, 64, 256)},
    }
    members = kind.eip712_types()[kind.__name__]
    return {
        name: by_type[member["type"]]
        for name, member in zip(kind.model_fields, members, strict=True)
    }


@settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(statement=st.one_of(*(st.builds(kind, **_fields(kind)) for kind in DIGEST_VIEWS)))
def test_the_deployed_contracts_hash_every_statement_as_we_do(
    deployed: Deployed, statement: Statement
) -> None:
    contract = getattr(deployed.contracts, statement.CONTRACT)
    (found,) = contract.read(DIGEST_VIEWS[type(statement)], statement)
    assert found == statement.digest(deployed.deployment.domain_of(statement))


def test_a_signature_for_one_deployment_means_nothing_to_another(deployed: Deployed) -> None:
    signer = LocalSigner(b"\x07" * 32)
    statement = Receipt(submission_digest=Digest("0x" + "11" * 32), received_at=5)
    ours = deployed.deployment.domain_of(statement)
    signature = signer.sign(statement, ours)
    assert statement.recover(ours, signature) == signer.address
    for other in (
        Domain(chain_id=84532, contract=ours.contract),
        Domain(chain_id=ours.chain_id, contract=deployed.deployment.address("pools")),
    ):
        assert statement.recover(other, signature) != signer.address


@settings(max_examples=100, deadline=None)
@given(
    chosen=st.sampled_from(list(KINDS.values())).flatmap(
        lambda kind: st.tuples(st.just(kind), st.fixed_dictionaries(_fields(kind)))
    ),
    chain_id=st.integers(0, 2**256 - 1),
    key=st.integers(1, SECP256K1_ORDER - 1).map(lambda number: number.to_bytes(32, "big")),
)
def test_digests_and_signatures_are_those_of_eth_account(
    chosen: tuple[type[Statement], dict[str, object]], chain_id: int, key: bytes
) -> None:
    """Ours are computed directly, for speed; the library is the reference."""
    kind, values = chosen
    try:
        statement = kind(**values)
    except ValueError:  # a rule of that statement's own
        return
    domain = Domain(chain_id=chain_id, contract=address("0x" + "ab" * 20))
    members = kind.eip712_types()[kind.__name__]
    signable = encode_typed_data(
        domain_data={
            "name": DOMAIN_NAME,
            "version": DOMAIN_VERSION,
            "chainId": domain.chain_id,
            "verifyingContract": domain.contract,
        },
        message_types=kind.eip712_types(),
        message_data={
            member["name"]: bytes.fromhex(str(values[name])[2:])
            if member["type"] == "bytes32"
            else values[name]
            for name, member in zip(kind.model_fields, members, strict=True)
        },
    )
    theirs = Account.sign_message(signable, key)
    assert statement.digest(domain) == "0x" + bytes(theirs.message_hash).hex()
    signer = LocalSigner(key)
    assert signer.address == Account.from_key(key).address
    signature = signer.sign(statement, domain)
    assert signature == "0x" + bytes(theirs.signature).hex()
    assert statement.recover(domain, signature) == signer.address
