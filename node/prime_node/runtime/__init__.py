"""Where a task runs: in a Docker container, or (development) as a plain child process."""

from __future__ import annotations

from prime_core.errors import UserError
from prime_node.config import Settings
from prime_node.runtime.base import Runtime
from prime_node.runtime.process import ProcessRuntime
from prime_node.state import DataFolder


def make_runtime(settings: Settings, data: DataFolder, owner: str) -> Runtime:
    """Returns the runtime that the settings select; `owner` labels its containers."""
    if settings.runtime == "process":
        return ProcessRuntime(data.logs, settings.worker_command, settings.gpus)
    if settings.worker_command:
        raise UserError(
            "another worker than the task's own runs only with --runtime process",
            hint="it is for development; leave worker_command out",
        )
    try:
        from prime_node.runtime.docker import DockerRuntime, OwnerLimits
    except ImportError as error:
        raise UserError(
            f"Docker's Python client is missing ({error})",
            hint="pip install 'prime-open[node]'",
        ) from error
    limits = OwnerLimits(
        memory_mb=settings.task_memory_mb,
        pids=settings.task_pids,
        image_bytes=settings.image_gb << 30,
        pull_seconds=settings.pull_minutes * 60,
        cpus=settings.task_cpus,
    )
    return DockerRuntime(
        owner,
        limits=limits,
        shm_mb=settings.shm_mb,
        public_only=settings.public_only,
        gpus=settings.gpus,
    )
