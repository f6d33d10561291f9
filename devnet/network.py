"""One network: its folders, accounts, processes and addresses, brought up step by step.

    chain → contracts → pool → orchestrator → validator → trainer (origin) → relay → nodes

Every program is started by the command that an operator would type; what they tell one another goes
over HTTP, objects and the chain, never through this module.
"""

from __future__ import annotations

import json
import os
import random
import secrets
import shlex
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from devnet.chain import Anvil
from devnet.faulty import KINDS, FaultyRpc, RpcFault
from devnet.foreign import ForeignEvents
from devnet.plan import TOKEN, NodePlan, Plan, run_definition
from devnet.ports import free_port
from devnet.processes import Child, Supervisor
from prime_broadcast.manifest import build_manifest
from prime_chain.client import ChainClient
from prime_chain.contracts import Contracts
from prime_chain.keystore import create_keystore, keystore_address, load_keystore
from prime_core.deployment import Deployment
from prime_core.errors import FatalError, PrimeError, UnavailableError, UserError
from prime_core.ids import Address, Digest
from prime_core.messages import Status
from prime_core.run import RunDefinition
from prime_core.signing import LocalSigner
from prime_core.transport.client import OrchestratorClient

MODEL = Path(__file__).parent / "model"
LIARS = Path(__file__).with_name("liars.py")
BIN = Path(sys.executable).parent
RECORD = "network.json"
POOL_FUNDS = 5_000 * TOKEN
BLOCK_SECONDS = 1
PASSED_ON = (
    "PATH", "HOME", "LANG", "LC_ALL", "TZ", "TMPDIR", "DOCKER_HOST", "OTEL_EXPORTER_OTLP_ENDPOINT",
)  # fmt: skip
PARTIES = ("deployer", "manager", "trainer", "validator", "relay")
ENDPOINTS = 3
SHORT_SECONDS, LONG_SECONDS = 1.0, 5.0
"""How long an endpoint fails in one way."""


class FaultyEndpoints:
    """Proxies of the chain at `target`. From `begin` on, one of them is at fault for `seconds`."""

    def __init__(self, target: str, seconds: float) -> None:
        self._proxies = [FaultyRpc(target, seed=7 + at) for at in range(ENDPOINTS)]
        self._seconds = seconds
        self._dice = random.Random(7)
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self.urls = tuple(proxy.url for proxy in self._proxies)

    def begin(self) -> None:
        """Starts the faults, once."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._fail, name="rpc-faults", daemon=True)
            self._thread.start()

    def over(self) -> bool:
        """Whether the faults have begun and ended."""
        return self._thread is not None and not self._thread.is_alive()

    def injected(self) -> Counter[str]:
        """Faults so far, by kind."""
        return sum((proxy.injected for proxy in self._proxies), Counter())

    def close(self) -> None:
        """Ends faults and proxies."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        for proxy in self._proxies:
            proxy.close()

    def _fail(self) -> None:
        end = time.monotonic() + self._seconds
        kinds: list[str] = []
        while time.monotonic() < end and not self._stop.is_set():
            kinds = kinds or self._dice.sample(KINDS, len(KINDS))  # each before one comes again
            kind = next(one for one in KINDS if one == kinds[-1])
            kinds.pop()
            victim = self._dice.choice(self._proxies)
            seconds = 0.2 if kind == "delay" else 20.0
            victim.faults = (RpcFault(kind, self._dice.choice([0.3, 1.0]), seconds=seconds),)
            self._stop.wait(self._dice.uniform(SHORT_SECONDS, LONG_SECONDS))
            victim.faults = ()


@dataclass(frozen=True)
class Account:
    """Where a party's key lies; the key itself is opened only when asked for."""

    name: str
    address: Address
    keystore: Path
    password_file: Path

    def flags(self) -> tuple[str, ...]:
        """The command-line flags that name this account to any of the programs."""
        return ("--wallet", str(self.keystore), "--password-file", str(self.password_file))

    def open(self) -> LocalSigner:
        """The key, in memory."""
        return load_keystore(self.keystore, self.password_file.read_text())


