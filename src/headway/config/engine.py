"""Section `engine`: the inference engines."""

from collections.abc import Iterable
from enum import StrEnum
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from headway.config.base import Count, Device, ImpossibleError, Seconds, Section

Url = Annotated[str, Field(pattern=r"^https?://[^\s/]+(/[^\s]*)?$")]


class UpdateMode(StrEnum):
    """What happens to running requests when the weights change (docs/glossary.md)."""

    KEEP = "keep"
    INTERRUPT = "interrupt"
    FINISH = "finish"


class EngineConfig(Section):
    """The inference engines."""

    kind: Literal["local", "vllm", "sglang"] = "local"
    """`local`: the embedded engine; `vllm`, `sglang`: servers of these (docs/engines.md)."""
    count: Count = 1
    """Engines that the run starts, and stops at its end; one process each on this machine."""
    urls: tuple[Url, ...] = ()
    """Running servers, such as `http://10.0.0.5:8000`, to connect to instead of starting `count`.
    They are never stopped, and must see the folder of the weights under the same path."""
    model_name: str = "policy"
    """The name that the engines serve the policy by."""
    update_mode: UpdateMode = UpdateMode.KEEP
    """What happens to running requests when the weights change: `keep` them (they go on under the
    new weights), `interrupt` and resubmit them, or let them `finish` first."""
    clear_cache: bool = True
    """In mode keep: running requests compute their keys and values again under the new weights.
    Off, an update costs nothing, and they go on with those of the old weights."""
    stamps_tokens: bool = True
    """Whether the engines report the version of every token. Off: a completion bears the version
    at which it was asked for, and `over_bound: trim` is refused."""
    python: str = ""
    """Interpreter of the environment that the engine is installed in; empty: Headway's own."""
    command: tuple[str, ...] = ()
    """Starts an engine instead of `python -m ...`; the flags are appended."""
    args: tuple[str, ...] = ()
    """More flags, after Headway's own: of a flag given twice, engines take the last."""
    env: dict[str, str] = Field(default_factory=dict)
    """Added to the environment of the engine processes."""
    gpus_per_engine: int = Field(default=0, ge=0)
    """GPUs of each engine: engine i sees those from `i * gpus_per_engine` on, and splits the model
    over them; 0: `CUDA_VISIBLE_DEVICES` is left as it is."""
    restarts: int = Field(default=2, ge=0)
    """How often each engine process that died is started again while others live. The run ends
    when the last one dies."""
    host: str = "127.0.0.1"
    """Where the engines listen."""
    port: int = Field(default=0, ge=0, le=65535)
    """Port of the first engine, the next ones follow; 0: free ports."""
    device: Device = "auto"
    """A PyTorch device; `auto`: a GPU if there is one."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Of the weights while sampling. A server of `urls` that computes in another is an event."""
    num_threads: Count = 1
    """CPU threads of each engine process."""
    num_blocks: Count = 512
    """Key/value cache blocks of `page_size` tokens (kind local; vLLM and SGLang size their own)."""
    page_size: Count = 16
    """Tokens per cache block (kind local)."""
    max_batch_tokens: Count = 1024
    """Tokens per forward pass (kind local)."""
    max_model_len: Count = 1024
    """Longest prompt plus completion."""
    update_seconds: Seconds = 60.0
    """Deadline for one engine to load one version."""
    check_weights: Literal["full", "shapes", "off"] = "full"
    """What is checked of a published version before an engine is told of it: `full` reads every
    byte (checksums, finite values; seconds per GB), `shapes` names, shapes and dtypes only."""
    canary: Literal["off", "warn", "stop"] = "stop"
    """Check at the start and after every update that each engine answers like the trainer's
    weights: `warn` is an event, `stop` ends the run (docs/engines.md)."""
    canary_tolerance: float = Field(default=0.1, gt=0)
    """Largest difference of a log-probability, in nats, that the canary lets pass: 0.02 is ample
    when engine and trainer both compute in float32, 0.2 is usual for bfloat16."""
    health_seconds: Seconds = 2.0
    """Between two health checks of an engine; one that fails its checks takes no requests."""
    health_deadline_seconds: Seconds = 10.0
    """How long a health check may take; an engine that takes longer is out."""
    live_seconds: Seconds = 120.0
    """How long requests wait while no engine is live, before they fail."""
    slow_start_seconds: float = Field(default=5.0, ge=0)
    """An engine that (re)joins gets its full share of requests after this long."""
    max_retries: int = Field(default=2, ge=0)
    """How often a request that an engine broke off is sent to another one."""

    @property
    def warnings(self) -> Iterable[str]:
        """Settings that have no effect."""
        # The configuration that a run wrote down gives every field.
        fields = type(self).model_fields
        defaults = {
            name: one.get_default(call_default_factory=True) for name, one in fields.items()
        }
        given = {name for name in self.model_fields_set if getattr(self, name) != defaults[name]}
        if self.urls:
            started = ("count", "python", "command", "args", "env", "gpus_per_engine", "restarts")
            for name in sorted({*started, "host", "port", "num_threads"} & given):
                yield f"engine.{name} has no effect with engine.urls: the servers run already"
        if self.command and self.python:
            yield "engine.python has no effect with engine.command"
        if self.kind != "local":
            for name in sorted({"num_blocks", "page_size", "max_batch_tokens"} & given):
                yield f"engine.{name} has no effect with kind: {self.kind} (use engine.args)"
        if not self.clear_cache and self.update_mode is not UpdateMode.KEEP:
            yield f"engine.clear_cache has no effect with update_mode: {self.update_mode}"

    @model_validator(mode="after")
    def _possible(self) -> Self:
        if problems := list(self._contradictions()):
            raise ImpossibleError(problems)
        return self

    def _contradictions(self) -> Iterable[tuple[str, str]]:
        if twice := sorted({url for url in self.urls if self.urls.count(url) > 1}):
            yield "urls", f"{twice[0]} is given twice; every server once"
        if self.gpus_per_engine and not (self.device == "auto" or self.device.startswith("cuda")):
            yield (
                "gpus_per_engine",
                f"engines with GPUs of their own cannot run on device: {self.device}; leave "
                "gpus_per_engine at 0, or set device: cuda",
            )
        if self.gpus_per_engine > 1 and self.kind == "local":
            yield (
                "gpus_per_engine",
                "the embedded engine uses one GPU; set 1, or use kind: vllm or sglang",
            )
        if self.kind == "local" and self.num_blocks * self.page_size < self.max_model_len:
            yield (
                "num_blocks",
                f"{self.num_blocks} blocks of {self.page_size} tokens hold "
                f"{self.num_blocks * self.page_size}, less than a sequence of max_model_len "
                f"({self.max_model_len}): it would wait for ever; raise num_blocks",
            )
        if self.port and self.port + self.count - 1 > 65535:
            yield (
                "port",
                f"{self.count} engines from port {self.port} on pass 65535; lower the port",
            )
