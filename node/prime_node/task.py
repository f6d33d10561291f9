"""Keeps the pool's task running: starts it, restarts it when it dies, stops it cleanly."""

from __future__ import annotations

import logging
from collections.abc import Callable

from prime_core.errors import FatalError, PolicyError, ProtocolError, UserError
from prime_core.task import Task
from prime_node.runtime.base import Mounts, Runtime, TaskHandle, WorkerOptions

log = logging.getLogger("prime.node.task")
FIRST_PAUSE, LONGEST_PAUSE = 1.0, 60.0
STEADY_SECONDS = 120.0
"""A task that ran this long counts as sound; its next death resets the pauses."""
MAX_DEATHS = 8
FINAL_STATUS = {error.exit_code: error for error in (UserError, ProtocolError, PolicyError)}
"""Exit statuses with which a worker says that a restart would not help."""
_SHOWN_LINES = 15


class TaskKeeper:
    """One task on one runtime. Call all methods from one thread (the main one)."""

    def __init__(
        self,
        runtime: Runtime,
        task: Task,
        mounts: Mounts,
        options: WorkerOptions,
        *,
        now: Callable[[], float],
    ) -> None:
        self._runtime = runtime
        self._task = task
        self._mounts = mounts
        self._options = options
        self._now = now
        self._handle: TaskHandle | None = None
        self._started_at = 0.0
        self._deaths = 0
        self._not_before = 0.0

    @property
    def description(self) -> str:
        """For `status`: the running task, or when it starts again."""
        if self._handle is not None:
            return self._handle.name
        return f"starts again in {max(0.0, self._not_before - self._now()):.0f} s"

    def keep_running(self) -> None:
        """Starts the task if it does not run, and detects if it has died.

        Raises PolicyError or UserError if the worker says that it cannot do this run's work,
        FatalError after MAX_DEATHS quick deaths; each includes the task's last output.
        """
        if self._handle is not None:
            status = self._handle.wait(0.0)
            if status is None:
                return
            self._handle_exit(status)
        if self._now() >= self._not_before:
            self._handle = self._runtime.start(self._task, self._mounts, self._options)
            self._started_at = self._now()
            log.info("the task runs in %s", self._handle.name)

    def _handle_exit(self, status: int) -> None:
        assert self._handle is not None
        words = "\n".join(self._handle.logs().splitlines()[-_SHOWN_LINES:])
        name = self._handle.name
        self._handle.stop(0.0)  # it has ended; this removes a container
        self._handle = None
        if self._now() - self._started_at > STEADY_SECONDS:
            self._deaths = 0
        self._deaths += 1
        if status in FINAL_STATUS:
            raise FINAL_STATUS[status](f"the task cannot do this pool's work; it said:\n{words}")
        if self._deaths >= MAX_DEATHS:
            raise FatalError(f"the task died {self._deaths} times in a row; it said last:\n{words}")
        pause = min(LONGEST_PAUSE, FIRST_PAUSE * 2 ** (self._deaths - 1))
        self._not_before = self._now() + pause
        log.error(
            "%s ended with status %d; again in %.0f s. It said:\n%s", name, status, pause, words
        )

    def replace(self, task: Task, options: WorkerOptions, grace: float) -> None:
        """Stops the current task within `grace` seconds; the next `keep_running` starts `task`."""
        self.stop(grace)
        self._task, self._options = task, options
        self._deaths, self._not_before = 0, 0.0

    def stop(self, grace: float) -> None:
        """Stops the task: by SIGTERM, then by force after `grace` seconds."""
        if self._handle is not None:
            status = self._handle.stop(grace)
            log.info("the task ended with status %d", status)
            self._handle = None
