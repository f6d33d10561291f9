"""The economic model: its numbers are the bench's, its bounds hold, its warnings name a cure, and
docs/protocol.md shows its table."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prime_core.ids import ZERO_DIGEST
from prime_core.run import MICRO, RunDefinition
from prime_envs.definition import run_from
from prime_orchestrator import economics
from prime_orchestrator.api.validators import AGAIN_ONE_IN
from prime_orchestrator.economics import CHEATS, SET_UPS, Prospect, prospect
from prime_verify.proofs.thresholds import FEW_TOKENS, newest

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "docs" / "examples"
MODEL = ROOT / "devnet" / "model"
BY_NAME = {cheat.bench: cheat for cheat in CHEATS}


def example(name: str) -> RunDefinition:
    """A shipped run, with an environment that is installed."""
    values = tomllib.loads((EXAMPLES / name).read_text())
    values["environment"] = {"name": "reverse", "train_size": 13_000, "heldout_size": 256}
    return run_from(values, EXAMPLES / name, MODEL, ZERO_DIGEST)


SHORT = example("run-target-short.toml")
WORDS = example("run.toml")


def changed(**values: object) -> RunDefinition:
    return SHORT.model_copy(update=values)


def test_the_numbers_are_those_of_the_detection_bench() -> None:
    rows = json.loads((ROOT / "bench/results/detection.json").read_text())["rows"]
    bench = {row["name"]: row["value"] for row in rows}
    for cheat in CHEATS:
        names = (cheat.bench, f"{cheat.bench}_as_vllm")
        assert cheat.tokens == bench[f"tokens_{cheat.bench}"]
        assert cheat.file == tuple(bench[f"caught_{name}"] for name in names)
        assert cheat.row == tuple(bench[f"caught256_{name}"] for name in names)
    rows = json.loads((ROOT / "bench/results/few.json").read_text())["rows"]
    bench = {row["name"]: row["value"] for row in rows}
    assert BY_NAME["int8"].few == tuple(
        (tokens, (bench[f"few{tokens}_bfloat16"], bench[f"few{tokens}_bfloat16_as_vllm"]))
        for tokens in FEW_TOKENS
        if f"few{tokens}_bfloat16" in bench
    )
    assert economics.SECOND_EVERY == AGAIN_ONE_IN


def test_no_detected_cheat_pays_in_a_shipped_run() -> None:
    for path in ("run.toml", "run-devnet.toml", "run-target-short.toml", "run-target-long.toml"):
        run = example(path)
        assert run.risk_factor_micro
        assert run.price_per_prompt_token
        assert run.price_per_judged_file
        for found in economics.prospects(run):
            assert found.pays == (found.detection == 0), (path, found)


@given(
    slash=st.integers(0, 100 * 10**18),
    share=st.integers(0, MICRO),
    price=st.integers(1, 10**15),
    groups=st.integers(1, 64),
    tokens=st.lists(st.integers(1, 6000), min_size=1, max_size=5, unique=True),
)
def test_more_stake_rows_or_judges_never_help_a_cheat(
    slash: int, share: int, price: int, groups: int, tokens: list[int]
) -> None:
    budgets = SHORT.budgets.model_copy(update={"targets": tuple(sorted(tokens)), "by_class": {}})
    run = changed(
        slash_amount=slash, replay_rows_micro=share, price_per_unit=price,
        groups_per_lease=groups, budgets=budgets, samples_per_group=2,
    )  # fmt: skip
    stricter = run.model_copy(update={"slash_amount": slash + 10**18})
    whole = run.model_copy(update={"replay_rows_micro": MICRO})
    for cheat in CHEATS:
        for set_up in SET_UPS:
            found = prospect(run, cheat, set_up)
            helped = prospect(run, cheat, set_up, judged_honestly=0.5)
            assert 0 <= found.detection <= 1
            assert 0 <= found.survival <= 1
            assert found.gain <= cheat.saves * economics.file_pay(run)
            assert prospect(stricter, cheat, set_up).gain <= found.gain <= helped.gain
            assert prospect(whole, cheat, set_up).survival <= found.survival <= helped.survival


def cure(run: RunDefinition, text: str) -> RunDefinition:
    """The run after a warning's advice ("set a = 1, b = 2")."""
    pairs = (part.split(" = ") for part in text.removeprefix("set ").split(", "))
    return run.model_copy(update={name: int(value) for name, value in pairs})


