"""A deployment killed at any transaction, and one read back: code, arguments, wiring, roles."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from devnet.chain import Anvil, dev_signer
from devnet.deployed import TEST_PERIODS, Deployed
from prime_chain import codec
from prime_chain.amounts import ETHER
from prime_chain.client import ChainClient
from prime_chain.deployer import Options, deploy, dry_run
from prime_chain.deployment_check import (
    DeploymentCheck,
    check_deployment,
    code_hash,
    masked,
    resolve,
    standard_input,
)
from prime_chain.keystore import save_keystore
from prime_core.deployment import SOLIDITY_NAMES, Deployment
from prime_core.encoding import sha256
from prime_core.errors import FatalError, NotFoundError, UserError
from prime_core.ids import ZERO_ADDRESS, Address
from prime_core.signing import CONTRACT_NAMES

ROOT = Path(__file__).resolve().parents[2]
TRANSACTIONS = 12  # eight contracts, four wirings


class KilledError(BaseException):
    """As good as SIGKILL: nothing of ours catches it."""


class Doomed(ChainClient):
    """A client of a process that lets `budget` broadcasts through and dies at the next one: before
    the chain has it, or after."""

    def __init__(self, url: str, chain_id: int, budget: int, *, after: bool) -> None:
        super().__init__([url], chain_id)
        self._budget = budget
        self._after = after

    def send_raw(self, raw: bytes) -> None:
        self._budget -= 1
        if self._budget >= 0 or self._after:
            super().send_raw(raw)
        if self._budget < 0:
            raise KilledError


def _options(**changes: object) -> Options:
    account = dev_signer(0).address
    values: dict[str, object] = {
        "periods": TEST_PERIODS, "testnet": True, "holder": account, "supply": 1,
        "arbiter": account,
    }  # fmt: skip
    return Options(**{**values, **changes})  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.parametrize("after", [False, True], ids=["before it is sent", "after it is sent"])
def test_a_deployment_killed_at_every_one_of_its_transactions_is_finished_without_a_double(
    deployed: Deployed, tmp_path: Path, after: bool
) -> None:
    signer = deployed.accounts[8]
    before = deployed.client.nonce(signer.address)
    deaths, finished = 0, False
    while not finished:
        budget = 0 if after or deaths == 0 else 1  # one more transaction each life, then the end
        doomed = Doomed(deployed.url, deployed.client.chain_id, budget, after=after)
        try:
            deploy(doomed, signer, _options(), journal=tmp_path / "j")
            finished = True
        except KilledError:
            deaths += 1
        finally:
            doomed.close()
    assert deaths == TRANSACTIONS
    assert deployed.client.nonce(signer.address) - before == TRANSACTIONS
    again = deploy(deployed.client, signer, _options(), journal=tmp_path / "j")
    assert len(again.transactions) == TRANSACTIONS
    assert faults(deployed, again) == []


def faults(deployed: Deployed, deployment: Deployment) -> list[DeploymentCheck]:
    return [
        one for one in check_deployment(deployed.client, deployment) if not one.ok and one.fault
    ]


def test_a_deployment_file_keeps_what_anyone_needs_to_check_it(deployed: Deployed) -> None:
    file = deployed.deployment
    assert faults(deployed, file) == []
    for table in (file.code, file.abi, file.arguments, file.encoded_arguments):
        assert set(table) == set(CONTRACT_NAMES)
    assert set(file.blocks) == set(file.transactions)
    assert file.block == min(file.blocks.values())
    for name in CONTRACT_NAMES:
        assert file.code[name] == code_hash(deployed.client.code(file.address(name)))
        artifact = codec.artifact(SOLIDITY_NAMES[name])
        encoded = bytes.fromhex(file.encoded_arguments[name][2:])
        codec.decode(artifact.constructor, encoded)
    assert file.roles is not None
    assert file.roles.arbiter == file.roles.governor == deployed.accounts[0].address


def test_other_code_at_an_address_is_found(deployed: Deployed) -> None:
    account = deployed.deployment.contracts.work
    code = bytearray(deployed.client.code(account))
    code[len(code) // 2] ^= 1
    deployed.anvil.rpc("anvil_setCode", account, "0x" + code.hex())
    (found,) = faults(deployed, deployed.deployment)
    assert (found.name, "other code" in found.found) == ("code of Work", True)


def test_an_immutable_that_the_constructor_did_not_give_is_found(deployed: Deployed) -> None:
    """The registry's address lies in the code: another one there is another contract."""
    file, artifact = deployed.deployment, codec.artifact("Rewards")
    code = bytearray(deployed.client.code(file.contracts.rewards))
    registry = bytes.fromhex(file.contracts.registry[2:])
    start = next(a for a, b in artifact.immutables if code[a:b][12:] == registry)
    code[start + 12 : start + 32] = bytes.fromhex(deployed.accounts[5].address[2:])
    assert masked(bytes(code), artifact) == masked(artifact.runtime, artifact)
    deployed.anvil.rpc("anvil_setCode", file.contracts.rewards, "0x" + code.hex())
    said = [one.found for one in faults(deployed, file)]
    assert len(said) == 1
    assert "the file says" in said[0]
    bare = file.model_copy(update={"code": {}})  # an old file without hashes
    said = [one.found for one in faults(deployed, bare)]
    assert any("other arguments" in one for one in said)


