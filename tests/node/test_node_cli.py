"""What a person sees: quick start-up, one sentence an error, the right exit status."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest
from command import prime_node
from node_world import NODE, NodeWorld
from other_user import as_another_user, open_path
from programs import typed
from served import served
from typer.testing import CliRunner

from devnet.ports import free_port
from prime_chain.amounts import ETHER
from prime_chain.keystore import create_keystore, load_keystore
from prime_core.errors import PolicyError, UnavailableError, UserError
from prime_core.ids import ZERO_DIGEST
from prime_core.messages import LeaseInfo, NodeInfo
from prime_core.node import Gpu, Hardware, Requirements
from prime_core.verdict import Reason
from prime_node import config, doctor, leave
from prime_node.api import NodeApi
from prime_node.cli import app, main, stake_out
from prime_node.cli_common import tree_lines
from prime_node.overview import overview
from prime_node.state import AgentStatus, DataFolder, remembered
from prime_node.wallet import open_provider

PASSWORD = "a password"
NOWHERE = ("--orchestrator", "http://127.0.0.1:9", "--rpc", "http://127.0.0.1:9")
"""Flags that name what `join` needs, where no one answers."""


def run(*words: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """`prime-node …` as a process, away from this machine's own settings."""
    clean = {name: value for name, value in os.environ.items() if "PRIME_NODE" not in name}
    return subprocess.run(
        [sys.executable, "-m", "prime_node.cli", *words],
        capture_output=True,
        text=True,
        timeout=60,
        env=clean | {"HOME": "/nonexistent", "NO_COLOR": "1"} | (env or {}),
        stdin=subprocess.DEVNULL,
        check=False,
    )


def fails(status: int, sentence: str, *words: str) -> str:
    """Runs the entry point here; asserts the exit status, the sentence, and no traceback."""
    code, _, said = typed(main, "prime-node", *words, env=os.environ | {"HOME": "/nonexistent"})
    assert code == status, said
    assert sentence in said
    assert "Traceback" not in said
    return said


@pytest.fixture
def wallet(tmp_path: Path) -> tuple[str, ...]:
    """Flags of a fresh keystore and its password."""
    (tmp_path / "pw").write_text(PASSWORD)
    create_keystore(tmp_path / "node.json", PASSWORD, light=True)
    keystore, password = str(tmp_path / "node.json"), str(tmp_path / "pw")
    return ("--wallet", keystore, "--password-file", password, "--data", str(tmp_path / "data"))


def closed_port() -> int:
    return free_port()


@pytest.mark.parametrize(
    ("program", "command"),
    [
        ("prime_node", ["--help"]),
        ("prime_node", ["join", "--help"]),
        ("prime_node", ["stake", "show", "--help"]),
        ("prime_node", ["status", "--data", ".", "--orchestrator", "http://127.0.0.1:9"]),
        ("prime_validator", ["--help"]),
        ("prime_validator", ["bond", "--help"]),
    ],
)
def test_help_and_status_load_no_machinery(program: str, command: list[str]) -> None:
    """`status` reads its folder and HTTP only, and so imports no client of the chain."""
    code = (
        f"import sys\nfrom typer.testing import CliRunner\nfrom {program}.cli import app\n"
        f"assert CliRunner().invoke(app, {command!r}).exit_code == 0\n"
        "print([m for m in ('torch', 'docker', 'web3', 'eth_abi', 'eth_account', 'numpy',"
        " 'pyarrow', 'prime_chain.client') if m in sys.modules])"
    )
    said = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout
    assert said.strip() == "[]"


def test_reading_commands_need_neither_torch_nor_docker() -> None:
    blocked = (
        "import sys\n"
        "for name in ('torch', 'docker', 'transformers', 'numpy'): sys.modules[name] = None\n"
        "from prime_node import link, rewards, overview, owner, leave\n"
        "import prime_chain.history\n"
    )
    subprocess.run([sys.executable, "-c", blocked], check=True)


def test_every_reading_command_has_json() -> None:
    for words in (
        ["status"], ["doctor"], ["wallet", "show"], ["stake", "show"], ["rewards", "show"],
        ["audit", "list"], ["audit", "show"], ["audit", "replay"], ["audit", "export"],
    ):  # fmt: skip
        said = CliRunner().invoke(app, [*words, "--help"], env={"COLUMNS": "200"}).output
        assert "--json" in said, words


