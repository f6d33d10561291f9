"""The steps of `orchestrator quickstart`: from an RPC endpoint to a pool and its settings.

    network → keys → ether → contracts → run → pool → bonds → funds → settings

Each step looks at files and chain to see whether it is done. So the same command continues a run
that was interrupted or waits for ether. The contracts' code never changes: it is compared in full
once and by `look`; afterwards one request shows that the contracts are still there. Steps that send
use the commands that a person would type, with their journals in the same folder.
"""

from __future__ import annotations

import importlib.util
import json
import secrets
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from prime_broadcast.files import write_whole
from prime_chain import codec, deployer, flows, networks
from prime_chain.amounts import ETHER, ether, parse_amount, prime
from prime_chain.chain_session import open_session
from prime_chain.client import ChainClient
from prime_chain.contracts import Contracts
from prime_chain.costs import has_l1_fee
from prime_chain.deployment_check import check_deployment
from prime_chain.errors import RpcError
from prime_chain.keystore import create_keystore, named_address
from prime_core import ids
from prime_core.deployment import SOLIDITY_NAMES, Deployment, Periods
from prime_core.encoding import sha256
from prime_core.errors import FatalError, PrimeError, UserError
from prime_core.folders import held_alone, make_folder, sync
from prime_core.ids import Address
from prime_core.run_file import read_run
from prime_core.transport.addresses import is_loopback
from prime_envs.definition import read_toml
from prime_orchestrator.cli.run import define

State = Literal["done", "to do", "waits", "failed", "note"]
GAS = {"deployer": 60_000_000, "manager": 30_000_000, "validator": 5_000_000}
"""Gas that each account should be able to pay for at today's fee cap: deployment; pool and the
first hundred roots; bond and claims. Relay and trainer send nothing."""
OLD_BLOCK_SECONDS = 60
LOG_BLOCKS = 100
AGAIN = "then type the same command again: it continues"
UNUSED = ids.address("0x000000000000000000000000000000000000dEaD")


@dataclass(frozen=True)
class Plan:
    """The user's choices. `fund` in whole tokens; paths are absolute."""

    folder: Path
    network: networks.Network
    rpc: tuple[str, ...]
    run: Path
    model: Path
    deployment: Path | None = None
    multisig: str = ""
    validators: int = 2
    fund: str = "5000"
    host: str = "127.0.0.1"
    port: int = 8470
    public_url: str = ""
    relay_url: str = ""
    origin_url: str = ""
    periods: Periods = field(default_factory=Periods)


@dataclass(frozen=True)
class Found:
    """How a step or check stands, and what was seen or is to be done."""

    name: str
    state: State
    said: str


