"""`trainer`: what a researcher types.

Commands import what they need when they are called, so `--help` answers at once. Expected errors
are one sentence and an exit code.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from prime_chain import wallet_cli
from prime_core.command_line import (
    AllowPrivate,
    ConfigFile,
    FirstAnswer,
    Json,
    LogLevel,
    PasswordFd,
    PasswordFile,
    PollSeconds,
    Quorum,
    Rpcs,
    program,
)
from prime_core.command_line import run as run_program
from prime_core.errors import UserError
from prime_core.waiting import until_stopped

if TYPE_CHECKING:
    from prime_core.run import RunDefinition
    from prime_trainer.config import Settings

app = program("trainer", "Trains a pool's policy on sealed batches and publishes it.")
app.add_typer(wallet_cli.app, name="wallet")

Orchestrator = Annotated[str | None, typer.Option(help="Base URL of the pool's orchestrator.")]
Model = Annotated[Path | None, typer.Option(help="Hugging Face folder of the base model.")]
Data = Annotated[
    Path | None, typer.Option(help="Folder for checkpoints, metrics and published policies.")
]
RunFile = Annotated[Path | None, typer.Option(help="Run definition (default: the orchestrator's).")]
DeploymentFile = Annotated[
    Path | None, typer.Option(help="Deployment JSON; with --rpc, facts are checked on chain.")
]
Pool = Annotated[int | None, typer.Option(help="Number of the pool; another is refused.")]
Wallet = Annotated[Path | None, typer.Option(help="Keystore of the pool's trainer.")]
OriginHost = Annotated[str | None, typer.Option(help="Address on which policies are served.")]
OriginPort = Annotated[
    int | None, typer.Option(help="Port on which policies are served; 0: any free one.")
]
OriginUrl = Annotated[str | None, typer.Option(help="URL at which relays fetch policies.")]
S3Bucket = Annotated[str | None, typer.Option(help="S3 bucket to put policies into, too.")]
S3Endpoint = Annotated[str | None, typer.Option(help="URL of the S3 server (default: AWS).")]
S3Region = Annotated[str | None, typer.Option(help="Region of the S3 bucket.")]
S3Url = Annotated[str | None, typer.Option(help="URL at which others read the bucket, or a CDN's.")]
LearningRate = Annotated[float | None, typer.Option(help="Learning rate after the warm-up.")]
ContextParallel = Annotated[int | None, typer.Option(help="Ranks that share each row.")]
LoraRank = Annotated[int | None, typer.Option(help="Rank of LoRA adapters; 0: train all weights.")]
TensorBoard = Annotated[Path | None, typer.Option(help="Folder for TensorBoard's event files.")]
Tracker = Annotated[str | None, typer.Option(help="Log to wandb or trackio.")]
Engine = Annotated[str, typer.Option(help="plain or vllm.")]
Dtype = Annotated[str, typer.Option(help="float32 or bfloat16.")]
Device = Annotated[str, typer.Option(help="cpu or cuda.")]
DataFolder = Annotated[Path, typer.Option(help="The trainer's data folder.")]
AnswersFolder = Annotated[
    Path | None, typer.Option(help="Folder of graded answers, to go on after an interruption.")
]
CassetteFile = Annotated[
    Path | None,
    typer.Option(help="Recorded answers of the run's gateway (orchestrator gateway export)."),
]

Policy = Annotated[
    Path,
    typer.Argument(help="Model folder, folder of a `trainer local`, or of fetched policies."),
]
RunOfPolicy = Annotated[
    Path | None,
    typer.Option("--run", help="Run definition: system prompt, budget, tools (default: run.json)."),
]
Budget = Annotated[
    int | None, typer.Option(min=0, help="Tokens of thinking to ask for (default: not asked).")
]
System = Annotated[str | None, typer.Option(help="System prompt (default: the run's).")]


@app.command()
def run(
    config: ConfigFile = None,
    orchestrator: Orchestrator = None,
    model: Model = None,
    data: Data = None,
    run: RunFile = None,
    rpc: Rpcs = None,
    rpc_quorum: Quorum = None,
    chain_poll_seconds: PollSeconds = None,
    deployment: DeploymentFile = None,
    pool: Pool = None,
    wallet: Wallet = None,
    password_file: PasswordFile = None,
    password_fd: PasswordFd = None,
    origin_host: OriginHost = None,
    origin_port: OriginPort = None,
    origin_url: OriginUrl = None,
    allow_private: AllowPrivate = None,
    origin_connections_each: Annotated[
        int | None, typer.Option(help="Most connections of one address at once; 0: unlimited.")
    ] = None,
    s3_bucket: S3Bucket = None,
    s3_endpoint: S3Endpoint = None,
    s3_region: S3Region = None,
    s3_public_url: S3Url = None,
    steps: Annotated[int | None, typer.Option(help="Stop after this many batches.")] = None,
    checkpoint_every: Annotated[
        int | None, typer.Option(help="Batches between checkpoints.")
    ] = None,
    linger: Annotated[
        bool | None, typer.Option(help="After the last batch, keep serving policies.")
    ] = None,
    learning_rate: LearningRate = None,
    warmup_steps: Annotated[int | None, typer.Option(help="Steps of linear warm-up.")] = None,
    optimizer: Annotated[
        str | None, typer.Option(help="adamw, or adamw8bit, which keeps its moments in 8 bits.")
    ] = None,
    beta1: Annotated[float | None, typer.Option(help="AdamW's first beta.")] = None,
    beta2: Annotated[float | None, typer.Option(help="AdamW's second beta.")] = None,
    weight_decay: Annotated[float | None, typer.Option(help="AdamW's weight decay.")] = None,
    gradient_clip: Annotated[float | None, typer.Option(help="Largest norm of a gradient.")] = None,
    optimizer_steps: Annotated[
        int | None, typer.Option(help="Optimizer steps for each batch.")
    ] = None,
    recompute: Annotated[
        bool | None, typer.Option(help="Recompute activations in the backward pass.")
    ] = None,
    cpu_offload: Annotated[
        bool | None, typer.Option(help="Keep weights and optimizer in host memory.")
    ] = None,
    context_parallel: ContextParallel = None,
    lora_rank: LoraRank = None,
    lora_alpha: Annotated[
        int | None, typer.Option(help="Scale of the LoRA adapters, times their rank.")
    ] = None,
    bad_batch: Annotated[
        str | None,
        typer.Option(help="What to do with a sealed batch that breaks a rule: stop or skip."),
    ] = None,
    skip_batch: Annotated[
        int | None, typer.Option(help="Go on without this batch, whose files are lost.")
    ] = None,
    alarm_ratio: Annotated[
        float | None, typer.Option(help="Alarm if the largest ratio of a batch exceeds this.")
    ] = None,
    alarm_kl: Annotated[
        float | None, typer.Option(help="Alarm if the mean KL of a batch exceeds this.")
    ] = None,
    alarm_entropy: Annotated[
        float | None, typer.Option(help="Alarm if the entropy of a batch is below this.")
    ] = None,
    alarm_action: Annotated[
        str | None, typer.Option(help="What an alarm does: warn or stop.")
    ] = None,
    metrics_port: Annotated[
        int | None, typer.Option(help="Port on which Prometheus metrics are served.")
    ] = None,
    metrics_host: Annotated[
        str | None, typer.Option(help="Address on which they are served (loopback).")
    ] = None,
    tensorboard: TensorBoard = None,
    tracker: Tracker = None,
    peak_tflops: Annotated[
        float | None, typer.Option(help="Peak TFLOPS of a device, for MFU.")
    ] = None,
    progress: Annotated[
        bool | None, typer.Option(help="Show a progress bar on a terminal.")
    ] = None,
    bf16: Annotated[bool | None, typer.Option(help="Compute in bf16 (GPUs).")] = None,
    head_fp32: Annotated[
        bool | None, typer.Option(help="With --bf16: compute logits in fp32.")
    ] = None,
    round_weights: Annotated[
        bool | None,
        typer.Option(help="Without --bf16: compute with weights rounded as nodes have them."),
    ] = None,
    row_tokens: Annotated[int | None, typer.Option(help="Tokens of a packed row.")] = None,
    micro_tokens: Annotated[int | None, typer.Option(help="Tokens of a micro-batch.")] = None,
    delta_from: Annotated[
        int | None, typer.Option(help="Publish deltas from this many earlier versions.")
    ] = None,
    first_answer_seconds: FirstAnswer = None,
    log_level: LogLevel = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the resolved plan and its cost; do nothing.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="With --dry-run: as JSON.")] = False,
) -> None:
    """Train until SIGTERM. A killed run resumes exactly.

    `trainer run @ FILE` is `trainer run --config FILE`; flag > environment > file > default.
    """
    flags: dict[str, object] = dict(locals())
    from prime_trainer.config import load
    from prime_trainer.run import run_trainer

    for name in ("config", "dry_run", "as_json"):
        del flags[name]
    settings = load(flags, config)
    if dry_run:
        _show_plan(settings, flags, config, as_json)
        return
    run_trainer(settings, until_stopped())


@app.command()
def plan(
    model: Annotated[Path, typer.Option(help="Folder with the model's config.json.")],
    run: Annotated[Path, typer.Option(help="The run definition.")],
    ranks: Annotated[list[int], typer.Option(min=1, help="Number of devices; repeat to compare.")],
    config: ConfigFile = None,
    sample_tokens: Annotated[
        int | None, typer.Option(min=2, help="Longest sample (default: the run's limits).")
    ] = None,
    memory_gib: Annotated[
        float, typer.Option(min=0, help="Memory of a device in GiB; 0: unknown.")
    ] = 0,
    peak_tflops: Annotated[float | None, typer.Option(help="Peak TFLOPS of a device.")] = None,
    context_parallel: ContextParallel = None,
    as_json: Json = False,
) -> None:
    """Plan memory, traffic and time of a step. Needs no weights or GPUs."""
    from prime_core.run_file import read_run
    from prime_trainer.config import load
    from prime_trainer.dryrun import PROMPT_TOKENS, compare_plans, plan_table

    definition = read_run(run)
    flags = {
        "model": model, "peak_tflops": peak_tflops, "context_parallel": context_parallel
    }  # fmt: skip
    settings = load(flags, config)
    longest = sample_tokens or PROMPT_TOKENS + definition.max_output_tokens
    rows = compare_plans(definition, settings, ranks, longest, memory_gib)
    if as_json:
        print(json.dumps([asdict(row) for row in rows]))
        return
    print(plan_table(rows))


@app.command()
def local(
    source: Annotated[Path, typer.Argument(help="TOML file of the run; see docs/tutorial.md.")],
    model: Annotated[Path, typer.Option(help="Hugging Face folder of the base model.")],
    out: Annotated[Path, typer.Option(help="Folder for metrics, samples, the trained model.")],
    steps: Annotated[int, typer.Option(min=1, help="Batches to train.")],
    config: Annotated[
        Path | None,
        typer.Option(
            "--config",
            help="TOML file of settings (default: RUN.trainer.toml, if it is there).",
        ),
    ] = None,
    learning_rate: LearningRate = None,
    lora_rank: LoraRank = None,
    tensorboard: TensorBoard = None,
    tracker: Tracker = None,
    engine: Engine = "plain",
    dtype: Annotated[str, typer.Option(help="Of the engine: float32 or bfloat16.")] = "float32",
    device: Annotated[str, typer.Option(help="Of the engine: cpu or cuda.")] = "cpu",
    threads: Annotated[
        int | None, typer.Option(min=1, help="Threads on a CPU (default: torch's own choice).")
    ] = None,
    evaluate_every: Annotated[
        int, typer.Option(min=0, help="Steps between evaluations; 0: none.")
    ] = 10,
    problems: Annotated[
        int, typer.Option(min=1, help="Held-out problems of each evaluation.")
    ] = 64,
    samples: Annotated[
        int, typer.Option(min=0, help="Answers of each step to write to samples.jsonl.")
    ] = 8,
    seed: Annotated[int, typer.Option(min=0, help="Seed of tasks and noise.")] = 0,
    checkpoint_every: Annotated[
        int, typer.Option(min=0, help="Steps between checkpoints; 0: only when it is stopped.")
    ] = 10,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with the run in --out that was stopped.")
    ] = False,
    cassette: CassetteFile = None,
) -> None:
    """Train in this process, without chain, keys or pool.

    Ctrl-C keeps the state and ends with exit code 130; a second one ends at once.
    """
    from prime_core.waiting import StoppedError
    from prime_trainer.config import load
    from prime_trainer.local import Options, run_local

    default = source.parent / f"{source.stem}.trainer.toml"
    flags = {
        "model": model, "data": out, "steps": steps, "learning_rate": learning_rate,
        "lora_rank": lora_rank, "tensorboard": tensorboard,
        "tracker": tracker,
    }  # fmt: skip
    settings = load(flags, config or (default if default.is_file() else None))
    options = Options(
        engine, dtype, device, threads, evaluate_every, problems, seed, samples,
        checkpoint_every, resume, cassette,
    )  # fmt: skip
    try:
        run_local(source, settings, options, until_stopped(second_ends=True))
    except StoppedError as stopped:
        typer.echo(f"trainer: {stopped}", err=True)
        raise typer.Exit(130) from stopped


@app.command()
def samples(
    folder: Annotated[Path, typer.Argument(help="Folder of `trainer local` or `trainer run`.")],
    step: Annotated[
        int | None, typer.Option(min=0, help="Step to show (default: the last).")
    ] = None,
    order: Annotated[str, typer.Option(help="written, best or worst first.")] = "written",
    count: Annotated[int, typer.Option(min=1, help="Most samples to show.")] = 8,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a line.")] = False,
) -> None:
    """Show a run's prompts and answers with their rewards."""
    from prime_envs.samples import styled
    from prime_trainer.samples import chosen_samples, samples_text

    found = chosen_samples(folder, step=step, order=order, count=count)
    if as_json:
        print("\n".join(json.dumps(sample, ensure_ascii=False) for sample in found))
        return
    typer.echo(samples_text(found, styled))


