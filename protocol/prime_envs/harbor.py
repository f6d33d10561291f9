"""Harbor task packages as rows of the environment `tasks`, with the task type `harbor`.

    task.toml, instruction.md     settings (most are ignored) and the prompt
    environment/                  files, and a Dockerfile of FROM, WORKDIR and COPY only
    tests/test.sh, tests/X.py     the verifier; test.sh is read, not run
    solution/solve.py             optional: a program that must be rewarded with 1

A validator repeats every grade, and neither it nor a worker builds containers, so a package is used
only if its verifier is one Python file of the standard library, and its answer can be a Python
program that reads and writes text files (graders/harbor.py). Everything else is refused, with the
reason: other images, services, GPUs, network, shell scripts, packages.
"""

from __future__ import annotations

import ast
import gzip
import hashlib
import io
import posixpath
import re
import tarfile
import tomllib
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prime_core import encoding
from prime_core.errors import MalformedError, UserError
from prime_envs.sandbox.server import MODULES
from prime_envs.tasks import MAX_PROMPT

MAX_FILES = 256
MAX_BYTES = 2 << 20
"""Bound of all files of a package together, and of those that an answer leaves."""
MAX_VERIFIER = 1 << 18
MAX_SETTINGS = 1 << 14
"""Characters of task.toml, Dockerfile and test.sh each: reading them may take time and memory that
grow with the square."""
MAX_PATH = 200
MAX_ARCHIVE = 64 << 20
MAX_PACKAGES = 10_000
WORKDIR = "/app"
ENDING = (
    "Answer with one Python program in a fenced block (```python). It runs in {workdir}, without "
    "network, and may read and write files and use the standard library."
)
_LOGS = "/logs/verifier"
_SKIPPED = re.compile(
    r"set [-+][a-z]+( pipefail)?|set [-+]o pipefail|mkdir -p /logs/verifier/?"
    r"|apt-get update( -q+y?| -y)*|apt-get install( -y| -q+)* curl"
    r"|curl -LsSf https://astral\.sh/uv/[0-9.a-z/]*install\.sh \| sh"
    r"|source \$HOME/\.local/bin/env"
)
"""Lines of test.sh without effect here: the last three install uv, by which the template of Harbor
runs pytest."""
_OPTION = r"(?: (?:-[a-zA-Z]+|--tb=[a-z]+|-p no:cacheprovider|--ctrf \S+))*"
_PYTEST = re.compile(
    r"(?:uvx(?: (?:-p|--python) [0-9.]+| --with[ =]pytest(?:-json-ctrf)?(?:[=><]=[0-9.]+)?)* )?"
    rf"(?:python3? -m )?pytest{_OPTION} (/tests/\w+\.py){_OPTION}"
)
_PYTHON = re.compile(r"python3? (/tests/\w+\.py)")
_ONE, _ZERO = (rf"echo {n} > {_LOGS}/reward.txt" for n in (1, 0))
_BY_STATUS = (['if [ $? -eq 0 ]', "then", _ONE, "else", _ZERO, "fi"],)  # fmt: skip
_CALLS = frozenset({"exec", "eval", "compile", "__import__", "globals", "vars", "input"})
_CHANGING = frozenset({"time", "timeit", "threading", "gc", "signal", "resource", "inspect"})
_SEEDS = frozenset({"seed", "Random"})
"""Without arguments, these start from the clock."""
_NOW = frozenset({"now", "today", "utcnow", "urandom", "SystemRandom"})
_HOOKS = frozenset({
    "setup_module", "setup_function", "setup_class", "setup_method", "setUpModule",
    "teardown_module", "teardown_function", "teardown_class", "teardown_method", "tearDownModule",
})  # fmt: skip
"""Functions that pytest calls around tests."""
OS = frozenset({
    "os.sep", "os.linesep", "os.fspath", "os.listdir", "os.getcwd", "os.makedirs", "os.mkdir",
    "os.remove", "os.unlink", "os.rename", "os.replace",
    *(f"os.path.{name}" for name in (
        "abspath", "basename", "commonpath", "dirname", "exists", "getsize", "isabs", "isdir",
        "isfile", "join", "normpath", "realpath", "relpath", "sep", "split", "splitext",
    )),
})  # fmt: skip
"""What gives the same on every machine: it is replaced in the sandbox, or touches no file."""


