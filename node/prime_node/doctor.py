"""`prime-node doctor`: checks this machine; each failure comes with its exact fix.

Checks continue after a failure; those that need the result of a failed one are skipped.
"""

from __future__ import annotations

import importlib.util
import platform
import shutil
import time
from collections.abc import Iterator
from contextlib import closing

from prime_chain.client import ChainClient
from prime_chain.keystore import keystore_address
from prime_core.doctor import DoctorCheck, Outcome, failed
from prime_core.errors import PrimeError, UserError
from prime_core.messages import PoolInfo, Status
from prime_core.run import RunDefinition
from prime_core.transport.client import OrchestratorClient
from prime_node.api import NodeApi
from prime_node.cards import passport, proved_memory
from prime_node.config import Settings
from prime_node.fingerprint import (
    CPU_ONLY,
    MIB,
    cards_on_bus,
    read_gpus,
    read_hardware,
    require_seen,
    use_gpus,
)
from prime_node.runtime import make_runtime
from prime_node.runtime.base import NoCardsError
from prime_node.state import DataFolder
from prime_node.wallet import named_provider

MIN_DISK_MB = 2048
MAX_SKEW_SECONDS = 5


def examine(settings: Settings) -> list[DoctorCheck]:
    """Runs every check possible with these settings, in order. Limits this process to the node's
    cards."""
    use_gpus(settings.gpus)
    checks = [_python(), _disk(settings), _memory(), _keystore(settings)]
    pool, run = None, None
    if settings.orchestrator:
        with OrchestratorClient(settings.need_orchestrator(), timeout=5.0) as client:
            check, pool, run = _orchestrator(client)
            checks.append(check)
            if pool is not None:
                checks.append(_clock(client))
    else:
        checks.append(
            DoctorCheck(
                "orchestrator", "warning", "none is named", "add --orchestrator URL to check it"
            )
        )
    checks += [_gpu(settings, run), _runtime(settings, run)]
    if run is not None:
        checks.append(_requirements(settings, run))
    if pool is not None:
        checks.extend(_passport(settings, run))
        checks.extend(_calibration(settings))
    checks.extend(_chain(settings, pool))
    return checks


def _python() -> DoctorCheck:
    found = f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    if platform.system() != "Linux":
        return DoctorCheck("python", "warning", found, "agents are tested on Linux only")
    return DoctorCheck("python", "ok", found)


def _disk(settings: Settings) -> DoctorCheck:
    folder = settings.data
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free // MIB
    found = f"{free} MiB free at {settings.data}"
    if free < MIN_DISK_MB:
        return DoctorCheck("disk", "failed", found, "free some space, or name another --data DIR")
    return DoctorCheck("disk", "ok", found)


def _memory() -> DoctorCheck:
    import psutil

    memory = psutil.virtual_memory()
    found = f"{memory.available // MIB} MiB available of {memory.total // MIB} MiB"
    if memory.available < 1024 * MIB:
        return DoctorCheck("memory", "warning", found, "end other programs before joining")
    return DoctorCheck("memory", "ok", found)


def _gpu(settings: Settings, run: RunDefinition | None) -> DoctorCheck:
    """Cards that do not work are a failure only if the run is known and gives its tasks cards, or
    has nodes prove them."""
    proved = run is not None and run.cards is not None and set(run.cards.kinds) != {"cpu"}
    asked = proved or (run is not None and run.task.gpus)
    outcome: Outcome = "failed" if asked else "warning"
    try:
        gpus = read_gpus(settings.gpus)
    except UserError as error:
        return failed("gpu", error, "nvidia-smi -L")
    try:
        require_seen(gpus)
    except UserError as error:
        return DoctorCheck("gpu", outcome, str(error), error.hint)
    if not gpus and settings.gpus == "none":
        return DoctorCheck("gpu", "ok", "none are used (gpus = none)")
    if not gpus and (there := cards_on_bus()):
        fix = f"install the NVIDIA driver until nvidia-smi -L lists them, or {CPU_ONLY}"
        found = f"{there} NVIDIA cards are in this machine, and its driver shows none"
        return DoctorCheck("gpu", outcome, found, fix)
    if not gpus:
        return DoctorCheck("gpu", "ok", "none seen (fine for pools that ask for none)")
    return DoctorCheck("gpu", "ok", ", ".join(f"{gpu.model} {gpu.memory_mb} MiB" for gpu in gpus))


def _keystore(settings: Settings) -> DoctorCheck:
    if settings.wallet is None:
        fix = "make one: prime-node wallet new --out FILE; name it: --wallet FILE"
        return DoctorCheck("wallet", "warning", "none is named", fix)
    try:
        return DoctorCheck(
            "wallet", "ok", f"{keystore_address(settings.wallet)} in {settings.wallet}"
        )
    except PrimeError as error:
        return failed("wallet", error, "prime-node wallet new --out FILE")


def _orchestrator(
    client: OrchestratorClient,
) -> tuple[DoctorCheck, PoolInfo | None, RunDefinition | None]:
    try:
        pool = client.pool()
        run = RunDefinition.parse(client.request("GET", "/v1/run", b"", signed=False))
    except PrimeError as error:
        fix = "check --orchestrator URL and that it is up (its /healthz answers)"
        return failed("orchestrator", error, fix), None, None
    found = f"{client.base_url} serves pool {pool.pool} ({pool.name}) on chain {pool.chain_id}"
    return DoctorCheck("orchestrator", "ok", found), pool, run