def make_account(folder: Path, name: str) -> Account:
    """Draws a key and a password; the weak key derivation is for local networks only."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    password_file = folder / f"{name}.password"
    password_file.touch(mode=0o600)
    password = secrets.token_urlsafe(24)
    password_file.write_text(password)
    keystore = folder / f"{name}.json"
    address = create_keystore(keystore, password, light=True)
    return Account(name, address, keystore, password_file)


def recorded_accounts(folder: Path) -> dict[str, Account]:
    """The accounts of an earlier run. Raises UserError if there are none."""
    accounts = {}
    for keystore in sorted(folder.glob("*.json")):
        address = keystore_address(keystore)
        assert address is not None, "made by us, with its address"
        password_file = keystore.with_suffix(".password")
        accounts[keystore.stem] = Account(keystore.stem, address, keystore, password_file)
    if not accounts:
        raise UserError(f"there is no run under {folder.parent}", hint="make demo")
    return accounts


class Network:
    """A network under `plan.root`. `start` brings it up, `stop` ends every process.

    `model`: folder of the base model; `node_flags`, `validator_flags` and `trainer_flags`: words
    that the commands of these programs get as well; `validator_program`: what each validator runs.
    """

    model: Path = MODEL
    validator_program: Path = BIN / "validator"
    node_flags: tuple[str, ...] = ()
    validator_flags: tuple[str, ...] = ()
    trainer_flags: tuple[str, ...] = ()

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.root = plan.root.absolute()
        self.root.mkdir(parents=True, exist_ok=True)
        self.supervisor = Supervisor(
            self.root / "logs", self.root / "pids.json", _environment(self.root)
        )
        # strangers' events would make the file of the chain's state as large as themselves
        state = None if plan.foreign_events else self.root / "chain.json"
        self.anvil = Anvil(log=self.root / "logs" / "anvil.log", state=state)
        self.accounts: dict[str, Account] = {}
        self.run_file = self.root / "run.json"
        self.deployment_file = self.root / "deployment.json"
        self.pool = 0
        self.relay_port = free_port()
        self._contracts: Contracts | None = None
        self.endpoints: FaultyEndpoints | None = None
        self.foreign: ForeignEvents | None = None

    @classmethod
    def recorded(cls, root: Path) -> Network:
        """An earlier run's network, as it was when it ended. Raises UserError if there is none."""
        record = root / RECORD
        if not record.is_file():
            raise UserError(f"there is no finished run under {root}", hint="make demo")
        saved = json.loads(record.read_text())
        network = cls(Plan.from_json(saved["plan"], root))
        network.accounts = recorded_accounts(network.root / "keys")
        network.pool = int(saved["pool"])
        return network

    def revive(self) -> None:
        """Brings back what outsiders ask: the chain as it was, orchestrator, origin, relay."""
        self.anvil.start()
        self.anvil.mine_every(BLOCK_SECONDS)
        self.start_orchestrator()
        self.start_trainer(steps=0)
        self.start_relay()

    # -- the walk ------------------------------------------------------------------------------

    def start_chain(self) -> None:
        """Starts a local chain, deploys the contracts and gives every party ether.

        Until `create_pool` ends, each transaction is mined at once; then blocks come regularly.
        """
        self.anvil.start()
        names = (*PARTIES, *self.plan.judges[1:], *(node.name for node in self.plan.nodes))
        self.accounts = {name: make_account(self.root / "keys", name) for name in names}
        for account in self.accounts.values():
            self.anvil.fund(account.address)
        periods = self.plan.periods
        self.supervisor.run(
            "deploy",
            [
                *self.command("deployment", "deploy", "--network", "local"),
                *("--rpc", self.anvil.url, "--out", str(self.deployment_file)),
                *self.accounts["deployer"].flags(),
                *("--epoch", str(periods.epoch_length), "--validity", str(periods.validity)),
                *("--slash-window", str(periods.slash_window)),
                *("--dispute-window", str(periods.dispute_window)),
                *("--reward-delay", str(periods.reward_delay)),
                *("--unbonding", str(periods.unbonding)),
            ],
        )

    def definition(self, base: Digest) -> RunDefinition:
        """What the pool trains, from the base model of that digest."""
        return run_definition(self.plan, base)

    def create_pool(self) -> None:
        """The run definition, the pool on chain, its funds and its validator."""
        run = self.definition(build_manifest(self.model, pool=0, version=0, step=0).result_digest)
        self.run_file.write_bytes(run.raw())
        manager = self.accounts["manager"].flags()
        chain = ("--rpc", self.anvil.url, "--deployment", str(self.deployment_file))
        create = [
            *self.command("pool", "create", *chain, *manager, "--json"),
            *("--run", str(self.run_file)),
            *("--trainer", self.accounts["trainer"].address),
            *self._named("--validator", self.plan.judges),
            *("--capacity", "1000", "--faucet"),
        ]
        self.pool = int(json.loads(self.supervisor.run("pool", create))["pool"])
        record = {"plan": self.plan.to_json(), "pool": self.pool}
        (self.root / RECORD).write_text(json.dumps(record))
        self.supervisor.run(
            "pool",
            [
                *self.command("pool", "fund", *chain, *manager, "--json"),
                *("--pool", str(self.pool), "--amount", str(POOL_FUNDS // TOKEN)),
            ],
        )
        if self.plan.foreign_events:
            other = int(json.loads(self.supervisor.run("pool", create))["pool"])
            self.foreign = ForeignEvents(self.anvil, self.contracts(), self.pool, other)
        self.anvil.mine_every(BLOCK_SECONDS)
        if self.plan.rpc_faults:
            self.endpoints = FaultyEndpoints(self.anvil.url, self.plan.rpc_faults)

    def start_orchestrator(self) -> None:
        """The API and its loops; returns once it answers."""
        serve_file = self.root / "orchestrator" / "serve.json"
        port = json.loads(serve_file.read_text())["port"] if serve_file.exists() else self.plan.port
        serve_file.unlink(missing_ok=True)
        self.supervisor.start(
            "orchestrator",
            [
                *self.command("serve", "--host", "127.0.0.1", "--port", str(port)),
                *("--data", str(self.root / "orchestrator"), "--run", str(self.run_file)),
                *("--allow-relay", self.accounts["relay"].address),
                *self._planted(),
                *self._chain_flags(),
                *self.accounts["manager"].flags(),
            ],
        )
        self.supervisor.wait_for("the orchestrator", serve_file.exists, 60)
        self.supervisor.wait_for("the orchestrator", self._answers, 60)

    def start_validators(self) -> None:
        """Starts every validator."""
        for name in self.plan.judges:
            self.start_validator(name)

    def start_validator(self, name: str) -> None:
        """Starts one validator with its own key and folder. It shares nothing else."""
        self.supervisor.start(
            name,
            [
                *(str(self.validator_program), "run", "--orchestrator", self.url),
                *self._rpc(),
                *("--data", str(self.root / name), "--threads", "1"),
                *self.accounts[name].flags(),
                *self.validator_flags,
            ],
        )

    def start_relay(self) -> None:
        """A relay between the trainer's origin and the nodes."""
        self.supervisor.start(
            "relay",
            [
                *self.command("relay", "--orchestrator", self.url),
                *("--data", str(self.root / "relay"), "--port", str(self.relay_port)),
                # the demo's outside observer reads it without an account
                *("--access", "anyone"),
                *self.accounts["relay"].flags(),
            ],
        )

    def start_trainer(self, *, steps: int | None = None) -> None:
        """The trainer; it publishes the base model as policy 0 and waits for batches.

        With `steps` it trains no further than that, and goes on serving policies as their origin.
        """
        limit = () if steps is None else ("--steps", str(steps), "--linger")
        self.supervisor.start(
            "trainer",
            [
                *(str(BIN / "trainer"), "run", "--orchestrator", self.url),
                *("--model", str(self.model), "--data", str(self.root / "trainer")),
                *("--learning-rate", "3e-4", "--warmup-steps", "10", "--weight-decay", "0"),
                *("--beta1", "0.9", "--beta2", "0.95", "--gradient-clip", "1.0", *limit),
                *self.accounts["trainer"].flags(),
                *self.trainer_flags,
            ],
        )

    def start_node(self, node: NodePlan) -> Child:
        """One agent. A liar is the same agent with another worker; no other program knows."""
        command = [
            *(str(BIN / "prime-node"), "join", "--orchestrator", self.url),
            *self._rpc(),
            *("--deployment", str(self.deployment_file)),
            *("--data", str(self.root / "nodes" / node.name), "--runtime", self.plan.runtime),
            *self.accounts[node.name].flags(),
            *("--threads", "1"),
            *self.node_flags,
        ]
        if node.shadow:
            command.append("--shadow")
        if node.throttle != 1.0:
            command += ["--throttle", str(node.throttle)]
        if worker := self.worker_command(node):
            command += ["--worker-command", worker]
        return self.supervisor.start(node.name, command, required=node.liar is None)

    def worker_command(self, node: NodePlan) -> str:
        """The command of a node's worker; empty: the agent's own."""
        if node.planted:
            return f"python -m prime_node.planting {self._planting_secret()}"
        return f"python -P {shlex.quote(str(LIARS))} {node.liar}" if node.liar else ""

    def stop(self) -> None:
        """Ends everything; harmless when called twice."""
        self.supervisor.stop_all()
        if self.foreign is not None:
            self.foreign.close()
        if self.endpoints is not None:
            self.endpoints.close()
        self.anvil.stop()

    # -- what anyone can see -------------------------------------------------------------------

    @property
    def url(self) -> str:
        """The orchestrator's address, from the file that it writes.

        Raises FatalError with the end of its log if the orchestrator has ended.
        """
        try:
            serve = json.loads((self.root / "orchestrator" / "serve.json").read_text())
        except FileNotFoundError as error:
            self.supervisor.check()
            raise FatalError(f"the orchestrator has ended; see {self.supervisor.logs}") from error
        return str(serve["url"])

    def client(self) -> OrchestratorClient:
        """An anonymous reader of the orchestrator."""
        return OrchestratorClient(self.url)

    def status(self) -> Status:
        with self.client() as client:
            return client.get("/v1/status", Status)

    def run(self) -> RunDefinition:
        return RunDefinition.parse(self.run_file.read_bytes())

    def deployment(self) -> Deployment:
        """Where the contracts live."""
        return Deployment.load(self.deployment_file)

    def contracts(self) -> Contracts:
        """The deployed contracts, read through this network's chain."""
        if self._contracts is None:
            deployment = self.deployment()
            client = ChainClient([self.anvil.url], deployment.chain_id)
            self._contracts = Contracts(client, deployment)
        return self._contracts

    @property
    def relay_url(self) -> str:
        """Where the relay serves."""
        return f"http://127.0.0.1:{self.relay_port}"

    def names(self) -> dict[str, str]:
        """Account address → name in this demo."""
        return {account.address: name for name, account in self.accounts.items()}

    # -- below ---------------------------------------------------------------------------------

    def _named(self, flag: str, names: Sequence[str]) -> list[str]:
        return [word for name in names for word in (flag, self.accounts[name].address)]

    def _planted(self) -> list[str]:
        """What the orchestrator alone knows of planted nodes."""
        names = [node.name for node in self.plan.nodes if node.planted]
        if not names:
            return []
        reported = ["--planted-secret", str(self._planting_secret()), "--planted-one-in", "8"]
        return [*self._named("--planted", names), *reported]

    def _planting_secret(self) -> Path:
        path = self.root / "planting.secret"
        if not path.exists():
            path.touch(mode=0o600)
            path.write_text(secrets.token_hex(32))
        return path

    def _answers(self) -> bool:
        try:
            with self.client() as client:
                client.pool()
        except UnavailableError:
            return False
        except PrimeError:
            return True
        return True

    def command(self, *words: str) -> Sequence[str]:
        """`orchestrator` with words."""
        return [str(BIN / "orchestrator"), *words]

    def _chain_flags(self) -> tuple[str, ...]:
        return (
            *self._rpc(),
            *("--deployment", str(self.deployment_file), "--pool", str(self.pool)),
        )

    def _rpc(self) -> tuple[str, ...]:
        """The endpoints that the programs of the network are given."""
        urls = (self.anvil.url,) if self.endpoints is None else self.endpoints.urls
        return tuple(word for url in urls for word in ("--rpc", url))


def _environment(root: Path) -> dict[str, str]:
    """What the children get: one thread each, no key, no proxy, their caches under `root`."""
    kept = {name: os.environ[name] for name in PASSED_ON if name in os.environ}
    return {
        **kept,
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "PYTHONUNBUFFERED": "1",
        "NO_COLOR": "1",
        "XDG_CACHE_HOME": str(root / "cache"),
    }
