"""Several kinds of liars, a shadow node and a planted one on one network, before two validators."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path

import pytest
from e2e_kit import devnet, findings, processes_of, require_anvil, run

from prime_core.verdict import Reason

SIX = {"learned", "liars_slashed", "paid", "replayed", "fresh", "delivered"}


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_each_kind_of_node_ends_as_it_should(tmp_path: Path) -> None:
    require_anvil()
    root = tmp_path / "run"
    words = (
        *("up", "--plain", "--quick", "--steps", "3", "--nodes", "5"),
        *("--liar", "t11", "--liar", "forged_modh", "--liar", "after_end"),
        *("--shadows", "1", "--planted", "1", "--validators", "2", "--root", str(root)),
    )
    done = run(devnet(*words), 880)
    assert findings(root) == dict.fromkeys(SIX, True)
    assert done.returncode == 0
    assert processes_of(root) == []

    store = sqlite3.connect(root / "orchestrator" / "orchestrator.sqlite")
    try:
        lies = store.execute("SELECT digest FROM submissions WHERE status = 'rejected'").fetchall()
        for (digest,) in lies:
            said = store.execute(
                "SELECT validator, reason FROM opinions WHERE submission_digest = ?", (digest,)
            ).fetchall()
            against = {validator for validator, reason in said if 0 < reason < Reason.MALFORMED}
            assert len(against) == 2, f"two validators agreed on {digest}"
        hidden = store.execute(
            "SELECT status, reason, root_id FROM submissions WHERE shadow AND digest NOT IN "
            "(SELECT submission_digest FROM planted)"
        ).fetchall()
        assert "accepted" in {status for status, *_ in hidden}, (
            "the shadow node's files were judged"
        )
        ends = {(status, reason) for status, reason, _ in hidden if status != "submitted"}
        late = ("void", int(Reason.UNAVAILABLE))  # on a machine too busy to judge it in time
        assert ends <= {("accepted", 0), late}
        planted = store.execute(
            "SELECT kind, status, root_id FROM planted JOIN submissions ON digest = "
            "submission_digest"
        ).fetchall()
        assert all(status == "accepted" for kind, status, _ in planted if kind == "honest")
        assert {root for *_, root in planted + hidden} <= {None}, "none of them came on chain"
    finally:
        store.close()


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_lies_are_played_on_a_network_and_recorded_with_their_audits(tmp_path: Path) -> None:
    require_anvil()
    root, out = tmp_path / "run", tmp_path / "lies.json"
    words = ("lies", "--kind", "truncated", "--kind", "copied_rows", "--kind", "old1_1e6")
    done = run(devnet(*words, "--out", str(out), "--root", str(root)), 580)
    assert done.returncode == 1, "the other kinds were not played"
    (network,) = json.loads(out.read_text())["networks"]
    audits = {one["kind"]: {*one["audits"]} for one in network["liars"] if one["ok"]}
    assert audits == {"truncated": {"match"}, "copied_rows": {"match"}, "old1_1e6": {"accepted"}}
    assert [node["refused"] for node in network["honest"]] == [[], []]
    assert processes_of(root) == []
