"""Programs and scripts in this process: another one would spend a second of processor on imports
alone. Keystores for them."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from unittest.mock import patch

from prime_chain.keystore import save_keystore
from prime_core.signing import LocalSigner


def typed(
    main: Callable[[], object], *words: str, env: Mapping[str, str] | None = None
) -> tuple[int, str, str]:
    """Runs an entry point as if `words` were typed, the program's name first. Returns exit status,
    standard output and standard error. `env`: the whole environment, if it is not this one."""
    out, said, status = io.StringIO(), io.StringIO(), 0
    with (
        patch.object(sys, "argv", [*words]),
        patch.dict(os.environ, env or {}, clear=env is not None),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(said),
    ):
        try:
            main()
        except SystemExit as ended:
            status = int(ended.code or 0)
    return status, out.getvalue(), said.getvalue()


def keystore(folder: Path, signer: LocalSigner) -> Path:
    """The signer's keystore in `folder`, made on first use; its password is \"secret\"."""
    path = folder / f"{signer.address}.json"
    if not path.exists():
        save_keystore(path, bytes(signer.account.key), "secret", light=True)
    return path


def load_script(path: Path) -> ModuleType:
    """A Python file that no package holds, as a module."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # its dataclasses look themselves up
    spec.loader.exec_module(module)
    return module
