"""The pool to judge for: the chain gives its manager, trainer and run.

The run definition comes from the orchestrator and must match the chain's digest. The result is
saved in the folder, so that a restart needs no RPC.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from prime_chain.contracts import Contracts
from prime_chain.link import deployment_for
from prime_core import encoding, ids
from prime_core.calibration import CalibrationStatement
from prime_core.deployment import Deployment
from prime_core.errors import MalformedError, NotFoundError, UntrustedError, UserError
from prime_core.ids import ZERO_DIGEST, Address, Digest
from prime_core.revisions import RunHistory, read_history
from prime_core.run import RunDefinition
from prime_core.signing import Domain, Statement
from prime_core.task import Lease
from prime_engine.base import cpu_name
from prime_envs.base import Environment
from prime_envs.registry import environment_for
from prime_envs.sources import bring_files, datasets_folder
from prime_validator.api import ValidatorApi
from prime_validator.settings import Settings
from prime_verify.proofs.thresholds import Calibration, parse_signed, shipped_as

FILE = "pool.json"


@dataclass(frozen=True)
class PoolOnChain:
    """One pool on one chain."""

    deployment: Deployment
    number: int
    manager: Address
    trainer: Address
    run: RunDefinition

    def domain(self, statement: type[Statement] | Statement) -> Domain:
        """Returns the EIP-712 domain under which this kind of statement is signed."""
        return self.deployment.domain_of(statement)


def find_pool(api: ValidatorApi, settings: Settings, folder: Path) -> PoolOnChain:
    """The orchestrator's pool, from `folder` or else from the chain.

    Raises UserError if no trusted source names the contracts or the folder is another pool's,
    UntrustedError if the orchestrator serves a different run than the chain names, UnavailableError
    if either does not answer.
    """
    kept, info = folder / FILE, api.pool()
    if kept.exists():
        saved = json.loads(kept.read_text())
        known = PoolOnChain(
            Deployment.model_validate_json(json.dumps(saved["deployment"])),
            int(saved["pool"]),
            ids.address(saved["manager"]),
            ids.address(saved["trainer"]),
            RunDefinition.parse(saved["run"].encode()),
        )
        served = (info.chain_id, info.pool, info.run_digest)
        if served != (known.deployment.chain_id, known.number, known.run.digest()):
            raise UserError(
                f"the folder {folder} belongs to pool {known.number} on chain "
                f"{known.deployment.chain_id} ({known.run.name}), and the orchestrator serves pool "
                f"{info.pool} on chain {info.chain_id} ({info.name})",
                hint="name another folder for this pool: --data DIR",
            )
        return known
    place = deployment_for(
        info, settings.need_rpc(), settings.deployment, quorum=settings.rpc_quorum
    )
    client = settings.open_chain(place.chain_id)
    try:
        facts = Contracts(client, place).pools.pool_of(info.pool)
    finally:
        client.close()
    raw = api.run()
    if encoding.sha256(raw) != facts.run_digest:
        raise UntrustedError("the orchestrator serves another run definition than the chain names")
    run = RunDefinition.parse(raw)
    place.check_run(run)
    pool = PoolOnChain(place, info.pool, facts.manager, facts.trainer, run)
    saved = {
        "deployment": place.model_dump(mode="json"),
        "pool": info.pool,
        "manager": facts.manager,
        "trainer": facts.trainer,
        "run": raw.decode(),
    }
    draft = kept.with_suffix(".new")
    draft.write_text(json.dumps(saved))
    draft.replace(kept)
    return pool


def load_environment(run: RunDefinition, api: ValidatorApi) -> Environment:
    """The environment of a run. Its files come from public addresses only, unless the orchestrator
    may name private ones."""
    bring_files(run, datasets_folder(), public_only=not api.client.allows_private)
    return environment_for(run)


class Runs:
    """The pool's run and its revisions on chain. The definitions come from the orchestrator and
    must match their digests. `revisions` returns first step and digest of each."""

    def __init__(
        self,
        pool: PoolOnChain,
        api: ValidatorApi,
        revisions: Callable[[], Iterable[tuple[int, Digest]]],
    ) -> None:
        self._pool = pool
        self._api = api
        self._revisions = revisions
        self._history = RunHistory(pool.run)
        self._environments: dict[Digest, Environment] = {}

    def of_lease(self, lease: Lease) -> RunDefinition:
        """Returns the run by which a lease is judged. Raises UntrustedError if the lease names a
        run other than its step's, UnavailableError if chain or orchestrator do not answer."""
        try:
            return self._history.of_lease(lease)
        except UntrustedError:  # the run may have been revised since the last read
            first = self._pool.run.digest()
            self._history = read_history(first, self._revisions(), self._fetch)
            return self._history.of_lease(lease)

    def environment(self, run: RunDefinition) -> Environment:
        """Returns the environment of a run, cached because files of it may keep arriving."""
        name = run.digest()
        if name not in self._environments:
            self._environments[name] = load_environment(run, self._api)
        return self._environments[name]

    def _fetch(self, digest: Digest) -> bytes:
        return self._pool.run.raw() if digest == self._pool.run.digest() else self._api.run(digest)


def run_calibration(pool: PoolOnChain, api: ValidatorApi) -> Calibration | None:
    """Returns the calibration that the run names, a shipped one or an object; None if it names none
    and so uses the shipped one.

    Raises UserError if the orchestrator lacks the object, or the manager did not sign it.
    """
    named = pool.run.calibration
    if named == ZERO_DIGEST:
        return None
    if found := shipped_as(named):
        return found
    try:
        raw = api.object(named)
    except NotFoundError as error:
        raise UserError(
            f"the run's calibration is not published: {error}",
            hint="the manager puts the object that the run names into the object store",
        ) from error
    try:
        return parse_signed(raw, pool.manager, pool.domain(CalibrationStatement))
    except (MalformedError, UntrustedError) as error:
        hint = "the run has to name one that its manager signed (docs/verification.md)"
        raise UserError(str(error), hint=hint) from error


def check_replay(calibration: Calibration, dtype: str, device: str) -> str:
    """Returns in a sentence what a validator that replays in `dtype` on `device` (as load_engine
    takes it) cannot do by this calibration; empty if it can do everything.

    Raises UserError if it could judge no file.
    """
    due = calibration.replay_engine, calibration.replay_dtype, calibration.replay_device
    found = cpu_name() if device.startswith("cpu") else _card(device)
    if calibration.replayed_by(due[0], dtype, found):
        return ""
    if calibration.replayed_widely_by(due[0], dtype, found):
        return (
            f"the run's calibration holds for replays on {due[2]}, and this validator replays on "
            f"{found}: it accepts files within their limits and abstains from all others, so it "
            f"rejects none; to judge them, replay on {due[2]}"
        )
    raise UserError(
        f"the run's calibration holds for replays in {due[1]} on {due[2]}, not in {dtype} on "
        f"{found}: this validator could judge no file",
        hint="replay as it says, or measure another: orchestrator calibrate --replay-device",
    )


def _card(device: str) -> str:
    """The name of the first card as engines state it; `device` itself if PyTorch does not see
    it."""
    try:
        import torch

        first = "cuda" if device == "all" else device.partition(",")[0]
        return str(torch.cuda.get_device_name(first))
    except (ImportError, RuntimeError, AssertionError, ValueError):
        return device
