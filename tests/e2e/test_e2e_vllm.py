"""Exact classes of vLLM on a whole network: nodes whose workers are vLLM, a validator that repeats
their proof passes with vLLM, and a liar that only the comparison of bits finds."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import pytest
from e2e_kit import ROOT, processes_of, require_anvil

from devnet.network import MODEL, Network
from devnet.observe import audit
from devnet.plan import NodePlan, Plan
from devnet.walk import Walk
from prime_chain.events import SlashExecuted
from prime_chain.history import read_events
from prime_core.deployment import Periods
from prime_core.errors import NotFoundError
from prime_core.ids import Digest
from prime_core.messages import ClassInfo, Status, SubmissionInfo
from prime_core.run import RunDefinition
from prime_core.task import SignedLease
from prime_core.validator_messages import OpinionList
from prime_core.verdict import Evidence, Reason, VerdictTable
from prime_engine.exact import NumericClass
from prime_verify.proofs.thresholds import ProvenClass, shipped

PYTHON = Path(os.environ.get("PRIME_VLLM_PYTHON", ROOT / "var/engines/vllm/bin/python"))
MISSING = "vLLM is not installed: scripts/setup_vllm.sh"
PATHS = [ROOT / name for name in ("protocol", "node", "validator", "orchestrator", "trainer")]
MEASURE = """
import json, sys
from pathlib import Path
from prime_verify.engines import load_engine
found = load_engine(Path(sys.argv[1]), engine="vllm", threads=1).numeric_class()
print(json.dumps([dict(found.facts), found.fingerprint]))
"""
PERIODS = Periods(
    epoch_length=8, validity=360, slash_window=6, dispute_window=6, reward_delay=4, unbonding=380
)
"""Files may wait for their verdict while several programs load vLLM at once."""
WAIT_SECONDS = 600.0


class VllmNetwork(Network):
    """A devnet whose workers and whose validator run in vLLM's own environment. Its calibration
    lists the exact class of vLLM on this machine as proven. The trainer makes one step."""

    validator_program = PYTHON.with_name("validator")
    validator_flags = ("--exact", "float32", "--exact-engine", "vllm")
    first: NumericClass
    """The class with policy 0, measured by a process of its own."""

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan)
        # The environment of vLLM may hold the code of another checkout.
        self.supervisor.environment["PYTHONPATH"] = os.pathsep.join(map(str, PATHS))

    def definition(self, base: Digest) -> RunDefinition:
        """The devnet's, with a calibration of its own; half of a file's rows are replayed."""
        run = super().definition(base)
        facts, fingerprint = json.loads(
            self.supervisor.run("class", [str(PYTHON), "-c", MEASURE, str(MODEL)])
        )
        self.first = NumericClass(facts, Digest(fingerprint))
        longest = run.max_output_tokens
        proven = ProvenClass(key=self.first.key, rows=10_000, providers=3, longest=longest)
        made = self.root / "made.json"
        made.write_bytes(shipped().model_copy(update={"proven": (proven,)}).canonical())
        said = self.supervisor.run(
            "calibrate",
            [
                *self.command("calibrate", "--sign", str(made), "--json"),
                *("--out", str(self.root / "calibration.json")),
                *("--objects", str(self.root / "orchestrator" / "objects")),
                *("--deployment", str(self.deployment_file)),
                *self.accounts["manager"].flags(),
            ],
        )
        named = {"calibration": json.loads(said)["digest"], "replay_rows_micro": 500_000}
        return run.model_copy(update=named | {"lease_seconds": 240})

    def start_trainer(self, *, steps: int | None = None) -> None:
        super().start_trainer(steps=1)

    def worker_command(self, node: NodePlan) -> str:
        liar = Path(__file__).with_name("vllm_liar.py")
        program = f"-P {liar}" if node.liar else "-m prime_node.worker"
        return f"{PYTHON} {program} --engine vllm"


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.skipif(not PYTHON.exists(), reason=MISSING)
def test_vllm_s_files_are_accepted_bit_by_bit_and_a_liar_is_slashed_by_its_exact_class(
    tmp_path: Path,
) -> None:
    require_anvil()
    nodes = (NodePlan("honest", throttle=3.0), NodePlan("liar", liar="old1_1e6"))
    plan = Plan(
        root=tmp_path / "run", nodes=nodes, periods=PERIODS, validators=1, groups_per_batch=24,
        groups_per_lease=2, samples_per_group=4,
    )  # fmt: skip
    network = VllmNetwork(plan)
    walk = Walk(network, note=print, tick=lambda: None)
    try:
        walk.bring_up(nodes=())
        walk.until("the class of policy 0", lambda _: _announced(network), WAIT_SECONDS)
        for node in nodes:  # now, so that each of their leases names it
            network.start_node(node)
        walk.until("the liar's slash", lambda status: _ejected(network, status), WAIT_SECONDS)
        walk.until(
            "an exact file of policy 1", lambda one: _of_policy_1(network, one), WAIT_SECONDS
        )
        walk.stop_nodes()
        _check_files(network)
        _check_audits(network)
        assert network.supervisor.stop("validator") == 0
    finally:
        network.stop()
    assert processes_of(network.root) == []


def _announced(network: VllmNetwork) -> bool:
    with network.client() as client:
        try:
            return bool(client.get(f"/v1/classes/{network.first.digest()}", ClassInfo))
        except NotFoundError:
            return False


def _ejected(network: Network, status: Status) -> bool:
    names = network.names()
    return "liar" in {names.get(one.node) for one in status.nodes if one.status == "ejected"}


def _files(network: Network, name: str) -> Iterator[tuple[SubmissionInfo, SignedLease]]:
    """A node's files, newest first, each with its lease."""
    with network.client() as client:
        for file in client.submissions(network.accounts[name].address):
            yield file, client.get(f"/v1/leases/{file.lease_digest}", SignedLease)


