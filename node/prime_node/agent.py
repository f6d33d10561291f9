"""The node agent: one process that joins a pool and keeps its task supplied with work.

    main thread    heartbeat ──► directive: join · work · wait · stop; manages the task
    bridge         the task's requests: lease, submit, abandon          (bridge.py, lease_broker.py)
    uploader        finished files ──► orchestrator, until receipted     (uploader.py, spool.py)
    policies       new policies, fetched while work goes on             (policies.py)

The heartbeat's answer is the only control loop. The task waits for a lease and its policy, and a
lease waits for a free slot; nothing waits for the chain. Not supported: several tasks on one
machine. Run one agent per task instead, each with its own data folder.
"""

from __future__ import annotations

import logging
import os
import random
import shutil
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from pathlib import Path
from typing import TypeVar

from prime_broadcast.access import Passes
from prime_broadcast.folder import PolicyFolder
from prime_broadcast.manifest import Trust
from prime_broadcast.sources import SourceBook
from prime_core.errors import UnavailableError
from prime_core.ids import Address, Digest
from prime_core.logs import set_process_fields
from prime_core.node import Hardware
from prime_core.run import RunDefinition
from prime_core.signing import LocalSigner
from prime_core.waiting import StoppedError, until_answered, until_stopped
from prime_envs.sources import DATASETS_FOLDER, bring_files
from prime_node.api import NodeApi
from prime_node.bridge import LONGEST_SOCKET_PATH, Bridge
from prime_node.config import Settings
from prime_node.fingerprint import held_cards, read_hardware
from prime_node.heartbeat import HeartbeatLoop, Parts
from prime_node.join import Accounts, Join, OwnersPart, check_pool
from prime_node.lease_broker import Connections, Deliveries, LeaseBroker, OpenLeases
from prime_node.link import Link, connect
from prime_node.policies import PolicyKeeper
from prime_node.revisions import Revisions, check_limits
from prime_node.runtime import make_runtime
from prime_node.runtime.base import Mounts, Runtime, WorkerOptions
from prime_node.spool import Spool, TaskUploads
from prime_node.state import DataFolder, remembered
from prime_node.task import TaskKeeper
from prime_node.unpaid import BackingReader, UnpaidWork
from prime_node.uploader import Uploader
from prime_node.wallet import named_provider

log = logging.getLogger("prime.node")
T = TypeVar("T")
STOP_GRACE_SECONDS = 20.0
API_SECONDS, GATEWAY_SECONDS = 30.0, 15.0
"""Without a byte from the orchestrator, or from the gateway, which answers within 10 s."""
DRAIN_SECONDS = 10.0
SHADOW = (
    "--shadow: this node works without a seat. Its files are judged as any others, and nothing "
    "follows from it: no stake, no pay, no slash. prime-node status shows the verdicts"
)
THROTTLED = (
    "--throttle %g: THIS MACHINE PLAYS ONE %g TIMES SLOWER, in the hardware challenge and in "
    "generation. It is for development and earns less."
)