@app.command()
def chat(
    model: Policy,
    once: Annotated[str | None, typer.Option(help="Ask this question and end.")] = None,
    run: RunOfPolicy = None,
    budget: Budget = None,
    system: System = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Most tokens of one answer.")] = 512,
    temperature: Annotated[float, typer.Option(min=0.01, help="Temperature of sampling.")] = 1.0,
    seed: Annotated[
        int | None,
        typer.Option(min=0, max=2**62 - 1, help="Seed of the sampling (default: random)."),
    ] = None,
    engine: Engine = "plain",
    dtype: Dtype = "float32",
    device: Device = "cpu",
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a question.")] = False,
) -> None:
    """Talk to a policy. One question a line, from the terminal or standard input."""
    from prime_core.printing import printable
    from prime_envs.samples import styled
    from prime_trainer.talk import Answering, answers, start

    folder, definition = _policy(model, run)
    talk = start(
        folder, definition, {"engine": engine, "dtype": dtype, "device": device},
        Answering(budget, max_tokens, temperature, seed), system,
    )  # fmt: skip
    try:
        for turns in answers(talk, _questions() if once is None else [once]):
            if as_json:
                said = [{"by": kind, "text": text} for kind, text in turns]
                print(json.dumps(said, ensure_ascii=False), flush=True)
            else:
                text = "\n".join(styled(printable(t, keep="\n\t"), kind) for kind, t in turns)
                typer.echo(f"{text}\n")
    finally:
        talk.engine.close()