@dataclass(frozen=True)
class Package:
    """What grading needs: files by absolute path, and the verifier's text, path and runner."""

    files: Mapping[str, str]
    workdir: str
    verifier: str
    path: str
    runner: str

    @staticmethod
    def read(info: Mapping[str, Any], where: str) -> Package:
        """Parses a row's verification_info. Raises MalformedError."""
        texts = {name: info.get(name) for name in ("workdir", "verifier", "path", "runner")}
        files = info.get("files")
        if set(info) != {*texts, "files"} or not isinstance(files, dict):
            raise MalformedError(f"{where}: verification_info is not that of a Harbor package")
        if not all(isinstance(one, str) for one in (*texts.values(), *files.values())):
            raise MalformedError(f"{where}: a file of the Harbor package is not text")
        package = Package(files=files, **texts)  # type: ignore[arg-type]
        problem = in_bounds(package.bytes()) or in_bounds({package.path: package.verifier})
        if problem or not _absolute(package.workdir) or package.runner not in ("pytest", "python"):
            raise MalformedError(f"{where}: the Harbor package {problem or 'names no place'}")
        _require_pure(package.verifier, package.runner, f"{where}: its {package.path}")
        return package

    def bytes(self) -> dict[str, str]:
        """The files' bytes, each as one latin-1 character."""
        return {path: text.encode().decode("latin-1") for path, text in self.files.items()}


def in_bounds(files: Mapping[str, str]) -> str:
    """What is wrong with files by absolute path, worded as a predicate; "" if nothing is."""
    if len(files) > MAX_FILES:
        return f"has {len(files)} files, at most {MAX_FILES}"
    size = sum(map(len, files.values()))
    if size > MAX_BYTES:
        return f"has {size} bytes of files, at most {MAX_BYTES}"
    wrong = next((path for path in files if path == "/" or not _absolute(path)), None)
    return "" if wrong is None else f"has a file with the path {wrong[:MAX_PATH]!a}"


def _absolute(path: str) -> bool:
    return (
        path.startswith("/")
        and len(path) <= MAX_PATH
        and path == posixpath.normpath(path).replace("//", "/")
        and path.isprintable()
    )


def fenced(program: str) -> str:
    """A program as an answer."""
    return f"```python\n{program}\n```"


# --- reading packages ----------------------------------------------------------------------------


def rows(source: Path) -> list[dict[str, Any]]:
    """Rows of the packages in a folder or a .tar.gz archive, ordered by name. Raises UserError (no
    such file, a package that is not supported) and MalformedError (a damaged archive)."""
    listed = dict(_archived(source) if source.is_file() else _listed(source))
    homes = {posixpath.dirname(path) for path in listed if posixpath.basename(path) == "task.toml"}
    if not homes:
        raise UserError(f"{source} holds no Harbor task: there is no task.toml")
    if len(homes) > MAX_PACKAGES:
        raise UserError(f"{source} holds {len(homes)} Harbor tasks, at most {MAX_PACKAGES}")
    found: dict[str, dict[str, bytes]] = {home: {} for home in homes}
    for path, data in listed.items():
        home = posixpath.dirname(path)
        while home and home not in homes:
            home = posixpath.dirname(home)
        if home in homes:
            found[home][path[len(home) + 1 :] if home else path] = data
    plain = source.resolve().name.removesuffix(".tar.gz").removesuffix(".tgz")
    made = [row(found[home], posixpath.basename(home) or plain) for home in sorted(homes)]
    names = [one["problem_id"] for one in made]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise UserError(f"{source} holds two Harbor tasks of the name {twice}")
    return made


def packed(made: list[dict[str, Any]]) -> bytes:
    """The file that a run pins: a row per line; the same packages give the same bytes."""
    return b"".join(encoding.canonical_json(one) + b"\n" for one in made)


def _listed(source: Path) -> Iterator[tuple[str, bytes]]:
    if not source.is_dir():
        raise UserError(f"{source} is neither a folder nor a .tar.gz archive")
    size = 0
    for path in sorted(source.rglob("*")):
        name = path.relative_to(source).as_posix()
        if not _absolute("/" + name):
            raise UserError(f"{source} has the path {name[:MAX_PATH]!a}")
        if path.is_symlink() or not (path.is_file() or path.is_dir()):
            raise UserError(f"{source}: {name} is a link or no plain file")
        if path.is_file():
            size += path.stat().st_size
            if size > MAX_ARCHIVE:
                raise UserError(f"{source} has more than {MAX_ARCHIVE} bytes of files")
            try:
                yield name, path.read_bytes()
            except OSError as error:
                raise UserError(f"{path} cannot be read: {error.strerror}") from error


