"""reasoning-gym on machines that could not build pycosat."""

from __future__ import annotations

import subprocess
import sys

WITHOUT_PYCOSAT = """
import importlib.abc, sys
class Missing(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name == "pycosat":
            raise ModuleNotFoundError(name)
import importlib.util
real = importlib.util.find_spec
importlib.util.find_spec = lambda name, *a: None if name == "pycosat" else real(name, *a)
sys.meta_path.insert(0, Missing())
from prime_core.errors import UserError
from prime_envs.reasoning import reasoning_gym
gym = reasoning_gym()
print(gym.create_dataset("spell_backward", seed=1, size=2)[0]["answer"])
try:
    gym.create_dataset("zebra_puzzles", seed=1, size=1)[0]
except UserError as error:
    print(error)
"""


def test_a_machine_that_could_not_build_pycosat_has_every_family_but_zebra_puzzles() -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_PYCOSAT], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    answer, refused = done.stdout.splitlines()
    assert answer.isalpha()
    assert "zebra_puzzles needs pycosat" in refused
