"""The demo from start to end, as one walk:

    start → premises (every target length is asked for)
          → learn (evaluate every few policies, until two in a row are good) → stop training
          → settle (last epoch's validity passes, reward roots are posted, honest nodes claim)
          → observe from outside → six findings → report

A run of fixed steps does the same with a shorter middle. Every wait is for an event, has a
deadline, and watches that no process has died.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import httpx

from devnet.findings import NEEDED_REWARD, NEEDED_RISE
from devnet.network import BIN, Network
from devnet.plan import HELDOUT, NodePlan
from prime_broadcast.access import Passes, ephemeral_signer
from prime_broadcast.folder import PolicyFolder
from prime_broadcast.layout import INDEX_NAME, POLICIES, parse_index
from prime_broadcast.manifest import Trust
from prime_broadcast.sources import SourceBook
from prime_chain.events import RootPosted
from prime_chain.history import read_events
from prime_core import ids
from prime_core.checkpoint import SignedManifest
from prime_core.errors import FatalError, PrimeError, UnavailableError
from prime_core.messages import Status
from prime_node.state import DataFolder

START_SECONDS = 600.0
STEP_SECONDS = 90.0
EVALUATION_SEED = 7
LEASES_SEEN = 4
"""Leases for each target length, after which the run's premises are looked at."""
TURNS = 8
"""Of foreign events, so that other load of the machine falls on both sides of the comparison."""
QUIET_SECONDS, FOREIGN_SECONDS, LATE_SECONDS = 14.0, 22.0, 3.0
"""Of one turn: without foreign events, with them, and untimed until they are read."""
HEARTBEAT_RATIO = 1.5
"""Bar of the 95th percentile of heartbeats with foreign events, as a multiple of that without."""
Note = Callable[[str], None]