def blind(run: RunDefinition) -> dict[str, Prospect]:
    """Cheats that pay or survive although some setting finds them."""
    found = economics.prospects(run)
    return {
        f"{one.cheat.bench} {one.set_up}": one
        for one in found
        if (one.pays or one.survival > economics.MOST_SURVIVAL)
        and one.cheat.file[SET_UPS.index(one.set_up)] > 0
    }


@pytest.mark.parametrize(
    ("run", "values", "cheat", "field"),
    [
        (WORDS, {"slash_amount": 10**16}, "shallow_model plain", "slash_amount"),
        (WORDS, {"stake_per_seat": 10**16}, "shallow_model vllm", "stake_per_seat"),
        (SHORT, {"groups_per_lease": 1, "samples_per_group": 2}, "int8 plain", "groups_per_lease"),
    ],
)
def test_a_pool_in_which_a_cheat_pays_is_named_with_a_cure(
    run: RunDefinition, values: dict[str, int], cheat: str, field: str
) -> None:
    assert cheat not in blind(run)
    run = run.model_copy(update=values)
    assert cheat in blind(run)
    name, set_up = cheat.split()
    advice = [
        one
        for one in economics.findings(run)
        if BY_NAME[name].name in one.cheats and one.set_up == set_up
    ]
    assert len(advice) == 1
    assert field in advice[0].change
    assert cheat not in blind(cure(run, advice[0].change))


def test_a_run_of_small_leases_counts_what_its_calibration_finds_in_few_rows() -> None:
    """`run new` names the newest calibration; a run that names none has no limits of few rows."""
    small = changed(groups_per_lease=1, samples_per_group=4)
    named = small.model_copy(update={"calibration": newest().digest()})
    own = small.model_copy(update={"calibration": "0x" + "11" * 32})
    assert [economics.judges_few(run, "plain") for run in (small, own, named)] == [0, 0, 1]
    for run in (small, own):
        assert "int8 plain" in blind(run)
        assert any("8-bit weights" in one["text"] for one in economics.warnings(run))
    assert "int8 plain" not in blind(named)
    found = prospect(named, BY_NAME["int8"], "plain")
    assert found.detection >= dict(BY_NAME["int8"].few)[128][0] > 0.5
    said = [one for one in economics.findings(named) if one.set_up == "plain"]
    assert all("8-bit weights" not in one.cheats for one in said)


def test_one_sentence_says_that_only_planted_files_make_accepting_everything_lose() -> None:
    for run in (SHORT, WORDS, changed(price_per_judged_file=0)):
        (said,) = (one["text"] for one in economics.warnings(run) if "validator" in one["text"])
        assert "loses fees only by planted lies: plant files with `serve --planted`" in said
        assert ("price_per_judged_file" in said) == (run.price_per_judged_file == 0)


@pytest.mark.parametrize("field", ["risk_factor_micro", "price_per_prompt_token"])
def test_a_run_lists_the_protections_it_leaves_off(field: str) -> None:
    def advice(run: RunDefinition) -> list[str]:
        return [one["text"] for one in economics.warnings(run) if field in one["text"]]

    assert advice(SHORT) == []
    (text,) = advice(changed(**{field: 0}))
    assert f"set {field}, such as {getattr(SHORT, field)} " in text
    assert advice(changed(price_per_unit=0, **{field: 0})) == [], "nothing is paid"


def test_a_validator_that_colludes_makes_no_cheat_pay_where_there_are_others() -> None:
    assert economics.honest_share(1) == 0
    for validators in (2, 3, 10):
        share = economics.honest_share(validators)
        for found in economics.prospects(SHORT, judged_honestly=share):
            assert found.pays == (found.detection == 0)


def test_protocol_shows_the_table() -> None:
    shown = (ROOT / "docs" / "protocol.md").read_text()
    assert economics.table(SHORT, 3) in shown, "print it again: see docs/protocol.md, Incentives"
