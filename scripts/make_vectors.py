"""Writes tests/vectors/eip712.json from prime_core: the one file that Python and Solidity share.

    scripts/make_vectors.py            write
    scripts/make_vectors.py --check    compare with what is committed, exit 1 if it differs

It holds the digest and a signature of every EIP-712 statement under one fixed domain a contract,
Merkle roots with all their proofs, and reward leaves. pytest checks that prime_core gives them,
forge that the contracts do (tests/contracts/Vectors.t.sol).
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from prime_core import encoding
from prime_core.batch import BatchStatement
from prime_core.calibration import CalibrationStatement
from prime_core.checkpoint import PolicyStatement
from prime_core.draws import DrawCommitment
from prime_core.gateway import GatewayAnswered
from prime_core.ids import address, digest
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
from prime_core.signing import CONTRACT_NAMES, Domain, LocalSigner, Sol, Statement
from prime_core.task import Lease
from prime_core.verdict import Law, Opinion

PATH = Path(__file__).resolve().parent.parent / "tests" / "vectors" / "eip712.json"
CHAIN_ID = 84532
PRIVATE_KEY = 0x5EED
STATEMENTS: tuple[type[Statement], ...] = (
    NodeConsent, SessionGrant, SessionRevocation, Invite, PolicyStatement,
    Lease, Submission, Receipt, BatchStatement, Law, Opinion, DrawCommitment,
    CalibrationStatement, RewardTable, GatewayAnswered, HardwarePassport,
    MemoryPassport,
)  # fmt: skip
TREE_SIZES = (1, 2, 3, 4, 5, 7, 8, 13)


def contract_address(name: str) -> str:
    """A made-up address for each contract."""
    return address(encoding.keccak256(f"contract/{name}".encode())[:42])


def _word(statement: str, member: str, kind: str, extreme: bool) -> Any:
    """A value of Solidity type `kind`: the greatest, or one drawn from the member's name."""
    seed = encoding.keccak256(f"{statement}/{member}".encode())
    if kind == "address":
        return address("0x" + "ff" * 20) if extreme else address(seed[:42])
    if kind == "bytes32":
        return digest("0x" + "ff" * 32) if extreme else seed
    if kind == "string":
        return "grün ✓ \\ \" '" if extreme else f"https://{member}.example"
    bits = int(kind.removeprefix("uint"))
    return (1 << bits) - 1 if extreme else int(seed, 16) % (1 << min(bits, 48))


def example(kind: type[Statement], extreme: bool) -> Statement:
    """A statement filled from its members' names, or with the greatest values."""
    values = {}
    for name, info in kind.model_fields.items():
        sol = next(item for item in info.metadata if isinstance(item, Sol))
        values[name] = _word(kind.__name__, name, sol.name, extreme)
    return kind(**values)


def vectors() -> dict[str, Any]:
    """The file's content."""
    signer = LocalSigner(PRIVATE_KEY.to_bytes(32, "big"))
    domains = {
        name: Domain(chain_id=CHAIN_ID, contract=address(contract_address(name)))
        for name in CONTRACT_NAMES
    }
    statements: dict[str, Any] = {}
    for kind in STATEMENTS:
        statements[kind.__name__] = []
        for extreme in (False, True):
            statement = example(kind, extreme)
            domain = domains[kind.CONTRACT]
            types = kind.eip712_types()[kind.__name__]
            message = {
                member["name"]: str(value) if isinstance(value, int) else value
                for member, value in zip(types, statement.model_dump().values(), strict=True)
            }
            statements[kind.__name__].append(
                {
                    "contract": kind.CONTRACT,
                    "message": message,
                    "digest": statement.digest(domain),
                    "signature": signer.sign(statement, domain),
                }
            )
    trees = []
    for size in TREE_SIZES:
        leaves = [encoding.keccak256(f"leaf/{size}/{i}".encode()) for i in range(size)]
        trees.append(
            {
                "leaves": leaves,
                "root": encoding.merkle_root(leaves),
                "proofs": [encoding.merkle_proof(leaves, i) for i in range(size)],
            }
        )
    rewards = []
    for cumulative in (0, 1, 10**18, 2**128 - 1, 2**256 - 1):
        node = address(encoding.keccak256(f"node/{cumulative}".encode())[:42])
        leaf = encoding.reward_leaf(node, cumulative)
        rewards.append({"node": node, "cumulative": str(cumulative), "leaf": leaf})
    return {
        "chainId": CHAIN_ID,
        "contracts": {name: domain.contract for name, domain in domains.items()},
        "signer": signer.address,
        "statements": statements,
        "trees": trees,
        "rewards": rewards,
    }


def text() -> str:
    """The file, byte for byte."""
    return json.dumps(vectors(), indent=1, ensure_ascii=True) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing, compare")
    if parser.parse_args().check:
        return int(not PATH.exists() or PATH.read_text() != text())
    PATH.parent.mkdir(parents=True, exist_ok=True)
    PATH.write_text(text())
    print(PATH)
    return 0


if __name__ == "__main__":
    sys.exit(main())
