"""Executes every `console` block of README.md and docs/ as typed, and checks the other blocks.

A page's blocks run in order in one bash session with `set -e`, in a folder that links to the
repository's own folders. README.md builds a pool by hand; pages listed in IN_THE_POOL run in its
session, after its block that trains. The runbooks share one session, too. Only the
port numbers are replaced by free ones.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import pytest
import sqlalchemy as sa

from devnet.findings import NEEDED_REWARD, NEEDED_RISE
from devnet.ports import free_port
from prime_core.run import RunDefinition
from prime_core.task import SignedLease
from prime_orchestrator.store import open_store, schema, sqlite_url

ROOT = Path(__file__).resolve().parents[2]
LINKED = ("docs", "devnet", "node_modules", "contracts", "scripts")
IN_THE_POOL = ("docs/protocol.md", "docs/storage.md", "docs/retention.md", "docs/learning.md")
ALONE = ("docs/tutorial.md", "docs/environments.md", "docs/broadcast.md", "docs/nodes.md")
RUNBOOKS = tuple(
    f"docs/runbooks/{name}.md"
    for name in (
        "install", "upgrade", "rotate-keys", "restore", "move-pool", "rpc-outage",
        "validator-misbehaves", "chain-halt", "incident",
    )
)  # fmt: skip
ELSEWHERE = {
    "orchestrator gateway serve": "tests/orchestrator/test_gateway.py",
    "orchestrator rewards import": "tests/money/test_mirror.py",
    "orchestrator slash apply-arbiter": "tests/money/test_role_clis.py",
    "orchestrator slash cancel": "tests/money/test_role_clis.py",
    "orchestrator slash disable": "tests/money/test_role_clis.py",
    "prime-node audit list": "tests/node/test_owner_on_chain.py",
    "prime-node audit replay": "devnet/observe.py",  # in the demo of tests/e2e/test_e2e_demo.py
    "prime-node dispute": "tests/node/test_owner_on_chain.py",
    "prime-node work post": "tests/node/test_owner_on_chain.py",
    "validator unbond": "tests/money/test_role_clis.py",
    "validator withdraw": "tests/money/test_role_clis.py",
}
"""Commands that runbooks name and `test_the_runbooks` does not type, and who does."""
COMMAND = re.compile(r"(?:orchestrator|prime-node|trainer|validator)(?: [a-z][a-z-]*)+")
NOT_COMMANDS = {"text", "toml", "json", "python", "mermaid", "solidity", "tsv"}
NOT_RUN = re.compile(r"<!-- not run: [^\n]{10,} -->\n\Z")
SECONDS = 1700
LEARNING_STEPS = 20


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, its text, and the page's text before it."""

    language: str
    text: str
    before: str


def pages() -> list[Path]:
    """README.md and every page below docs/."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def blocks(page: Path) -> list[Block]:
    """The fenced blocks of a page, in order."""
    text = page.read_text()
    found = re.finditer(r"^```([^\n]*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [Block(one[1].strip(), one[2], text[: one.start()]) for one in found]


def console(page: str) -> list[str]:
    return [block.text for block in blocks(ROOT / page) if block.language == "console"]


def test_each_block_is_executed_or_says_why_not() -> None:
    faults = []
    for page in pages():
        name = str(page.relative_to(ROOT))
        for block in blocks(page):
            line = block.before.count("\n") + 1
            if block.language == "console":
                if name not in ("README.md", *IN_THE_POOL, *ALONE, *RUNBOOKS):
                    faults.append(f"{name}:{line}: console, but no test runs this page")
            elif block.language in ("bash", "sh"):
                if not NOT_RUN.search(block.before):
                    faults.append(f"{name}:{line}: no `<!-- not run: reason -->` above it")
            elif block.language not in NOT_COMMANDS:
                faults.append(f"{name}:{line}: {block.language or 'no language'}")
    assert not faults, "\n".join(faults)


def anchors(page: Path) -> set[str]:
    """The names of a page's headings in links, as GitHub makes them."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    headings = (one.lower() for one in re.findall(r"^#+ (.+)$", text, re.MULTILINE))
    return {re.sub(r"[^\w -]", "", one).replace(" ", "-") for one in headings}


