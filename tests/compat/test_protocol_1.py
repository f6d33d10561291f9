"""Protocol 1 is frozen: what was recorded of it is replayed against the code of today.

A failure here means that a peer of another release breaks. Do not record again; make the change
part of a new protocol version (docs/protocol.md, "Versions").
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel, TypeAdapter
from recording import (
    FOLDER,
    as_json,
    ask_gateway,
    derived,
    fields,
    gateway_call,
    left_out,
    recorded,
    submission_of,
)
from traffic import MismatchError, Tape, covers, traffic, unpacked

from prime_core import batch, checkpoint, messages, task, validator_messages
from prime_core.batch import BatchManifest
from prime_core.draws import DrawList, DrawReveal
from prime_core.encoding import merkle_proof, merkle_root, reward_leaf, sha256
from prime_core.ids import ZERO_DIGEST
from prime_core.rollout import decode_leaves, encode_leaves
from prime_core.run import RunDefinition
from prime_core.settlement import Settlement, SettlementPage, load_settlement
from prime_core.signing import Domain, Statement
from prime_core.verdict import Evidence, Verdict, VerdictTable
from prime_orchestrator.api.app import create_app
from prime_verify.rollout_file import read_rollout_file

EXCHANGES: dict[str, Any] = recorded("http.json")
OBJECTS = (Verdict, VerdictTable, Evidence, DrawList, DrawReveal, BatchManifest)


@dataclass(frozen=True)
class Operation:
    """A method and path of the API, and what it answers (None: no JSON of a known kind)."""

    method: str
    path: str
    answer: TypeAdapter[Any] | None

    def fits(self, exchange: dict[str, Any]) -> bool:
        pattern = re.sub(r"{key}", ".+", self.path)
        pattern = re.sub(r"{[^}]*}", "[^/]+", pattern)
        target = exchange["request"]["target"].partition("?")[0]
        return exchange["request"]["method"] == self.method and bool(re.fullmatch(pattern, target))


def operations(document: dict[str, Any]) -> Iterator[Operation]:
    """Those of the API's OpenAPI document."""
    modules = (messages, validator_messages, batch, checkpoint, task)
    kinds = {name: one for module in modules for name, one in vars(module).items()}
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            content = operation["responses"].get("200", {}).get("content", {})
            schema = content.get("application/json", {}).get("schema", {})
            kind = kinds.get((schema.get("items") or schema).get("$ref", "").rpartition("/")[2])
            if kind is not None and "items" in schema:
                kind = list[kind]
            yield Operation(method.upper(), path, None if kind is None else TypeAdapter(kind))


@pytest.fixture(scope="module")
def routes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Operation]]:
    """The API's operations, after the recorded traffic was replayed."""
    tape = Tape(EXCHANGES)
    with traffic(tape, tmp_path_factory.mktemp("pool")) as world:
        assert set(tape.used) >= set(EXCHANGES), "a recorded request was not made"
        yield list(operations(create_app(world.backend).openapi()))


def test_recorded_requests_are_still_made_and_answered_as_recorded(routes: list[Operation]) -> None:
    """The replay itself compares; this is what it must have covered."""
    missing = {
        (one.method, one.path)
        for one in routes
        if one.path.startswith("/v1/") and not any(one.fits(e) for e in EXCHANGES.values())
    }
    assert missing == {("GET", "/v1/events")}, "an endless stream of what GET /v1/status gives"


def grown(value: Any) -> Any:
    """JSON of an answer with one field more in each object that a later release may extend."""
    if isinstance(value, list):
        return [grown(one) for one in value]
    if not isinstance(value, dict) or "signature" in value:
        return value
    exact = {"lease", "receipt", "opening", "invite", "headers", "urls", "submission", "files"}
    exact |= {"batches", "transactions", "slashes", "shadow_files", "marks", "args", "facts"}
    return {k: v if k in exact else grown(v) for k, v in value.items()} | {"added_later": {"x": 1}}


