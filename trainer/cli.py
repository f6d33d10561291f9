"""`trainer`: what a researcher types.

Commands import what they need when they are called, so `--help` answers at once. Expected errors
are one sentence and an exit code.
"""

from __future__ import annotations

import json
import logging
import signal
import sys
import threading
from pathlib import Path
from typing import Annotated

import typer

from protocol.core.errors import PrimeError, UserError

app = typer.Typer(
    name="trainer",
    help="Trains a pool's policy on sealed batches and publishes it.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

Config = Annotated[Path | None, typer.Option("--config", help="TOML file of settings.")]
Orchestrator = Annotated[str | None, typer.Option(help="Base URL of the pool's orchestrator.")]
Model = Annotated[Path | None, typer.Option(help="Hugging Face folder of the base model.")]
Data = Annotated[Path | None, typer.Option(help="Checkpoints, metrics, the origin's policies.")]
RunFile = Annotated[Path | None, typer.Option(help="Run definition (default: the orchestrator's).")]
Rpc = Annotated[list[str] | None, typer.Option(help="RPC endpoint; repeat for more.")]
DeploymentFile = Annotated[
    Path | None, typer.Option(help="Deployment JSON; with --rpc, facts are checked on chain.")
]
Pool = Annotated[int | None, typer.Option(help="Refuse to work for another pool.")]
Wallet = Annotated[Path | None, typer.Option(help="Keystore of the pool's trainer.")]
PasswordFile = Annotated[Path | None, typer.Option(help="File with its password.")]
PasswordFd = Annotated[int | None, typer.Option(help="Open descriptor with it.")]


@app.command()
def run(
    config: Config = None,
    orchestrator: Orchestrator = None,
    model: Model = None,
    data: Data = None,
    run: RunFile = None,
    rpc: Rpc = None,
    deployment: DeploymentFile = None,
    pool: Pool = None,
    wallet: Wallet = None,
    password_file: PasswordFile = None,
    password_fd: PasswordFd = None,
    origin_host: Annotated[str | None, typer.Option(help="Address the origin binds.")] = None,
    origin_port: Annotated[int | None, typer.Option(help="Its port; 0: any free one.")] = None,
    origin_url: Annotated[str | None, typer.Option(help="How relays reach it.")] = None,
    steps: Annotated[int | None, typer.Option(help="Stop after this many batches.")] = None,
    linger: Annotated[
        bool | None, typer.Option(help="After the last batch, go on serving policies.")
    ] = None,
    learning_rate: Annotated[float | None, typer.Option(help="AdamW's peak rate.")] = None,
    warmup_steps: Annotated[int | None, typer.Option(help="Steps of linear warm-up.")] = None,
    beta1: Annotated[float | None, typer.Option(help="AdamW's first beta.")] = None,
    beta2: Annotated[float | None, typer.Option(help="AdamW's second beta.")] = None,
    weight_decay: Annotated[float | None, typer.Option(help="AdamW's weight decay.")] = None,
    gradient_clip: Annotated[float | None, typer.Option(help="Gradient norm limit.")] = None,
    bf16: Annotated[bool | None, typer.Option(help="Compute in bf16 (GPUs).")] = None,
    row_tokens: Annotated[int | None, typer.Option(help="Tokens of a packed row.")] = None,
    micro_tokens: Annotated[int | None, typer.Option(help="Tokens of a micro-batch.")] = None,
    delta_from: Annotated[int | None, typer.Option(help="Versions deltas start from.")] = None,
    log_level: Annotated[str | None, typer.Option(help="debug, info, warning, error.")] = None,
) -> None:
    """Train until told to stop (SIGTERM ends cleanly; killed, it resumes exactly)."""
    flags: dict[str, object] = dict(locals())
    from trainer.config import load
    from trainer.run import run_trainer

    del flags["config"]
    settings = load(flags | {"rpc": tuple(rpc or ())}, config)
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    run_trainer(settings, stop)


@app.command()
def evaluate(
    model: Annotated[Path, typer.Option(help="Hugging Face folder to evaluate.")],
    run: Annotated[Path, typer.Option(help="The run definition, whose reward it is.")],
    problems: Annotated[int, typer.Option(min=1, help="Held-out problems.")] = 256,
    seed: Annotated[int, typer.Option(min=0, help="Fixes problems, targets and noise.")] = 0,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    as_json: Annotated[bool, typer.Option("--json", help="Machine-readable.")] = False,
) -> None:
    """The mean of the run's own reward over held-out problems."""
    import torch

    from protocol.run_file import read_run
    from trainer.evaluate import evaluate as evaluate_model

    torch.set_num_threads(1)
    result = evaluate_model(model, read_run(run), problems=problems, seed=seed, device=device)
    if as_json:
        print(json.dumps(result.as_json()))
        return
    for name in ("reward", "task", "length_error"):
        value = getattr(result, name)
        print(f"{name:13} {value.mean:7.4f}  [{value.low:.4f}, {value.high:.4f}]")
    for target, value in sorted(result.by_target.items(), key=lambda item: int(item[0])):
        print(f"  target {target:>5} {value.mean:6.4f}  ({value.count} problems)")


@app.command()
def publish(
    model: Annotated[Path, typer.Option(help="Hugging Face folder to publish.")],
    version: Annotated[int, typer.Option(min=0, help="Its policy version.")],
    config: Config = None,
    orchestrator: Orchestrator = None,
    data: Data = None,
    wallet: Wallet = None,
    password_file: PasswordFile = None,
    password_fd: PasswordFd = None,
) -> None:
    """Sign a folder as a policy by hand (`run` does it after each step by itself)."""
    flags: dict[str, object] = dict(locals())
    from trainer.config import load
    from trainer.run import publish_by_hand

    for name in ("config", "model", "version"):
        del flags[name]
    publish_by_hand(load(flags, config), model, version)


@app.command()
def status(
    data: Annotated[Path, typer.Option(help="The trainer's data folder.")] = Path("var/trainer"),
    as_json: Annotated[bool, typer.Option("--json", help="Machine-readable.")] = False,
) -> None:
    """The last step trained, from the metrics file."""
    path = data / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.is_file() else []
    if not lines:
        raise UserError(f"no step is recorded in {path}", hint="name the folder by --data")
    last = json.loads(lines[-1])
    if as_json:
        print(json.dumps(last))
    else:
        print(f"step {last['step']}: reward {last['reward']:.3f}, policy {last['version']}")


def main() -> None:
    """Entry point: expected errors become one sentence on stderr and their exit code."""
    try:
        app(prog_name="trainer")
    except PrimeError as error:
        logging.getLogger("trainer").debug("the cause", exc_info=True)
        hint = error.hint if isinstance(error, UserError) else ""
        print(f"trainer: {error}" + (f"; {hint}" if hint else ""), file=sys.stderr)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
