"""Makes an image from this machine's own Python, where no registry can be reached.

    .venv/bin/python deploy/build_image.py worker [--tag TAG] [--python-sandbox]
    var/engines/vllm/bin/python deploy/build_image.py worker-vllm
    .venv/bin/python deploy/build_image.py services [--push REPOSITORY]

    interpreter + standard library ─┐
    installed packages that the     ├─► one tar stream ─► docker import ─► image id on stdout
    image needs (by their metadata) │
    shared libraries (ldd)          │
    protocol/ and node/, or all    ─┘

`worker` and `worker-vllm` run a task; `services` holds the programs that deploy/compose runs, and
takes the place of deploy/Dockerfile. `--python-sandbox` adds the tool python-2 with its compiled
interpreter, 650 MB. `--push` puts the image into a registry, as REPOSITORY, and prints its name by
digest instead of its id.

The image holds no package manager and no other program but those of PROGRAMS, SCRIPTS and, for
services, the project's own; the plain worker's has no shell. With a registry, build
deploy/worker.Dockerfile or deploy/Dockerfile instead. Linux with glibc only; run it with the
interpreter that has the packages: the project's own, that of scripts/setup_vllm.sh for vLLM on
CPUs.
"""

from __future__ import annotations

import argparse
import importlib.metadata as metadata
import io
import json
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
from collections.abc import Iterator
from importlib.util import cache_from_source
from pathlib import Path, PurePosixPath

