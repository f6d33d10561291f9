"""What a person sees of a run: a bar with what it waits for, Prometheus' text, TensorBoard's files.

All of them are fed from the step's one line of metrics; without any of them the line is the same.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any

from prime_trainer.config import Settings
from prime_trainer.events import EventFile, flat
from prime_trainer.progress import Bar

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
COMPUTE = ("proximal", "forward_backward", "statistics", "optimizer")
"""The loop's names for what a device works at."""
PEAK_TFLOPS = {
    "H200": 989.0, "H100 PCIe": 756.0, "H100": 989.0, "A100": 312.0, "L40S": 362.0, "B200": 2250.0,
    "A10G": 70.0, "L4": 121.0, "RTX 4090": 165.0, "RTX 3090": 71.0, "T4": 65.0,
}  # fmt: skip
"""Dense bf16 (T4: fp16) tensor peaks from the makers' data sheets, by a part of the device's name,
longer names before those that they contain."""


def peak_flops(settings: Settings, device_name: str) -> float | None:
    """Operations a second of one device at its best, or None if nobody knows."""
    if settings.peak_tflops:
        return settings.peak_tflops * 1e12
    for name in sorted(PEAK_TFLOPS, key=len, reverse=True):
        if name in device_name:
            return PEAK_TFLOPS[name] * 1e12
    return None


class Observers:
    """Everybody who looks on. `waiting` and `step` may come from different threads."""

    def __init__(self, peak: float | None = None, now: Callable[[], float] = time.time) -> None:
        self.bar: Bar | None = None
        self.events: EventFile | None = None
        self.server: MetricsServer | None = None
        self._peak, self._now = peak, now
        self._background: dict[str, float] = {}

    @classmethod
    def none(cls) -> Observers:
        """Nobody looks on."""
        return cls()

    @classmethod
    def of(cls, settings: Settings, leads: bool) -> Observers:
        """As the settings say; only rank 0 shows anything. Raises UserError for a taken port."""
        import torch

        name = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
        found = cls(peak_flops(settings, name))
        if not leads:
            return found
        if settings.progress and sys.stderr.isatty():
            found.bar = Bar(settings.steps)
        if settings.tensorboard is not None:
            found.events = EventFile(settings.tensorboard, found._now())
        if settings.metrics_port is not None:
            found.server = MetricsServer(settings.metrics_port)
        return found

    def __enter__(self) -> Observers:
        if self.bar is not None:
            self.bar.start()
        if self.server is not None:
            self.server.start()
            print(f"metrics: {self.server.url}", flush=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        if self.bar is not None:
            self.bar.stop()
        if self.server is not None:
            self.server.stop()

    def waiting(self, name: str) -> None:
        """The loop now waits for, or works at, `name`."""
        if self.bar is not None:
            self.bar.say(name)
        if self.server is not None:
            self.server.waits(name)

    def background(self, seconds: Mapping[str, float]) -> None:
        """A thread beside the loop has worked so long at these."""
        for name, value in seconds.items():
            self._background[name] = self._background.get(name, 0.0) + value

    def taken_background(self) -> dict[str, float]:
        """What `background` was told since the last question."""
        found, self._background = self._background, {}
        return found

    def complete(self, line: dict[str, Any], ranks: int) -> None:
        """Adds rates to a step's line: tokens a second of computing, and of the whole step; MFU
        where the device's peak is known."""
        compute = sum(line["seconds"].get(name, 0.0) for name in COMPUTE)
        whole = sum(line["seconds"].values())
        if not compute or "tokens" not in line:
            return
        line["tokens_s"] = line["tokens"] / compute
        line["tokens_s_wall"] = line["tokens"] / whole
        if self._peak:
            line["mfu"] = line["flops"] / (compute * self._peak * ranks)

    def step(self, line: Mapping[str, Any]) -> None:
        """A step is kept."""
        numbers = dict(flat(line))
        if self.bar is not None:
            self.bar.step(line)
        if self.events is not None:
            self.events.add(line["time"], line["step"], numbers)
        if self.server is not None:
            self.server.show(numbers)


def prometheus_text(numbers: Mapping[str, float], waiting: str) -> str:
    """Prometheus' text format 0.0.4: one gauge a number, nested names as a label."""
    lines = []
    known = set()
    for name, value in sorted(numbers.items()):
        family, _, part = name.partition("/")
        metric = f"prime_trainer_{family}"
        if metric not in known:
            known.add(metric)
            lines.append(f"# TYPE {metric} gauge")
        label = f'{{part="{part}"}}' if part else ""
        lines.append(f"{metric}{label} {value:.10g}")
    lines.append("# TYPE prime_trainer_waiting gauge")
    lines.append(f'prime_trainer_waiting{{for="{waiting}"}} 1')
    return "\n".join(lines) + "\n"


class MetricsServer:
    """GET /metrics on the local address, from a thread; the newest step's numbers."""

    def __init__(self, port: int) -> None:
        from prime_core.errors import UserError

        self._lock = threading.Lock()
        self._numbers: dict[str, float] = {}
        self._waiting = "start"
        owner = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                found = self.path.split("?")[0] == "/metrics"
                body = owner.text().encode() if found else b"only /metrics is here\n"
                self.send_response(200 if found else 404)
                self.send_header("Content-Type", CONTENT_TYPE if found else "text/plain")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:
                pass  # a scrape is no event

        try:
            self._server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        except OSError as error:
            raise UserError(
                f"the metrics cannot be served on port {port}: {error.strerror}",
                hint="name another --metrics-port, or 0 for any free one",
            ) from error
        self._thread = threading.Thread(
            target=self._server.serve_forever, name="metrics", daemon=True
        )

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}/metrics"

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def show(self, numbers: dict[str, float]) -> None:
        with self._lock:
            self._numbers = numbers

    def waits(self, name: str) -> None:
        with self._lock:
            self._waiting = name

    def text(self) -> str:
        """The page."""
        with self._lock:
            return prometheus_text(self._numbers, self._waiting)