def test_wallet_new_writes_a_keystore_that_opens_and_never_overwrites(tmp_path: Path) -> None:
    (tmp_path / "pw").write_text(PASSWORD + "\n")
    flags = ("--out", str(tmp_path / "k.json"), "--password-file", str(tmp_path / "pw"))
    done = run("wallet", "new", *flags, "--light", "--json")
    shown = json.loads(done.stdout)
    assert load_keystore(tmp_path / "k.json", PASSWORD).address == shown["address"]
    assert (tmp_path / "k.json").stat().st_mode & 0o777 == 0o600
    assert PASSWORD not in done.stdout + done.stderr
    fails(64, "exists already and is never overwritten", "wallet", "new", *flags)


def test_wallet_show_needs_no_password(wallet: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "pw").unlink()
    done = prime_node("wallet", "show", *wallet[:2])
    assert done.stdout.startswith("0x")


def test_wrong_password(wallet: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "pw").write_text("another")
    said = fails(64, "the password does not open", "join", *wallet, *NOWHERE)
    assert "check the password file" in said


def test_password_without_a_terminal_names_the_flags(wallet: tuple[str, ...]) -> None:
    said = fails(64, "no terminal", "join", *wallet[:2], *NOWHERE)
    assert "--password-file" in said


def test_password_is_never_an_argument() -> None:
    done = prime_node("join", "--password", "x")
    assert done.returncode == 2
    assert "No such option" in done.stderr


def test_missing_wallet_orchestrator_and_rpc_are_named(wallet: tuple[str, ...]) -> None:
    url = ("--orchestrator", "http://127.0.0.1:9")
    fails(64, "no orchestrator is named", "join", *wallet)
    said = fails(64, "no RPC endpoint is named", "join", *wallet, *url)
    assert "--rpc" in said
    fails(64, "no wallet is named", "join", *NOWHERE)
    fails(64, "there is no keystore at", "join", *NOWHERE, "--wallet", "/nonexistent/k.json")
    fails(64, "no RPC endpoint is named", "stake", "show", *wallet, *url)
    for number in ("-1", "9" * 80):
        fails(64, "the setting 'pool' is wrong", "leave", *wallet, *NOWHERE, "--pool", number)


def test_orchestrator_that_does_not_answer(wallet: tuple[str, ...]) -> None:
    url = f"http://127.0.0.1:{closed_port()}"
    fails(
        69, "does not answer", "stake", "show", *wallet, "--orchestrator", url,
        "--rpc", "http://127.0.0.1:9",
    )  # fmt: skip
    for words in (
        ["rewards", "show"], ["rewards", "explain"], ["audit", "show", "0x" + "1" * 64],
    ):  # fmt: skip
        said = fails(
            69, "does not answer", *words, *wallet[:2], "--orchestrator", url,
            "--rpc", "http://127.0.0.1:9",
        )  # fmt: skip
        assert "check --orchestrator" in said
        assert "prime-node audit mirrors --pool N --deployment FILE" in said


def test_rpc_that_does_not_answer(world: NodeWorld) -> None:
    rpc = f"http://127.0.0.1:{closed_port()}"
    said = fails(
        69, rpc.removeprefix("http://"), "stake", "show", "--orchestrator", world.url,
        "--rpc", rpc, "--wallet", str(world.keystore),
    )  # fmt: skip
    assert said.count("\n") <= 2


def test_orchestrator_that_never_answered_ends_the_first_start(wallet: tuple[str, ...]) -> None:
    said = fails(
        69, "does not answer", "join", *wallet, *NOWHERE, "--first-answer-seconds", "0",
        "--runtime", "process",
    )  # fmt: skip
    assert said.splitlines()[-1].startswith("prime-node: 127.0.0.1:9 does not answer")
    assert "check the address (--orchestrator, --rpc)" in said


def test_rpc_that_never_answered_ends_the_first_start(world: NodeWorld) -> None:
    rpc = f"http://127.0.0.1:{closed_port()}"
    done = run(
        "join", "--orchestrator", world.url, "--wallet", str(world.keystore),
        "--password-file", str(world.password_file), "--data", str(world.folder / "d"),
        "--rpc", rpc, "--runtime", "process", "--first-answer-seconds", "0",
    )  # fmt: skip
    assert done.returncode == 69, done.stderr
    said = done.stderr.strip().splitlines()[-1]
    assert said.startswith(f"prime-node: no RPC endpoint answers: {rpc}")
    assert "check the address (--orchestrator, --rpc)" in said
    assert not (world.folder / "d" / "settings.json").exists(), "the next start is the first again"


