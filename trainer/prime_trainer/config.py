"""Settings of `trainer run`, loaded once at startup: flag > environment > TOML > default.

Environment variables begin with PRIME_TRAINER_ (PRIME_TRAINER_LEARNING_RATE, …). Settings that only
the trainer uses are here and not in the run definition, because nodes do not need them to do or
judge work. Those that determined a policy are published in the policy's own folder
(`Settings.training`, docs/adr/0009).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field
from pydantic_settings import SettingsConfigDict

from prime_chain.link import ChainSettings
from prime_core.settings import UserPath, load_settings, needed, settings_file
from prime_core.waiting import FIRST_ANSWER_SECONDS

ENV_PREFIX = "PRIME_TRAINER_"


TRAINING_FILE = "trainer.json"
"""File in a policy's folder with the configuration that the policy was trained with."""
TRAINING = (
    "objective", "optimizer", "learning_rate", "warmup_steps", "beta1", "beta2", "weight_decay",
    "gradient_clip", "optimizer_steps", "bf16", "head_fp32", "round_weights", "lora_rank",
    "lora_alpha",
)  # fmt: skip
"""The settings that determine how a batch changes the weights."""


class ObjectiveSettings(BaseModel):
    """The loss: clip bounds (`clip` is ε, `delta` the two-sided bound δ), and weights of the KL and
    entropy terms (`kl` is β, `entropy` η)."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    name: str = Field(default="grpo", pattern=r"^[a-z][a-z0-9_]{0,31}$")
    """An entry of the registry (prime_trainer/objectives), which defines token weights and
    clipping."""
    clip: float = Field(default=0.2, gt=0, le=1)
    clip_high: float | None = Field(default=None, gt=0, le=10)
    """Upper bound of the clip, if it is not `clip` (DAPO: 0.28)."""
    delta: float = Field(default=4.0, ge=1)
    kl: float = Field(default=0.0, ge=0)
    kl_form: Literal["k1", "k2", "k3"] = "k3"
    entropy: float = 0.0
    advantage: Literal["mean_std", "mean", "leave_one_out"] = "mean_std"
    ratio: Literal["behaviour", "proximal"] = "behaviour"
    """The denominator of the ratio: the policy that generated the row ("behaviour"; its
    log-probabilities are in the file), or the trainer's own policy at the start of the batch
    ("proximal", decoupled PPO). The remaining difference is corrected by an importance weight
    truncated at `importance_cap`."""
    importance: Literal["truncate", "mask", "divergence"] = "truncate"
    """Tokens whose importance weight is above the cap: weighted by the cap, or left out, like those
    below `importance_floor` ("mask", IcePop; its bounds are 0.5 and 5). "divergence" (DPPO) weights
    by the cap and leaves out tokens whose probability differs by more than `importance_divergence`
    from the engine's, if the update would move it further away. For `ratio` "proximal"."""
    importance_cap: float = Field(default=2.0, ge=1)
    importance_floor: float = Field(default=0.5, ge=0, le=1)
    importance_divergence: float = Field(default=0.15, gt=0, le=1)
    parameters: dict[str, float] = Field(default_factory=dict)
    """The objective's own settings (prime_trainer/objectives/base.py, `Objective.parameters`)."""
    overlong: Literal["keep", "mask", "penalise"] = "keep"
    """Treatment of samples cut at the length limit: "keep" trains them unchanged, "mask" gives them
    no weight in the loss (their reward stays in the group's baseline), "penalise" lowers their
    reward by the penalty."""
    overlong_penalty: float = Field(default=0.0, ge=0)

    @property
    def upper_clip(self) -> float:
        """ε_high: `clip_high`, or `clip` if that is not set."""
        return self.clip if self.clip_high is None else self.clip_high