def test_an_address_without_code_and_swapped_contracts_are_found(deployed: Deployed) -> None:
    places = deployed.deployment.contracts

    def moved(**to: Address) -> Deployment:
        return deployed.deployment.model_copy(
            update={"contracts": places.model_copy(update=to), "code": {}}
        )

    (found,) = faults(deployed, moved(slasher=deployed.accounts[9].address))
    assert "there is no Slasher" in found.found
    (found,) = faults(deployed, moved(slasher=places.pools))
    assert "other code" in found.found


def test_a_wrong_wire_wrong_periods_and_wrong_roles_are_found(
    deployed: Deployed, tmp_path: Path
) -> None:
    # two deployments of the same code by the same key, mixed in one file
    other = deploy(deployed.client, deployed.accounts[0], _options(), journal=tmp_path / "j")
    mixed = deployed.deployment.model_copy(
        update={
            "contracts": deployed.deployment.contracts.model_copy(
                update={"registry": other.contracts.registry}
            ),
            "code": {},
        }
    )
    assert {"pools knows registry", "registry knows vault"} <= {
        one.name for one in faults(deployed, mixed)
    }
    longer = TEST_PERIODS.model_copy(update={"validity": TEST_PERIODS.validity + 1})
    wrong = deployed.deployment.model_copy(update={"periods": longer})
    assert [one.name for one in faults(deployed, wrong)] == ["periods"]
    roles = deployed.deployment.roles
    assert roles is not None
    other_treasury = roles.model_copy(update={"treasury": deployed.accounts[5].address})
    wrong = deployed.deployment.model_copy(update={"roles": other_treasury})
    assert [one.name for one in faults(deployed, wrong)] == ["treasury as the file says"]


def test_roles_go_to_a_multisig_and_the_deployer_keeps_none(
    deployed: Deployed, tmp_path: Path
) -> None:
    multisig = deployed.deployment.contracts.token  # some contract
    options = _options(arbiter=multisig, holder=multisig, validator_bond=ETHER)
    signer = deployed.accounts[9]
    made = deploy(deployed.client, signer, options, journal=tmp_path / "j")
    checks = {one.name: one for one in check_deployment(deployed.client, made)}
    for role in ("arbiter", "governor", "offered governor"):
        assert checks[f"deployer is not {role}"].ok
    assert made.roles is not None
    assert made.roles.governor == multisig
    # one key for all, as on the demo: said, not refused
    local = {one.name: one for one in check_deployment(deployed.client, deployed.deployment)}
    mine = local["deployer is not arbiter"]
    assert (mine.ok, mine.fault) == (False, False)


def test_immutable_terms_are_deployed_without_a_governor(
    deployed: Deployed, tmp_path: Path
) -> None:
    options = _options(governor=ZERO_ADDRESS)
    made = deploy(deployed.client, deployed.accounts[9], options, journal=tmp_path / "j")
    from prime_chain.contracts import Contracts

    assert Contracts(deployed.client, made).slasher.governor() is None


class OnBase(ChainClient):
    """A local chain that calls itself Base: roles must be multisigs there."""

    def __init__(self, url: str) -> None:
        super().__init__([url], 31337)
        from prime_chain.networks import BASE

        self.network = BASE


