"""What protocol 1 is, as recorded bytes: a valid request to each operation with its answer, and
an example of everything that is signed or named by a digest.

    python tests/compat/recording.py    records what is missing; what is recorded never changes

Keys, clock and randomness are fixed, so a second recording would give the same bytes. The tests
replay the recorded requests against the code of today.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from fastapi.testclient import TestClient
from httpx import Response

HERE = Path(__file__).resolve().parent
for folder in (HERE.parent.parent / "scripts", HERE.parent / "orchestrator", HERE.parent):
    if str(folder) not in sys.path:
        sys.path.append(str(folder))

from api_walk import VALIDATOR  # noqa: E402
from make_vectors import vectors  # noqa: E402
from orchestrator_world import (  # noqa: E402
    START,
    VERSIONED,
    deployment,
    run_definition,
    signer,
)
from traffic import Tape, traffic, unpacked  # noqa: E402

from prime_core import (  # noqa: E402
    batch,
    calibration,
    checkpoint,
    draws,
    encoding,
    fees,
    gateway,
    messages,
    node,
    rollout,
    seeds,
    settlement,
    task,
    validator_messages,
    verdict,
)
from prime_core.clock import Clock  # noqa: E402
from prime_core.encoding import sha256  # noqa: E402
from prime_core.gateway import GatewayCall, GatewayRequest  # noqa: E402
from prime_core.ids import ZERO_DIGEST, Digest  # noqa: E402
from prime_core.rollout import (  # noqa: E402
    CONVERSATION_SCHEMA,
    GATEWAY_SCHEMA,
    SCHEMA_VERSION,
    SignedSubmission,
    encode_leaves,
)
from prime_core.run import Chat, RunDefinition  # noqa: E402
from prime_core.settlement import (  # noqa: E402
    RewardEntry,
    SettledFile,
    SettledSlash,
    Settlement,
    SettlementPage,
)
from prime_core.signing import Answer, Strict  # noqa: E402
from prime_core.task import Lease, SignedLease  # noqa: E402
from prime_node import bridge_messages  # noqa: E402
from prime_orchestrator.gateway.service import CallService, Pool, Settings  # noqa: E402
from prime_orchestrator.gateway.service import create_app as service_app  # noqa: E402
from prime_orchestrator.store import open_store, sqlite_url  # noqa: E402
from prime_orchestrator.store.gateway_records import Records  # noqa: E402
from prime_verify.proofs import sampling  # noqa: E402
from prime_verify.rollout_file import (  # noqa: E402
    FileMetadata,
    FileRow,
    RolloutFile,
    read_rollout_file,
    write_rollout_file,
)

FOLDER = HERE / "protocol_1"


def objects_of(folder: Path) -> dict[str, str]:
    """Every JSON object that the walk published, by its digest."""
    found = {}
    for path in sorted((folder / "objects").rglob("*")):
        data = path.read_bytes() if path.is_file() else b""
        if data.startswith(b"{"):
            found[sha256(data)] = data.decode()
    return found


def runs() -> dict[str, str]:
    """A run definition of each schema."""
    chat = Chat(template=sha256(b"template"), system="Answer briefly.")
    talk: dict[str, Any] = {"turns": 3, "tools": ("search-2",), "observation_bytes": 64}
    pinned = {"url": "http://gateway:9", "key": signer(7).address, "tools": ("search-2",)}
    made = {
        1: {},
        2: {"chat": chat},
        3: {"chat": chat, "conversation": talk},
        4: {"chat": chat, "conversation": talk | {"gateway": pinned}},
    }
    found = {}
    for number, more in made.items():
        whole = json.loads(run_definition().raw()) | json.loads(
            json.dumps(more, default=lambda one: one.model_dump(mode="json"))
        )
        run = RunDefinition.model_validate_json(json.dumps(whole | {"schema_version": number}))
        found[str(number)] = run.raw().decode()
    return found


def rollouts(lease: Digest) -> dict[str, bytes]:
    """A file of each schema, and one of an exact class. Tokens, proofs and sketches are made up."""
    call = GatewayCall(
        group=0, sample=0, turn=0, prefix=ZERO_DIGEST, tool="search", arguments={"query": "x"}
    )
    answered = call.answered(lease, "An answer.", signer(7))
    versions = {
        "1": (SCHEMA_VERSION, ""), "2": (CONVERSATION_SCHEMA, ""), "3": (GATEWAY_SCHEMA, ""),
        "1-exact": (SCHEMA_VERSION, sha256(b"exact class")),
    }  # fmt: skip
    found = {}
    for name, (version, exact) in versions.items():
        talk = version != SCHEMA_VERSION
        rows = [
            FileRow(
                problem_id=f"p{number // 2}",
                group=number // 2,
                sample=number % 2,
                prompt_tokens=(1, 2, 3),
                output_tokens=(4, 5, 6, 7),
                logprobs=np.array([-0.5, 0.0 if talk else -1.0, -0.25, -2.0], np.float32),
                target_length=6,
                finish_reason="end",
                policy_version=0,
                reward=number / 4,
                proofs=bytes([4, 0, 9, 9, 9, 9]),
                sketch=bytes(range(128)),
                spans=(1, 1, 2) if talk else (),
                gateway=(answered,) if version == GATEWAY_SCHEMA and number == 0 else (),
                digests=bytes(range(16)) if exact else b"",
            )
            for number in range(4)
        ]
        metadata = FileMetadata(lease, "plain/1", "float32", "cpu", version, exact)
        found[name] = write_rollout_file(rows, metadata)
    return found


def as_json(file: RolloutFile) -> dict[str, Any]:
    """A parsed rollout file as JSON."""

    def value(one: Any) -> Any:
        if isinstance(one, bytes):
            return one.hex()
        if isinstance(one, np.ndarray):
            return one.tolist()
        return [part.model_dump(mode="json") for part in one] if _models(one) else one

    rows = [{name: value(one) for name, one in vars(row).items()} for row in file.rows]
    return json.loads(json.dumps({"metadata": vars(file.metadata), "rows": rows}))


def _models(one: Any) -> bool:
    return isinstance(one, tuple) and bool(one) and hasattr(one[0], "model_dump")


def settlements(submission: Digest, receipt: str) -> dict[str, str]:
    """A settlement that is one object, and a head with its page."""
    file = SettledFile(
        submission_digest=submission, node=signer(30).address, root_seq=1, received_at=5,
        receipt=receipt, verdict=sha256(b"verdict"), table=sha256(b"table"), units=20,
        price_per_unit="10", state="paid", because=ZERO_DIGEST, judges=(VALIDATOR.address,),
        price_per_judged_file="7", prompt_units=6, price_per_prompt_token="1",
    )  # fmt: skip
    slash = SettledSlash(
        submission_digest=sha256(b"bad"), node=signer(31).address, received_at=6, receipt=receipt,
        state="open",
    )  # fmt: skip
    entry = RewardEntry(node=signer(30).address, cumulative="206")
    whole = Settlement(
        chain_id=31337, pool=1, epoch=3, previous=ZERO_DIGEST, as_of_block=9, files=(file,),
        slashes=(slash,), entries=(entry,), cumulative_total="206",
    )  # fmt: skip
    page = encoding.canonical_json(SettlementPage(files=(file,)).model_dump(mode="json"))
    values = whole.model_dump() | {"schema_version": 2, "files": (), "pages": (sha256(page),)}
    return {
        "whole": whole.canonical().decode(),
        "head": encoding.canonical_json(Settlement(**values).model_dump(mode="json")).decode(),
        "page": page.decode(),
    }


def derived(lease: Digest, submission: Digest) -> dict[str, Any]:
    """What all parties compute alike from a lease and a submission."""
    seed = seeds.lease_seed(lease)
    noise = [seeds.noise_seed(seed, group, 1) for group in range(2)]
    return {
        "seed": seed,
        "problems": seeds.problem_indices(seed, 4, 100),
        "noise_seeds": noise,
        "noise": sampling.noise_bits(noise, [0, 7], 5).tolist(),
        "sketch_key": seeds.sketch_key(seed, 1, 0, 2, [4, 5, 6]).hex(),
        "file_secret": draws.file_secret(sha256(b"epoch"), submission),
        "rows_secret": draws.rows_secret(sha256(b"a"), sha256(b"b")),
        "lot": str(draws.lot("second", sha256(b"epoch"), submission)),
        "drawn_rows": seeds.drawn_rows(sha256(b"rows"), submission, 64, 8),
    }


class Repeats:
    """A tool of the gateway that needs no network."""

    def answer(self, arguments: Mapping[str, str]) -> str:
        return f"You asked for {arguments['query']}."


def gateway_call(run: RunDefinition) -> bytes:
    """A node's call of the run's gateway."""
    work = deployment().domain("work")
    lease = Lease(
        pool=1, step=7, node=signer(30).address, index=0, policy_digest=ZERO_DIGEST,
        run_digest=run.digest(), target=2, salt=ZERO_DIGEST, deadline=int(START) + 60,
    )  # fmt: skip
    signed = SignedLease(lease=lease, signature=signer(200).sign(lease, work), policy_version=0)
    call = GatewayCall(
        group=0, sample=1, turn=0, prefix=sha256(b"tokens"), tool="search-2",
        arguments={"query": "x"},
    )  # fmt: skip
    signature = signer(30).sign(call.statement(lease.digest(work), ""), work)
    return GatewayRequest(lease=signed, call=call, signature=signature).model_dump_json().encode()


def ask_gateway(run: RunDefinition, body: bytes, folder: Path) -> Response:
    """What the gateway of today answers to a call."""
    store = open_store(sqlite_url(folder / "gateway.sqlite"))
    pool = Pool(1, signer(200).address, deployment().domain("work"), lambda _: run)
    service = CallService(
        pool, signer(7), Records(store), {"search-2": Repeats()}, Settings(data=folder),
        Clock(now=lambda: START),
    )  # fmt: skip
    with TestClient(service_app(service)) as http:
        answer = http.post("/v1/call", content=body, headers=VERSIONED)
    store.close()
    return answer


MODULES = (
    batch, calibration, checkpoint, draws, fees, gateway, messages, node, rollout, settlement,
    task, validator_messages, verdict, bridge_messages,
)  # fmt: skip
LENIENT = {"Task", "Gateway"}
"""Parts of a run, whose readers ignore what they do not know."""


def fields(*, exact: bool) -> dict[str, list[str]]:
    """The fields of everything whose readers refuse an unknown one (`exact`: requests, what is
    signed, and objects named by a digest), or of answers, which may gain fields."""
    return {
        f"{module.__name__}.{name}": sorted(kind.model_fields)
        for module in MODULES
        for name, kind in sorted(vars(module).items())
        if isinstance(kind, type)
        and issubclass(kind, Strict)
        and issubclass(kind, Answer) != exact
        and kind.__module__ == module.__name__
        and name not in LENIENT
    }


def left_out(name: str) -> set[str]:
    """The fields of a type of `fields` that its objects leave out unless they are used. Adding one
    changes no byte of objects without it; readers of before refuse those with it."""
    module, _, kind = name.rpartition(".")
    found: type[Strict] = vars(sys.modules[module])[kind]
    return {field for field, about in found.model_fields.items() if about.exclude_if is not None}


def recorded(name: str) -> Any:
    """A recorded JSON file."""
    return json.loads((FOLDER / name).read_text())


def submission_of(exchanges: Mapping[str, Any]) -> tuple[SignedSubmission, dict[str, str]]:
    """The first submission of the recorded traffic, and its receipt."""
    exchange = exchanges["POST /v1/submissions 1"]
    signed = SignedSubmission.model_validate_json(unpacked(exchange["request"]["body"]))
    return signed, json.loads(unpacked(exchange["answer"]["body"]))


def write(name: str, content: Any) -> None:
    """Writes a JSON file of the recording, unless there is one."""
    path = FOLDER / name
    if not path.exists():
        path.write_text(json.dumps(content, indent=1) + "\n")
        print(path)


def main() -> None:
    """Records what is missing."""
    (FOLDER / "rollouts").mkdir(parents=True, exist_ok=True)
    known = recorded("http.json") if (FOLDER / "http.json").exists() else {}
    tape = Tape(dict(known), recording=True)
    with tempfile.TemporaryDirectory() as name, traffic(tape, Path(name)) as world:
        write("objects.json", objects_of(Path(name)))
        deployed = world.backend.context.deployment.model_dump(mode="json")
        write("deployment.json", deployed)
    if tape.exchanges != known:
        path = FOLDER / "http.json"
        path.write_text(json.dumps(tape.exchanges, indent=1) + "\n")
        print(path)
    signed, receipt = submission_of(tape.exchanges)
    lease, digest = signed.submission.lease_digest, receipt["receipt"]["submission_digest"]
    write("runs.json", runs())
    run = RunDefinition.parse(recorded("runs.json")["4"].encode())
    with tempfile.TemporaryDirectory() as name:
        body = gateway_call(run)
        answer = ask_gateway(run, body, Path(name)).text
        write("gateway.json", {"request": body.decode(), "answer": answer})
    write("fields.json", fields(exact=True))
    write("answers.json", fields(exact=False))
    write("statements.json", vectors())
    write("settlements.json", settlements(digest, receipt["signature"]))
    write("leaves.json", encode_leaves([signed]).decode())
    write("derived.json", derived(lease, digest))
    for version, data in rollouts(lease).items():
        path = FOLDER / "rollouts" / f"{version}.parquet"
        if not path.exists():
            path.write_bytes(data)
            write(f"rollouts/{version}.json", as_json(read_rollout_file(data)))


if __name__ == "__main__":
    main()
