"""The configuration: one frozen pydantic model per section, the important fields first.

Names are the field's own (AReaL's block `rollout:` / `actor:` loads as it is). Reading a file,
applying `--dotted.override` values and turning what is wrong into a message with file, key, reason
and "did you mean" lives in `config_file.py`; this module only says what a configuration may be.
"""

from collections.abc import Iterable
from enum import StrEnum
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    model_validator,
)

from headway.core.advantages import Baseline
from headway.core.filters import FilterName

Seconds = Annotated[float, Field(gt=0)]
Count = Annotated[int, Field(ge=1)]
Device = Annotated[str, Field(pattern=r"^(auto|cpu|mps|(cuda|xpu)(:\d+)?)$")]

BUILTIN_MODEL = "builtin:arithmetic"
"""The small character-level model that is built and warm-started at first use."""


class ImpossibleError(ValueError):
    """Settings that are valid one by one and cannot work together.

    `problems` holds one `(dotted key within the section, reason)` per combination.
    """

    def __init__(self, problems: Iterable[tuple[str, str]]) -> None:
        self.problems = tuple(problems)
        super().__init__("; ".join(f"{key}: {reason}" for key, reason in self.problems))


class Section(BaseModel):
    """Base of every section: frozen, unknown keys refused."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", allow_inf_nan=False, ser_json_inf_nan="constants"
    )


class UpdateMode(StrEnum):
    """What happens to running requests when the weights change (docs/glossary.md)."""

    KEEP = "keep"
    INTERRUPT = "interrupt"
    FINISH = "finish"


class RunConfig(Section):
    """The run as a whole."""

    dir: str = "runs/run"
    """Run directory; it must not hold a run yet."""
    steps: Count = 100
    """Step target: batches to train."""
    seed: int = Field(default=0, ge=0)
    """Of everything random: tasks, sampling order, warm start."""
    max_empty_batches: Count = 3
    """Consecutive batches' worth of samples with nothing trainable that end the run."""
    shutdown_seconds: Seconds = 20.0
    """Window for clean-up; then the process ends whatever is left."""
    start_seconds: Seconds = 300.0
    """Deadline for engines and trainer to become ready."""
    stall_seconds: Seconds = 600.0
    """No sample finished, no batch shipped and no version published for this long ends the run."""
    metrics_interval_seconds: Seconds = 1.0
    """Between two `interval` rows of metrics.jsonl."""


class RolloutConfig(Section):
    """Generation and its bounds."""

    max_head_offpolicyness: int = Field(default=2, ge=0)
    """`S`, in versions. 0 is the synchronous loop."""
    consumer_batch_size: Count = 16
    """`B`, in samples (groups) per batch."""
    max_concurrent_rollouts: Count | None = None
    """Samples in flight; `consumer_batch_size` when unset."""
    queue_size: Count = 1024
    """Size of the dispatcher's input and output queue, in samples."""
    group_size: Count = 8
    """Rollouts per sample: they share a prompt and an advantage baseline. 1 needs
    `actor.advantage: mean`."""
    max_new_tokens: Count = 64
    """Tokens per model turn."""
    temperature: float = Field(default=1.0, gt=0)
    """Of sampling; log-probabilities are of the distribution that was sampled from."""
    deadline_seconds: Seconds = 300.0
    """For one rollout, all its turns and its environment included."""
    max_infrastructure_retries: int = Field(default=3, ge=0)
    """Per rollout, when an engine fails; then the sample fails."""
    max_environment_retries: int = Field(default=1, ge=0)
    """Per rollout, when its environment or reward raises; then the sample fails."""
    max_failed_samples: Count = 64
    """Consecutive failed samples, with no success between them, that end the run."""
    max_batches_ahead: int = Field(default=1, ge=0)
    """Ship gate: batch `k` is handed over once the version is at least `k - max_batches_ahead`."""
    filters: tuple[FilterName, ...] = (FilterName.ZERO_ADVANTAGE,)
    """Groups that these name are rejected, and replaced by new samples."""

    @property
    def max_concurrent(self) -> int:
        """The concurrency limit in force, in samples."""
        return self.max_concurrent_rollouts or self.consumer_batch_size

    @model_validator(mode="after")
    def _possible(self) -> Self:
        problems = []
        if self.queue_size < self.consumer_batch_size:
            problems.append(
                (
                    "queue_size",
                    f"{self.queue_size} is smaller than consumer_batch_size "
                    f"({self.consumer_batch_size}): no batch could pass; raise queue_size",
                )
            )
        if problems:
            raise ImpossibleError(problems)
        return self