def test_every_link_leads_to_a_file_and_a_heading() -> None:
    faults = []
    for page in (*pages(), ROOT / "CONTRIBUTING.md", ROOT / "contracts/README.md"):
        for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
            if "://" in target:
                continue
            file, _, anchor = target.partition("#")
            place = (page.parent / file).resolve() if file else page
            if not place.exists() or (anchor and anchor not in anchors(place)):
                faults.append(f"{page.relative_to(ROOT)}: {target}")
    assert not faults, "\n".join(faults)


def test_every_page_that_a_source_names_exists() -> None:
    listed = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    kinds = (".py", ".toml", ".sh", ".sol", ".yml", ".yaml", ".md", ".service", ".css", ".js")
    faults = []
    for name in listed.stdout.splitlines():
        file = ROOT / name
        if not name.endswith(kinds) or name == "CHANGELOG.md" or not file.exists():
            continue
        for page in re.findall(r"\bdocs/adr/\d{4}|\bdocs/[\w/-]+\.md", file.read_text()):
            if not (ROOT / page).exists() and not [*ROOT.glob(f"{page}-*.md")]:
                faults.append(f"{name}: {page}")
    assert not faults, "\n".join(faults)


def test_each_rule_names_code_and_tests_that_exist() -> None:
    sections = re.split(r"^### (\d+)\. ", (ROOT / "docs" / "rules.md").read_text(), flags=re.M)
    assert [int(number) for number in sections[1::2]] == list(range(1, 27))
    faults = []
    for number, text in zip(sections[1::2], sections[2::2], strict=True):
        kept, _, tested = text.partition("*tested by*")
        places = re.findall(r"`([\w/]+\.(?:py|sol))`", kept)
        tests = re.findall(r"`([\w/]+\.(?:py|t\.sol))::(\w+)`", tested)
        if not places or not tests:
            faults.append(f"rule {number} names no code or no test")
        faults += [name for name in places if not (ROOT / name).is_file()]
        for name, test in tests:
            file = ROOT / "tests" / name
            if not file.is_file() or not re.search(rf"\b{test}\(", file.read_text()):
                faults.append(f"rule {number}: {name}::{test}")
    assert not faults, "\n".join(faults)