def test_recorded_answers_parse_also_with_fields_that_came_later(routes: list[Operation]) -> None:
    """A program of today reads what servers of protocol 1 answered, and what later ones will."""
    seen = set()
    for name, exchange in EXCHANGES.items():
        found = next((one for one in routes if one.fits(exchange)), None)
        if exchange["answer"]["status"] != 200 or found is None or found.answer is None:
            continue
        body = unpacked(exchange["answer"]["body"])
        parsed = found.answer.validate_json(body)
        covers(json.loads(body), json.loads(found.answer.dump_json(parsed)), name)
        assert found.answer.validate_json(json.dumps(grown(json.loads(body)))) == parsed, name
        seen.add(found.path)
    assert len(seen) > 25


def test_the_gateway_is_asked_and_answers_as_recorded(tmp_path: Path) -> None:
    known = recorded("gateway.json")
    run = RunDefinition.parse(recorded("runs.json")["4"].encode())
    assert gateway_call(run) == known["request"].encode()
    answer = ask_gateway(run, known["request"].encode(), tmp_path)
    assert answer.status_code == 200, answer.text
    covers(json.loads(known["answer"]), answer.json())


def test_what_readers_take_exactly_has_the_recorded_fields() -> None:
    """A field more in a request, a statement or an object is refused by peers of protocol 1; one
    less in an answer is missed. This holds for the bridge and the gateway as well."""
    now, known = fields(exact=True), recorded("fields.json")
    added = {name: {*now[name]} - {*known[name]} for name in known if now[name] != known[name]}
    assert added == {
        "prime_core.draws.SaltOpening": {"heldout"},  # of evaluation leases alone
        "prime_core.messages.Heartbeat": {"proves"},  # once an answer names a time
        "prime_core.messages.LeaseRequest": {"holds"},  # once several leases are allowed
        # where an environment's plugin raised; in runs of schema 6
        "prime_core.verdict.VerdictRow": {"ungraded", "limited", "parts"},
        "prime_node.bridge_messages.LeaseWish": {"holds"},
    }
    assert all(added[name] <= left_out(name) for name in added)
    assert all({*known[name]} <= {*now[name]} for name in known)
    now, known = fields(exact=False), recorded("answers.json")
    assert {name for name in known if not {*known[name]} <= {*now.get(name, ())}} == set()


def test_what_was_recorded_counts_and_what_was_added_does_not() -> None:
    covers({"a": [1]}, {"a": [1], "b": 2})
    for now in ({}, {"a": [2]}, {"a": [1, 1]}, {"a": ["1"]}, {"a": 1}):
        with pytest.raises(MismatchError):
            covers({"a": [1]}, now)


def test_statements_have_the_recorded_digests_and_signatures() -> None:
    vectors = recorded("statements.json")
    kinds = {kind.__name__: kind for kind in Statement.__subclasses__()}
    for name, examples in vectors["statements"].items():
        kind = kinds[name]
        types = kind.eip712_types()[name]
        for one in examples:
            values = {
                field: int(one["message"][member["name"]])
                if member["type"].startswith("uint")
                else one["message"][member["name"]]
                for field, member in zip(kind.model_fields, types, strict=True)
            }
            assert len(values) == len(one["message"])
            contract = vectors["contracts"][one["contract"]]
            domain = Domain(chain_id=vectors["chainId"], contract=contract)
            assert one["contract"] == kind.CONTRACT
            assert kind(**values).digest(domain) == one["digest"], name
            assert kind(**values).recover(domain, one["signature"]) == vectors["signer"], name
            with pytest.raises(ValueError, match="added_later"):
                kind(**values, added_later=1)
    for tree in vectors["trees"]:
        assert merkle_root(tree["leaves"]) == tree["root"]
        for index, proof in enumerate(tree["proofs"]):
            assert merkle_proof(tree["leaves"], index) == proof
    for one in vectors["rewards"]:
        assert reward_leaf(one["node"], int(one["cumulative"])) == one["leaf"]