class OptimizerConfig(Section):
    """AdamW with linear warm-up."""

    lr: float = Field(default=3e-4, gt=0)
    """Learning rate after warm-up."""
    warmup_steps: int = Field(default=5, ge=0)
    """Steps over which the learning rate rises linearly from 0."""
    weight_decay: float = Field(default=0.01, ge=0)
    """Decoupled weight decay."""
    beta1: float = Field(default=0.9, ge=0, lt=1)
    """Decay of the gradient's running mean."""
    beta2: float = Field(default=0.95, ge=0, lt=1)
    """Decay of the squared gradient's running mean."""
    gradient_clipping: float = Field(default=1.0, gt=0)
    """Largest norm of the gradient over all parameters."""


class ActorConfig(Section):
    """The objective and the reference trainer."""

    use_decoupled_loss: bool = True
    """Clip against recomputed proximal log-probabilities and weight by the capped behaviour ratio;
    off: plain clipped PPO against the behaviour log-probabilities."""
    recompute_logprobs: bool = True
    """Recompute the batch's log-probabilities under the policy that starts the update. Also read
    as `recompute_logprob`."""
    advantage: Baseline = Baseline.GRPO
    """What a rollout's reward is compared with: its group (`grpo`, `grpo_no_std`, `rloo`), or all
    rewards so far (`mean`)."""
    eps_clip: float = Field(default=0.2, gt=0, lt=1)
    """The policy ratio is clipped to `1 - eps_clip .. 1 + eps_clip`."""
    behav_imp_weight_cap: float = Field(default=5.0, gt=0)
    """Largest behaviour weight, proximal over behaviour probability of a token."""
    ppo_n_minibatches: Count = 1
    """Optimizer steps per batch, each on its share of the rollouts."""
    micro_batch_tokens: Count = 16384
    """Padded or packed tokens per forward pass."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """AdamW."""
    device: Device = "auto"
    """A PyTorch device; `auto`: a GPU if there is one."""
    num_threads: Count = 1
    """CPU threads of the trainer process."""
    checkpoint_every: int = Field(default=50, ge=0)
    """Steps between optimizer checkpoints; 0: only at the end."""

    @model_validator(mode="before")
    @classmethod
    def _one_spelling(cls, given: Any) -> Any:
        if not isinstance(given, dict) or "recompute_logprob" not in given:
            return given
        given = dict(given)
        singular = given.pop("recompute_logprob")
        plural = given.setdefault("recompute_logprobs", singular)
        if plural is not singular:
            reason = (
                f"is the same setting as recompute_logprobs, and they differ ({singular!r} and "
                f"{plural!r}); keep one"
            )
            raise ImpossibleError([("recompute_logprob", reason)])
        return given

    @model_validator(mode="after")
    def _possible(self) -> Self:
        if self.use_decoupled_loss and not self.recompute_logprobs:
            reason = (
                "needs recompute_logprobs: true (the proximal policy is the one that starts the "
                "update); turn both on, or both off for plain clipped PPO"
            )
            raise ImpossibleError([("use_decoupled_loss", reason)])
        return self


class ModelConfig(Section):
    """The policy."""

    path: str = BUILTIN_MODEL
    """A Hugging Face folder with weights and tokenizer, or `builtin:arithmetic`."""
    cache_dir: str = ".cache/headway"
    """Where the built-in model is kept once built."""
    warm_start_steps: int = Field(default=-1, ge=-1)
    """Supervised steps of the built-in model; -1: its own default."""


class EnvironmentConfig(Section):
    """One environment of the mix."""

    id: str = "arithmetic"
    """A built-in environment, `package.module:factory`, or `path/to/file.py:factory`."""
    name: str | None = None
    """Stamped on rollouts; `id` when unset."""
    weight: float = Field(default=1.0, gt=0)
    """Share of the prompts, relative to the others'."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Passed on to the environment."""

    @property
    def label(self) -> str:
        """The name in force."""
        return self.name or self.id