def run_session(parts: list[str], folder: Path) -> None:
    """Runs the blocks in one bash session below `folder`, for at most SECONDS, and ends every
    process it started."""
    for name in LINKED:
        (folder / name).symlink_to(ROOT / name)
    script = "\n".join(parts)
    for port in ("8545", "8700", "8480", "8475", "8476", "8490"):
        script = re.sub(rf"\b{port}\b", str(free_port()), script)
    assert "/tmp/" not in script, "blocks write below the current folder only"
    environment = {
        "PATH": f"{ROOT / '.venv/bin'}:{os.environ['PATH']}",
        "HOME": str(folder), "LANG": "C.UTF-8", "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    said = folder / "session.log"
    with said.open("w") as out:
        shell = subprocess.Popen(
            ["bash", "-euo", "pipefail", "-c", f"PS4='+${{SECONDS}}s '; set -x\n{script}"],
            cwd=folder, env=environment, stdin=subprocess.DEVNULL, stdout=out,
            stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        try:
            status = shell.wait(SECONDS)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            _end_group(shell.pid)
            shell.wait()
    if status != 0:
        logs = [said, *sorted(folder.glob("var/*/*.log"))]
        tails = [f"== {log.name}\n{log.read_text(errors='replace')[-2500:]}" for log in logs]
        pytest.fail(f"the session ended with {status}\n" + "\n".join(tails))


def _end_group(group: int) -> None:
    try:
        os.killpg(group, signal.SIGKILL)
    except ProcessLookupError:
        return


@pytest.mark.slow
@pytest.mark.forge
@pytest.mark.timeout(1800)
def test_a_pool_by_hand_as_the_readme_says(tmp_path: Path) -> None:
    """Its node works on leases of the steps before 5 while docs/protocol.md revises the run from
    step 5 on; the backup of docs/storage.md shows what became of every lease."""
    parts = console("README.md")
    after = next(i for i, text in enumerate(parts) if text.startswith("trainer run")) + 1
    inside = [text for page in IN_THE_POOL for text in console(page)]
    run_session([*parts[:after], *inside, *parts[after:]], tmp_path)
    pool = tmp_path / "var" / "pool"
    first, later = (
        RunDefinition.parse((pool / name).read_bytes()).digest()
        for name in ("run.json", "revised.json")
    )
    backup = sqlite_url(pool / "backup" / "store.sqlite")
    with closing(open_store(backup)) as store, store.read() as connection:
        leases = connection.execute(sa.select(schema.leases)).all()
        submissions = connection.execute(sa.select(schema.submissions)).all()
    files = {row.lease_digest: row.status for row in submissions}
    for row in leases:
        run = SignedLease.model_validate_json(row.body).lease.run_digest
        assert run == (first if row.step < 5 else later)
        assert row.status == "open" or files.get(row.digest) in ("submitted", "accepted"), row
    assert {row.step for row in leases if row.status == "submitted"} >= {4, 5}
    assert (pool / "node.log").read_text().count("replaces the current one") == 1


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_the_pool_of_the_readme_learns(tmp_path: Path) -> None:
    """README.md's commands up to its trainer's, which makes more steps; `make soak ARGS=by-hand`.
    Held-out problems, answered by the policy before and after, show what was learned."""
    parts = console("README.md")
    at = next(i for i, text in enumerate(parts) if text.startswith("trainer run"))
    train, *_ = parts[at].partition("trainer status")
    assert train.count(" --steps 2\n") == 1
    run_session(
        [
            *parts[:at],
            train.replace(" --steps 2\n", f" --steps {LEARNING_STEPS}\n"),
            "trainer export --data trainer --out finished",
            "trainer evaluate --model finished --base ../../devnet/model --run run.json "
            "--problems 256 --json > evaluation.json",
        ],
        tmp_path,
    )
    pool = tmp_path / "var" / "pool"
    found = json.loads((pool / "evaluation.json").read_text())
    lines = (pool / "trainer" / "metrics.jsonl").read_text().splitlines()
    batches = [round(json.loads(line)["reward"], 2) for line in lines]
    print(f"reward of each batch {batches}\nheld-out problems {json.dumps(found)}")
    before, after = found["base"]["reward"]["mean"], found["trained"]["reward"]["mean"]
    assert after >= NEEDED_REWARD, found
    assert after - before >= NEEDED_RISE, found


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("page", ALONE)
def test_a_page_s_commands(page: str, tmp_path: Path) -> None:
    run_session(console(page), tmp_path)


def test_each_command_that_a_runbook_names_is_executed() -> None:
    named, typed = set[str](), "".join(text for page in RUNBOOKS for text in console(page))
    for page in RUNBOOKS:
        text = (ROOT / page).read_text()
        lines = [line for one in blocks(ROOT / page) for line in one.text.splitlines()]
        for line in (*lines, *re.findall(r"`([^`\n]+)`", text)):
            if found := COMMAND.match(line):
                named.add(found[0])
    assert {one for one in named if one not in typed} == ELSEWHERE.keys()
    for command, file in ELSEWHERE.items():
        words = ", ".join(f'"{word}"' for word in command.split()[1:])
        assert words in (ROOT / file).read_text(), f"{file} does not type {command}"


@pytest.mark.slow
@pytest.mark.forge
@pytest.mark.timeout(1800)
def test_the_runbooks(tmp_path: Path) -> None:
    run_session([text for page in RUNBOOKS for text in console(page)], tmp_path)