def _of_policy_1(network: Network, status: Status) -> bool:
    return status.latest_version == 1 and any(
        file.status == "accepted" and lease.policy_version == 1 and lease.numeric_class()
        for file, lease in islice(_files(network, "honest"), 8)
    )


def _check_files(network: VllmNetwork) -> None:
    """Each exact file of the honest node was accepted by equal bits, each of the liar's rejected by
    others, and the pool's records say so."""
    honest, liar = (list(_files(network, name)) for name in ("honest", "liar"))
    assert {file.status for file, _ in honest} == {"accepted"}
    assert {(file.status, file.reason) for file, _ in liar} == {
        ("rejected", Reason.WRONG_PROOF_PASS)
    }
    exact = [(file, lease) for file, lease in honest if lease.numeric_class()]
    with network.client() as client:
        compared = 0
        for file, _ in exact:
            answer = client.get(f"/v1/submissions/{file.submission_digest}/opinions", OpinionList)
            (opinion,) = (signed.opinion for signed in answer.opinions)
            table = VerdictTable.model_validate_json(client.get_object(Digest(opinion.table)))
            assert table.statistics["exact_mismatches"] == "0"
            assert int(table.statistics["exact_rows"]) == len(table.rows_drawn) >= 4
            compared += len(table.rows_drawn)
        for file, lease in liar:
            assert lease.numeric_class() == network.first.digest()
            assert file.evidence is not None
            evidence = Evidence.model_validate_json(client.get_object(Digest(file.evidence)))
            found = evidence.statistics
            assert found["exact_first"] == found["exact_mismatches"] == found["exact_rows"]
        names = {lease.policy_version: lease.numeric_class() for _, lease in exact}
        classes = [client.get(f"/v1/classes/{names[version]}", ClassInfo) for version in (0, 1)]
    assert classes[0].digest == network.first.digest(), "an equal class in three processes"
    assert classes[0].facts == classes[1].facts == network.first.facts
    assert classes[0].fingerprint != classes[1].fingerprint

    data = ("--data", str(network.root / "orchestrator"))
    words = network.command("classes", "--run", str(network.run_file), "--json", *data)
    (shown,) = json.loads(network.supervisor.run("classes", words))["classes"]
    assert shown["key"] == network.first.key
    assert (shown["files"], shown["mismatched"]) == (len(exact) + len(liar), len(liar))
    print(f"{compared} rows of {len(exact)} of {len(honest)} files were equal")


def _check_audits(network: VllmNetwork) -> None:
    """An auditor with vLLM repeats the slash. One without says that it cannot."""
    work = network.contracts().work
    events = read_events(work.client, work.deployment)
    slash = next(event.tx_hash for event in events if isinstance(event, SlashExecuted))
    assert audit(network, [slash]) == ["cannot tell"]
    assert audit(network, [slash], PYTHON.with_name("prime-node")) == ["match"]
