"""A pool's run and its revisions: which definition a lease is issued, judged and paid under.

The pool's first definition is fixed at its creation. A revision is announced on chain with its
first step and may change the fields in REVISABLE. The run of a step follows from the chain alone: a
lease of step `s` names the last revision whose first step is not after `s`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from prime_core.errors import NotFoundError, PolicyError, UntrustedError
from prime_core.ids import Digest
from prime_core.run import RunDefinition
from prime_core.task import Lease

REVISABLE = frozenset(
    {
        *("budgets", "environment", "requirements", "cards", "task"),
        *("price_per_judged_file", "price_per_prompt_token", "price_per_unit"),
    }
)
"""Everything else (the model, and what the trainer and the contracts depend on) is fixed for the
pool's lifetime."""


def check_revision(before: RunDefinition, after: RunDefinition) -> None:
    """Raises PolicyError naming every changed field that a revision may not change."""
    fixed = sorted(
        name
        for name in RunDefinition.model_fields
        if getattr(before, name) != getattr(after, name) and name not in REVISABLE
    )
    if fixed:
        raise PolicyError(
            f"a revision cannot change {', '.join(fixed)}: it may change "
            f"{', '.join(sorted(REVISABLE))}; anything else needs a new pool"
        )


@dataclass(frozen=True)
class RunHistory:
    """The pool's first definition and its revisions with their first steps, ordered by step."""

    first: RunDefinition
    revisions: tuple[tuple[int, RunDefinition], ...] = ()

    def at(self, step: int) -> RunDefinition:
        """The run for leases of `step`."""
        found = self.first
        for from_step, run in self.revisions:
            if from_step <= step:
                found = run
        return found

    def most_worth(self, step: int) -> int:
        """Maximum earnings of a file of `step`, in wei: under the best-paid definition that a lease
        of it may have named, also one given before a revision of the step."""
        before = [run for from_step, run in self.revisions if from_step <= step]
        return max(run.most_worth for run in (self.first, *before))

    def of(self, digest: Digest) -> RunDefinition:
        """The definition with this digest. Raises NotFoundError if the pool has none."""
        for run in (self.first, *(run for _, run in self.revisions)):
            if run.digest() == digest:
                return run
        raise NotFoundError(f"no revision of the pool's run has digest {digest}")

    def of_lease(self, lease: Lease) -> RunDefinition:
        """The run under which a lease is judged and paid. Raises UntrustedError unless the lease
        names the run of its step."""
        run = self.at(lease.step)
        if lease.run_digest != run.digest():
            raise UntrustedError(
                f"the lease names run {lease.run_digest}, not that of step {lease.step}"
            )
        return run


def read_history(
    first: Digest, revisions: Iterable[tuple[int, Digest]], fetch: Callable[[Digest], bytes]
) -> RunHistory:
    """Builds the history recorded on chain, fetching the definitions by digest.

    `first` is the digest at the pool's creation, `revisions` the first step and digest of each in
    order; `fetch` returns the bytes of a digest. Raises UntrustedError if fetched bytes do not hash
    to their digest, MalformedError if they are not a run definition, and what `fetch` raises.
    """

    def read(digest: Digest) -> RunDefinition:
        run = RunDefinition.parse(fetch(digest))
        if run.digest() != digest:
            raise UntrustedError(f"the run definition that came is not {digest}")
        return run

    return RunHistory(read(first), tuple((step, read(digest)) for step, digest in revisions))