from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[1]
EXTRAS = {
    "worker": ("rollout-base", "families", "python-tool", "search-tool", "torch"),
    "worker-vllm": ("rollout-base", "families", "python-tool", "search-tool", "rollout-cpu"),
    "services": ("families", "node", "orchestrator", "python-tool", "s3", "search-tool",
                 "trainer", "validator"),
}  # fmt: skip
TAGS = {
    "worker": "prime-worker:local",
    "worker-vllm": "prime-worker-vllm:local",
    "services": "prime-open",
}
OPTIONAL = ("pycosat",)
"""Left out where this machine could not build it (prime_envs/reasoning.py)."""
NOT_NEEDED = ("triton", "torchvision", "torchaudio", "torchcodec", "numba", "anthropic")
"""What vLLM names and its CPU kernels do without: 1 GB of compilers for GPUs, builds for another
torch, n-gram speculation, another server's API. The container test fails if that ever changes."""
PROGRAMS = {
    "worker": (),
    "worker-vllm": ("sh", "lscpu"),
    "services": ("bash", "sh", "base64", "cat", "head", "mv", "sed", "sleep", "tr"),
}
"""What is called by name inside: vLLM asks lscpu, through a shell, which cores there are;
deploy/compose/setup.sh needs a few tools."""
SCRIPTS = ("monty",)
"""Of the programs that packages install, those that the worker starts: the tool python-1's."""
NEVER_LOADED = (PurePosixPath("torch/test"), PurePosixPath("torch/include"))
PREFIX = PurePosixPath("opt/python")
SOURCE = PurePosixPath("opt/prime")
SOURCES = {
    "worker": ("protocol", "node"),
    "worker-vllm": ("protocol", "node"),
    "services": ("protocol", "node", "validator", "orchestrator", "trainer"),
}
EXAMPLES = ("docs/examples", "devnet/model")
"""Folders that deploy/compose names below SOURCE."""
FOLDERS = {
    "worker": ("prime",),
    "worker-vllm": ("prime",),
    "services": ("keys", "s3-keys", "data"),
}
"""Where volumes are mounted. A named volume takes the owner of the folder that it covers."""
TOOLS = PurePosixPath("opt/prime-tools")
VERSION = f"python{sys.version_info.major}.{sys.version_info.minor}"
PACKAGES = PREFIX / "lib" / VERSION / "site-packages"
LEFT_OUT = {"test", "tests", "idlelib", "lib2to3", "ensurepip", "site-packages", "turtledemo"}
ENVIRONMENT = {
    "PATH": f"/{PREFIX}/bin:/bin",
    # The packages by name too: Debian's own Python looks for `dist-packages`.
    "PYTHONPATH": f"/{SOURCE}:/{PACKAGES}",
    "PRIME_TOOL_CACHE": f"/{TOOLS}",
    "PYTHONDONTWRITEBYTECODE": "1",
    "PYTHONUNBUFFERED": "1",
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
COMMAND = {
    "worker": ["python", "-m", "prime_node.worker"],
    "worker-vllm": ["python", "-m", "prime_node.worker", "--engine", "vllm"],
    "services": ["orchestrator", "--help"],
}
USER = 65532


def distributions(kind: str, more: tuple[str, ...] = ()) -> list[metadata.Distribution]:
    """prime-open's requirements for this kind of image and of the extras `more`, and theirs, as
    installed here."""
    found: dict[str, metadata.Distribution] = {}
    waiting = [("prime-open", frozenset((*EXTRAS[kind], *more)))]
    seen: set[tuple[str, frozenset[str]]] = set()
    while waiting:
        name, extras = waiting.pop()
        if (name, extras) in seen or (kind == "worker-vllm" and name in NOT_NEEDED):
            continue
        seen.add((name, extras))
        try:
            distribution = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            if name not in OPTIONAL:
                raise
            continue
        found[name] = distribution
        for text in distribution.requires or []:
            requirement = Requirement(text)
            marker = requirement.marker
            if marker is None or any(marker.evaluate({"extra": e}) for e in extras or {""}):
                wanted = re.sub(r"[-_.]+", "-", requirement.name).lower()
                waiting.append((wanted, frozenset(requirement.extras)))
    del found["prime-open"]
    return list(found.values())


def package_files(kind: str, more: tuple[str, ...] = ()) -> Iterator[tuple[PurePosixPath, Path]]:
    """(place in the image, file here) of every installed file that the image needs."""
    for distribution in distributions(kind, more):
        for file in distribution.files or []:
            here = Path(str(distribution.locate_file(file)))
            if PurePosixPath(*file.parts[:2]) in NEVER_LOADED:
                continue
            if file.parts[0] != ".." and here.is_file():
                yield PACKAGES / PurePosixPath(*file.parts), here
            elif file.name in SCRIPTS and file.parent.name == "bin":
                yield PREFIX / "bin" / file.name, here.resolve()


def interpreter_files() -> Iterator[tuple[PurePosixPath, Path]]:
    """The interpreter and its standard library, without tests, tools and static libraries."""
    binary = PREFIX / "bin" / VERSION
    yield binary, Path(sys.executable).resolve()
    library = Path(sysconfig.get_path("stdlib"))
    for here in library.rglob("*"):
        inside = here.relative_to(library)
        left_out = here.suffix == ".a" or LEFT_OUT.intersection(inside.parts)
        if here.is_file() and not left_out:
            yield PREFIX / "lib" / VERSION / inside.as_posix(), here


def files_below(folder: Path) -> Iterator[tuple[str, Path]]:
    """(place below the folder, file) of what lies in a folder of this project."""
    for here in folder.rglob("*"):
        if here.is_file() and "__pycache__" not in here.parts:
            yield here.relative_to(folder).as_posix(), here


def source_files(kind: str) -> Iterator[tuple[PurePosixPath, Path]]:
    """What the image's programs import and read of this project."""
    for folder in SOURCES[kind]:
        for name, here in files_below(ROOT / folder):
            yield SOURCE / name, here
    if kind == "services":
        for folder in EXAMPLES:
            for name, here in files_below(ROOT / folder):
                yield SOURCE / folder / name, here


def written_files(kind: str) -> Iterator[tuple[PurePosixPath, int, str]]:
    """Yields (place, mode, text) of each file that the image has and this machine has not: users
    and, for services, our programs' entry points and the package's metadata."""
    yield (
        PurePosixPath("etc/passwd"), 0o644,
        f"root:x:0:0:root:/:\nprime:x:{USER}:{USER}:prime:/tmp:\n",
    )  # fmt: skip
    if kind != "services":
        return
    ours = metadata.distribution("prime-open")
    folder = PACKAGES / f"prime_open-{ours.version}.dist-info"
    for name in ("METADATA", "entry_points.txt"):
        yield folder / name, 0o644, ours.read_text(name) or ""
    for point in ours.entry_points.select(group="console_scripts"):
        text = (
            f"#!/{PREFIX}/bin/python\n"
            f"import sys\nfrom {point.module} import {point.attr}\nsys.exit({point.attr}())\n"
        )
        yield PREFIX / "bin" / point.name, 0o755, text


def sandbox_file() -> tuple[PurePosixPath, Path]:
    """The compiled interpreter of python-2, which is compiled here if need be."""
    sys.path.insert(0, str(ROOT / "protocol"))
    from prime_envs import python_wasm

    folder = python_wasm.cache_folder()
    python_wasm.compile_into(folder)
    here = python_wasm.compiled_file(folder)
    return TOOLS / here.name, here


def program_files(kind: str) -> Iterator[tuple[PurePosixPath, Path]]:
    """The programs that are called by name, from this machine."""
    for name in PROGRAMS[kind]:
        here = shutil.which(name)
        if here is None:
            sys.exit(f"the image of {kind} calls {name}, which this machine lacks")
        yield PurePosixPath("bin") / name, Path(here).resolve()


def shared_libraries(files: list[Path], programs: list[Path]) -> dict[PurePosixPath, Path]:
    """Libraries outside `files` that their binaries and `programs` load, where the loader looks for
    them."""
    binaries = [str(file) for file in files if file.suffix == ".so" or ".so." in file.name]
    binaries += [str(Path(sys.executable).resolve()), *map(str, programs)]
    carried = {str(file.resolve()) for file in files}
    found: dict[PurePosixPath, Path] = {}
    for start in range(0, len(binaries), 100):
        said = subprocess.run(
            ["ldd", *binaries[start : start + 100]], capture_output=True, text=True, check=False
        ).stdout
        for line in said.splitlines():
            match = re.match(r"\s+(?:(\S+) => )?(/\S+) \(0x", line)
            if match is None:
                continue
            path = Path(match[2])
            if str(path.resolve()) in carried:
                continue
            if match[1] is None or match[1].startswith("/"):  # the loader itself, by its full path
                found[PurePosixPath(str(path).lstrip("/"))] = path.resolve()
            else:
                found[PurePosixPath("lib") / match[1]] = path.resolve()
    return found


def bytecode_files(
    files: dict[PurePosixPath, Path],
) -> Iterator[tuple[PurePosixPath, Path]]:
    """Yields (place in the image, file here) of the bytecode of `files` that Python has cached.

    A container's root is read-only: each process there compiles what it imports without a cache.
    """
    for place, here in files.items():
        if here.suffix == ".py":
            cached = Path(cache_from_source(here))
            if cached.is_file():
                yield place.parent / "__pycache__" / cached.name, cached


def write_image(stream: io.BufferedIOBase, kind: str, *, sandbox: bool = False) -> int:
    """Writes the image's root as one tar; its number of files. `sandbox`: with python-2."""
    more = ("python-sandbox",) if sandbox else ()
    packages = dict(package_files(kind, more))
    files = {**dict(interpreter_files()), **packages, **dict(source_files(kind))}
    files |= dict(bytecode_files(files))
    programs = dict(program_files(kind))
    started = [*programs.values(), *(files[PREFIX / "bin" / name] for name in SCRIPTS)]
    files |= shared_libraries(list(files.values()), started) | programs
    if sandbox:
        files |= dict([sandbox_file()])
    with tarfile.open(fileobj=stream, mode="w|") as tar:
        for folder, mode in (("tmp", 0o1777), ("etc", 0o755), ("proc", 0o755)):
            entry = tarfile.TarInfo(folder)
            entry.type, entry.mode = tarfile.DIRTYPE, mode
            tar.addfile(entry)
        for folder in FOLDERS[kind]:
            entry = tarfile.TarInfo(folder)
            entry.type, entry.mode = tarfile.DIRTYPE, 0o755
            entry.uid = entry.gid = USER if kind == "services" else 0
            tar.addfile(entry)
        for place, mode, text in written_files(kind):
            entry = tarfile.TarInfo(str(place))
            entry.size, entry.mode = len(text.encode()), mode
            tar.addfile(entry, io.BytesIO(text.encode()))
        for place, here in sorted(files.items()):
            info = tar.gettarinfo(str(here.resolve()), str(place))
            info.type, info.linkname = tarfile.REGTYPE, ""  # hard links become files
            info.size = here.stat().st_size
            info.uid = info.gid = 0
            info.uname = info.gname = "root"
            info.mode = 0o755 if info.mode & 0o100 else 0o644
            with here.open("rb") as content:
                tar.addfile(info, content)
        for name in ("python", "python3"):
            entry = tarfile.TarInfo(str(PREFIX / "bin" / name))
            entry.type, entry.linkname = tarfile.SYMTYPE, VERSION
            tar.addfile(entry)
    return len(files)


def pushed(image: str, repository: str) -> str:
    """Pushes an image to a registry and returns its name by digest."""
    tag = f"{repository}:{metadata.version('prime-open')}"
    for words in (["tag", image, tag], ["push", "--quiet", tag]):
        subprocess.run(["docker", *words], check=True, stdout=subprocess.DEVNULL)
    command = ["docker", "image", "inspect", "--format", "{{json .RepoDigests}}", image]
    names: list[str] = json.loads(subprocess.check_output(command))
    return next(name for name in names if name.startswith(f"{repository}@"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("kind", choices=sorted(EXTRAS))
    parser.add_argument("--tag", help="default: by kind, " + ", ".join(TAGS.values()))
    parser.add_argument("--python-sandbox", action="store_true", help="with the tool python-2")
    parser.add_argument("--push", metavar="REPOSITORY", help="HOST/NAME in a registry")
    options = parser.parse_args()
    kind, tag = options.kind, options.tag or TAGS[options.kind]
    changes = [f"--change=ENV {name}={value}" for name, value in ENVIRONMENT.items()]
    changes += [f"--change=USER {USER}:{USER}", f"--change=CMD {json.dumps(COMMAND[kind])}"]
    if kind == "services":
        changes += ["--change=ENV HOME=/tmp", "--change=WORKDIR /data"]
    docker = subprocess.Popen(
        ["docker", "import", *changes, "-", tag], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert docker.stdin is not None
    assert docker.stdout is not None
    count = write_image(
        docker.stdin,  # type: ignore[arg-type]
        kind,
        sandbox=options.python_sandbox,
    )
    docker.stdin.close()
    image = docker.stdout.read().decode().strip()
    if docker.wait() != 0:
        sys.exit("docker import failed; is the engine up? (docker info)")
    print(f"{count} files as {tag}", file=sys.stderr)
    print(pushed(image, options.push) if options.push else image)


if __name__ == "__main__":
    main()