class Agent:
    """Runs until stopped. `owner_signer` is the provider's key if it is on this machine. `runtime`
    takes the place of the one that the settings select."""

    def __init__(
        self,
        settings: Settings,
        signer: LocalSigner,
        owner_signer: LocalSigner | None,
        *,
        runtime: Runtime | None = None,
    ) -> None:
        self._settings = settings
        self._runtime = runtime
        self._signer = signer
        self._owner_signer = owner_signer
        self._data = DataFolder(settings.data)
        self._give_up = None if _had_answers(settings) else settings.first_answer_seconds
        self._stop = threading.Event()
        self._manager: Address | None = None

    def run(self) -> int:
        """Runs the agent to its end; returns the exit status. Raises PrimeError with the reason if
        it ends for any cause other than a signal or the end of the pool."""
        self._data.make()
        self._data.lock()
        try:
            with ExitStack() as stack:
                return self._live(stack)
        finally:
            self._data.unlock()

    def stop(self) -> None:
        """Asks the agent to stop; callable from any thread."""
        self._stop.set()

    def install_signals(self) -> None:
        """Makes SIGTERM and SIGINT stop the agent cleanly; a second signal ends it immediately."""
        until_stopped(self._stop, second_ends=True)

    # -- from start to first heartbeat

    def _live(self, stack: ExitStack) -> int:
        settings, data = self._settings, self._data
        if settings.throttle > 1.0:
            log.warning(THROTTLED, settings.throttle, settings.throttle)
        if settings.shadow:
            log.warning(SHADOW)
        api = self._api(stack)
        pool = self._until_answered(api.client.pool)
        run = self._until_answered(lambda: newest_run(api))
        if pool is None or run is None:
            return 0
        self._manager = api.manager = pool.manager  # compared with the chain below
        data.bind(pool)
        set_process_fields(pool=pool.pool)
        hardware = read_hardware(data.root, settings.gpus)
        check_limits(settings, run, hardware)
        if run.task.gpus:
            stack.enter_context(held_cards(settings.gpus))
        runtime = self._runtime or make_runtime(settings, data, self._signer.address)
        log.warning("%s", runtime.check(run.task))
        if left := runtime.clean():
            log.warning("ended %d task(s) that an earlier agent left behind", left)
        link = self._link(api, stack)
        if link is not None and not (
            self._pool_is_checked(link, api) and self._run_is_checked(api, run.digest())
        ):
            return 0
        data.remember(settings.to_remember())
        data.remember_pool(pool)
        data.empty_task_outbox()

        spool = Spool(data.spool, now=time.time)
        revisions = self._revisions(run, hardware, runtime, link is not None)
        unpaid = self._unpaid(api, spool, stack)
        open_leases = OpenLeases()
        keeper = self._policies(api, run, open_leases)
        broker = LeaseBroker(
            self._connections(api, stack), revisions, keeper,
            Deliveries(TaskUploads(data.task_inbox), spool, unpaid), open_leases, now=time.time,
            most_slots=settings.lease_slots,
        )  # fmt: skip
        bridge_folder = self._bridge_folder(stack)
        bridge = Bridge(bridge_folder, broker, task_uid=runtime.task_uid)
        uploader = Uploader(spool, self._new_api, rng=random.Random(), on_settled=open_leases.nudge)
        accounts = Accounts(self._signer, self._provider(), self._owner_signer)
        owners_part = OwnersPart(api, link, run, accounts, data, now=time.time)
        join = Join(settings, api, run, hardware, owners_part, stop=self._stop)

        def options(of: RunDefinition) -> WorkerOptions:
            threads = settings.threads or max(1, of.task.cpus_milli // 1000)
            return WorkerOptions(
                threads, settings.generation_batch, settings.throttle, device=join.device,
                gpus=settings.gpus, tensor_parallel=settings.tensor_parallel,
                memory_share=settings.memory_share, max_length=settings.max_length,
            )  # fmt: skip

        mounts = Mounts(data.policies, data.task_outbox, bridge_folder)
        if not self._fetch_dataset(run):
            return 0
        task = TaskKeeper(runtime, run.task, mounts, options(run), now=time.monotonic)

        # Stopped in reverse order: the task first, while its bridge still answers.
        stack.callback(lambda: self._end_uploader(uploader))
        stack.callback(lambda: keeper.stop(2.0))
        stack.callback(lambda: revisions.stop(2.0))
        threads = [uploader.thread, keeper.thread, bridge.thread, revisions.thread]
        if unpaid is not None:
            stack.callback(unpaid.stop, 2.0)
            unpaid.thread.start()
            threads.append(unpaid.thread)
        stack.callback(bridge.close)
        stack.callback(lambda: self._end_task(broker, task))
        uploader.start()
        keeper.start()
        bridge.start()
        revisions.start()
        heartbeat_loop = HeartbeatLoop(
            api,
            Parts(broker, keeper, spool, join, task, revisions, options, threads),
            data=data, runtime=settings.runtime, now=time.time, stop=self._stop,
        )  # fmt: skip
        return heartbeat_loop.run()

    def _api(self, stack: ExitStack, timeout: float = API_SECONDS) -> NodeApi:
        api = self._new_api(timeout)
        stack.callback(api.close)
        return api

    def _new_api(self, timeout: float = API_SECONDS) -> NodeApi:
        settings = self._settings
        return NodeApi(
            settings.need_orchestrator(),
            self._signer,
            timeout=timeout,
            shadow=settings.shadow,
            allow_private=settings.allow_private,
            manager=self._manager,
        )

    def _provider(self) -> Address:
        return named_provider(self._settings) or (self._owner_signer or self._signer).address

    def _link(self, api: NodeApi, stack: ExitStack) -> Link | None:
        """Connects to the chain if an RPC is named."""
        if not self._settings.rpc:
            return None
        link = connect(self._settings, api.client.pool())
        stack.callback(link.close)
        return link

    def _unpaid(self, api: NodeApi, spool: Spool, stack: ExitStack) -> UnpaidWork | None:
        """Returns the limit on unpaid work, with a chain connection of its own; None without an
        RPC, and in shadow, where nothing is paid."""
        link = None if self._settings.shadow else self._link(api, stack)
        if link is None:
            return None
        read = BackingReader(link, self._new_api, self._signer.address)
        return UnpaidWork(
            spool, self._signer.address, self._settings.max_unpaid_wei, read,
            calm_seconds=link.deployment.periods.epoch_length / 4,
        )  # fmt: skip

    def _pool_is_checked(self, link: Link, api: NodeApi) -> bool:
        """Checks the orchestrator's statements about the pool against the chain; returns False if
        stopped before. An unavailable RPC is tolerated if an earlier start got an answer."""
        if self._give_up is not None:
            return self._until_answered(lambda: check_pool(link, api)) is not None
        try:
            check_pool(link, api)
        except UnavailableError as error:
            log.warning("the pool is not checked against the chain: %s", error)
        return True

    def _run_is_checked(self, api: NodeApi, digest: Digest) -> bool:
        """Waits until the chain names the run; returns False if stopped before."""

        def checked() -> bool:
            self._check_on_chain(api, digest)
            return True

        return self._until_answered(checked) is not None

    def _revisions(
        self, run: RunDefinition, hardware: Hardware, runtime: Runtime, chain: bool
    ) -> Revisions:
        """Returns the handler for revisions of `run`: they are fetched, checked against the owner's
        limits and the chain, and prepared."""
        settings = self._settings

        def fetch(digest: Digest) -> RunDefinition:
            with closing(self._new_api()) as api:
                if chain:
                    self._check_on_chain(api, digest)
                return api.run(digest)

        def prepare(later: RunDefinition) -> None:
            runtime.check(later.task)  # pulls its image
            folder = self._data.policies / DATASETS_FOLDER
            bring_files(later, folder, public_only=self._settings.public_only)

        return Revisions(
            run,
            fetch=fetch,
            check=lambda later: check_limits(settings, later, hardware),
            prepare=prepare,
        )

    def _check_on_chain(self, api: NodeApi, digest: Digest) -> None:
        """Raises UnavailableError while the chain does not name a run. An unreachable chain is
        tolerated, because the manager signs every lease that names the run."""
        try:
            with closing(connect(self._settings, api.client.pool())) as link:
                pools = link.contracts.pools
                named = {one.run_digest for one in pools.revisions_of(link.pool)}
                named.add(pools.pool_of(link.pool).run_digest)
        except UnavailableError as error:
            log.warning("run %s is not checked against the chain: %s", digest, error)
            return
        if digest not in named:
            raise UnavailableError("the chain does not name it yet")

    def _connections(self, api: NodeApi, stack: ExitStack) -> Connections:
        """Returns the connections that the lease broker's threads use."""
        return Connections(
            api=self._api(stack),
            gateway=self._api(stack, timeout=GATEWAY_SECONDS),
            signer=self._signer,
            domain=api.client.domain("work"),
        )

    def _policies(self, api: NodeApi, run: RunDefinition, open_leases: OpenLeases) -> PolicyKeeper:
        info = api.client.pool()
        trust = Trust(info.trainer, api.client.domain("pools"), info.pool)
        passes = Passes(self._signer, api.client.domain("registry"))
        book = SourceBook(passes=passes, public_only=not api.client.allows_private)
        return PolicyKeeper(
            PolicyFolder(
                self._data.policies,
                trust,
                book=book,
                most_bytes=self._settings.policy_gb << 30,
                base_model=self._settings.base_model_source,
            ),
            self._new_api,
            keep=run.max_staleness + 2,
            on_arrival=open_leases.nudge,
            pinned=open_leases.versions,
        )

    def _bridge_folder(self, stack: ExitStack) -> Path:
        """Returns the socket's folder: in the data folder, or a short temporary one if that path
        exceeds the limit for Unix sockets."""
        if len(os.fsencode(self._data.bridge / "agent.sock")) <= LONGEST_SOCKET_PATH:
            return self._data.bridge
        short = Path(tempfile.mkdtemp(prefix="prime-node-"))
        stack.callback(lambda: shutil.rmtree(short, ignore_errors=True))
        return short

    def _fetch_dataset(self, run: RunDefinition) -> bool:
        """Downloads the run's dataset and corpus, if any, for the worker, which has no network.
        Retries while a server is unavailable; returns False if stopped first."""
        folder = self._data.policies / DATASETS_FOLDER
        public_only = self._settings.public_only
        fetched = self._until_answered(lambda: bring_files(run, folder, public_only=public_only))
        return fetched is not None

    def _until_answered(self, ask: Callable[[], T]) -> T | None:
        """Retries until there is an answer; returns None if stopped first. On the first start in
        this data folder, raises UnavailableError if no answer comes in time."""

        def tell(error: UnavailableError, wait: float) -> None:
            log.warning("%s; trying again in %.0f s", error, wait)

        try:
            return until_answered(ask, self._stop, tell, give_up=self._give_up)
        except StoppedError:
            return None

    # -- the end

    def _end_task(self, broker: LeaseBroker, task: TaskKeeper) -> None:
        broker.close()
        try:
            task.stop(STOP_GRACE_SECONDS)
        except UnavailableError as error:
            log.warning("%s; the next start ends the task", error)
        broker.give_back_open("the agent was asked to stop")

    def _end_uploader(self, uploader: Uploader) -> None:
        try:
            uploader.drain(DRAIN_SECONDS if uploader.thread.is_alive() else 0.0, time.monotonic)
            left = uploader.stop(5.0)
        except UnavailableError as error:
            log.warning("what waits in the spool is not known: %s", error)
            return
        if left:
            log.warning("%d finished file(s) stay in the spool; the next start delivers them", left)


def newest_run(api: NodeApi) -> RunDefinition:
    """Returns the last definition that is final on chain. Leases issued from now on are of it, or
    of one that the heartbeat names."""
    listed = api.runs()
    final = [one.run_digest for one in listed.revisions if one.final]
    return api.run(final[-1] if final else listed.first)


def _had_answers(settings: Settings) -> bool:
    """Whether an earlier start in this data folder got answers from this orchestrator and from a
    chain. A node with that history may also start without its current RPC."""
    kept, given = remembered(settings.data), settings.to_remember()
    chain_too = bool(kept.get("rpc")) or not given["rpc"]
    return chain_too and kept.get("orchestrator") == given["orchestrator"]