def _archived(source: Path) -> Iterator[tuple[str, bytes]]:
    """Files of an archive, which is unpacked in memory, never on disk."""
    if source.stat().st_size > MAX_ARCHIVE:
        raise MalformedError(f"{source.name} has more than {MAX_ARCHIVE} bytes")
    try:
        with gzip.open(source) as stream:
            data = stream.read(MAX_ARCHIVE + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise MalformedError(f"{source.name} is not a .tar.gz archive: {error}") from error
    if len(data) > MAX_ARCHIVE:
        raise MalformedError(f"{source.name} unpacks into more than {MAX_ARCHIVE} bytes")
    try:
        with tarfile.open(fileobj=io.BytesIO(data), mode="r:") as archive:
            for member in archive:
                if member.isdir():
                    continue
                name = posixpath.normpath(member.name)
                if not _absolute("/" + name) or name.startswith(".."):
                    raise MalformedError(f"{source.name} has the path {member.name[:MAX_PATH]!a}")
                opened = archive.extractfile(member) if member.isreg() else None
                if opened is None or member.sparse is not None:
                    raise MalformedError(f"{source.name}: {name} is a link or no plain file")
                yield name, opened.read()
    except (tarfile.TarError, OSError, ValueError, OverflowError, LookupError) as error:
        raise MalformedError(f"{source.name} is not a valid archive: {error}") from error


def row(files: Mapping[str, bytes], name: str) -> dict[str, Any]:
    """The row of one package: its files by relative path. Raises UserError, one sentence."""
    try:
        return _row(files, name)
    except MalformedError as error:
        raise UserError(
            f"the Harbor task {name} cannot be used: {error}",
            hint="docs/environments.md says which packages can be",
        ) from error


def _row(files: Mapping[str, bytes], name: str) -> dict[str, Any]:
    settings = _settings(files)
    instruction = _text(files, "instruction.md").strip()
    if not instruction or len(instruction) > MAX_PROMPT - len(ENDING):
        raise MalformedError("its instruction.md is empty or too long")
    workdir, placed = _placed(files, settings)
    path, runner = _verifier(_text(files, "tests/test.sh", MAX_SETTINGS))
    held = path.removeprefix("/")
    others = sorted(
        one for one in files if one.startswith("tests/") and one.endswith(".py") and one != held
    )
    if others:
        raise MalformedError(f"its verifier has a second program, {others[0]}")
    placed |= {
        f"/{one}": _text(files, one)
        for one in files
        if one.startswith("tests/") and one not in (held, "tests/test.sh")
    }
    info = {
        "files": placed, "workdir": workdir, "verifier": _text(files, held), "path": path,
        "runner": runner,
    }  # fmt: skip
    Package.read(info, name)
    solution = "solution/solve.py"
    known = str(settings.get("task", {}).get("name") or name)
    if not known.strip() or not _absolute("/" + known):
        raise MalformedError(f"its name is {known[:MAX_PATH]!a}")
    return {
        "problem_id": known,
        "source": "harbor",
        "task_type": "harbor",
        "prompt": f"{instruction}\n\n{ENDING.format(workdir=workdir)}",
        "gold_standard_solution": _text(files, solution) if solution in files else None,
        "verification_info": info,
        "metadata": {"package": digest(files)},
    }


def digest(files: Mapping[str, bytes]) -> str:
    """SHA-256 over the names and contents of a package's files."""
    named = {path: hashlib.sha256(data).hexdigest() for path, data in files.items()}
    return str(encoding.sha256(encoding.canonical_json(named)))


def _text(files: Mapping[str, bytes], path: str, most: int = MAX_BYTES) -> str:
    if path not in files:
        raise MalformedError(f"it has no {path}")
    try:
        text = files[path].decode()
    except UnicodeDecodeError as error:
        raise MalformedError(f"its {path} is not text in UTF-8") from error
    if len(text) > most:
        raise MalformedError(f"its {path} has more than {most} characters")
    return text


def _settings(files: Mapping[str, bytes]) -> dict[str, Any]:
    """task.toml, if it asks for nothing that we do not have."""
    try:
        settings = tomllib.loads(_text(files, "task.toml", MAX_SETTINGS))
    except (ValueError, RecursionError) as error:  # ValueError: also a number of 5000 digits
        raise MalformedError(f"its task.toml is not TOML: {error}") from error
    tables = {name: settings.get(name, {}) for name in ("task", "environment", "verifier", "agent")}
    if not all(isinstance(table, dict) for table in tables.values()):
        raise MalformedError("its task.toml has a value where a table belongs")
    environment, verifier = tables["environment"], tables["verifier"]
    for asked, what in (
        (settings.get("steps"), "it has several steps"),
        (environment.get("gpus"), "it needs a GPU"),
        (environment.get("docker_image"), "it needs an image, and no container is run"),
        (environment.get("os", "linux") != "linux", "it needs another system than Linux"),
        (environment.get("mcp_servers"), "it needs MCP servers"),
        (environment.get("healthcheck"), "it needs a service"),
        (environment.get("env"), "it sets variables of the environment"),
        (verifier.get("env"), "its verifier needs variables of the environment"),
        (verifier.get("collect"), "its verifier collects files by shell commands"),
        (verifier.get("environment"), "its verifier needs a container of its own"),
        ("environment/docker-compose.yaml" in files, "it needs several containers"),
        ("tests/Dockerfile" in files, "its verifier needs a container of its own"),
    ):
        if asked:
            raise MalformedError(what)
    for table in tables.values():
        online = table.get("network_mode", "no-network") != "no-network"
        if table.get("allow_internet") or table.get("allowed_hosts") or online:
            raise MalformedError("it asks for a network, and programs and verifiers have none")
    return settings


def _placed(files: Mapping[str, bytes], settings: Mapping[str, Any]) -> tuple[str, dict[str, str]]:
    """The working directory, and the files in it as the Dockerfile's COPY lines say."""
    inside = {
        path.removeprefix("environment/"): path for path in files if path.startswith("environment/")
    }
    if len(inside) > MAX_FILES:
        raise MalformedError(f"its environment has {len(inside)} files, at most {MAX_FILES}")
    workdir = str(settings.get("environment", {}).get("workdir", WORKDIR))
    placed: dict[str, str] = {}
    if "Dockerfile" not in inside:
        lines = ["COPY . ."] if inside else []
    else:
        text = re.sub(r"\\\n", " ", _text(files, "environment/Dockerfile", MAX_SETTINGS))
        lines = [line.strip() for line in text.splitlines()]
    for line in lines:
        word, _, rest = line.partition(" ")
        if not line or line.startswith("#") or word.upper() == "FROM":
            continue
        if word.upper() == "WORKDIR":
            workdir = posixpath.normpath(posixpath.join(workdir, rest.strip()))
        elif word.upper() == "COPY" and (places := rest.split()) and len(places) > 1:
            placed |= {
                to: _text(files, inside[one]) for one, to in _copied(inside, places, workdir)
            }
            if problem := in_bounds(placed):  # before the next line copies as much again
                raise MalformedError(f"it {problem}")
        else:
            raise MalformedError(f"its Dockerfile does more than copy files: {line[:80]!a}")
    if not _absolute(workdir):
        raise MalformedError(f"its working directory is {workdir[:MAX_PATH]!a}")
    return workdir, placed


def _copied(
    inside: Mapping[str, str], places: list[str], workdir: str
) -> Iterator[tuple[str, str]]:
    """(path in environment/, absolute path) of the files that one COPY line copies."""
    *sources, target = places
    folder = target.endswith("/") or len(sources) > 1 or target in (".", "./")
    to = posixpath.normpath(posixpath.join(workdir, target))
    for source in sources:
        name = posixpath.normpath(source.lstrip("/") or ".")
        if name in inside:
            yield name, posixpath.join(to, posixpath.basename(name)) if folder else to
            continue
        below = [one for one in inside if name == "." or one.startswith(f"{name}/")]
        if not below or name.startswith(("-", "..")):
            raise MalformedError(f"its Dockerfile copies {source[:80]!a}, which is not there")
        for one in below:
            yield one, posixpath.join(to, one if name == "." else one.removeprefix(f"{name}/"))


def _verifier(script: str) -> tuple[str, str]:
    """The path and the runner ("pytest", "python") of the one Python file that test.sh runs."""
    text = re.sub(r"\\\n", " ", script).replace("; then", "\nthen")
    lines = [" ".join(line.split()) for line in text.splitlines()]
    lines = [line for line in lines if line and not line.startswith("#")]
    lines = [line for line in lines if not _SKIPPED.fullmatch(line)]
    if lines[-1:] == ["exit 0"]:
        lines.pop()
    first, rest = (lines[0], lines[1:]) if lines else ("", [])
    if not rest and (run := _PYTHON.fullmatch(first)):
        return run[1], "python"
    if rest in _BY_STATUS and (run := _PYTEST.fullmatch(first)):
        return run[1], "pytest"
    if ["if [ $? -eq 0 ]", *rest] in _BY_STATUS and (
        run := _PYTEST.fullmatch(first.removeprefix("if "))
    ):
        return run[1], "pytest"
    known = (_PYTEST, _PYTHON)
    strange = [
        line
        for line in lines
        if line not in _BY_STATUS[0]
        and not any(kind.fullmatch(line.removeprefix("if ")) for kind in known)
    ]
    said = f": {strange[0][:100]!a}" if strange else ""
    raise MalformedError(f"its tests/test.sh needs a shell, and only one Python file is run{said}")


def os_names(tree: ast.AST) -> set[str]:
    """What a program uses of `os`, as dotted names; "os" for the module itself."""
    found: set[str] = set()
    inner: set[int] = set()
    for node in ast.walk(tree):  # an attribute before what it is of
        if isinstance(node, ast.Import):
            found |= {"os" for one in node.names if one.name in ("os", "os.path") and one.asname}
        elif isinstance(node, ast.ImportFrom) and node.module in ("os", "os.path"):
            found |= {f"{node.module}.{one.name}" for one in node.names}
        elif isinstance(node, ast.Attribute | ast.Name) and id(node) not in inner:
            words: list[str] = []
            of: ast.expr = node
            while isinstance(of, ast.Attribute):
                words.append(of.attr)
                of = of.value
                inner.add(id(of))
            if isinstance(of, ast.Name) and of.id == "os":
                found.add(".".join(["os", *reversed(words)]))
    return found


def _require_pure(source: str, runner: str, what: str) -> None:
    """Raises MalformedError unless a verifier uses only what the sandbox has, and gives every
    machine the same answer."""
    if len(source) > MAX_VERIFIER:
        raise MalformedError(f"{what} has {len(source)} characters, at most {MAX_VERIFIER}")
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise MalformedError(f"{what} is not Python: {error}") from error
    for name in sorted(os_names(tree) - OS - {"os", "os.path"}):
        raise MalformedError(f"{what} uses {name[:80]}, which files in memory do not have")
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
        elif isinstance(node, ast.Attribute) and node.attr in _NOW:
            raise MalformedError(f"{what} reads a clock or chance ({node.attr})")
        elif isinstance(node, ast.Name) and node.id in _CALLS:
            raise MalformedError(f"{what} runs other code or asks for input ({node.id})")
        elif isinstance(node, ast.Call) and not node.args and not node.keywords:
            called = getattr(node.func, "attr", None) or getattr(node.func, "id", None)
            if called in _SEEDS:
                raise MalformedError(f"{what} reads a clock or chance ({called})")
        elif runner == "pytest":
            _require_plain(node, what)
        for name in names:
            _require_module(name, what)


def _require_plain(node: ast.AST, what: str) -> None:
    """Raises MalformedError for tests that only pytest runs: else a verifier would seem to pass."""
    if isinstance(node, ast.ClassDef):
        tests = (one for one in node.body if isinstance(one, ast.ClassDef))
        strange = any(one.name.startswith("Test") for one in tests)
    elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        given = [one.arg for one in (*node.args.posonlyargs, *node.args.args) if one.arg != "self"]
        strange = node.name in _HOOKS or (
            node.name.startswith("test")
            and bool(
                given
                or node.decorator_list
                or isinstance(node, ast.AsyncFunctionDef)
                or any(isinstance(one, ast.Yield | ast.YieldFrom) for one in ast.walk(node))
            )
        )
    else:
        return
    if strange:
        raise MalformedError(f"{what} needs pytest itself for {node.name}")


def _require_module(name: str, what: str) -> None:
    if name.partition(".")[0] in _CHANGING:
        raise MalformedError(f"{what} imports {name}, so it may judge differently another time")
    if name not in MODULES and name not in ("os.path", "pathlib", "__future__"):
        raise MalformedError(f"{what} imports {name[:80]!a}, which the sandbox does not have")
