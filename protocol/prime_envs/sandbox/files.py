"""Files in memory, for programs in the sandbox, where the kernel lets none be opened.

Not imported: graders/harbor.py sends this module's text into the sandbox (Program.source) and calls
`run_answer` or `run_verifier` there. A program sees its files by `open`, the functions of `os` and
`os.path` that `_installed` replaces, and a small `pathlib`. What is missing raises Unsupported or
the kernel's PermissionError. Contents cross the border as latin-1 text, one character per byte.
"""

from __future__ import annotations

import builtins
import contextlib
import io
import os
import sys
import weakref
from types import ModuleType
from typing import Any

FOLDERS = ("/", "/tmp", "/tests", "/logs", "/logs/verifier")  # noqa: S108 - names in memory


class Unsupported(Exception):  # noqa: N818 - the reason for refusing a verifier
    """Something that files in memory do not have."""


class Files:
    """Contents by absolute path, and the folders that exist."""

    def __init__(self, contents: dict[str, str], workdir: str) -> None:
        self.workdir = workdir
        self.contents = {path: text.encode("latin-1") for path, text in contents.items()}
        self.folders: set[str] = set()
        self._handles: list[Handle] = []
        self._texts: list[weakref.ref[io.TextIOWrapper]] = []
        for path in (*FOLDERS, workdir):
            self.make(path)
        for path in self.contents:
            self.make(os.path.dirname(path))  # noqa: PTH120 - pathlib is not in the sandbox

    def at(self, path: Any) -> str:
        """The absolute, normal form of a path."""
        text = os.fspath(path)
        if isinstance(text, bytes):
            text = text.decode()
        return os.path.normpath(os.path.join(self.workdir, text)).replace("//", "/")  # noqa: PTH118

    def make(self, path: str) -> None:
        """Makes a folder and those above it."""
        while path not in self.folders:
            self.folders.add(path)
            path = os.path.dirname(path)  # noqa: PTH120

    def inside(self, path: Any) -> list[str]:
        """Sorted names in a folder."""
        at = self.at(path)
        if at not in self.folders:
            kind = NotADirectoryError if at in self.contents else FileNotFoundError
            raise kind(f"{at!r} is no folder")
        start = at.rstrip("/") + "/"
        every = [one for one in (*self.contents, *self.folders) if one.startswith(start)]
        return sorted({one[len(start) :].split("/")[0] for one in every if one != start})

    def open(
        self, file: Any, mode: str = "r", buffering: int = -1, encoding: str | None = None,
        errors: str | None = None, newline: str | None = None, *_: Any, **__: Any,
    ) -> Any:  # fmt: skip
        """As the built-in `open`."""
        if isinstance(file, int):
            return _real_open(file, mode)  # a descriptor, as of standard input
        at, letters = self.at(file), set(mode)
        if len(letters & set("rwax")) != 1 or letters - set("rwaxbt+"):
            raise ValueError(f"invalid mode: {mode!r}")
        if at in self.folders:
            raise IsADirectoryError(f"{at!r} is a folder")
        known = at in self.contents
        if "r" in letters and not known:
            raise FileNotFoundError(f"[Errno 2] No such file or directory: {at!r}")
        if "x" in letters and known:
            raise FileExistsError(f"[Errno 17] File exists: {at!r}")
        if os.path.dirname(at) not in self.folders:  # noqa: PTH120
            raise FileNotFoundError(f"[Errno 2] No such file or directory: {at!r}")
        writes = bool(letters & set("wax+"))
        start = b"" if letters & set("wx") else self.contents.get(at, b"")
        handle = Handle(self, at, start, writes)
        if "a" in letters:
            handle.seek(0, io.SEEK_END)
        self._handles.append(handle)
        if writes:
            handle.flush()
        if "b" in letters:
            return handle
        text = io.TextIOWrapper(handle, encoding or "utf-8", errors, newline)
        self._texts.append(weakref.ref(text))
        return text

    def flush(self) -> None:
        """Stores what open files hold, as the end of a process does."""
        for one in [*(text() for text in self._texts), *self._handles]:
            if one is not None and not one.closed:
                one.flush()

    def remove(self, path: Any, *_: Any, **__: Any) -> None:
        """As `os.remove`."""
        if self.contents.pop(self.at(path), None) is None:
            raise FileNotFoundError(f"[Errno 2] No such file or directory: {self.at(path)!r}")

    def rename(self, source: Any, target: Any, *_: Any, **__: Any) -> None:
        """As `os.replace`, for files."""
        if self.at(source) not in self.contents:
            raise FileNotFoundError(f"[Errno 2] No such file or directory: {self.at(source)!r}")
        self.contents[self.at(target)] = self.contents.pop(self.at(source))

    def make_folder(self, path: Any, mode: int = 0o777, exist_ok: bool = False, **_: Any) -> None:
        """As `os.makedirs`."""
        at = self.at(path)
        if at in self.contents or (at in self.folders and not exist_ok):
            raise FileExistsError(f"[Errno 17] File exists: {at!r}")
        self.make(at)


