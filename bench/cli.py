"""CPU time of commands that people and shells call often, whole processes, median of five.

help_…          PROGRAM --help
status          prime-node status: data folder, and one request to a local HTTP server
trainer_status  trainer status: one line of a metrics file
"""

from __future__ import annotations

import json
import resource
import statistics
import subprocess
import sys
import tempfile
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

from bench.form import Row
from prime_core import version
from prime_core.ids import address
from prime_core.messages import NodeInfo

PACKAGES = ("typer", "pydantic", "httpx")
PROGRAMS = {
    "prime-node": "prime_node.cli",
    "orchestrator": "prime_orchestrator.cli.main",
    "validator": "prime_validator.cli",
    "trainer": "prime_trainer.cli",
    "prime-broadcast": "prime_broadcast.cli",
    "prime-verify": "prime_verify.cli",
}
NODE = address("0x" + "11" * 20)


class _Orchestrator(BaseHTTPRequestHandler):
    """Answers what `status` asks for."""

    answers: ClassVar[dict[str, bytes]] = {
        f"/v1/nodes/{NODE}": NodeInfo(
            node=NODE, provider=None, status="active", speed_class=1, last_heartbeat=1,
            policy_version=1, accepted=1, rejected=0, void=0, units=1,
        ).model_dump_json().encode(),
    }  # fmt: skip

    def do_GET(self) -> None:
        body = self.answers.get(self.path)
        self.send_response(200 if body else 404)
        self.send_header("Content-Type", "application/json")
        self.send_header(version.HEADER, str(version.SPOKEN[-1]))
        self.send_header("Content-Length", str(len(body or b"")))
        self.end_headers()
        self.wfile.write(body or b"")

    def log_message(self, *_: object) -> None:
        pass


def run(quick: bool) -> list[Row]:
    """The rows; `quick` takes the median of three."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Orchestrator)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    tries = 3 if quick else 5
    try:
        with tempfile.TemporaryDirectory() as scratch:
            folder = Path(scratch)
            line = {"step": 1, "reward": 0.5, "version": 2}
            (folder / "metrics.jsonl").write_text(json.dumps(line) + "\n")
            wallet = folder / "wallet.json"
            wallet.write_text(json.dumps({
                "version": 3, "address": NODE[2:], "crypto": {"kdfparams": {"n": 2, "r": 8, "p": 1}}
            }))  # fmt: skip
            url = f"http://127.0.0.1:{server.server_address[1]}"
            node = ("status", "--data", scratch, "--wallet", str(wallet), "--orchestrator", url)
            return [
                *(
                    Row(f"help_{name}", _cpu(module, "--help", tries=tries), "CPU s", 0.4)
                    for name, module in PROGRAMS.items()
                ),
                Row("status", _cpu("prime_node.cli", *node, "--json", tries=tries), "CPU s", 0.8),
                Row(
                    "trainer_status",
                    _cpu("prime_trainer.cli", "status", "--data", scratch, tries=tries),
                    "CPU s",
                    0.8,
                ),
            ]
    finally:
        server.shutdown()
        server.server_close()


def _cpu(module: str, *words: str, tries: int) -> float:
    spent = []
    for _ in range(tries):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(
            [sys.executable, "-m", module, *words], stdout=subprocess.DEVNULL, check=True
        )
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        spent.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return round(statistics.median(spent), 3)
