"""What pyproject.toml cannot say about the wheel.

It is built in a fresh folder, so that nothing of an earlier build or of a dirty tree gets in, with
one time stamp, so that equal sources give equal bytes. The example runs come from docs/examples,
their small model from devnet/model.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
EXAMPLES = "prime_orchestrator/examples"


class BuildPy(build_py):
    """Copies the example runs and their small model next to the orchestrator's modules."""

    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        target = Path(self.build_lib) / EXAMPLES
        target.mkdir(parents=True, exist_ok=True)
        for file in sorted((ROOT / "docs" / "examples").glob("*.*")):
            shutil.copyfile(file, target / file.name)
        (target / "model").mkdir(exist_ok=True)
        for file in sorted((ROOT / "devnet" / "model").iterdir()):
            shutil.copyfile(file, target / "model" / file.name)


os.environ.setdefault("SOURCE_DATE_EPOCH", "315619200")  # 1980-01-02, the first day a zip can name
fresh = tempfile.TemporaryDirectory(prefix="prime-open-build-")
setup(cmdclass={"build_py": BuildPy}, options={"build": {"build_base": fresh.name}})
