"""The weights of earlier policies, by which rows that those generated are scored."""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch
from torch import Tensor

from prime_trainer.model import Policy
from prime_trainer.parallel import replaced, trained_parts

HOST = torch.device("cpu")


class PastPolicies:
    """What was trained of the last policies, by version: this rank's part, in host memory."""

    def __init__(self) -> None:
        self._parts: dict[int, list[Tensor]] = {}

    def __contains__(self, version: int) -> bool:
        return version in self._parts

    @torch.no_grad()
    def keep(
        self, version: int, optimizer: torch.optim.Optimizer, width: torch.dtype | None
    ) -> None:
        """Copies the weights, which are those of policy `version`. `width`: in which the trainer
        computes with them (None: their own)."""
        self._parts[version] = [
            part.to(HOST, width or part.dtype, copy=True) for part in trained_parts(optimizer)
        ]

    def forget(self, oldest: int) -> None:
        """Drops policies below version `oldest`."""
        for version in [one for one in self._parts if one < oldest]:
            del self._parts[version]

    def in_place(
        self, version: int, policy: Policy, optimizer: torch.optim.Optimizer
    ) -> AbstractContextManager[None]:
        """Gives `policy` the weights of `version` for a block; on every rank together."""
        return replaced(policy, optimizer, self._parts[version], HOST)