class Handle(io.BytesIO):
    """An open file: what it holds is stored when it is flushed or closed."""

    def __init__(self, files: Files, path: str, start: bytes, writes: bool) -> None:
        super().__init__(start)
        self._files, self._path, self._writes = files, path, writes

    def writable(self) -> bool:
        return self._writes

    def flush(self) -> None:
        if self._writes and not self.closed:
            self._files.contents[self._path] = self.getvalue()

    def close(self) -> None:
        self.flush()
        super().close()


_real_open = builtins.open


def _installed(contents: dict[str, str], workdir: str) -> Files:
    """Makes the files what the process's programs see."""
    files = Files(contents, workdir)

    class Path:
        """The part of pathlib.Path that programs use for reading and writing."""

        def __init__(self, *parts: Any) -> None:
            self._text = os.path.normpath(os.path.join("", *map(os.fspath, parts)) or ".")  # noqa: PTH118

        def __fspath__(self) -> str:
            return self._text

        def __str__(self) -> str:
            return self._text

        def __repr__(self) -> str:
            return f"PosixPath({self._text!r})"

        def __eq__(self, other: object) -> bool:
            return isinstance(other, Path) and self._text == other._text

        def __lt__(self, other: Path) -> bool:
            return self._text < other._text

        def __hash__(self) -> int:
            return hash(self._text)

        def __truediv__(self, other: Any) -> Path:
            return Path(self._text, other)

        def __getattr__(self, name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            raise Unsupported(f"pathlib.Path.{name}")

        @property
        def name(self) -> str:
            return os.path.basename(self._text)  # noqa: PTH119

        @property
        def suffix(self) -> str:
            return os.path.splitext(self.name)[1]  # noqa: PTH122

        @property
        def stem(self) -> str:
            return os.path.splitext(self.name)[0]  # noqa: PTH122

        @property
        def parent(self) -> Path:
            return Path(os.path.dirname(self._text))  # noqa: PTH120

        @classmethod
        def cwd(cls) -> Path:
            return cls(files.workdir)

        def resolve(self, strict: bool = False) -> Path:
            return Path(files.at(self))

        absolute = resolve

        def exists(self) -> bool:
            return exists(self)

        def is_file(self) -> bool:
            return is_file(self)

        def is_dir(self) -> bool:
            return is_folder(self)

        def iterdir(self) -> Any:
            return iter([self / name for name in files.inside(self)])

        def open(self, mode: str = "r", *rest: Any, **named: Any) -> Any:
            return files.open(self, mode, *rest, **named)

        def read_text(self, encoding: str | None = None, errors: str | None = None) -> str:
            with files.open(self, "r", encoding=encoding, errors=errors) as file:
                return str(file.read())

        def read_bytes(self) -> bytes:
            with files.open(self, "rb") as file:
                return bytes(file.read())

        def write_text(self, data: str, encoding: str | None = None, *rest: Any) -> int:
            with files.open(self, "w", encoding=encoding) as file:
                return int(file.write(data))

        def write_bytes(self, data: bytes) -> int:
            with files.open(self, "wb") as file:
                return int(file.write(data))

        def mkdir(self, mode: int = 0o777, parents: bool = False, exist_ok: bool = False) -> None:
            if not parents and not is_folder(self.resolve().parent):
                raise FileNotFoundError(f"[Errno 2] No such file or directory: {self._text!r}")
            files.make_folder(self, exist_ok=exist_ok)

        def unlink(self, missing_ok: bool = False) -> None:
            if not missing_ok or exists(self):
                files.remove(self)

    def exists(path: Any) -> bool:
        return files.at(path) in files.contents or files.at(path) in files.folders

    def is_file(path: Any) -> bool:
        return files.at(path) in files.contents

    def is_folder(path: Any) -> bool:
        return files.at(path) in files.folders

    def size(path: Any) -> int:
        with files.open(path, "rb") as file:
            return len(file.read())

    pathlib = ModuleType("pathlib")
    for name in ("Path", "PosixPath", "PurePath", "PurePosixPath"):
        setattr(pathlib, name, Path)
    sys.modules["pathlib"] = pathlib
    for owner, functions in (
        (builtins, {"open": files.open}),
        (io, {"open": files.open}),
        (os, {
            "listdir": lambda path=".": files.inside(path), "getcwd": lambda: files.workdir,
            "makedirs": files.make_folder, "mkdir": files.make_folder, "remove": files.remove,
            "unlink": files.remove, "rename": files.rename, "replace": files.rename,
        }),
        (os.path, {
            "exists": exists, "isfile": is_file, "isdir": is_folder, "getsize": size,
            "abspath": files.at, "realpath": files.at,
        }),
    ):  # fmt: skip
        for name, function in functions.items():
            setattr(owner, name, function)
    return files


def _run(source: str, name: str, path: str) -> dict[str, Any]:
    """Runs a program like a script; returns its names. Raises what it raises."""
    module = ModuleType(name)
    module.__dict__.update(__builtins__=builtins, __file__=path)
    sys.modules[name] = module
    sys.argv = [path]
    exec(compile(source, path, "exec", dont_inherit=True), module.__dict__)  # noqa: S102
    return module.__dict__


def _failure(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:200]


def run_answer(source: str, contents: dict[str, str], workdir: str) -> dict[str, Any]:
    """Runs an answer's program. Returns `changed`: new contents by path, null for a removed file,
    and `error`: what ended the program, "" if nothing did."""
    files = _installed(contents, workdir)
    error = ""
    try:
        with contextlib.suppress(SystemExit):
            _run(source, "__main__", "answer.py")
    except MemoryError:
        raise
    except Exception as raised:
        error = _failure(raised)
    files.flush()
    changed: dict[str, str | None] = {path: None for path in contents if path not in files.contents}
    for path, data in files.contents.items():
        text = data.decode("latin-1")
        if contents.get(path) != text:
            changed[path] = text
    return {"changed": changed, "error": error}


def run_verifier(source: str, path: str, runner: str, contents: dict[str, str], workdir: str) -> (
    dict[str, Any]
):  # fmt: skip
    """Runs a verifier. With `runner` "pytest", calls its test functions and methods in the order of
    their definition. Returns `passed` and `failed` (names; none for "python"), `reward`: the texts
    of /logs/verifier/reward.json and reward.txt (null where there is none), and `unsupported`. A
    test that calls sys.exit has failed, as in pytest."""
    files = _installed(contents, workdir)
    passed: list[str] = []
    failed: list[str] = []
    unsupported = ""
    try:
        names: dict[str, Any] = {}
        if runner == "pytest":
            names = _run(source, "verifier", path)
        else:
            with contextlib.suppress(SystemExit):
                _run(source, "__main__", path)
        for name, test in _tests(names):
            try:
                test()
                passed.append(name)
            except (MemoryError, Unsupported, PermissionError):
                raise
            except (Exception, SystemExit):
                failed.append(name)
    except (Unsupported, PermissionError) as error:
        unsupported = _failure(error)
    except MemoryError:
        raise
    except (Exception, SystemExit) as error:
        failed.append(_failure(error))
    files.flush()
    logs = [files.contents.get(f"/logs/verifier/reward.{kind}") for kind in ("json", "txt")]
    texts = [None if data is None else data[:4096].decode("latin-1") for data in logs]
    return {"passed": passed, "failed": failed, "reward": texts, "unsupported": unsupported}


def _tests(names: dict[str, Any]) -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for name, value in names.items():
        if name.startswith("test") and callable(value) and not isinstance(value, type):
            found.append((name, value))
        elif name.startswith("Test") and isinstance(value, type):
            methods = [method for owner in reversed(value.__mro__) for method in vars(owner)]
            found.extend(
                (f"{name}.{method}", lambda value=value, method=method: getattr(value(), method)())
                for method in dict.fromkeys(methods)
                if method.startswith("test") and callable(getattr(value, method))
            )
    return found