def _clock(client: OrchestratorClient) -> DoctorCheck:
    before = time.time()
    try:
        server = client.get("/v1/status", Status).time
    except PrimeError as error:
        return failed("clock", error, "check that the orchestrator is up")
    after = time.time()
    skew = server + 0.5 - (before + after) / 2
    found = f"within {abs(skew):.0f} s of the orchestrator's"
    if abs(skew) > MAX_SKEW_SECONDS + (after - before):
        return DoctorCheck("clock", "failed", f"{skew:+.0f} s off", "sudo timedatectl set-ntp true")
    return DoctorCheck("clock", "ok", found)


def _runtime(settings: Settings, run: RunDefinition | None) -> DoctorCheck:
    try:
        runtime = make_runtime(settings, DataFolder(settings.data), "doctor")
        said = runtime.check(run.task if run is not None else None)
    except NoCardsError as error:
        outcome: Outcome = "warning" if run is None else "failed"
        return DoctorCheck("runtime", outcome, str(error), error.hint)
    except PrimeError as error:
        return failed("runtime", error, "prime-node join --runtime process (development only)")
    outcome = "warning" if runtime.name == "process" else "ok"
    missing = _missing_packages() if runtime.name == "process" else []
    if missing:
        fix = "pip install 'prime-open[node,torch]'"
        return DoctorCheck("runtime", "failed", f"missing: {', '.join(missing)}", fix)
    return DoctorCheck("runtime", outcome, said)


def _missing_packages() -> list[str]:
    """Returns the packages that the plain worker needs and this virtual environment lacks."""
    needed = ("torch", "transformers", "pyarrow", "numpy")
    return [name for name in needed if importlib.util.find_spec(name) is None]


def _requirements(settings: Settings, run: RunDefinition) -> DoctorCheck:
    try:
        missing = run.requirements.shortfalls(read_hardware(settings.data, settings.gpus))
    except UserError as error:
        return failed("requirements", error, "")
    if missing:
        return DoctorCheck(
            "requirements", "failed", "the pool asks for " + "; ".join(missing),
            "use another machine, or another pool",
        )  # fmt: skip
    return DoctorCheck("requirements", "ok", "this machine meets the pool's")


def _passport(settings: Settings, run: RunDefinition | None) -> Iterator[DoctorCheck]:
    """What the pool measured of this node's cards, if the run asks for a proof of them."""
    if run is None or run.cards is None or settings.wallet is None:
        return
    try:
        address = keystore_address(settings.wallet)
        if address is None:
            return
        with closing(NodeApi(settings.need_orchestrator(), None, timeout=5.0)) as api:
            found = passport(api, address)
            memory = proved_memory(api, address) if found is not None else None
            trouble = api.node(address).cards_trouble if found is not None else ""
    except PrimeError as error:
        yield failed("passport", error, "")
        return
    if found is None:
        fix = "prime-node join proves this machine's cards, all at once"
        yield DoctorCheck("passport", "warning", "the pool has not measured this node's cards", fix)
        return
    when = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(found.measured_at))
    claimed = f"{found.claimed_memory_mb} MiB of memory a card claimed"
    shown = "none" if memory is None else f"{memory.proved_memory_mb} MiB"
    sentence = f"{found.sentence}, measured on {when}; {claimed}, {shown} proved"
    if trouble:
        fix = "the pool measures them again by itself: stop other work on them, and let it run"
        yield DoctorCheck("passport", "failed", f"{sentence}. No lease is given: {trouble}", fix)
        return
    yield DoctorCheck("passport", "ok", sentence)


def _calibration(settings: Settings) -> Iterator[DoctorCheck]:
    """What follows for an active node whose card has no limits in the run's calibration."""
    if settings.wallet is None:
        return
    try:
        address = keystore_address(settings.wallet)
        if address is None:
            return
        with closing(NodeApi(settings.need_orchestrator(), None, timeout=5.0)) as api:
            found = api.node(address)
    except PrimeError:  # not admitted yet; other checks name what does not answer
        return
    if found.uncalibrated_trouble:
        fix = "the pool's operator can measure this card: orchestrator calibrate"
        yield DoctorCheck("calibration", "failed", found.uncalibrated_trouble, fix)
    elif found.uncalibrated_card:
        said = f"none for {found.uncalibrated_card}: its files are judged at the widest limits"
        yield DoctorCheck("calibration", "warning", said)


def _chain(settings: Settings, pool: PoolInfo | None) -> Iterator[DoctorCheck]:
    if not settings.rpc:
        yield DoctorCheck(
            "rpc", "warning", "none is named", "add --rpc URL to check stake and rewards"
        )
        return
    if pool is None:
        yield DoctorCheck("rpc", "warning", "not checked: the orchestrator did not name the chain")
        return
    try:
        client = settings.open_chain(pool.chain_id, timeout=5.0)
    except UserError as error:
        yield failed("rpc", error)
        return
    try:
        block = client.block("latest")
        name = client.network.name
        yield DoctorCheck("rpc", "ok", f"chain {pool.chain_id} ({name}) at block {block.number}")
        if settings.wallet is not None:
            yield from _balance(settings, client)
    except PrimeError as error:
        yield failed("rpc", error, "check --rpc URL; a public endpoint may limit you: add another")
    finally:
        client.close()


def _balance(settings: Settings, client: ChainClient) -> Iterator[DoctorCheck]:
    assert settings.wallet is not None
    try:
        account = keystore_address(settings.wallet)
    except UserError:  # reported by the wallet's own check
        return
    if account is None:
        return
    try:
        provider = named_provider(settings)
    except UserError as error:
        yield failed("provider", error, "name the owner: --provider ADDRESS")
        return
    wei = client.balance(account)
    found = f"{account} has {wei / 1e18:.4f} ETH"
    if wei == 0 and provider in (None, account):
        fix = "send it a little ETH, or name the owner that pays: --provider ADDRESS"
        yield DoctorCheck("balance", "warning", found, fix)
    else:
        yield DoctorCheck("balance", "ok", found)