@pytest.mark.slow
def test_who_has_joined_before_waits_for_an_orchestrator_that_is_away(
    wallet: tuple[str, ...], tmp_path: Path
) -> None:
    (tmp_path / "data").mkdir()
    before = {"orchestrator": NOWHERE[1], "rpc": [NOWHERE[3]]}
    (tmp_path / "data" / "settings.json").write_text(json.dumps(before))
    clean = {name: value for name, value in os.environ.items() if "PRIME_NODE" not in name}
    words = ("join", *wallet, "--runtime", "process", "--first-answer-seconds", "0")
    with subprocess.Popen(
        [sys.executable, "-m", "prime_node.cli", *words],
        stderr=subprocess.PIPE,
        text=True,
        env=clean,
    ) as child:
        try:
            assert child.stderr is not None
            assert any("trying again in 2 s" in line for line in child.stderr)
            child.send_signal(signal.SIGTERM)
            assert child.wait(120) == 0
        finally:
            child.kill()


def test_deployment_file_that_is_none(wallet: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "d.json").write_text("[]")
    flags = ("--rpc", "http://127.0.0.1:9", "--pool", "1")
    given = ("--deployment", str(tmp_path / "d.json"))
    fails(64, "is not a deployment file", "stake", "show", *wallet, *flags, *given)


@pytest.mark.slow
def test_a_machine_without_docker_learns_how_to_get_it(world: NodeWorld) -> None:
    done = run(
        "join", "--orchestrator", world.url, "--wallet", str(world.keystore),
        "--password-file", str(world.password_file), "--data", str(world.folder / "d"),
        "--rpc", "http://127.0.0.1:9",
        env={"DOCKER_HOST": "unix:///nonexistent/docker.sock"},
    )  # fmt: skip
    assert done.returncode == 64
    assert "no Docker engine answers on this machine" in done.stderr
    assert "--runtime process" in done.stderr


def test_other_worker_runs_only_as_a_process(world: NodeWorld) -> None:
    done = run(
        "join", "--orchestrator", world.url, "--wallet", str(world.keystore),
        "--password-file", str(world.password_file), "--data", str(world.folder / "d"),
        "--rpc", "http://127.0.0.1:9",
        "--worker-command", "python -m worker", "--runtime", "docker",
    )  # fmt: skip
    assert done.returncode == 64
    assert "only with --runtime process" in done.stderr