class EvalConfig(Section):
    """Evaluation on held-out tasks, alongside training."""

    every: int = Field(default=20, ge=0)
    """Versions between evaluations; 0 turns them off. The first and the last version count too."""
    num_tasks: Count = 64
    """Held-out tasks per environment, the same at every evaluation."""
    max_concurrent: Count = 16
    """Eval rollouts in flight, beside the training ones."""
    temperature: float = Field(default=1.0, ge=0)
    """Of sampling; 0 is greedy."""


class EngineConfig(Section):
    """The inference engines."""

    kind: Literal["local"] = "local"
    """`local`: the embedded engine, one process each on this machine."""
    count: Count = 1
    """Engines in the pool."""
    host: str = "127.0.0.1"
    """Where the engines listen."""
    port: int = Field(default=0, ge=0, le=65535)
    """Port of the first engine, the next ones follow; 0: free ports."""
    update_mode: UpdateMode = UpdateMode.KEEP
    """What happens to running requests when the weights change: `keep` them (they go on under the
    new weights), `interrupt` and resubmit them, or let them `finish` first."""
    device: Device = "auto"
    """A PyTorch device; `auto`: a GPU if there is one."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Of the weights while sampling."""
    num_threads: Count = 1
    """CPU threads of each engine process."""
    num_blocks: Count = 512
    """Key/value cache blocks of `page_size` tokens."""
    page_size: Count = 16
    """Tokens per cache block."""
    max_batch_tokens: Count = 1024
    """Tokens per forward pass."""
    max_model_len: Count = 1024
    """Longest prompt plus completion."""
    update_seconds: Seconds = 60.0
    """Deadline for one engine to load one version."""


class WeightsConfig(Section):
    """Publication of new versions."""

    keep_last: int = Field(default=4, ge=3)
    """Versions kept on disk."""
    poll_seconds: Seconds = 0.02
    """How often the watcher looks for a new version."""


class LatencyConfig(Section):
    """A distribution of seconds; only the fields of its `kind` have an effect."""

    kind: Literal["constant", "uniform", "lognormal"] = "lognormal"
    """Shape of the distribution."""
    value: float = Field(default=1.0, ge=0)
    """`constant`: always this."""
    low: float = Field(default=1.0, ge=0)
    """`uniform`: the least value."""
    high: float = Field(default=2.0, ge=0)
    """`uniform`: every value is below this."""
    median: float = Field(default=20.0, gt=0)
    """`lognormal`: half of the values are below this."""
    sigma: float = Field(default=1.0, ge=0)
    """`lognormal`: standard deviation of the logarithm."""

    @model_validator(mode="after")
    def _possible(self) -> Self:
        if self.kind == "uniform" and self.high < self.low:
            reason = f"{self.high:g} is below low ({self.low:g}); swap them"
            raise ImpossibleError([("high", reason)])
        return self


class SimulateConfig(Section):
    """The stated workload of `headway simulate`; seconds are virtual."""

    rollout_seconds: LatencyConfig = LatencyConfig()
    """How long one engine request takes."""
    tokens_per_second: float = Field(default=50.0, gt=0)
    """Per rollout: its length is its latency times this."""
    prompt_tokens: Count = 16
    """Length of every prompt."""
    reward_probability: float = Field(default=0.5, ge=0, le=1)
    """A rollout's reward is 1 this often, else 0."""
    train_seconds: float = Field(default=10.0, ge=0)
    """Per batch."""
    weight_sync_seconds: float = Field(default=0.2, ge=0)
    """From new weights to engines that serve them."""


