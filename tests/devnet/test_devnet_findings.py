"""Each finding holds for an honest run and fails for the one thing that it is there to see."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from devnet import findings as f
from devnet import report

EVALUATIONS = [
    f.Evaluation(0, 0.38, 256, True),
    f.Evaluation(32, 0.77, 256, True),
    f.Evaluation(40, 0.80, 256, True),
]
HONEST = f.NodeFacts("honest-1", "0x1", False, (), 0, False, None, 0, 100, 100, 0)
LIAR = f.NodeFacts("liar-1", "0x2", True, ("0xabc",), 50, True, True, 0, 100, 50, 1)
PAYMENTS = [f.Payment("honest-1", 7, 7, True), f.Payment("liar-1", 0, 3, False)]
REPLAYS = [f.AuditReplay("0xabc", "match", "match"), f.AuditReplay("file", "accepted", "accepted")]
BATCHES = [f.TrainedBatch(s, f"d{s}", f"d{s}", True, 512) for s in range(3)]
FILES = [f.TrainedFile(s, f"file{s}", (0, 1), max(0, s - 2), True) for s in range(3)]
ARRIVALS = [f.Arrival("honest-1", v, v > 0, True, True) for v in range(3)]


def test_an_honest_run_passes_all_six() -> None:
    assert f.learned(EVALUATIONS).ok
    assert f.liars_slashed([HONEST, LIAR]).ok
    assert f.paid(PAYMENTS, True).ok
    assert f.replayed(REPLAYS, 1).ok
    assert f.fresh(BATCHES, FILES, [0, 1, 2, 3]).ok
    assert f.delivered(ARRIVALS, ["honest-1"], [0, 1, 2]).ok


@pytest.mark.parametrize(
    "evaluations",
    [
        EVALUATIONS[:1],
        [EVALUATIONS[0], EVALUATIONS[1]],
        [EVALUATIONS[0], replace(EVALUATIONS[1], mean_reward=0.74), EVALUATIONS[2]],
        [replace(EVALUATIONS[0], mean_reward=0.6), *EVALUATIONS[1:]],
        [*EVALUATIONS[:2], replace(EVALUATIONS[2], on_chain=False)],
    ],
)
def test_learned_fails_without_a_steady_rise_of_policies_on_chain(
    evaluations: list[f.Evaluation],
) -> None:
    assert not f.learned(evaluations).ok


@pytest.mark.parametrize(
    "node",
    [
        replace(LIAR, slash_transactions=(), slashed=0),
        replace(LIAR, ejected_on_chain=False),
        replace(LIAR, leases_after_slash=1),
        replace(LIAR, lease_refused=False),
        replace(LIAR, lease_refused=None),
        replace(HONEST, slashed=1),
        replace(HONEST, stake_active=99),
        replace(HONEST, rejected_leaves=1),
        replace(HONEST, ejected_on_chain=True),
    ],
)
def test_liars_slashed_fails_for_a_free_liar_or_a_hurt_honest_node(node: f.NodeFacts) -> None:
    assert not f.liars_slashed([HONEST, LIAR, node]).ok


@pytest.mark.parametrize(
    ("payments", "roots"),
    [
        ([replace(PAYMENTS[0], claimed=6)], True),
        ([f.Payment("honest-1", 0, 0, True)], True),
        (PAYMENTS, False),
        ([PAYMENTS[1]], True),
    ],
)
def test_paid_fails_if_a_unit_is_missing(payments: list[f.Payment], roots: bool) -> None:
    assert not f.paid(payments, roots).ok


@pytest.mark.parametrize(
    ("replays", "slashes"),
    [
        ([replace(REPLAYS[0], said="mismatch"), REPLAYS[1]], 1),
        ([REPLAYS[0], replace(REPLAYS[1], said="rejected")], 1),
        (REPLAYS, 2),
        (REPLAYS[:1], 1),
    ],
)
def test_replayed_fails_if_an_audit_disagrees_or_is_missing(
    replays: list[f.AuditReplay], slashes: int
) -> None:
    assert not f.replayed(replays, slashes).ok


@pytest.mark.parametrize(
    ("batches", "files"),
    [
        ([], []),
        (BATCHES[:2], FILES[:2]),
        ([*BATCHES, BATCHES[0]], FILES),
        ([replace(BATCHES[0], digest_trained="other"), *BATCHES[1:]], FILES),
        ([replace(BATCHES[0], signed_by_manager=False), *BATCHES[1:]], FILES),
        (BATCHES, [replace(FILES[2], step=3), *FILES[:2]]),
        (BATCHES, [replace(FILES[0], leaf_on_chain=False), *FILES[1:]]),
        (BATCHES, [*FILES, replace(FILES[0], step=1)]),
    ],
)
def test_fresh_fails_for_old_unsealed_unrooted_or_repeated_rows(
    batches: list[f.TrainedBatch], files: list[f.TrainedFile]
) -> None:
    assert not f.fresh(batches, files, [0, 1, 2, 3]).ok


@pytest.mark.parametrize(
    "arrivals",
    [
        ARRIVALS[:2],
        [*ARRIVALS[:2], replace(ARRIVALS[2], identical=False)],
        [*ARRIVALS[:2], replace(ARRIVALS[2], signed=False)],
        [replace(a, as_delta=False) for a in ARRIVALS],
    ],
)
def test_delivered_fails_for_a_missing_forged_or_never_delta_policy(
    arrivals: list[f.Arrival],
) -> None:
    assert not f.delivered(arrivals, ["honest-1"], [0, 1, 2]).ok


def test_a_liar_whose_files_are_void_must_earn_nothing_and_lose_nothing() -> None:
    void = f.NodeFacts("liar-2", "0x3", True, (), 0, False, None, 0, 100, 100, 0, ends="void")
    assert f.liars_slashed([HONEST, void]).ok
    assert "earned 5 units" in f.liars_slashed([replace(void, units=5)]).because
    assert "only void" in f.liars_slashed([replace(void, slashed=50)]).because


def test_nothing_is_asked_of_a_lie_that_is_known_not_to_be_seen() -> None:
    unseen = f.NodeFacts("liar-3", "0x4", True, (), 0, False, None, 0, 100, 100, 0, "unseen", 9)
    assert f.liars_slashed([HONEST, unseen]).ok


def test_nodes_and_slashes_of_the_report_link_to_their_details() -> None:
    node, tx_hash = "0x" + "11" * 20, "0x" + "22" * 32
    page = report.page(
        {
            "ok": True, "seconds": 60.0, "findings": [], "evaluations": [], "steps": [],
            "targets": [], "transactions": {"SlashExecuted": 1},
            "nodes": [
                {"name": "liar", "address": node, "status": "ejected", "speed_class": 1,
                 "accepted": 1, "rejected": 1, "void": 0, "units": 5}
            ],
            "slashes": [
                {"node": "liar", "address": node, "amount": "2", "transaction": tx_hash, "at": 3}
            ],
            "slash_transactions": [{"hash": tx_hash, "block": 7, "events": ["SlashExecuted <>"]}],
            "payouts": [{"node": "liar", "claimed": "0", "rebuilt": "0"}],
        }
    )  # fmt: skip
    links = re.findall(r'<a href="#(\w+)">', page)
    assert links == [node, tx_hash, node]
    assert all(page.count(f'id="{one}"') == 1 for one in links)
    assert "SlashExecuted &lt;&gt;" in page