@app.command()
def serve(
    model: Policy,
    host: Annotated[str, typer.Option(help="Address to bind.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0: any free one.")] = 8000,
    name: Annotated[
        str | None, typer.Option(help="Model name in the API (default: the folder's).")
    ] = None,
    run: RunOfPolicy = None,
    budget: Budget = None,
    system: System = None,
    max_tokens: Annotated[
        int, typer.Option(min=1, help="Tokens of an answer if the client names no limit.")
    ] = 512,
    engine: Engine = "plain",
    dtype: Dtype = "float32",
    device: Device = "cpu",
    as_json: Json = False,
) -> None:
    """Serve a policy with an OpenAI-compatible API.

    It asks for no key: bind an address other than the loopback one only behind a proxy that does.
    """
    from prime_trainer.serving import Served
    from prime_trainer.serving import serve as serve_policy

    def say(url: str, served: Served) -> None:
        facts = {"url": url, "model": served.name, "engine": served.engine.name}
        shown = f"{served.name} ({served.engine.name}, {dtype}, {device}): {url}"
        print(json.dumps(facts) if as_json else shown, flush=True)

    folder, definition = _policy(model, run)
    serve_policy(
        folder, definition, {"engine": engine, "dtype": dtype, "device": device},
        until_stopped(second_ends=True), say, name=name or model.resolve().name, host=host,
        port=port, system=system, budget=budget, max_tokens=max_tokens,
    )  # fmt: skip