class Walk:
    """The demo's acts on a running network; `note` is called with what happens now."""

    def __init__(self, network: Network, note: Note, tick: Callable[[], None]) -> None:
        self.network = network
        self.note = note
        self.tick = tick
        self.evaluations: list[tuple[int, float]] = []
        self.heartbeats_ok = True
        """Whether HEARTBEAT_RATIO was kept; also if no foreign events were asked for."""

    def start(self) -> None:
        """Everything up, the premises looked at, policy 0 evaluated, the first batch sealed."""
        self.bring_up()
        self.premises()
        self.evaluate(0)
        self.until("the first batch", lambda status: status.step >= 1, START_SECONDS)

    def premises(self) -> None:
        """Waits until the first nodes work and LEASES_SEEN leases are out, and looks at what the
        run rests on. Raises FatalError with what is wrong."""
        run = self.network.run()
        self.note("nodes are joining")
        least = LEASES_SEEN * len(run.budgets.targets)

        def asked(status: Status) -> int:
            return sum(share.asked for share in status.targets)

        self.until(f"{least} leases", lambda status: asked(status) >= least, START_SECONDS)
        status = self.network.status()
        if missing := [share.target for share in status.targets if share.asked == 0]:
            raise FatalError(
                f"of {asked(status)} leases none asked for the target lengths {missing}: the run "
                "cannot learn them"
            )
        names = self.network.names()
        classes = {
            names[node.node]: node.speed_class for node in status.nodes if node.node in names
        }
        slow = [node.name for node in self.network.plan.nodes if node.throttle > 1.0]
        distinguished = slow and len({*classes.values()}) > 1
        words = ", ".join(f"{name} {number}" for name, number in sorted(classes.items()))
        asks = ", ".join(f"{share.target}: {share.asked}" for share in status.targets)
        self.note(f"leases by target length {asks}; speed classes: {words}")
        if slow and not distinguished:
            self.note(f"{', '.join(slow)} should be of a lower class, and is not seen to be (yet)")

    def bring_up(self, nodes: Sequence[NodePlan] | None = None) -> None:
        """Chain, contracts, pool, programs, nodes (by default all of the plan), until the first
        policy is published."""
        network = self.network
        self.note("starting a local chain and deploying the contracts")
        network.start_chain()
        self.note("creating and funding the pool")
        network.create_pool()
        self.note("starting orchestrator, validator, trainer and relay")
        network.start_orchestrator()
        self.note(f"page: {network.url}")
        network.start_validators()
        network.start_trainer()
        network.start_relay()
        for node in network.plan.nodes if nodes is None else nodes:
            self.note(f"starting {node.name}")
            network.start_node(node)
        self.until("policy 0", lambda status: status.latest_version is not None, START_SECONDS)
        if network.endpoints is not None:
            self.note("one of the three RPC endpoints fails from now on")
            network.endpoints.begin()

    def learn(self) -> None:
        """Until two evaluations in a row are good enough, or the run's last step."""
        plan = self.network.plan
        self.note("learning")
        while True:
            due = self.evaluations[-1][0] + plan.evaluate_every
            target = min(due, plan.steps)
            self.until(f"policy {target}", _published(target), STEP_SECONDS * plan.evaluate_every)
            version = self.network.status().latest_version or target
            self.evaluate(version)
            if plan.fixed_steps and version >= plan.steps:
                return
            if not plan.fixed_steps and self._good():
                return
            if version >= plan.steps:
                self.note(f"not learned within {plan.steps} steps")
                return

    def outlast_faults(self) -> None:
        """Until no RPC endpoint fails any more; the network works meanwhile."""
        endpoints = self.network.endpoints
        if endpoints is None:
            return
        self.note("the network works on while RPC endpoints fail")
        limit = self.network.plan.rpc_faults + 60
        self.until("the end of the faults", lambda _: endpoints.over(), limit)
        self.note(f"faults: {dict(sorted(endpoints.injected().items()))}")

    def bear_foreign_events(self) -> None:
        """Times the honest nodes' heartbeats, by turns without and with events of a stranger."""
        foreign, count = self.network.foreign, self.network.plan.foreign_events
        if foreign is None:
            return
        self.note(f"{count} foreign events in {TURNS} turns; heartbeats between them and meanwhile")
        quiet: list[int] = []
        loud: list[int] = []
        for _ in range(TURNS):
            quiet += self._heartbeats("a quiet turn", _passed(QUIET_SECONDS))
            foreign.begin(-(-count // TURNS), FOREIGN_SECONDS)
            loud += self._heartbeats("a turn of foreign events", foreign.over)
            time.sleep(LATE_SECONDS)
        before, during = (sorted(took)[len(took) * 95 // 100] for took in (quiet, loud))
        ratio = during / max(1, before)
        self.heartbeats_ok = ratio <= HEARTBEAT_RATIO
        self.note(
            f"heartbeats, 95th percentile: {before} ms of {len(quiet)}; {during} ms of {len(loud)} "
            f"during {foreign.emitted()} foreign events: {ratio:.2f} times (bar {HEARTBEAT_RATIO})"
        )

    def _heartbeats(self, what: str, over: Callable[[], bool]) -> list[int]:
        """Milliseconds of each heartbeat of the honest nodes until `over`."""
        root = self.network.root / "nodes"
        folders = [DataFolder(root / node.name) for node in self.network.plan.nodes if node.paid]
        began = time.time()
        seen: dict[tuple[str, int], int] = {}

        def look() -> bool:
            for status in filter(None, (folder.read_status() for folder in folders)):
                if status.heard_at > began:
                    seen.setdefault((status.node, status.heard_at), status.heartbeat_ms)
            return over()

        self.network.supervisor.wait_for(what, look, 300, interval=0.2)
        return list(seen.values())

    def wait_for_slashes(self) -> None:
        """Until every liar that should be is ejected by its slash (validity bounds how long that
        takes)."""
        names = self.network.names()
        liars = {node.name for node in self.network.plan.nodes if node.ends == "slashed"}
        if not liars:
            return
        self.note("waiting until every liar's slash is executed on chain")

        def all_ejected(status: Status) -> bool:
            out = {names.get(node.node) for node in status.nodes if node.status == "ejected"}
            return liars <= out

        periods = self.network.plan.periods
        self.until("the liars' slashes", all_ejected, periods.validity + periods.slash_window + 120)

    def settle(self) -> None:
        """Ends training and the nodes, lets the last epoch's validity pass, and claims for the
        honest. The trainer stays up as the origin that auditors fetch from."""
        network = self.network
        self.note("ending training: every node takes the last policy, every file its verdict")
        network.supervisor.stop("trainer")
        network.start_trainer(steps=0)
        self.until("the last policy at every honest node", self._all_have_the_last, START_SECONDS)
        self.stop_nodes()
        self.until_claimable()
        for node in network.plan.nodes:
            if node.paid:
                self.note(f"{node.name} claims its rewards")
                network.supervisor.run(
                    "claims",
                    [
                        *(str(BIN / "prime-node"), "rewards", "claim", "--json"),
                        *("--data", str(network.root / "nodes" / node.name)),
                    ],
                )

    def until_claimable(self) -> None:
        """Until the reward root of the last epoch with work can be claimed from."""
        network = self.network
        self.note("waiting until the last work's validity has passed")
        contracts = network.contracts()
        periods = network.plan.periods
        last = self._last_epoch_with_work()
        wait = (last + 1) * periods.epoch_length + periods.validity + periods.reward_delay
        deadline = max(0.0, wait - time.time()) + 120

        def claimable(_: Status) -> bool:
            root = contracts.rewards.reward_root(network.pool, last)
            now = network.anvil.rpc("eth_getBlockByNumber", "latest", False)["timestamp"]
            return root is not None and int(now, 16) >= root.claimable_at

        self.until(f"the reward root of epoch {last}", claimable, deadline)

    def stop_nodes(self) -> None:
        """Ends every node; then every file gets its verdict and its root."""
        for node in self.network.plan.nodes:
            self.network.supervisor.stop(node.name)
        self.until("every file's verdict and root", self._all_judged_and_rooted, START_SECONDS)

    def evaluate(self, version: int) -> None:
        """Evaluates a policy that came through the relay, and remembers its mean reward."""
        network = self.network
        self.note(f"evaluating policy {version} on held-out problems")
        folder = fetch_through_relay(network, version)
        mean = evaluate(network, folder)
        self.evaluations.append((version, mean))
        record = network.root / "evaluations" / "index.json"
        record.write_text(json.dumps(self.evaluations))
        self.tick()

    def _good(self) -> bool:
        first, *later = self.evaluations
        return len(later) >= 2 and all(
            mean >= NEEDED_REWARD and mean - first[1] >= NEEDED_RISE for _, mean in later[-2:]
        )

    def _all_have_the_last(self, status: Status) -> bool:
        names = self.network.names()
        honest = {node.name for node in self.network.plan.nodes if node.paid}
        return all(
            node.policy_version == status.latest_version
            for node in status.nodes
            if names.get(node.node) in honest
        )

    def _all_judged_and_rooted(self, status: Status) -> bool:
        rooted = sum(event.count for event in self._roots())
        return status.files.get("submitted", 0) == 0 and rooted == sum(status.files.values())

    def _roots(self) -> list[RootPosted]:
        contracts = self.network.contracts()
        found = read_events(
            contracts.work.client, contracts.work.deployment, contracts=("work",),
            pool=self.network.pool,
        )  # fmt: skip
        return [event for event in found if isinstance(event, RootPosted)]

    def _last_epoch_with_work(self) -> int:
        """The newest epoch in which a work root was posted."""
        return max(event.epoch for event in self._roots())

    def until(self, what: str, ready: Callable[[Status], bool], timeout: float) -> None:
        def poll() -> bool:
            self.tick()
            try:
                return ready(self.network.status())
            except UnavailableError:
                return False

        self.network.supervisor.wait_for(what, poll, timeout, interval=0.5)


def _passed(seconds: float) -> Callable[[], bool]:
    end = time.monotonic() + seconds
    return lambda: time.monotonic() > end


def _published(version: int) -> Callable[[Status], bool]:
    return lambda status: status.latest_version is not None and status.latest_version >= version


def fetch_through_relay(network: Network, version: int) -> Path:
    """Brings a policy from the relay alone, verified, into `evaluations/<version>`."""
    dest = network.root / "evaluations"
    folder = dest / str(version)
    if folder.exists():
        return folder
    deployment, url = network.deployment(), network.relay_url
    passes = Passes(ephemeral_signer(), deployment.domain("registry"))  # as any reader signs
    found: list[SignedManifest] = []

    def there() -> bool:
        try:
            answer = httpx.get(
                f"{url}/{POLICIES}/{INDEX_NAME}",
                headers={"Authorization": passes.header(url)},
                timeout=5.0,
            )
            index = parse_index(answer.raise_for_status().content)
        except (httpx.HTTPError, PrimeError):
            return False
        found[:] = [signed for signed in index if signed.manifest.version == version]
        return bool(found)

    network.supervisor.wait_for(f"policy {version} at the relay", there, 60)
    trainer = ids.address(network.accounts["trainer"].address)
    trust = Trust(trainer, deployment.domain("pools"), network.pool)
    policies = PolicyFolder(dest, trust, book=SourceBook(passes=passes))
    return policies.ensure(version, found[0], [url]).path


def evaluate(network: Network, folder: Path) -> float:
    """`trainer evaluate` on held-out problems, always the same: the mean of the run's reward."""
    said = network.supervisor.run(
        "evaluate",
        [
            *(str(BIN / "trainer"), "evaluate", "--model", str(folder), "--json"),
            *("--run", str(network.run_file), "--problems", str(HELDOUT)),
            *("--seed", str(EVALUATION_SEED)),
        ],
    )
    return float(json.loads(said)["mean_reward"])
