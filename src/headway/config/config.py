"""All sections but the larger ones, and `Config`, which checks them against each other."""

from collections.abc import Iterable
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from headway.config.base import Count, Device, ImpossibleError, Seconds, Section
from headway.config.engine import EngineConfig
from headway.config.liveness import LivenessConfig
from headway.config.rollout import PRESETS, RolloutConfig
from headway.config.simulate import SimulateConfig
from headway.config.store import StoreConfig
from headway.core.advantages import Baseline
from headway.core.bound import Bound, OverBound
from headway.core.gate import CapacityGate
from headway.core.order import Order

BUILTIN_MODEL = "builtin:arithmetic"
"""The small character-level model that is built and warm-started at first use."""


class RunConfig(Section):
    """The run as a whole."""

    dir: str = "runs/run"
    """Run directory; it must not hold a run yet, unless that is resumed."""
    resume: bool = False
    """Go on with the run that `run.dir` holds, if it holds one: for jobs that are started again."""
    steps: Count = 100
    """Step target: batches to train."""
    seed: int = Field(default=0, ge=0)
    """Of everything random: tasks, sampling order, warm start."""
    max_empty_batches: Count = 3
    """Consecutive batches' worth of samples with nothing trainable that end the run."""
    shutdown_seconds: Seconds = 20.0
    """Window for what is in flight when a run is stopped; the trainer has as long to save after
    that, and all processes together as long to end."""
    max_seconds: Seconds | None = None
    """Deadline of this process, start-up included, such as a job's time limit: the run drains
    `shutdown_seconds` before it and ends as `preempted` (exit code 75), to be resumed."""
    preempt_signal: Literal["SIGUSR1", "SIGUSR2", "SIGHUP", "SIGTERM", "SIGINT"] = "SIGUSR1"
    """Says that the machine will be taken away: the run drains and ends as `preempted` (exit code
    75), to be resumed. For SLURM: `--signal=B:USR1@120`."""
    start_seconds: Seconds = 300.0
    """Deadline for engines and trainer to become ready."""
    stall_seconds: Seconds = 600.0
    """No sample finished, no batch shipped and no version published for this long, and no part that
    has a limit of its own (section `liveness`) accounts for it: as `liveness.on_stall` says."""
    metrics_interval_seconds: Seconds = 1.0
    """Between two `interval` rows of metrics.jsonl; unset, `headway simulate` writes one a virtual
    minute."""


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
    keep_checkpoints: Count = 2
    """Checkpoints kept: the newest, and others should its disk go bad."""

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
    over_bound: OverBound | None = None
    """For its samples, instead of `rollout.over_bound`."""
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