def test_where_value_is_real_no_single_key_gets_a_role(deployed: Deployed, tmp_path: Path) -> None:
    client, contract = OnBase(deployed.url), deployed.deployment.contracts.token
    good = {
        "testnet": False, "arbiter": contract, "holder": contract, "governor": contract,
        "validator_bond": ETHER,
    }  # fmt: skip
    for change, complaint in (
        ({"arbiter": dev_signer(3).address}, "arbiter 0x.* is not a contract"),
        ({"governor": dev_signer(3).address}, "governor 0x.* is not a contract"),
        ({"holder": dev_signer(3).address}, "holder 0x.* is not a contract"),
        ({"validator_bond": 0}, "without a price"),
        ({"testnet": True}, "faucet"),
    ):
        with pytest.raises(UserError, match=complaint):
            dry_run(client, dev_signer(9).address, _options(**{**good, **change}))
    assert len(dry_run(client, dev_signer(9).address, _options(**good))) == TRANSACTIONS
    client.close()


def test_arguments_that_the_constructor_refuses_are_reported(deployed: Deployed) -> None:
    file = deployed.deployment
    none = "0x" + codec.encode(codec.artifact("Pools").constructor, (ZERO_ADDRESS,) * 2).hex()
    wrong = file.model_copy(update={"encoded_arguments": {**file.encoded_arguments, "pools": none}})
    with pytest.raises(FatalError, match="the constructor of Pools refuses"):
        list(check_deployment(deployed.client, wrong))


# ── the compiler's input ──


def test_imports_resolve_as_solc_resolves_them() -> None:
    remappings = ["@x/=node_modules/@x/", "@x/y/=lib/y/"]
    assert resolve("contracts/src/A.sol", "./libraries/B.sol", remappings) == (
        "contracts/src/libraries/B.sol"
    )
    assert resolve("contracts/src/libraries/B.sol", "../A.sol", remappings) == "contracts/src/A.sol"
    assert resolve("a.sol", "@x/C.sol", remappings) == "node_modules/@x/C.sol"
    assert resolve("a.sol", "@x/y/D.sol", remappings) == "lib/y/D.sol", "the longest one wins"


def test_a_place_without_sources_says_so(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="no contract sources"):
        standard_input(tmp_path)


@pytest.mark.soak
def test_the_kept_compiler_input_gives_the_committed_bytecode() -> None:
    shim = ROOT / "scripts" / "solc-shim"
    if not (ROOT / "node_modules" / "solc").is_dir():
        pytest.skip("needs solc: make setup")
    raw = standard_input(ROOT)
    assert sha256(raw) == sha256(standard_input(ROOT))
    done = subprocess.run(
        [str(shim), "--standard-json"], input=raw, capture_output=True, check=True
    )
    made = json.loads(done.stdout)["contracts"]
    for name in SOLIDITY_NAMES.values():
        compiled = made[f"contracts/src/{name}.sol"][name]["evm"]["bytecode"]["object"]
        assert bytes.fromhex(compiled) == codec.artifact(name).bytecode, name


@pytest.mark.slow
def test_the_command_killed_again_and_again_ends_in_one_deployment(tmp_path: Path) -> None:
    """SIGKILL at every step that the process reports, on a chain that mines by the clock."""
    (tmp_path / "pw").write_text("secret")
    key = bytes(dev_signer(4).account.key)
    save_keystore(tmp_path / "k.json", key, "secret", light=True)
    with Anvil(block_time=0.3) as anvil:
        command = [
            *(sys.executable, "-m", "prime_orchestrator.cli.main", "deployment", "deploy"),
            *("--rpc", anvil.url, "--wallet", str(tmp_path / "k.json")),
            *("--password-file", str(tmp_path / "pw"), "--out", str(tmp_path / "d.json")),
        ]
        killed = 0
        while not (tmp_path / "d.json").exists():
            assert killed < 50
            with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
                assert process.stderr is not None
                for number, _ in enumerate(process.stderr):
                    if number == killed:  # one step further each time
                        process.kill()
                        killed += 1
                        break
        client = ChainClient([anvil.url], 31337)
        made = Deployment.load(tmp_path / "d.json")
        assert client.nonce(dev_signer(4).address) == TRANSACTIONS
        assert killed >= TRANSACTIONS
        assert [c for c in check_deployment(client, made) if not c.ok and c.fault] == []
        client.close()