def test_data_folder_that_cannot_be_used(wallet: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    flags = (*wallet[:4], "--data", str(tmp_path / "file"))
    fails(
        64, "the data folder", "join", *flags, *NOWHERE, "--runtime", "process",
    )  # fmt: skip


def test_unusable_settings_file_is_named(tmp_path: Path, wallet: tuple[str, ...]) -> None:
    (tmp_path / "c.toml").write_text("threads = 'many'\n")
    fails(64, "the setting 'threads' is wrong", "status", "--config", str(tmp_path / "c.toml"))
    (tmp_path / "c.toml").write_text("= =\n")
    fails(64, "is not TOML", "status", "--config", str(tmp_path / "c.toml"))
    (tmp_path / "c.toml").write_text("no_such_setting = 1\n")
    fails(64, "no_such_setting", "status", "--config", str(tmp_path / "c.toml"))
    (tmp_path / "c.toml").write_text("password-file = 'p'\nzzz = 1\n")
    said = fails(64, "no setting 'zzz'", "status", "--config", str(tmp_path / "c.toml"))
    assert "no setting 'password-file'; did you mean password_file?" in said
    assert "PRIME_NODE" not in said
    fails(64, "there is no settings file", "status", "--config", str(tmp_path / "missing.toml"))


def test_flag_beats_environment_beats_file_beats_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = tmp_path / "data"
    data.mkdir()
    (data / "settings.json").write_text('{"orchestrator": "memory", "rpc": ["memory"], "pool": 4}')
    toml = tmp_path / "c.toml"
    toml.write_text('orchestrator = "file"\nrpc = ["file"]\n')
    monkeypatch.setenv("PRIME_NODE_ORCHESTRATOR", "environment")
    flags = {"data": data, "orchestrator": None}
    settings = config.load(flags, toml)
    assert (settings.orchestrator, settings.rpc, settings.pool) == ("environment", ("file",), 4)
    assert config.load({"data": data, "orchestrator": "flag"}, toml).orchestrator == "flag"
    monkeypatch.setenv("PRIME_NODE_RPC", "one, two")
    assert config.load(flags, toml).rpc == ("one", "two")


def test_remembered_settings_hold_no_secret(tmp_path: Path) -> None:
    settings = config.load({"data": tmp_path, "password_fd": 3, "wallet": "k", "throttle": 2.0})
    assert settings.to_remember().keys() <= {"rpc", "wallet", "password_file", "orchestrator"}


def test_a_plain_join_has_the_runtime_and_the_limits_that_an_earlier_one_named(
    tmp_path: Path,
) -> None:
    flags = {"data": tmp_path, "runtime": "process", "threads": 2, "min_price": 7}
    data = DataFolder(tmp_path)
    data.remember(config.load(flags).to_remember())
    again = config.load({"data": tmp_path})
    assert (again.runtime, again.threads, again.min_price) == ("process", 2, 7)
    data.remember(config.load({"data": tmp_path, "threads": 3}).to_remember())
    third = config.load({"data": tmp_path, "runtime": "docker"})
    assert (third.runtime, third.threads, third.min_price) == ("docker", 3, 7)
    assert "image_gb" not in third.to_remember(), "a default of this release is not kept"


def test_provider_is_the_same_account_in_any_letters(wallet: tuple[str, ...]) -> None:
    node = load_keystore(Path(wallet[1]), PASSWORD)
    for text in (node.address, node.address.lower(), node.address.upper().replace("0X", "0x")):
        settings = config.load({"provider": text, "data": wallet[5]})
        assert open_provider(settings, node) is node, text
    assert open_provider(config.load({"provider": NODE.address, "data": wallet[5]}), node) is None
    wrong = "--provider is not an Ethereum address: '0x12'"
    fails(64, wrong, "join", *wallet, *NOWHERE, "--provider", "0x12")


def test_what_only_a_running_agent_knows_is_not_shown_of_one_that_ended(tmp_path: Path) -> None:
    folder = DataFolder(tmp_path)
    last = AgentStatus(
        node=NODE.address, pool=1, pid=1, started_at=1, heard_at=2, directive="work", reason="",
        node_status="active", policy_version=3, latest_version=3, files={},
        tokens_per_second=9, task="t",
    )  # fmt: skip
    folder.write_status(last)
    shown = overview(config.load({"data": tmp_path, "pool": 99}))
    assert shown["agent"] == "not running"
    assert not shown.keys() & {"directive", "reason", "node_status", "tokens_per_second", "task"}
    assert "works in pool 1" in shown["pool_differs"]
    folder.lock()
    try:
        shown = overview(config.load({"data": tmp_path, "pool": 1}))
    finally:
        folder.unlock()
    assert (shown["directive"], shown["tokens_per_second"]) == ("work", 9)
    assert not shown.keys() & {"reason", "pool_differs"}


@pytest.mark.parametrize("trouble", ["", "1 of 9 active nodes may use such cards"])
def test_status_and_doctor_say_what_follows_for_a_card_without_calibration(
    tmp_path: Path, wallet: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, trouble: str
) -> None:
    known = NodeInfo(
        node=NODE.address, provider=None, status="active", speed_class=1, last_heartbeat=1,
        policy_version=None, accepted=0, rejected=0, void=0, units=0,
        uncalibrated_card="NVIDIA L4", uncalibrated_trouble=trouble,
    )  # fmt: skip
    monkeypatch.setattr(NodeApi, "node", lambda *_: known)
    given = {"data": tmp_path, "orchestrator": "http://127.0.0.1:9", "wallet": Path(wallet[1])}
    settings = config.load(given)
    shown = overview(settings)["card"]
    (check,) = doctor._calibration(settings)
    if trouble:
        assert shown == check.found == trouble
        assert (check.outcome, "orchestrator calibrate" in check.fix) == ("failed", True)
    else:
        assert "no limits are calibrated for NVIDIA L4: its files are judged at the" in shown
        assert (check.outcome, "for NVIDIA L4" in check.found) == ("warning", True)
    calibrated = known.model_copy(update={"uncalibrated_card": "", "uncalibrated_trouble": ""})
    monkeypatch.setattr(NodeApi, "node", lambda *_: calibrated)
    assert "card" not in overview(settings)
    assert list(doctor._calibration(settings)) == []


class Stopping:
    """A data folder whose agent has `waiting[n]` undelivered files after n × 50 s, then ends."""

    def __init__(self, folder: Path, waiting: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
        self.data, self.waiting, self.time = DataFolder(folder), waiting, 0.0
        self.said: list[str] = []
        self.leases: list[LeaseInfo] | None = None
        self.signals: list[tuple[int, int]] = []
        monkeypatch.setattr(self.data, "holder", lambda: 77 if self.step < len(waiting) else None)
        monkeypatch.setattr(
            leave, "waiting_in", lambda _: waiting[min(self.step, len(waiting) - 1)]
        )
        monkeypatch.setattr(leave.os, "kill", lambda *sent: self.signals.append(sent))

    @property
    def step(self) -> int:
        return int(self.time // 50)

    def pause(self, seconds: float) -> None:
        self.time += seconds

    def stop(self) -> None:
        leave.stop_agent(
            self.data, self.said.append, lambda: self.leases,
            clock=lambda: self.time, pause=self.pause,
        )  # fmt: skip


def test_leaving_waits_for_an_agent_as_long_as_it_delivers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = Stopping(tmp_path, [3, 2, 1, 0], monkeypatch)
    agent.stop()
    assert agent.signals == [(77, signal.SIGTERM)]
    assert agent.time > 3 * leave.STOP_SECONDS
    first, *progress, last = agent.said
    assert "gives its open leases back and delivers its finished files (3 waiting)" in first
    assert [line.split(":")[1] for line in progress] == [
        f" {left} finished file(s) wait to be delivered" for left in (2, 1, 0)
    ]
    assert last == "the agent has ended"


def test_leaving_ends_where_an_agent_makes_no_progress(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = Stopping(tmp_path, [1, 1, 1, 1], monkeypatch)
    with pytest.raises(UnavailableError, match="kill 77, then type prime-node leave again"):
        agent.stop()
    assert leave.STOP_SECONDS < agent.time < leave.STOP_SECONDS + 1
    assert len(agent.said) == 1

    agent = Stopping(tmp_path, [1], monkeypatch)
    agent.stop()
    assert agent.said[-1] == "the agent has ended; 1 finished file(s) were not delivered"


def test_leaving_says_how_many_leases_are_open_and_until_when(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = Stopping(tmp_path, [0], monkeypatch)
    agent.leases = [
        LeaseInfo(
            digest=ZERO_DIGEST, step=1, index=number, policy_version=1, status="open",
            created_at=0, deadline=1_763_688_400 + number, target=2,
        )
        for number in (25, 5)
    ]  # fmt: skip
    agent.stop()
    assert "gives its open leases back (2) and delivers" in agent.said[0]
    assert agent.said[-1] == (
        "the agent has ended; 2 lease(s) that it gave back run out by 2025-11-21 01:27:05Z"
    )
    agent.time, agent.leases, agent.said = 0.0, [], []
    agent.stop()
    assert "gives its open leases back (0) and delivers" in agent.said[0]
    assert agent.said[-1] == "the agent has ended"


def test_an_orchestrator_that_answers_nonsense_keeps_no_node_from_leaving() -> None:
    class Nonsense(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"nonsense")

        def log_message(self, *_: object) -> None: ...

    with served(Nonsense) as url:
        assert leave._open_leases(config.load({"orchestrator": url}), NODE.address) is None


def test_a_node_that_left_learns_where_to_withdraw_its_stake(wallet: tuple[str, ...]) -> None:
    alone = config.load({"wallet": wallet[1]})
    assert stake_out(alone).endswith("prime-node stake unbond AMOUNT")
    owned = config.load({"wallet": wallet[1], "provider": "0x" + "11" * 20})
    assert "at the owner's machine" in stake_out(owned)
    assert "--wallet OWNER_KEYSTORE" in stake_out(owned)


def test_what_is_published_is_shown_a_line_a_fact() -> None:
    found = {
        "slash": {"id": 3, "amount": str(5 * ETHER), "reason": 1, "proposed_at": 1_763_688_425},
        "evidence": {
            "submission": {"node": NODE.address, "valid_until": 0},
            "rows_drawn": [4, 7],
            "detail": "",
            "tables": [{"row": 1}, {"row": 2}],
        },
        "verdict": None,
    }
    lines = tree_lines(found)
    text = "\n".join(lines)
    assert not set("{}[]'") & set(text), text
    assert lines[0] == "slash"
    assert "  amount       5 PRIME" in lines
    assert "  proposed at  2025-11-21 01:27:05Z" in lines
    assert f"  reason       {Reason(1).name} (1)" in lines
    assert f"    node         {NODE.address}" in lines
    assert "    valid until  not yet" in lines
    assert "  rows drawn  4, 7" in lines
    assert "  detail      –" in lines
    assert lines[-5:-1] == ["  tables 0", "    row  1", "  tables 1", "    row  2"]
    assert lines[-1] == "verdict   –"


def test_limits_of_price_and_unpaid_work_are_read_with_their_unit(tmp_path: Path) -> None:
    flags = {"data": tmp_path, "min_price": "0.0000004 PRIME", "max_unpaid": "2.5 PRIME"}
    settings = config.load(flags)
    assert settings.min_price == 4 * 10**11
    assert settings.max_unpaid_wei == 25 * ETHER // 10
    assert config.load({"data": tmp_path, "min_price": "7"}).min_price == 7
    fails(64, "a number alone is whole wei", "join", *NOWHERE, "--min-price", "0.5")


def test_where_the_base_model_comes_from_is_remembered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_ENDPOINT", "http://hub.example")
    monkeypatch.setenv("HF_TOKEN", "secret")
    settings = config.load({"data": tmp_path, "base_model": "model"})
    assert settings.to_remember()["base_model"] == str(tmp_path / "model")
    assert config.load({"data": tmp_path, "base_model": ""}).base_model_source is None
    found = config.load({"data": tmp_path, "base_model": "hf:a/b@v1"}).base_model_source
    assert found is not None
    assert (found.url, found.token) == ("http://hub.example/a/b/resolve/v1", "secret")
    fails(64, "is not of the form hf:owner/name@revision", "join", *NOWHERE, "--base-model", "hf:a")


def test_requirements_name_everything_a_machine_lacks() -> None:
    machine = Hardware(
        cpu_model="x", cpu_count=2, memory_mb=1000, disk_mb=50,
        gpus=(Gpu(model="NVIDIA RTX 4090", memory_mb=24_000),),
    )  # fmt: skip
    Requirements(gpu_count=1, gpu_model="rtx", gpu_memory_mb=20_000, cpu_count=2).require(machine)
    needed = Requirements(gpu_count=1, gpu_model="H100", cpu_count=4, memory_mb=2000, disk_mb=51)
    with pytest.raises(PolicyError) as caught:
        needed.require(machine)
    for part in ("H100", "4 CPUs", "2000 MiB of memory", "51 MiB of disk"):
        assert part in str(caught.value)


def test_a_data_folder_of_another_user_and_a_damaged_status_are_one_sentence(
    tmp_path: Path,
) -> None:
    data = DataFolder(tmp_path / "data")
    data.make()

    def said(read: Callable[[], object]) -> str:
        try:
            return f"it may: {read()}"
        except UserError as error:
            return f"{error}; {error.hint}"

    def refused(read: Callable[[], object]) -> str:
        data.root.chmod(0)
        open_path(data.root)
        try:
            return as_another_user(lambda: said(read)) if os.getuid() == 0 else said(read)
        finally:
            data.root.chmod(0o700)

    for read in (lambda: remembered(data.root), data.holder, data.read_status):
        assert "cannot be read: Permission denied; use the account that" in refused(read)
    (data.root / "status.json").write_text('{"node":')
    assert said(data.read_status) == (
        f"{data.root / 'status.json'} is damaged; remove it: a running agent writes it again"
    )


def test_doctor_finds_each_lack_and_its_fix(world: NodeWorld) -> None:
    done = prime_node(
        "doctor", "--orchestrator", world.url, "--wallet", str(world.keystore), "--json",
        "--data", str(world.folder / "d"), "--rpc", f"http://127.0.0.1:{closed_port()}",
        env={"DOCKER_HOST": "unix:///nonexistent/docker.sock"},
    )  # fmt: skip
    assert done.returncode == 69
    checks = {check["name"]: check for check in json.loads(done.stdout)}
    assert checks["wallet"]["found"].startswith(NODE.address)
    for name in ("python", "disk", "orchestrator", "clock", "requirements"):
        assert checks[name]["outcome"] == "ok", checks[name]
    for name in ("runtime", "rpc"):
        assert checks[name]["outcome"] == "failed"
        assert checks[name]["fix"]


def test_doctor_without_anything_warns_and_goes_on() -> None:
    done = prime_node("doctor", "--runtime", "process", "--data", "/tmp", "--json")
    checks = {check["name"]: check for check in json.loads(done.stdout)}
    assert checks["orchestrator"]["outcome"] == "warning"
    assert checks["runtime"]["outcome"] == "warning"
    assert "ISOLATES NOTHING" in checks["runtime"]["found"]
    assert done.returncode == 0
