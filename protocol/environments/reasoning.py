"""How reasoning-gym is imported.

It requires pycosat for one family (`zebra_puzzles`), and pycosat comes as C source only. A machine
without a compiler has every other family: there, that one is refused by name.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from types import ModuleType
from typing import Any

from protocol.core.errors import UserError


def reasoning_gym() -> ModuleType:
    """The package `reasoning_gym`, about a second at the first call.

    Raises UserError if it is not installed.
    """
    if importlib.util.find_spec("reasoning_gym") is None:
        raise UserError(
            "This environment needs the package reasoning-gym.",
            hint="pip install 'prime-open[families]'",
        )
    if "pycosat" not in sys.modules and importlib.util.find_spec("pycosat") is None:
        sys.modules["pycosat"] = _without_pycosat()
    return importlib.import_module("reasoning_gym")


def _without_pycosat() -> ModuleType:
    def itersolve(*_: Any, **__: Any) -> Any:
        raise UserError(
            "The family zebra_puzzles needs pycosat, which needs a C compiler to install.",
            hint="install a C compiler and Python's headers, then: pip install pycosat",
        )

    module = ModuleType("pycosat", "Stands for a package that this machine could not build.")
    vars(module)["itersolve"] = itersolve
    return module
