"""The configuration: one frozen pydantic model per section, the important fields first.

Names are the field's own (AReaL's block `rollout:` / `actor:` loads as it is). `file.py` reads a
file and `--dotted.override` values, `problems.py` turns what is wrong into a message with file,
key, reason and "did you mean", `reference.py` writes docs/configuration.md; the other modules only
say what a configuration may be.
"""

from headway.config.base import ImpossibleError, Section
from headway.config.config import (
    BUILTIN_MODEL,
    ActorConfig,
    Config,
    EnvironmentConfig,
    EvalConfig,
    ModelConfig,
    OptimizerConfig,
    RunConfig,
    WeightsConfig,
)
from headway.config.engine import EngineConfig, UpdateMode
from headway.config.liveness import LivenessConfig, OnStall
from headway.config.rollout import PRESETS, Preset, RolloutConfig
from headway.config.simulate import DistributionConfig, SimulateConfig
from headway.config.store import StoreConfig

__all__ = [
    "BUILTIN_MODEL",
    "PRESETS",
    "ActorConfig",
    "Config",
    "DistributionConfig",
    "EngineConfig",
    "EnvironmentConfig",
    "EvalConfig",
    "ImpossibleError",
    "LivenessConfig",
    "ModelConfig",
    "OnStall",
    "OptimizerConfig",
    "Preset",
    "RolloutConfig",
    "RunConfig",
    "Section",
    "SimulateConfig",
    "StoreConfig",
    "UpdateMode",
    "WeightsConfig",
]
