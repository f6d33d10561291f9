"""The compiler's standard-JSON input of our contracts: what a block explorer needs in order to show
that the code on chain is these sources, and what anyone can hand to `solc --standard-json`.

All of contracts/src and everything that it imports, in one input: the compiler's numbering of what
it reads together can show in the bytecode.
"""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path, PurePosixPath
from typing import Any

from prime_core.errors import NotFoundError

_IMPORT = re.compile(r"""^\s*import\s+(?:[^"';]*?from\s+)?["']([^"']+)["']\s*;""", re.MULTILINE)


def standard_input(root: Path) -> bytes:
    """The input (JSON) for the repository at `root`, with the settings of its foundry.toml.

    Raises NotFoundError where sources or their libraries are not there: an installed package has
    none.
    """
    try:
        profile = tomllib.loads((root / "foundry.toml").read_text())["profile"]["default"]
    except OSError as error:
        raise NotFoundError(f"there are no contract sources at {root}") from error
    remappings: list[str] = profile["remappings"]
    first = sorted(
        path.relative_to(root).as_posix() for path in (root / profile["src"]).rglob("*.sol")
    )
    sources: dict[str, dict[str, str]] = {}
    waiting = list(first)
    while waiting:
        name = waiting.pop()
        if name in sources:
            continue
        try:
            text = (root / name).read_text()
        except OSError as error:
            raise NotFoundError(f"{name} is not there: make setup installs it") from error
        sources[name] = {"content": text}
        waiting += [resolve(name, wanted, remappings) for wanted in _IMPORT.findall(text)]
    body: dict[str, Any] = {
        "language": "Solidity",
        "sources": dict(sorted(sources.items())),
        "settings": {
            "remappings": remappings,
            "optimizer": {"enabled": profile["optimizer"], "runs": profile["optimizer_runs"]},
            "viaIR": profile["via_ir"],
            "evmVersion": profile["evm_version"],
            "metadata": {
                "bytecodeHash": profile["bytecode_hash"],
                "appendCBOR": profile["cbor_metadata"],
            },
            "outputSelection": {
                "*": {"*": ["abi", "evm.bytecode.object", "evm.deployedBytecode.object"]}
            },
        },
    }
    return json.dumps(body, indent=1).encode() + b"\n"


def resolve(importer: str, wanted: str, remappings: list[str]) -> str:
    """The source unit that `wanted` names in file `importer` (solc's rules: relative paths against
    the importer's folder, else the longest matching remapping)."""
    if wanted.startswith("."):
        parts: list[str] = list(PurePosixPath(importer).parent.parts)
        for part in wanted.split("/"):
            if part == "..":
                parts.pop()
            elif part != ".":
                parts.append(part)
        return "/".join(parts)
    pairs = (one.split("=", 1) for one in remappings)
    fits = [(prefix, target) for prefix, target in pairs if wanted.startswith(prefix)]
    if not fits:
        return wanted
    prefix, target = max(fits, key=lambda pair: len(pair[0]))
    return target + wanted[len(prefix) :]
