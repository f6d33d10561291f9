"""Where a task runs: in a Docker container, or (development) as a plain child process."""