class Quickstart:
    """The steps for one folder. `report` gets each command before it runs."""

    def __init__(self, plan: Plan, report: Callable[[str], object]) -> None:
        self.plan, self._report = plan, report
        self.folder = plan.folder
        self.client = ChainClient(plan.rpc, plan.network.chain_id)
        self.error: PrimeError | None = None
        """Why the last step failed, if it did."""
        self._in_full = False
        """Whether the contracts are compared again even if they were compared before."""
        self.judges = ["validator", *(f"validator-{n}" for n in range(2, plan.validators + 1))]
        self.roles = [
            *([] if plan.deployment else ["deployer"]), "manager", *self.judges, "relay", "trainer",
        ]  # fmt: skip
        self._steps: dict[str, tuple[Callable[[], Found], Callable[[], object]]] = {
            "network": (self._network, lambda: None),
            "keys": (self._keys, self._make_keys),
            "ether": (self._ether, self._give_ether),
            "contracts": (self._contracts, self._deploy),
            "run": (self._run, self._make_run),
            "pool": (self._pool, self._make_pool),
            "bonds": (self._bonds, self._make_bonds),
            "funds": (self._funds, self._make_funds),
            "settings": (self._settings, self._make_settings),
        }

    def close(self) -> None:
        self.client.close()

    # -- what the command does -------------------------------------------------------------------

    def look(self) -> Iterator[Found]:
        """Yields every step's state and the checks of machine and network. Changes nothing."""
        self._in_full = True
        chain = self._state("network")
        yield chain
        if chain.state != "failed":
            yield from self._endpoint()
        yield from self._machine()
        for name in list(self._steps)[1:]:
            yield self._state(name)

    def go(self) -> Iterator[Found]:
        """Does what is left of each step and yields its state. Ends with the first step that waits
        for ether or failed."""
        make_folder(self.folder).chmod(0o700)
        with held_alone(self.folder, "quickstart"):
            for name, (_, act) in self._steps.items():
                found = self._state(name)
                if found.state == "to do":
                    act()
                    found = self._state(name)
                yield found
                if found.state != "done":
                    return

    def commands(self) -> dict[str, list[str]]:
        """Program name → the command that starts it in the folder."""
        url, relay_url = self.url, self.plan.relay_url
        relay = ["--port", "8480", "--public-url", relay_url] if relay_url else ["--port", "0"]
        origin = ["--origin-port", "8475", "--origin-url", self.plan.origin_url]
        judge = ["validator", "run", "--orchestrator", url, *self._rpc(), "--deployment",
                 "deployment.json", "--password-file", "password"]  # fmt: skip
        return {
            "orchestrator": ["orchestrator", "serve", "--config", "orchestrator.toml"],
            **{one: [*judge, "--wallet", f"{one}.json", "--data", one] for one in self.judges},
            "relay": [
                "orchestrator", "relay", "--orchestrator", url, *relay,
                "--wallet", "relay.json", "--password-file", "password", "--data", "relay",
            ],
            "trainer": [
                "trainer", "run", "--orchestrator", url, "--model", str(self.plan.model),
                "--wallet", "trainer.json", "--password-file", "password", "--data", "trainer",
                *(origin if self.plan.origin_url else []),
            ],
            "node key": [
                "prime-node", "wallet", "new", "--out", "node.json", "--password-file", "password",
            ],
            "node": [
                "prime-node", "join", "--orchestrator", url, *self._rpc(),
                "--deployment", "deployment.json", *self._signs("node"), "--data", "node",
            ],
        }  # fmt: skip

    @property
    def url(self) -> str:
        return self.plan.public_url or f"http://{self.plan.host}:{self.plan.port}"

    @property
    def lacks_urls(self) -> bool:
        """Whether the API is public but relay or origin are not. A public API refuses loopback
        addresses."""
        public = self.plan.network is not networks.LOCAL and not is_loopback(self.url)
        return public and not (self.plan.relay_url and self.plan.origin_url)

    def _state(self, name: str) -> Found:
        try:
            return self._steps[name][0]()
        except PrimeError as error:
            self.error = error
            return Found(name, "failed", str(error))

    # -- steps: how it stands, and what to do ----------------------------------------------------

    def _network(self) -> Found:
        block = self.client.block("latest")
        age = time.time() - block.time
        said = f"{self.plan.network.name} ({self.plan.network.chain_id}) at block {block.number}"
        if age > OLD_BLOCK_SECONDS:
            return Found("network", "failed", f"{said}, which is {age:.0f} s old")
        return Found("network", "done", said)

    def _file(self, role: str) -> Path:
        return self.folder / f"{role}.json"

    def _address(self, role: str) -> Address:
        return named_address(self._file(role))

    def _keys(self) -> Found:
        missing = [role for role in self.roles if not self._file(role).exists()]
        if missing:
            return Found("keys", "to do", f"keystores for {', '.join(missing)}")
        return Found("keys", "done", f"{len(self.roles)} keystores in {self.folder}")

    def _make_keys(self) -> None:
        password = self.folder / "password"
        if not password.exists():
            draft = self.folder / "password.part"
            draft.touch(0o600)
            draft.write_text(secrets.token_urlsafe(24) + "\n")
            sync(draft)
            draft.rename(password)
        for role in self.roles:
            if not self._file(role).exists():
                create_keystore(self._file(role), password.read_text().strip())

    def needs(self) -> dict[str, int]:
        """Role → wei that its account lacks."""
        lacking = {}
        made = (self.folder / "pool.json").exists()
        fee = 0 if made else self.client.fees().max_fee
        for role in self.roles:
            gas = GAS.get(role.partition("-")[0], 0)
            if role == "deployer" and (self.folder / "deployment.json").exists():
                continue
            needed = min(gas, 1) if made else gas * fee
            if needed and (held := self.client.balance(self._address(role))) < needed:
                lacking[role] = needed - held
        return lacking

    def _ether(self) -> Found:
        if self._keys().state != "done":
            return Found("ether", "to do", "once there are keys")
        lacking = self.needs()
        if not lacking:
            return Found("ether", "done", "every account can pay for its transactions")
        said = "; ".join(f"{ether(wei)} to {self._address(r)} ({r})" for r, wei in lacking.items())
        local = self.plan.network is networks.LOCAL
        return Found("ether", "to do" if local else "waits", f"send {said}")

    def _give_ether(self) -> None:
        for role, wei in self.needs().items():
            self.client.request("anvil_setBalance", self._address(role), hex(wei + ETHER))

    def _contracts(self) -> Found:
        file = self.folder / "deployment.json"
        if not file.exists():
            what = "copy --deployment" if self.plan.deployment else "deploy the contracts"
            return Found("contracts", "to do", what)
        done = Found("contracts", "done", "the chain holds what deployment.json says")
        record, compared = self.folder / "contracts.checked", self._what_is_compared()
        if not self._in_full and record.exists() and record.read_text() == compared:
            return done
        wrong = [
            one for one in check_deployment(self.client, self._place) if not one.ok and one.fault
        ]
        if wrong:
            return Found("contracts", "failed", f"{wrong[0].name}: {wrong[0].found}")
        if not self._in_full:
            write_whole(record, compared.encode())
        return done

    def _what_is_compared(self) -> str:
        """Returns a digest of what the comparison of the contracts depends on: the file, this
        program's contracts, and the code of one contract on chain, which shows another chain."""
        parts = [
            (self.folder / "deployment.json").read_bytes(),
            self.client.code(self._place.address("pools")),
            *(codec.artifact(name).digest.encode() for name in SOLIDITY_NAMES.values()),
        ]
        return sha256(b"".join(sha256(part).encode() for part in parts))

    def _deploy(self) -> None:
        if self.plan.deployment is not None:
            Deployment.load(self.plan.deployment)
            write_whole(self.folder / "deployment.json", self.plan.deployment.read_bytes())
            return
        p = self.plan.periods
        words = ["deployment", "deploy", "--network", self.plan.network.name, *self._rpc()]
        words += [*self._signs("deployer"), "--out", "deployment.json"]
        words += ["--epoch", str(p.epoch_length), "--validity", str(p.validity)]
        words += ["--slash-window", str(p.slash_window), "--dispute-window", str(p.dispute_window)]
        words += ["--reward-delay", str(p.reward_delay), "--unbonding", str(p.unbonding)]
        self._type([*words, *(["--multisig", self.plan.multisig] if self.plan.multisig else [])])

    @cached_property
    def _place(self) -> Deployment:
        return Deployment.load(self.folder / "deployment.json")

    @property
    def _calls(self) -> Contracts:
        return Contracts(self.client, self._place)

    def definition(self, periods: Periods) -> bytes:
        """The run definition for contracts with these periods."""
        values = read_toml(self.plan.run) | {
            "epoch_seconds": periods.epoch_length,
            "validity_seconds": periods.validity,
        }
        return define(values, self.plan.run, self.plan.model).raw()

    def _run(self) -> Found:
        file = self.folder / "run.json"
        if not file.exists():
            return Found("run", "to do", f"from {self.plan.run.name}")
        run = read_run(file, exact=True)
        self._place.check_run(run)
        return Found("run", "done", f"{run.name}, digest {run.digest()}")

    def _make_run(self) -> None:
        write_whole(self.folder / "run.json", self.definition(self._place.periods))

    def _facts(self) -> dict[str, Any] | None:
        file = self.folder / "pool.json"
        found: dict[str, Any] | None = json.loads(file.read_text()) if file.exists() else None
        return found

    def _pool(self) -> Found:
        facts = self._facts()
        if facts is None:
            return Found("pool", "to do", f"create it with {self.plan.validators} validators")
        self._calls.pools.pool_of(facts["pool"])
        return Found("pool", "done", f"pool {facts['pool']}, managed by {facts['manager']}")

    def _make_pool(self) -> None:
        words = ["pool", "create", "--run", "run.json", "--trainer", self._address("trainer")]
        for judge in self.judges:
            words += ["--validator", self._address(judge)]
        words += ["--faucet"] if self.plan.network.testnet else []
        made = self._type([*words, *self._chain(), *self._signs("manager"), "--json"])
        write_whole(self.folder / "pool.json", made.encode())

    def _short(self) -> dict[str, int]:
        """Validator → wei of the token that its bond lacks."""
        needed = self._calls.slasher.validator_bond()
        found = {}
        for judge in self.judges:
            active = self._calls.vault.active(self._address(judge))
            if active < needed:
                found[judge] = needed - active
        return found

    def _bonds(self) -> Found:
        if self._facts() is None:
            return Found("bonds", "to do", "once there is a pool")
        short = self._short()
        if not short:
            return Found("bonds", "done", "every validator has the bond that the terms ask for")
        said = "; ".join(f"{prime(wei)} of {judge}" for judge, wei in short.items())
        held = all(
            self._calls.token.balance_of(self._address(judge)) >= wei
            for judge, wei in short.items()
        )
        ready = held or self.plan.network.testnet
        return Found("bonds", "to do" if ready else "waits", f"bond {said}")

    def _make_bonds(self) -> None:
        for judge, wei in self._short().items():
            self._report(f"validator bond {prime(wei)} --wallet {judge}.json")
            with open_session(
                rpc=list(self.plan.rpc), rpc_quorum=None, chain_poll_seconds=None,
                deployment=self.folder / "deployment.json", wallet=self._file(judge),
                password_file=self.folder / "password", password_fd=None, sender="", journal=None,
                dry_run=False, calldata=False, command="quickstart",
            ) as session:  # fmt: skip
                if session.contracts.token.balance_of(session.account) < wei:
                    session.perform([session.contracts.token.faucet()])
                session.perform(flows.stake(session.contracts, session.account, wei))

    def _funds(self) -> Found:
        if (facts := self._facts()) is None:
            return Found("funds", "to do", "once there is a pool")
        funds = self._calls.rewards.funds(facts["pool"])
        said = f"{prime(funds.free)} free, {prime(funds.reserved)} promised"
        if funds.free + funds.reserved > 0 or parse_amount(self.plan.fund) == 0:
            return Found("funds", "done", said)
        ready = self._calls.token.balance_of(self._address("manager")) >= parse_amount(
            self.plan.fund
        )
        what = f"{self.plan.fund} PRIME of {self._address('manager')}"
        return Found("funds", "to do" if ready else "waits", f"fund the pool with {what}")

    def _make_funds(self) -> None:
        facts = self._facts()
        assert facts is not None
        words = ["pool", "fund", "--pool", str(facts["pool"]), "--amount", self.plan.fund]
        self._type([*words, *self._chain(), *self._signs("manager")])

    def _settings(self) -> Found:
        file = self.folder / "orchestrator.toml"
        if not file.exists():
            return Found("settings", "to do", "write orchestrator.toml")
        return Found("settings", "done", f"{file}; start it: quickstart --start")

    def _make_settings(self) -> None:
        facts = self._facts()
        assert facts is not None
        values = {
            "host": self.plan.host, "port": self.plan.port, "public_url": self.plan.public_url,
            "pool": facts["pool"], "run": "run.json", "rpc": list(self.plan.rpc),
            "deployment": "deployment.json", "wallet": "manager.json", "password_file": "password",
            "data": "orchestrator", "allow_relay": [self._address("relay")],
        }  # fmt: skip
        text = "".join(f"{name} = {json.dumps(value)}\n" for name, value in values.items())
        write_whole(self.folder / "orchestrator.toml", text.encode())

    # -- checks of the endpoint and the machine --------------------------------------------------

    def _endpoint(self) -> Iterator[Found]:
        """What the programs ask of an endpoint, and what the deployment would cost."""
        client, number = self.client, self.client.block("latest").number
        depth = {tag: number - client.block(tag).number for tag in ("safe", "finalized")}
        said = f"safe is {depth['safe']} blocks behind, finalized {depth['finalized']}"
        yield Found("finality", "done", said)
        wanted = {"fromBlock": hex(max(0, number - LOG_BLOCKS)), "toBlock": hex(number)}
        try:
            client.request("eth_getLogs", wanted)
            yield Found("logs", "done", f"events of {LOG_BLOCKS} blocks in one answer")
        except PrimeError as error:
            yield Found("logs", "failed", f"events of {LOG_BLOCKS} blocks: {error}")
        try:
            client.request("eth_simulateV1", {"blockStateCalls": []}, "latest")
            yield Found("simulation", "done", "dry runs see several transactions in a row")
        except RpcError as error:
            yield Found("simulation", "note", f"dry runs estimate transactions alone: {error}")
        fees = client.fees()
        high = fees.max_fee > self.plan.network.max_fee_wei
        l1 = "with" if has_l1_fee(client) else "without"
        said = f"at most {fees.max_fee / networks.GWEI:g} gwei, {l1} an L1 data fee"
        yield Found("fees", "failed" if high else "done", said)
        if self.plan.deployment is None and not (self.folder / "deployment.json").exists():
            yield self._deployment_cost()

    def _deployment_cost(self) -> Found:
        file = self._file("deployer")
        account = named_address(file) if file.exists() else UNUSED
        role = ids.address(self.plan.multisig) if self.plan.multisig else account
        options = deployer.Options(
            periods=self.plan.periods, testnet=self.plan.network.testnet, holder=role,
            supply=ETHER, arbiter=role, uptime_feed=self.plan.network.uptime_feed,
        )  # fmt: skip
        try:
            steps = deployer.dry_run(self.client, account, options)
        except PrimeError as error:
            return Found("deployment", "failed", str(error))
        fees, gas = self.client.fees(), sum(step.gas or 0 for step in steps)
        wei = gas * (fees.base_fee + fees.priority_fee) + sum(step.l1_fee or 0 for step in steps)
        return Found("deployment", "done", f"{gas:,} gas, about {ether(wei)}")

    def _machine(self) -> Iterator[Found]:
        """What this machine needs for the programs and for the run definition."""
        lacking = [name for name in ("torch", "pyarrow") if importlib.util.find_spec(name) is None]
        fix = f"missing: {', '.join(lacking)}; pip install 'prime-open[orchestrator,validator]'"
        yield Found("packages", *(("failed", fix) if lacking else ("done", "all are installed")))
        try:
            self.definition(self.plan.periods)
            yield Found("definition", "done", f"{self.plan.run.name} fits model and environment")
        except PrimeError as error:
            yield Found("definition", "failed", str(error))
        with socket.socket() as probe:
            probe.settimeout(1)
            taken = probe.connect_ex((self.plan.host, self.plan.port)) == 0
        said = f"{self.plan.host}:{self.plan.port} is {'in use' if taken else 'free'}"
        yield Found("port", "note" if taken else "done", said)
        local = self.plan.network is networks.LOCAL
        secure = local or self.plan.public_url.startswith("https://")
        said = self.url if secure else "--public-url https://… lets others reach it safely"
        yield Found("public URL", "done" if secure else "note", said)
        if self.lacks_urls:
            said = "--relay-url and --origin-url https://… let nodes fetch policies"
            yield Found("policies", "note", said)
        password = self.folder / "password"
        if password.exists() and password.stat().st_mode & 0o077:
            yield Found("password", "failed", f"{password} can be read by others: chmod 600")

    # -- commands --------------------------------------------------------------------------------

    def _rpc(self) -> list[str]:
        return [word for url in self.plan.rpc for word in ("--rpc", url)]

    def _chain(self) -> list[str]:
        return [*self._rpc(), "--deployment", "deployment.json"]

    def _signs(self, role: str) -> list[str]:
        return ["--wallet", f"{role}.json", "--password-file", "password"]

    def _type(self, words: Sequence[str]) -> str:
        """Runs an `orchestrator` command in the folder and returns its standard output. If it
        fails, raises UserError with its last words and its exit code, or FatalError if it met a
        defect or was killed."""
        self._report(shlex.join(["orchestrator", *words]))
        done = subprocess.run(
            [sys.executable, "-m", "prime_orchestrator.cli.main", *words],
            cwd=self.folder, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False,
        )  # fmt: skip
        if done.returncode:
            said = f"orchestrator {words[0]} {words[1]} failed: {done.stderr.strip()[-1500:]}"
            if done.returncode in (1, FatalError.exit_code) or done.returncode < 0:
                raise FatalError(said)
            raise UserError(said, hint=AGAIN, exit_code=done.returncode)
        return done.stdout
