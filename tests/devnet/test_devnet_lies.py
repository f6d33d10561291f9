"""`python -m devnet lies`: a kind's record says what came of its liar, and is kept while the code
that judges it is the same."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from devnet import lies, play
from devnet.findings import NodeFacts
from devnet.kinds import LIES
from devnet.lies import JudgedFile
from devnet.origin import ROOT
from prime_core.errors import UnavailableError
from prime_core.ids import Digest, address, digest
from prime_core.messages import NodeInfo
from prime_core.task import SubmissionStatus
from prime_core.verdict import Reason

TX = "0x" + "ab" * 32
LIAR = NodeFacts("liar", "0x1", True, (), 0, False, None, 0, 100, 100, 0)
SLASHED = replace(
    LIAR, slash_transactions=(TX,), slashed=50, ejected_on_chain=True, lease_refused=True
)
VOID, UNSEEN = replace(LIAR, ends="void"), replace(LIAR, ends="unseen", units=9)
HONEST = replace(LIAR, name="honest", liar=False, ends="")
FOUND, WRITTEN = Reason.WRONG_SAMPLING, Reason.WRONG_ROWS


def files(*reasons: Reason) -> list[JudgedFile]:
    status: dict[int, SubmissionStatus] = {1: "accepted", 2: "rejected", 3: "void"}
    return [
        JudgedFile(digest(bytes([n]) * 32), status[int(reason.outcome)], reason)
        for n, reason in enumerate(reasons)
    ]


def seen(accepted: int = 0, rejected: int = 0, void: int = 0, status: str = "active") -> NodeInfo:
    return NodeInfo.model_validate(
        {
            "node": address("0x" + "11" * 20), "provider": None, "status": status,
            "speed_class": 1, "last_heartbeat": 0, "policy_version": 0, "units": 0,
            "accepted": accepted, "rejected": rejected, "void": void,
        }
    )  # fmt: skip


ENDED_AS_LISTED = [
    ("t11", SLASHED, files(Reason.NONE, FOUND, FOUND), ["match"]),
    ("truncated", VOID, files(*[Reason.MALFORMED] * 6), ["match"]),
    ("old1_1e6", UNSEEN, files(*[Reason.NONE] * 6), ["accepted"]),
]


@pytest.mark.parametrize(("kind", "facts", "its", "audits"), ENDED_AS_LISTED)
def test_a_liar_that_ends_as_listed_and_is_audited_so_is_in_order(
    kind: str, facts: NodeFacts, its: list[JudgedFile], audits: list[str]
) -> None:
    found = lies.record(kind, its, facts, audits)
    assert found["wrong"] == []
    assert found["came"] == LIES[kind].ends


def test_a_record_says_which_file_was_the_first_found_and_how_often_which_reason() -> None:
    found = lies.record(
        "t11", files(Reason.NONE, FOUND, Reason.IMPROBABLE_TOKENS), SLASHED, ["match"]
    )
    assert (found["files"], found["judged"]) == (2, 3)
    assert found["reasons"] == {"WRONG_SAMPLING": 1, "IMPROBABLE_TOKENS": 1}
    assert found["burned_wei"] == "50"


@pytest.mark.parametrize(
    ("kind", "facts", "its", "audits"),
    [
        ("t11", LIAR, files(Reason.NONE), ["accepted"]),
        ("t11", LIAR, files(FOUND), ["match"]),  # rejected, and no slash came of it
        ("t11", SLASHED, files(FOUND), ["mismatch"]),
        ("t11", SLASHED, files(FOUND), ["cannot tell"]),
        ("t11", SLASHED, files(FOUND), []),
        ("t11", replace(SLASHED, lease_refused=False), files(FOUND), ["match"]),
        ("truncated", VOID, files(FOUND), ["match"]),
        ("truncated", replace(VOID, units=1), files(WRITTEN, Reason.NONE), ["match"]),
        ("truncated", VOID, [], []),
        ("truncated", VOID, files(Reason.LATE), ["match"]),
        ("old1_1e6", replace(SLASHED, ends="unseen"), files(FOUND), ["match"]),
        ("old1_1e6", UNSEEN, files(Reason.NONE), ["mismatch"]),
    ],
)
def test_any_other_end_or_audit_is_reported(
    kind: str, facts: NodeFacts, its: list[JudgedFile], audits: list[str]
) -> None:
    found = lies.record(kind, its, facts, audits)
    assert found["wrong"]
    assert not found["ok"]


def test_a_file_that_was_judged_too_late_says_nothing_of_the_lie() -> None:
    late = files(Reason.UNAVAILABLE, Reason.NONE, Reason.LATE)
    found = lies.record("old1_1e6", late, UNSEEN, ["accepted"])
    assert found["ok"]
    assert (found["judged"], found["late"]) == (1, 2)
    assert lies.subjects(late, UNSEEN) == (late[1].submission,)
    assert lies.honest_record(late, HONEST)["ok"]


def test_an_honest_node_is_hurt_by_a_refused_file_or_a_wei_of_stake() -> None:
    assert lies.honest_record(files(Reason.NONE), HONEST)["ok"]
    assert not lies.honest_record(files(Reason.NONE, WRITTEN), HONEST)["ok"]
    assert not lies.honest_record(files(Reason.NONE), replace(HONEST, stake_active=99))["ok"]


def test_a_liar_plays_until_it_is_out_or_has_had_its_chances() -> None:
    assert lies.shown("slashed", seen(accepted=3, rejected=1, status="ejected"))
    assert not lies.shown("slashed", seen(accepted=lies.GIVEN_UP, rejected=1))
    assert not lies.shown("slashed", seen(accepted=lies.GIVEN_UP - 1))
    assert lies.shown("slashed", seen(accepted=lies.GIVEN_UP))
    assert lies.shown("void", seen(void=lies.SHOWN))
    assert lies.shown("unseen", seen(accepted=lies.SHOWN))
    assert not lies.shown("unseen", seen(accepted=lies.SHOWN, rejected=1))


def test_every_kind_is_in_one_lot_and_no_lot_is_too_large() -> None:
    kinds = tuple(LIES)
    found = lies.lots(kinds, 8)
    assert sorted(kind for lot in found for kind in lot) == sorted(kinds)
    assert {len(lot) for lot in found} <= {7, 8}


def whole() -> list[lies.Record]:
    liars = [{"kind": kind, "ok": True} for kind in LIES]
    return [{"liars": liars, "honest": [{"ok": True}]}]


def test_all_is_as_listed_only_if_every_kind_was_played_and_no_honest_node_was_hurt() -> None:
    networks = whole()
    assert lies.all_as_listed(networks)
    assert not lies.all_as_listed([{**networks[0], "liars": networks[0]["liars"][1:]}])
    assert not lies.all_as_listed([{**networks[0], "honest": [{"ok": False}]}])
    failed = {"liars": [{"kind": "t11", "ok": False}], "honest": []}
    assert not lies.all_as_listed([*networks, failed]), "the newest of a kind counts"
    assert lies.all_as_listed([failed, *networks])


def played(kinds: Sequence[str]) -> lies.Record:
    liars = [{"kind": kind, "ok": True} for kind in kinds]
    return {"sources": lies.sources(ROOT), "liars": liars, "honest": [{"ok": True}]}


def test_what_was_played_is_kept_and_a_network_that_fails_is_left_to_be_played(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, reported = tmp_path / "kept" / "lies.json", list[str]()

    def some(kinds: Sequence[str], root: Path, note: play.Note) -> lies.Record:
        if "t11" in kinds:
            raise UnavailableError("the orchestrator did not happen")
        return played(kinds)

    monkeypatch.setattr(play, "play", some)
    found = play.play_all(("t09", "t11"), out, tmp_path, 1, lambda: None, reported.append)
    assert not found["ok"]
    assert {*lies.newest(play.load(out)["networks"])} == {"t09"}
    assert "the orchestrator did not happen" in reported[-1]
    monkeypatch.setattr(play, "play", lambda kinds, root, note: played(kinds))
    rest = [kind for kind in LIES if kind != "t09"]
    assert play.play_all(rest, out, tmp_path, 50, lambda: None, reported.append)["ok"]
    assert play.load(out)["ok"]
    monkeypatch.setattr(play, "play", some)
    again = play.play_all(("t11",), out, tmp_path, 1, lambda: None, reported.append)
    assert not again["ok"], "requested again, and not played"


def test_what_other_sources_found_does_not_count(tmp_path: Path) -> None:
    out = tmp_path / "lies.json"
    old = {**played(tuple(LIES)), "sources": str(Digest("0x" + "00" * 32))}
    out.write_text(json.dumps({"networks": [old]}))
    assert play.load(out)["networks"] == []
    assert not play.load(out)["ok"]


def test_the_sources_are_those_that_make_and_judge_files(tmp_path: Path) -> None:
    for name in (
        "node/prime_node/planting.py",
        "devnet/liars.py",
        "devnet/kinds.py",
        "protocol/prime_verify/proofs/calibration.json",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("")
    before = lies.sources(tmp_path)
    (tmp_path / "protocol" / "prime_verify" / "proofs" / "calibration.json").write_text("{}")
    assert lies.sources(tmp_path) != before
    assert lies.sources(ROOT) == lies.sources(ROOT)
    names = (
        "prime_verify/verify.py",
        "prime_verify/canaries/lies.py",
        "prime_engine/plain.py",
        "prime_verify/proofs/sketch.py",
    )
    assert all((ROOT / "protocol" / name).exists() for name in names)


def test_the_table_also_shows_the_liars_of_a_kind_that_ended_otherwise() -> None:
    let_pass = lies.record("t11", files(Reason.NONE, Reason.NONE), LIAR, ["accepted"])
    found = lies.record("t11", files(FOUND), SLASHED, ["match"])
    reported = play.table([{"liars": [let_pass, found], "honest": []}])
    assert "another: unseen, file 2" in reported
    assert "WRONG_SAMPLING 1" in reported
    assert "NOT AS LISTED" not in reported
    assert "NOT AS LISTED: unseen" in play.table([{"liars": [let_pass], "honest": []}])
    assert reported.count("not played") == len(LIES) - 1