def _policy(place: Path, run: Path | None) -> tuple[Path, RunDefinition | None]:
    """The model folder of a policy and the run that it is asked for."""
    from prime_core.run_file import read_run
    from prime_trainer.talk import policy_in

    folder, found = policy_in(place)
    run = run or found
    return folder, None if run is None else read_run(run)


def _questions() -> Iterator[str]:
    """Lines of standard input, with a prompt on a terminal."""
    while True:
        if sys.stdin.isatty():
            typer.echo("> ", nl=False, err=True)
        line = sys.stdin.readline()
        if not line:
            return
        yield line


@contextmanager
def _counting(things: str, total: int) -> Iterator[Callable[[int], None]]:
    """Yields a function that counts things done, out of `total`: a bar on a terminal, otherwise a
    line on stderr at each call."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    terminal = Console(stderr=True)
    bar = Progress(
        TextColumn(things), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(),
        console=terminal, disable=not terminal.is_terminal,
    )  # fmt: skip
    task = bar.add_task(things, total=total)

    def went(count: int) -> None:
        bar.advance(task, count)
        if bar.disable:
            print(f"{bar.tasks[task].completed:.0f} of {total} {things}", file=sys.stderr)

    with bar:
        yield went


@app.command()
def evaluate(
    model: Annotated[Path, typer.Option(help="Hugging Face folder to evaluate.")],
    run: Annotated[Path, typer.Option(help="The run definition, whose reward it is.")],
    problems: Annotated[int, typer.Option(min=1, help="Held-out problems.")] = 256,
    samples: Annotated[int, typer.Option(min=1, max=1024, help="Answers to each problem (k).")] = 1,
    base: Annotated[Path | None, typer.Option(help="Compare with this model folder.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of problems, targets and noise.")] = 0,
    answers: AnswersFolder = None,
    cassette: CassetteFile = None,
    engine: Engine = "plain",
    dtype: Dtype = "float32",
    device: Device = "cpu",
    as_json: Json = False,
) -> None:
    """Measure reward and pass@k on held-out problems. By environment and budget, with
    intervals.

    With --answers, the same command continues where an earlier one stopped.
    """
    import torch

    from prime_core.run_file import read_run
    from prime_trainer.evaluate import compare, comparison_table, evaluation_table
    from prime_trainer.evaluate import evaluate as evaluate_model
    from prime_trainer.sampling import Sampling

    torch.set_num_threads(1)
    definition = read_run(run)
    with _counting("problems", problems * (1 if base is None else 2)) as progress:
        sampling = Sampling(engine, dtype, device, answers, progress, cassette)
        if base is None:
            one = evaluate_model(
                model, definition, problems=problems, seed=seed, samples=samples, sampling=sampling
            )
        else:
            both = compare(
                base, model, definition,
                problems=problems, seed=seed, samples=samples, sampling=sampling,
            )  # fmt: skip
    if base is None:
        print(json.dumps(one.as_json()) if as_json else evaluation_table(one))
    else:
        print(json.dumps(both.as_json()) if as_json else comparison_table(both))


@app.command()
def benchmark(
    model: Policy,
    task: Annotated[
        str,
        typer.Option(help="aime24, aime25, gpqa-diamond, gsm8k, ifeval or livecodebench-v5."),
    ],
    data: Annotated[Path, typer.Option("--data", help="The benchmark's rows: .jsonl or .parquet.")],
    digest: Annotated[
        str | None, typer.Option(help="SHA-256 that the file must have: 0x….")
    ] = None,
    problems: Annotated[int | None, typer.Option(min=1, help="Only the first N problems.")] = None,
    samples: Annotated[int, typer.Option(min=1, max=1024, help="Answers to each problem (k).")] = 1,
    run: RunOfPolicy = None,
    budget: Budget = None,
    system: System = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Most tokens of one answer.")] = 32_768,
    temperature: Annotated[
        float, typer.Option(min=0, help="Temperature of sampling; 0: the most probable token.")
    ] = 0.6,
    seed: Annotated[
        int, typer.Option(min=0, max=2**64 - 1, help="Seed of noise and of the order of choices.")
    ] = 0,
    answers: AnswersFolder = None,
    out: Annotated[Path | None, typer.Option(help="File for the report as JSON.")] = None,
    engine: Engine = "plain",
    dtype: Dtype = "float32",
    device: Device = "cpu",
    as_json: Json = False,
) -> None:
    """Score a model on a public benchmark. You supply its file; published figures are shown
    next to it.

    With --answers, the same command continues where an earlier one stopped. See docs/benchmarks.md.
    """
    import torch

    from prime_trainer.benchmark import (
        Asked,
        count_problems,
        report_table,
        require_pinned,
        run_benchmark,
        write_report,
    )
    from prime_trainer.benchmark_tasks import open_benchmark
    from prime_trainer.sampling import Sampling

    torch.set_num_threads(1)
    folder, definition = _policy(model, run)
    found = require_pinned(data, digest)
    asked = Asked(data, problems, samples, seed, temperature, max_tokens, budget, system)
    scored = open_benchmark(task, seed)
    try:
        with _counting("problems", count_problems(scored, asked)) as progress:
            sampling = Sampling(engine, dtype, device, answers, progress)
            report = run_benchmark(scored, folder, definition, asked, found, sampling)
    finally:
        scored.close()
    print(json.dumps(report.as_json()) if as_json else report_table(report))
    if out is not None:
        write_report(report, out)


@app.command()
def follow(
    orchestrator: Annotated[str, typer.Option(help="Base URL of the pool's orchestrator.")],
    data: Annotated[Path, typer.Option(help="Folder for policies and evaluations.jsonl.")],
    every: Annotated[int, typer.Option(min=1, help="Evaluate every n-th policy.")] = 5,
    until: Annotated[
        int | None, typer.Option(min=0, help="End after a policy of this version or later.")
    ] = None,
    problems: Annotated[int, typer.Option(min=1, help="Held-out problems.")] = 64,
    samples: Annotated[int, typer.Option(min=1, max=1024, help="Answers to each problem (k).")] = 1,
    seed: Annotated[int, typer.Option(min=0, help="Seed of problems, targets and noise.")] = 0,
    cassette: CassetteFile = None,
    engine: Engine = "plain",
    dtype: Dtype = "float32",
    device: Device = "cpu",
    allow_private: AllowPrivate = None,
    tensorboard: TensorBoard = None,
    tracker: Tracker = None,
) -> None:
    """Evaluate a pool's policies while it trains, on any machine.

    Needs no key. Ctrl-C ends it; the same command continues where it stopped.
    """
    import torch

    from prime_core.folders import make_folder
    from prime_core.transport.client import OrchestratorClient
    from prime_core.waiting import StoppedError
    from prime_trainer import follow as following
    from prime_trainer import observe
    from prime_trainer.sampling import Sampling

    torch.set_num_threads(1)
    sampling = Sampling(engine, dtype, device, cassette=cassette)
    options = following.Options(data, every, until, problems, samples, seed, sampling=sampling)
    make_folder(data)
    sinks: list[observe.Sink] = []
    if tensorboard is not None:
        sinks.append(observe.TensorBoard(tensorboard))
    if tracker is not None:
        sinks.append(observe.Tracker(tracker, "prime", {"orchestrator": orchestrator}))
    stop = until_stopped(second_ends=True)
    try:
        with OrchestratorClient(orchestrator, allow_private=bool(allow_private)) as client:
            following.follow(client, options, sinks, stop, lambda line: print(line, flush=True))
    except StoppedError:
        raise typer.Exit(130) from None
    finally:
        for sink in sinks:
            sink.close()


@app.command(name="filter")
def filter_(
    run: Annotated[Path, typer.Option(help="The run definition, whose tasks these are.")],
    out: Annotated[Path, typer.Option(help="JSONL file to write.")],
    model: Annotated[Path | None, typer.Option(help="Hugging Face folder that answers.")] = None,
    rollouts: Annotated[
        Path | None,
        typer.Option(help="A pool's answers: the file of `orchestrator rollouts export --grade`."),
    ] = None,
    samples: Annotated[
        int, typer.Option(min=1, max=1024, help="Answers to each task; with --rollouts, at least.")
    ] = 8,
    low: Annotated[float, typer.Option(min=0, max=1, help="Least pass rate kept.")] = 0.125,
    high: Annotated[float, typer.Option(min=0, max=1, help="Largest pass rate kept.")] = 0.75,
    tasks: Annotated[int | None, typer.Option(min=1, help="Only the first N tasks.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of targets and noise.")] = 0,
    answers: AnswersFolder = None,
    cassette: CassetteFile = None,
    engine: Engine = "plain",
    dtype: Dtype = "float32",
    device: Device = "cpu",
    as_json: Json = False,
) -> None:
    """Keep the tasks that a model solves sometimes. They are a dataset of its own, named by
    its digest.

    The answers are those of --model, or the accepted --rollouts of a pool. With --answers, the same
    command continues where an earlier one stopped.
    """
    import torch

    from prime_core.run_file import read_run
    from prime_trainer.difficulty import Range, describe, filter_rollouts, filter_tasks
    from prime_trainer.sampling import Sampling

    torch.set_num_threads(1)
    if low > high:
        raise UserError(f"--low {low:g} is above --high {high:g}", hint="swap them")
    if (model is None) == (rollouts is None):
        raise UserError("the filter needs a model or rollouts", hint="add --model or --rollouts")
    wanted, definition = Range(low, high, samples), read_run(run)
    total = definition.environment.train_size
    if rollouts is not None:
        filter_rollouts(rollouts, definition, wanted, out, tasks=tasks)
    if model is not None:
        with _counting("tasks", total if tasks is None else min(tasks, total)) as progress:
            sampling = Sampling(engine, dtype, device, answers, progress, cassette)
            for _ in filter_tasks(
                model, definition, wanted, out, tasks=tasks, seed=seed, sampling=sampling
            ):
                pass
    found = describe(out)
    if as_json:
        print(json.dumps(found.as_json()))
    else:
        print(
            f"{found.file}: {found.kept} of {found.asked} tasks; a run pins them as environment "
            f"{found.environment} with sha256 {found.digest}"
        )


@app.command()
def export(
    out: Annotated[Path, typer.Option(help="Folder to write.")],
    data: DataFolder = Path("var/trainer"),
    version: Annotated[int | None, typer.Option(min=0, help="Policy (default: newest).")] = None,
) -> None:
    """Write a finished run as a Hugging Face folder. With model card, run definition and
    curve."""
    from prime_trainer.finished import export_run

    print(f"{out}: policy {export_run(data, out, version)}")


@app.command()
def publish(
    model: Annotated[Path, typer.Option(help="Hugging Face folder to publish.")],
    version: Annotated[int, typer.Option(min=0, help="Version to publish it as.")],
    config: ConfigFile = None,
    orchestrator: Orchestrator = None,
    data: Data = None,
    wallet: Wallet = None,
    password_file: PasswordFile = None,
    password_fd: PasswordFd = None,
    origin_host: OriginHost = None,
    origin_port: OriginPort = None,
    origin_url: OriginUrl = None,
    s3_bucket: S3Bucket = None,
    s3_endpoint: S3Endpoint = None,
    s3_region: S3Region = None,
    s3_public_url: S3Url = None,
    serve: Annotated[
        bool,
        typer.Option(
            help="Serve it until a relay or node has all of it; --no-serve if a mirror serves it."
        ),
    ] = True,
    as_json: Json = False,
) -> None:
    """Sign a folder as a policy and serve it. `run` does so after each step."""
    flags: dict[str, object] = dict(locals())
    from prime_trainer.config import load
    from prime_trainer.run import publish_by_hand

    for name in ("config", "model", "version", "serve", "as_json"):
        del flags[name]
    publish_by_hand(load(flags, config), model, version, serve=serve, as_json=as_json)


@app.command()
def status(
    data: DataFolder = Path("var/trainer"),
    as_json: Json = False,
) -> None:
    """Show the last step trained, from the metrics file."""
    from prime_trainer.metrics import read_lines

    path = data / "metrics.jsonl"
    lines = read_lines(path, "step", "version")
    if not lines:
        raise UserError(f"no step is recorded in {path}", hint="name the folder by --data")
    last = lines[-1]
    if as_json:
        print(json.dumps(last))
    else:
        reward = f"reward {last['reward']:.3f}" if "reward" in last else "skipped"
        print(f"step {last['step']}: {reward}, policy {last['version']}")


def _show_plan(
    settings: Settings, flags: Mapping[str, object], config: Path | None, as_json: bool
) -> None:
    from prime_trainer.dryrun import report, sources
    from prime_trainer.run import dry_run

    definition, estimate = dry_run(settings)
    resolved = sources(settings, flags, config, os.environ)
    if not as_json:
        print(report(definition, settings.objective, estimate, resolved))
        return
    named = {name: {"value": value, "from": origin} for name, (value, origin) in resolved.items()}
    run = definition.model_dump(mode="json")
    print(json.dumps({"settings": named, "run": run, "estimate": asdict(estimate)}))


def with_file(words: list[str]) -> list[str]:
    """`@ FILE` and `@FILE` spelled out as `--config FILE`."""
    found = []
    for word in words:
        found += ["--config", word[1:]] if word.startswith("@") else [word]
    return [word for word in found if word]


def main() -> None:
    """Entry point."""
    run_program(app, "trainer", with_file(sys.argv[1:]))


if __name__ == "__main__":
    main()