class WeightsConfig(Section):
    """Publication of new versions."""

    keep_last: int = Field(default=4, ge=3)
    """Versions kept on disk."""
    poll_seconds: Seconds = 0.02
    """How often the watcher looks for a new version."""


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
    store: StoreConfig = StoreConfig()
    liveness: LivenessConfig = LivenessConfig()
    simulate: SimulateConfig = SimulateConfig()

    def without_limits(self) -> Self:
        """The same with nobody watching the progress: for times that are recorded or made up."""
        run = self.run.model_copy(update={"stall_seconds": 1e9})
        return self.model_copy(update={"run": run, "liveness": LivenessConfig.unlimited()})

    @property
    def bound(self) -> Bound:
        """The staleness policy."""
        rollout = self.rollout
        return Bound(
            max_age=rollout.max_head_offpolicyness,
            batch_size=rollout.consumer_batch_size,
            enforcement=rollout.enforcement,
            order=rollout.order,
            window=rollout.window,
            over_bound=rollout.over_bound,
            by_env={env.label: env.over_bound for env in self.envs if env.over_bound},
            envs=tuple(env.label for env in self.envs),
            wait_seconds=rollout.wait_seconds,
            after_wait=rollout.after_wait,
        )

    @property
    def gate(self) -> CapacityGate:
        """The limits of admission."""
        rollout = self.rollout
        bounded = rollout.enforcement.bounds_admission
        return CapacityGate(
            max_head_offpolicyness=rollout.max_head_offpolicyness if bounded else None,
            batch_size=rollout.consumer_batch_size,
            max_concurrent=rollout.max_concurrent,
            target_samples=self.run.steps * rollout.consumer_batch_size,
            spare_samples=rollout.consumer_batch_size,
        )

    @property
    def batches_ahead(self) -> int:
        """Of `rollout.max_batches_ahead`, what has an effect: a batch more than `S` versions ahead
        could hold nothing that is young enough."""
        return min(self.rollout.max_batches_ahead, self.rollout.max_head_offpolicyness)

    @property
    def max_unserved(self) -> int:
        """Versions that may be announced and not served yet, so that the trainer, which has batches
        for that many and `batches_ahead`, never deletes the one that engines are loading."""
        return self.weights.keep_last - 2 - max(self.batches_ahead - 1, 0)

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
        bound = self.bound
        for name, reason in bound.problems():
            yield f"rollout.{name}", reason
        for name, reason in self.simulate.unknown_envs(bound.envs):
            yield f"simulate.{name}", reason
        if not engine.stamps_tokens and bound.trims:
            yield (
                "rollout.over_bound",
                "trim needs the version of every token, and engine.stamps_tokens is off: use an "
                "engine that stamps tokens, or drop, wait or admit",
            )
        if bound.holds and rollout.queue_size < bound.admission_limit:
            yield (
                "rollout.queue_size",
                f"{rollout.queue_size} is below (S + 1) * B = {bound.admission_limit}: with "
                "over_bound: wait or order: window, the samples that a batch is held for could "
                "not get past the others",
            )
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
        num_rollouts = rollout.consumer_batch_size * rollout.group_size
        if actor.ppo_n_minibatches > num_rollouts:
            yield (
                "actor.ppo_n_minibatches",
                f"{actor.ppo_n_minibatches} minibatches cannot be made of the {num_rollouts} "
                "rollouts of a batch (consumer_batch_size * group_size)",
            )
        if self.max_unserved < 1:
            yield (
                "rollout.max_batches_ahead",
                f"{self.batches_ahead} batches ahead with weights.keep_last = "
                f"{self.weights.keep_last}: the trainer would delete a version that engines are "
                f"loading; raise keep_last to {self.batches_ahead + 2}",
            )

    @property
    def warnings(self) -> list[str]:
        """Settings that have no effect, or not the one that their name promises."""
        found = [*self.engine.warnings]
        rollout = self.rollout
        useful = (rollout.max_head_offpolicyness + 1) * rollout.consumer_batch_size
        if rollout.max_concurrent > useful and rollout.enforcement.bounds_admission:
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
        bound = self.bound
        if rollout.window is not None and bound.order is not Order.WINDOW:
            found.append(f"rollout.window has no effect with order: {bound.order}")
        if rollout.wait_seconds is not None and not bound.waits:
            found.append("rollout.wait_seconds has no effect: no environment has over_bound: wait")
        given = rollout.model_fields_set
        policy = {name: getattr(rollout, name) for name in PRESETS[rollout.preset]}
        if {"preset", *policy} <= given and policy != PRESETS[rollout.preset]:
            found.append(f"rollout.preset has no effect: {', '.join(policy)} are all given")
        if rollout.after_wait is not OverBound.TRIM and rollout.wait_seconds is None:
            found.append("rollout.after_wait has no effect without rollout.wait_seconds")
        if rollout.max_batches_ahead > bound.max_age:
            found.append(
                f"rollout.max_batches_ahead ({rollout.max_batches_ahead}) acts as S = "
                f"{bound.max_age}: a batch further ahead could hold nothing young enough"
            )
        if not self.actor.use_decoupled_loss and rollout.max_head_offpolicyness > 1:
            found.append(
                "actor.use_decoupled_loss is off with max_head_offpolicyness > 1: nothing corrects "
                "for the policy that sampled the data"
            )
        shutdown = self.run.shutdown_seconds
        if self.run.max_seconds is not None and self.run.max_seconds <= shutdown:
            found.append(
                f"run.max_seconds ({self.run.max_seconds:g}) is not above run.shutdown_seconds "
                f"({shutdown:g}): the run stops as soon as it has started"
            )
        if self.store.keep_batches is not None and not self.actor.checkpoint_every:
            found.append(
                "store.keep_batches has no effect with actor.checkpoint_every: 0: without a "
                "checkpoint a resume needs every batch"
            )
        if self.liveness.eval_seconds < rollout.deadline_seconds and self.eval.every:
            found.append(
                f"liveness.eval_seconds ({self.liveness.eval_seconds:g}) is below "
                f"rollout.deadline_seconds ({rollout.deadline_seconds:g}): one slow rollout can "
                "count as a stall"
            )
        if self.actor.optimizer.warmup_steps >= self.run.steps:
            found.append(
                f"actor.optimizer.warmup_steps ({self.actor.optimizer.warmup_steps}) is not below "
                f"run.steps ({self.run.steps}): the learning rate never reaches lr"
            )
        return found