def test_objects_keep_their_digests_and_their_parts_check() -> None:
    found: dict[str, BaseModel] = {}
    for name, text in recorded("objects.json").items():
        assert sha256(text.encode()) == name
        for kind in OBJECTS:
            if {*kind.model_fields} >= {*json.loads(text)} and _required(kind) <= {
                *json.loads(text)
            }:
                found[name] = kind.model_validate_json(text)
        canonical = json.dumps(
            found[name].model_dump(mode="json"), sort_keys=True, separators=(",", ":"),
            ensure_ascii=False,
        )  # fmt: skip
        assert canonical == text
    assert {type(one) for one in found.values()} == set(OBJECTS)
    contracts = recorded("deployment.json")["contracts"]
    work = Domain(chain_id=31337, contract=contracts["work"])
    opinions = [o for one in found.values() if isinstance(one, Verdict) for o in one.opinions]
    for opinion in opinions:
        opinion.check(work)
        table = found[opinion.opinion.table]
        assert isinstance(table, VerdictTable)
        assert table.submission_digest == opinion.opinion.submission
        assert opinion.opinion.evidence in {ZERO_DIGEST, *found}
    assert {opinion.outcome.name for opinion in opinions} == {"ACCEPTED", "REJECTED", "VOID"}


def _required(kind: type[BaseModel]) -> set[str]:
    return {name for name, info in kind.model_fields.items() if info.is_required()}


def test_a_run_keeps_its_digest_and_may_gain_an_optional_field() -> None:
    digests = {
        "1": "0x5e76d37a4c68f60317771690ecf932fde5d8009a620471a3f0a12b28745f62c6",
        "2": "0x6073cfee68639776e1ec42182cd5699ee0043ce46859d3ca4d198e573df54211",
        "3": "0xdac200f30c4356fec48badc711918f67e252ff1364aa5942cc5b3cdfc7b0b6ba",
        "4": "0xc31b2b577e63a50fb79bb65e7de4ac37061cb8fd6f2bebe686286ca89341025c",
    }
    for number, text in recorded("runs.json").items():
        run = RunDefinition.parse(text.encode(), exact=True)
        assert (run.schema_version, run.digest()) == (int(number), digests[number])
        assert run.raw() == text.encode()
        assert run.model_copy(update={"name": run.name}).raw() == text.encode(), "as written today"
        later = json.loads(text) | {"added_later": 1}
        later["task"]["added_later"] = 1
        raw = json.dumps(later).encode()
        older = RunDefinition.parse(raw)
        assert older.digest() == sha256(raw)
        assert older.model_dump() == run.model_dump()


def test_settlements_and_leaves_keep_their_bytes() -> None:
    texts = {name: text.encode() for name, text in recorded("settlements.json").items()}
    objects = {sha256(data): data for data in texts.values()}
    whole = load_settlement(sha256(texts["whole"]), objects.__getitem__)
    assert whole.canonical() == texts["whole"]
    head = Settlement.model_validate_json(texts["head"])
    page = SettlementPage.model_validate_json(texts["page"])
    assert (head.pages, page.files) == ((sha256(texts["page"]),), whole.files)
    assert head.root() == whole.root()
    leaves = recorded("leaves.json").encode()
    assert encode_leaves(decode_leaves(leaves)) == leaves


@pytest.mark.parametrize("path", sorted((FOLDER / "rollouts").glob("*.parquet")), ids=str)
def test_rollout_files_read_as_recorded(path: Path) -> None:
    now = as_json(read_rollout_file(path.read_bytes()))
    covers(json.loads(path.with_suffix(".json").read_text()), now)


def test_all_parties_derive_the_same_from_a_lease() -> None:
    signed, receipt = submission_of(EXCHANGES)
    digest = receipt["receipt"]["submission_digest"]
    covers(
        recorded("derived.json"),
        json.loads(json.dumps(derived(signed.submission.lease_digest, digest))),
    )


def test_the_recording_is_small() -> None:
    assert sum(path.stat().st_size for path in FOLDER.rglob("*") if path.is_file()) < 1 << 20
    assert not re.search(r"/(tmp|work|home)/", (FOLDER / "http.json").read_text())