class Config(Section):
    """Everything that a run needs."""

    run: RunConfig = RunConfig()
    rollout: RolloutConfig = RolloutConfig()
    actor: ActorConfig = ActorConfig()
    model: ModelConfig = ModelConfig()
    envs: tuple[EnvironmentConfig, ...] = Field(default=(EnvironmentConfig(),), min_length=1)
    eval: EvalConfig = EvalConfig()
    engine: EngineConfig = EngineConfig()
    weights: WeightsConfig = WeightsConfig()
    simulate: SimulateConfig = SimulateConfig()

    @model_validator(mode="after")
    def _names_differ(self) -> Self:
        labels = [env.label for env in self.envs]
        twice = sorted({label for label in labels if labels.count(label) > 1})
        if twice:
            reason = f"the name {twice[0]!r} is used twice; give each its own `name`"
            raise ImpossibleError([("envs", reason)])
        return self

    @model_validator(mode="after")
    def _possible(self) -> Self:
        if problems := list(self._contradictions()):
            raise ImpossibleError(problems)
        return self

    def _contradictions(self) -> Iterable[tuple[str, str]]:
        """Settings of different sections that would start a run which cannot end well."""
        rollout, actor, engine = self.rollout, self.actor, self.engine
        if rollout.group_size == 1 and actor.advantage is not Baseline.MEAN:
            yield (
                "rollout.group_size",
                f"a lone rollout has no siblings, so actor.advantage: {actor.advantage} is 0 for "
                "every sample: raise group_size, or set actor.advantage: mean",
            )
        if rollout.max_new_tokens >= engine.max_model_len:
            yield (
                "rollout.max_new_tokens",
                f"{rollout.max_new_tokens} tokens leave no room for a prompt within "
                f"engine.max_model_len ({engine.max_model_len}); lower one or raise the other",
            )
        cache_tokens = engine.num_blocks * engine.page_size
        if cache_tokens < engine.max_model_len:
            yield (
                "engine.num_blocks",
                f"{engine.num_blocks} blocks of {engine.page_size} tokens hold {cache_tokens}, "
                f"less than a sequence of engine.max_model_len ({engine.max_model_len}): it "
                "would wait for ever; raise num_blocks",
            )
        num_rollouts = rollout.consumer_batch_size * rollout.group_size
        if actor.ppo_n_minibatches > num_rollouts:
            yield (
                "actor.ppo_n_minibatches",
                f"{actor.ppo_n_minibatches} minibatches cannot be made of the {num_rollouts} "
                "rollouts of a batch (consumer_batch_size * group_size)",
            )
        if engine.port and engine.port + engine.count - 1 > 65535:
            yield (
                "engine.port",
                f"{engine.count} engines from port {engine.port} on pass 65535; lower the port",
            )

    @property
    def warnings(self) -> list[str]:
        """Settings that have no effect, or not the one that their name promises."""
        found = []
        rollout = self.rollout
        useful = (rollout.max_head_offpolicyness + 1) * rollout.consumer_batch_size
        if rollout.max_concurrent > useful:
            found.append(
                f"rollout.max_concurrent_rollouts ({rollout.max_concurrent}) is above "
                f"(S + 1) * B = {useful}: the staleness gate binds first, the rest has no effect"
            )
        if rollout.max_head_offpolicyness > 0 and rollout.max_concurrent_rollouts is None:
            found.append(
                "rollout.max_concurrent_rollouts is unset, so one batch "
                f"({rollout.consumer_batch_size} samples) is in flight at most: set it up to "
                f"{useful} to use max_head_offpolicyness = {rollout.max_head_offpolicyness}"
            )
        if not self.actor.use_decoupled_loss and rollout.max_head_offpolicyness > 1:
            found.append(
                "actor.use_decoupled_loss is off with max_head_offpolicyness > 1: nothing corrects "
                "for the policy that sampled the data"
            )
        if self.run.stall_seconds < rollout.deadline_seconds:
            found.append(
                f"run.stall_seconds ({self.run.stall_seconds:g}) is below rollout.deadline_seconds "
                f"({rollout.deadline_seconds:g}): one slow rollout can end the run as stalled"
            )
        if self.actor.optimizer.warmup_steps >= self.run.steps:
            found.append(
                f"actor.optimizer.warmup_steps ({self.actor.optimizer.warmup_steps}) is not below "
                f"run.steps ({self.run.steps}): the learning rate never reaches lr"
            )
        return found
