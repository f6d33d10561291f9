"""`validator doctor`: checks in advance whether this machine and account can judge."""

from __future__ import annotations

import importlib.util
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from prime_chain.amounts import prime
from prime_chain.contracts import Contracts
from prime_chain.flows import stake_view
from prime_chain.keystore import keystore_address
from prime_chain.mirror import announced
from prime_core.doctor import DoctorCheck, failed
from prime_core.errors import PolicyError, PrimeError, UserError
from prime_core.folders import make_folder
from prime_core.ids import Address
from prime_core.transport.client import OrchestratorClient
from prime_validator.api import ValidatorApi
from prime_validator.pool import (
    PoolOnChain,
    check_replay,
    find_pool,
    load_environment,
    run_calibration,
)
from prime_validator.settings import Settings
from prime_verify.engines import policy_bytes
from prime_verify.proofs.thresholds import shipped

FREE_MB = 1024


def examine(settings: Settings) -> list[DoctorCheck]:
    """Runs all checks; those that depend on a failed one are skipped."""
    found: list[DoctorCheck] = []

    def check(name: str, ask: Callable[[], str]) -> bool:
        try:
            found.append(DoctorCheck(name, "ok", ask()))
        except PrimeError as error:
            found.append(failed(name, error))
        return found[-1].outcome == "ok"

    check("torch", _torch)
    check("folder", lambda: _folder(settings.data))
    client = OrchestratorClient(settings.need("orchestrator"))
    api = ValidatorApi(client, "doctor")
    pools: list[PoolOnChain] = []
    try:
        if check("pool", lambda: _pool(api, settings, pools)):
            pool = pools[0]
            check("replay", lambda: _replay(pool, api, settings))
            check("policies", lambda: policies_loaded(api, settings))
            check("environment", lambda: f"{load_environment(pool.run, api).name} loads")
            check("appointment", lambda: _appointed(pool, settings))
            check("bond", lambda: _bond(pool, settings))
            check("mirror", lambda: _mirror(pool, settings))
    finally:
        client.close()
    return found


def _torch() -> str:
    if importlib.util.find_spec("torch") is None:
        raise UserError("torch is not installed", hint="pip install 'prime-open[validator]'")
    return "installed"


def _folder(path: Path) -> str:
    free = shutil.disk_usage(make_folder(path)).free >> 20
    if free < FREE_MB:
        raise UserError(f"{path} has {free} MiB free", hint=f"policies need {FREE_MB} MiB at least")
    return f"{path} takes files; {free} MiB free"


def _pool(api: ValidatorApi, settings: Settings, pools: list[PoolOnChain]) -> str:
    with tempfile.TemporaryDirectory() as nowhere:  # ignores what the folder remembers
        pool = find_pool(api, settings, Path(nowhere))
    pools.append(pool)
    return f"pool {pool.number} of chain {pool.deployment.chain_id}, run {pool.run.name!r}"


def _replay(pool: PoolOnChain, api: ValidatorApi, settings: Settings) -> str:
    calibration = run_calibration(pool, api) or shipped()
    limited = check_replay(calibration, settings.dtype, settings.device)
    said = limited or f"{settings.dtype} on {settings.device} is calibrated"
    return "; ".join([said, *calibration.unlisted()])


def policies_loaded(api: ValidatorApi, settings: Settings) -> str:
    """Returns how many policies stay loaded, by the files of the newest one and the free memory.
    If not even one fits, a warning: they may be loaded already, by a validator that runs."""
    newest = api.pool().latest_version
    if newest is None:
        return "the pool has no policy yet"
    files = api.policy(newest).manifest.files
    weights = sum(one.size for one in files if one.name.endswith(".safetensors"))
    size, room = policy_bytes(weights, settings.device), settings.policy_bytes()
    needs = f"a policy of the pool takes {size / 1e9:.2f} GB on {settings.device}"
    if room is None:
        return f"{needs}; this system does not say how much is free"
    sizes = f"{needs}, all of them may take {room / 1e9:.2f} GB"
    fit = min(settings.policies, room // size)
    if fit:
        return f"{sizes}: {fit} stay{'s' if fit == 1 else ''} loaded"
    if settings.policy_memory_mb:
        return f"{sizes}: only the one in use stays loaded"
    return (
        f"warning: {sizes}: none fits into what is free now. That is fine if this validator runs "
        "already; else end other programs, or share a policy between cards: --device all"
    )


def _account(settings: Settings) -> Address:
    path = settings.need("wallet")
    found = keystore_address(path)
    if found is None:
        raise UserError(f"{path} does not say whose key it holds", hint="name another --wallet")
    return found


def _appointed(pool: PoolOnChain, settings: Settings) -> str:
    account = _account(settings)
    client = settings.open_chain(pool.deployment.chain_id)
    try:
        appointed = Contracts(client, pool.deployment).pools.is_validator(pool.number, account)
    finally:
        client.close()
    if not appointed:
        raise PolicyError(
            f"{account} is not appointed; the manager types: orchestrator pool set-validator "
            f"{account} --pool {pool.number}"
        )
    return f"{account} is appointed"


def _bond(pool: PoolOnChain, settings: Settings) -> str:
    account = _account(settings)
    client = settings.open_chain(pool.deployment.chain_id)
    try:
        contracts = Contracts(client, pool.deployment)
        needed = contracts.slasher.validator_bond()
        view = stake_view(contracts, account, client.agreed_block("latest").time)
    finally:
        client.close()
    if view.unbondable < needed:
        raise PolicyError(
            f"{prime(view.active)} bonded, {prime(needed)} needed: no slash can be proposed; "
            "validator bond AMOUNT"
        )
    return f"{prime(view.active)} bonded, {prime(needed)} needed"


def _mirror(pool: PoolOnChain, settings: Settings) -> str:
    """Evidence is also served without a mirror, by the manager: its absence is not a failure."""
    account = _account(settings)
    client = settings.open_chain(pool.deployment.chain_id)
    try:
        url = announced(client, pool.deployment, pool.number).get(account, "")
    finally:
        client.close()
    if url:
        return f"others find this validator's evidence at {url}"
    return (
        "none is announced: only the manager serves the evidence of this validator's opinions; "
        "validator run --mirror FOLDER --mirror-listen HOST:PORT, then validator announce-mirror "
        f"URL --pool {pool.number}"
    )