class Settings(ChainSettings):
    """All settings of the trainer. Relative paths refer to the working directory."""

    model_config = SettingsConfigDict(env_prefix=ENV_PREFIX)

    orchestrator: str = ""
    """Base URL of the pool's orchestrator."""
    model: UserPath | None = None
    """Hugging Face folder of the run's base model (policy 0)."""
    data: UserPath = Path("var/trainer").absolute()
    """Checkpoints, metrics and the origin's policies."""
    run: UserPath | None = None
    """The run definition; by default fetched from the orchestrator with its digest checked."""
    deployment: UserPath | None = None
    """Together with `rpc`: the pool's facts are checked on chain before training."""
    pool: int | None = Field(default=None, ge=0, lt=1 << 63)
    """If set, refuse to work for any other pool."""
    wallet: UserPath | None = None
    """Keystore (v3) of the pool's trainer."""
    password_file: UserPath | None = None
    password_fd: int | None = None
    origin_host: str = "127.0.0.1"
    origin_port: int = Field(default=0, ge=0, le=65_535)
    """Port from which relays fetch policies; 0 selects a free port."""
    origin_url: str = ""
    """The origin's public URL, if it is behind a proxy."""
    allow_private: bool = False
    """Connect to private and loopback addresses that the orchestrator names (on one's own network).
    An orchestrator on this machine may always name them."""
    origin_connections_each: int = Field(default=256, ge=0)
    """Maximum simultaneous connections per address (an IPv6 /64) to the origin, of 1024 in total. A
    relay uses two. 0: unlimited, for an origin whose readers all come through one proxy."""
    s3_bucket: str = Field(default="", pattern=r"^([a-z0-9][a-z0-9.-]{1,61}[a-z0-9])?$")
    """Put each policy into this bucket, too, from which nodes fetch it. Credentials come from the
    environment (AWS_ACCESS_KEY_ID …)."""
    s3_endpoint: str = ""
    """The S3 server's URL; empty: AWS."""
    s3_region: str = "us-east-1"
    s3_public_url: str = ""
    """The bucket's URL for readers, for example a CDN's; by default the endpoint's."""
    steps: int | None = Field(default=None, ge=0)
    """Stop after this many batches in total; by default never."""
    checkpoint_every: int = Field(default=1, ge=1)
    """Batches between checkpoints. After a crash, the batches since the last one are trained again,
    and their policies get new version numbers."""
    checkpoints_kept: int = Field(default=2, ge=1)
    """Newest checkpoints that are kept on disk."""
    policies_kept_days: int | None = Field(default=None, ge=1)
    """Days after which policies that no lease can name are removed from origin and bucket, at least
    twice the deployment's unbonding period and a dispute window; by default never."""
    linger: bool = False
    """After the last step, keep serving policies, which validators and auditors still need."""

    objective: ObjectiveSettings = ObjectiveSettings()
    optimizer: Literal["adamw", "adamw8bit"] = "adamw"
    """adamw8bit keeps AdamW's two moments in 8 bits, in blocks of 256 with a scale each (Dettmers
    et al., arXiv 2110.02861; torchao): a quarter of their memory."""
    learning_rate: float = Field(default=3e-7, gt=0, le=1)
    warmup_steps: int = Field(default=25, ge=0)
    beta1: float = Field(default=0.9, ge=0, lt=1)
    beta2: float = Field(default=0.99, ge=0, lt=1)
    weight_decay: float = Field(default=0.01, ge=0)
    gradient_clip: float = Field(default=0.1, gt=0)
    """Limit of the global gradient norm."""
    optimizer_steps: int = Field(default=1, ge=1, le=256)
    """Optimizer steps per batch, each on its share of the groups; with more than one, the objective
    should use the proximal ratio."""
    bf16: bool = False
    """Compute in bf16 (master weights and reductions stay fp32); for GPUs."""
    head_fp32: bool = False
    """With bf16: compute logits in fp32, which is slower and needs an extra copy of the head. By
    default, like the engines, logits are rounded to bf16 before the softmax."""
    round_weights: bool = False
    """Without bf16: round the trained weights to bf16 before the loss is computed, so that the loss
    sees the policy that nodes run. (With bf16, FSDP rounds them.) Needed for small learning rates:
    one step is then less than bf16 resolves, so it changes the fp32 masters but not the published
    policy. Ignored with adapters, which are merged before they are rounded."""
    recompute: bool = False
    """Recompute activations in the backward pass instead of storing them (activation
    checkpointing)."""
    cpu_offload: bool = False
    """Keep weights, gradients, optimizer state and the reference in host memory; a device holds
    only the layers in use. The optimizer then runs on the CPU."""
    context_parallel: int = Field(default=1, ge=1)
    """Consecutive ranks that share each row, for samples whose activations one device cannot hold
    (docs/adr/0015). It divides the number of ranks."""
    lora_rank: int = Field(default=0, ge=0, le=4096)
    """Train adapters of this rank on frozen weights; 0 trains the weights themselves."""
    lora_alpha: int = Field(default=0, ge=0)
    """Adapters are scaled by α/rank; 0 selects twice the rank."""
    row_tokens: int = Field(default=128, ge=1)
    """Samples are packed into rows of this many tokens (a longer sample gets its own row)."""
    micro_tokens: int = Field(default=4096, ge=1)
    """Padded tokens per micro-batch, limited by the device's memory. With `context_parallel`, a
    device holds its share of them."""
    delta_from: int = Field(default=2, ge=0, le=16)
    """Number of earlier versions for which deltas are made."""
    bad_batch: Literal["stop", "skip"] = "stop"
    """Reaction to a sealed batch that breaks a rule: end the trainer, or publish the weights
    unchanged under the next number. Three in a row always end it."""
    skip_batch: int | None = Field(default=None, ge=0)
    """Skip the batch of this number, whose files are lost for good: publish the weights unchanged
    under the next number."""
    mismatch_every: int = Field(default=10, ge=0)
    """Batches between those whose stale rows are scored by the policies that generated them; 0:
    never. Until then, the weights of at most `max_staleness` policies are kept in host memory."""
    alarm_ratio: float = Field(default=100.0, gt=0)
    """An importance ratio above this in a batch raises an alarm."""
    alarm_kl: float = Field(default=1.0, gt=0)
    """A mean KL from the behavior (or the reference) policy above this raises an alarm."""
    alarm_entropy: float = Field(default=0.0, ge=0)
    """A mean entropy below this raises an alarm; 0: never."""
    alarm_action: Literal["warn", "stop"] = "warn"
    """Effect of an alarm: a warning and a note in the step's line, or the end of the run (the batch
    is kept, but training stops)."""
    metrics_port: int | None = Field(default=None, ge=0, le=65_535)
    """Serve Prometheus metrics at http://<metrics_host>:<port>/metrics; 0 selects a free port."""
    metrics_host: str = "127.0.0.1"
    """Address on which metrics are served."""
    tensorboard: UserPath | None = None
    """Also write TensorBoard event files into this folder."""
    tracker: Literal["wandb", "trackio"] | None = None
    """Also log to this experiment tracker."""
    tracker_project: str = "prime-open"
    """Project of the tracker."""
    texts_every: int = Field(default=10, ge=0)
    """Steps between tables of rollout texts in TensorBoard, the tracker and, for `trainer run`,
    samples.jsonl; 0: none."""
    peak_tflops: float = Field(default=0.0, ge=0)
    """Peak of one device in 10^12 operations per second, for MFU; 0 uses the value of a known
    device."""
    progress: bool = True
    """Show a progress bar on terminals, with what the loop waits for."""
    first_answer_seconds: float = Field(default=FIRST_ANSWER_SECONDS, ge=0)
    """How long the very first start waits for the orchestrator and the RPC to answer."""
    log_level: str = "info"

    def training(self, origin: Mapping[str, int | str] | None = None) -> str:
        """The JSON text of TRAINING_FILE: every setting that determines how a batch changes the
        weights, including defaults, and the policy's `origin` (its batch and the policy before)."""
        values = self.model_dump(mode="json", include=set(TRAINING)) | dict(origin or {})
        return json.dumps({"schema_version": 1, **values}, indent=2, sort_keys=True) + "\n"

    def need(self, name: str) -> Any:
        """The value of a required setting. Raises UserError if it was not given."""
        return needed(self, name)


def load(flags: Mapping[str, object], config: Path | None = None) -> Settings:
    """Loads settings from flags (None or empty = not given), environment and TOML file.

    Raises UserError with the setting's name if a value is invalid or the file cannot be read.
    """
    return load_settings(Settings, flags, settings_file(config))
