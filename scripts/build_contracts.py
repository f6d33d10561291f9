"""Compiles the contracts and writes prime_chain/abi/*.json: Python users need no compiler.

    scripts/build_contracts.py            compile, write
    scripts/build_contracts.py --check    compile, compare with what is committed, exit 1 if stale

One file a contract: {contractName, abi, bytecode, deployedBytecode, immutables, compiler,
sourcesHash}, and Errors.json with every custom error. The bytecode holds no metadata, so it depends
on the sources' meaning alone; the same inputs give the same bytes on every platform. `immutables`
are the [start, length] byte ranges of the deployed code that the constructor fills in.
contracts/storage-layout.json holds where every variable lies, for readers of raw storage: slots
must not move unnoticed.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
OUT = ROOT / "contracts" / "out" / "release"
CACHE = ROOT / "contracts" / "cache" / "release"
ABI = ROOT / "protocol" / "prime_chain" / "abi"
LAYOUT = ROOT / "contracts" / "storage-layout.json"
CONTRACTS = ("PrimeToken", "Registry", "StakeVault", "Pools", "Work", "Rewards", "Slasher", "Court")


def compile_contracts() -> None:
    """Runs forge over contracts/src. Raises SystemExit with forge's own words if it fails.

    Always all sources and nothing else: the compiler's numbering of what it reads together can show
    in the bytecode, so neither the tests nor a cache may take part.
    """
    forge = str(ROOT / "scripts" / "forge")
    command = [forge, "build", "contracts/src", "--force", "--quiet"]
    command += ["--out", str(OUT), "--cache-path", str(CACHE), "--extra-output", "storageLayout"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"forge build failed ({done.returncode}):\n{done.stdout}{done.stderr}")


def artifact(name: str) -> dict[str, Any]:
    """The committed form of one compiled contract."""
    out = json.loads((OUT / f"{name}.sol" / f"{name}.json").read_text())
    metadata = out["metadata"]
    sources = {path: source["keccak256"] for path, source in metadata["sources"].items()}
    references = out["deployedBytecode"].get("immutableReferences", {}).values()
    immutables = sorted([part["start"], part["length"]] for parts in references for part in parts)
    pinned = {
        "sources": sources,
        "compiler": metadata["compiler"]["version"],
        "evm": metadata["settings"]["evmVersion"],
        "optimizer": metadata["settings"]["optimizer"],
        "viaIR": metadata["settings"].get("viaIR", False),
    }
    return {
        "contractName": name,
        "abi": out["abi"],
        "bytecode": out["bytecode"]["object"],
        "deployedBytecode": out["deployedBytecode"]["object"],
        "immutables": immutables,
        "compiler": pinned["compiler"],
        "sourcesHash": hashlib.sha256(json.dumps(pinned, sort_keys=True).encode()).hexdigest(),
    }


def artifacts() -> dict[str, str]:
    """File name to content of everything under prime_chain/abi."""
    files = {f"{name}.json": artifact(name) for name in CONTRACTS}
    errors = json.loads((OUT / "Errors.sol" / "Errors.json").read_text())
    files["Errors.json"] = {"contractName": "Errors", "abi": errors["abi"]}
    return {
        name: json.dumps(content, indent=1, sort_keys=True) + "\n"
        for name, content in files.items()
    }


def layout() -> str:
    """Every contract's storage: name, slot, byte in the slot, type; and the structs' members."""
    found: dict[str, Any] = {}
    for name in CONTRACTS:
        body = json.loads((OUT / f"{name}.sol" / f"{name}.json").read_text())["storageLayout"]
        types = {
            kind["label"]: [_place(member, body["types"]) for member in kind["members"]]
            for kind in (body["types"] or {}).values()
            if "members" in kind
        }
        found[name] = {
            "variables": [_place(one, body["types"]) for one in body["storage"]],
            "structs": types,
        }
    return json.dumps(found, indent=1, sort_keys=True) + "\n"


def _place(one: dict[str, Any], types: dict[str, Any]) -> str:
    return f"{one['slot']}+{one['offset']} {one['label']}: {types[one['type']]['label']}"


def stale() -> list[str]:
    """Names of committed files that the sources do not give, are missing, or are too many."""
    expected = {**artifacts(), LAYOUT.name: layout()}
    present = {path.name: path.read_text() for path in ABI.glob("*.json")}
    if LAYOUT.exists():
        present[LAYOUT.name] = LAYOUT.read_text()
    return sorted(
        name for name in expected.keys() | present.keys() if expected.get(name) != present.get(name)
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing, compare")
    arguments = parser.parse_args()
    compile_contracts()
    if arguments.check:
        names = stale()
        if names:
            print(f"stale: {', '.join(names)}; run `make contracts`", file=sys.stderr)
        return 1 if names else 0
    ABI.mkdir(parents=True, exist_ok=True)
    for path in ABI.glob("*.json"):
        path.unlink()
    for name, content in artifacts().items():
        (ABI / name).write_text(content)
        print(f"protocol/prime_chain/abi/{name}")
    LAYOUT.write_text(layout())
    return 0


if __name__ == "__main__":
    sys.exit(main())
