"""Command lines and environments of engine processes.

What Headway needs of a server is always passed; `engine.args` comes last and so has the last word.
docs/engines.md says why each flag is there.
"""

import sys
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

from headway.config import EngineConfig
from headway.errors import EngineError

Options = Mapping[str, object]
"""Flags by name without dashes; True: the flag alone; None: left out."""

_GPU_DEVICES = ("/dev/nvidiactl", "/dev/kfd")


def engine_command(
    config: EngineConfig, *, model_dir: Path, port: int, version: int = 0, seed: int | None = None
) -> list[str]:
    """Command line of one engine that serves the weights in `model_dir` as `version`."""
    python = config.python or sys.executable
    match config.kind:
        case "local":
            program = [python, "-m", "headway.engines.local"]
            options = _local(config, model_dir, version, seed)
        case "vllm":
            program = [python, "-m", "vllm.entrypoints.openai.api_server"]
            options = _vllm(config, model_dir, seed)
        case "sglang":
            program = [python, "-m", "sglang.launch_server"]
            options = _sglang(config, model_dir, version, seed)
    command = [*config.command] or program
    for name, value in {"host": config.host, "port": port, **options}.items():
        if value is True:
            command.append(f"--{name}")
        elif value is not None:
            command += [f"--{name}", str(value)]
    return [*command, *config.args]


def check_installed(config: EngineConfig) -> None:
    """Raises EngineError when the server would be started with this interpreter and is not there;
    what another one has, only starting it tells."""
    if config.python or config.command or find_spec(config.kind) or config.kind == "local":
        return
    raise EngineError(
        f"{config.kind} is not installed beside Headway: set engine.python to the interpreter of "
        "the environment that has it, or engine.command"
    )


def engine_environment(config: EngineConfig, index: int) -> dict[str, str]:
    """What is added to the environment of engine `index`, from 0."""
    found: dict[str, str] = {}
    if config.gpus_per_engine:
        first = index * config.gpus_per_engine
        devices = range(first, first + config.gpus_per_engine)
        found["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, devices))
    if config.kind != "local":
        # The model is a folder: nothing is to be looked up, and a look-up without a network takes
        # minutes to fail.
        found["HF_HUB_OFFLINE"] = "1"
        if on_cpu(config):
            # More threads than cores spin at barriers: twenty times slower with two servers on two.
            found["OMP_NUM_THREADS"] = str(config.num_threads)
    if config.kind == "vllm":
        found |= {
            "VLLM_SERVER_DEV_MODE": "1",  # /pause, /resume, /collective_rpc and the label
            "VLLM_NO_USAGE_STATS": "1",
        }
        if on_cpu(config):
            found |= {
                "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB; its default is a share of the machine
                "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # else every server takes the first core
            }
    return found | config.env


def on_cpu(config: EngineConfig) -> bool:
    """Whether engines run on the CPU; with `device: auto`, whether there is no GPU."""
    if config.device != "auto" or config.gpus_per_engine:
        return config.device == "cpu"
    return not any(Path(device).exists() for device in _GPU_DEVICES)


def _local(config: EngineConfig, model_dir: Path, version: int, seed: int | None) -> Options:
    return {
        "model": model_dir.resolve(),
        "served-model-name": config.model_name,
        "dtype": config.dtype,
        "device": config.device,
        "num-threads": config.num_threads,
        "num-blocks": config.num_blocks,
        "page-size": config.page_size,
        "max-batch-tokens": config.max_batch_tokens,
        "max-model-len": config.max_model_len,
        "weight-version": version,
        "logprobs-mode": "processed_logprobs",  # of what was sampled from, as the trainer does
        "seed": seed,
    }


def _vllm(config: EngineConfig, model_dir: Path, seed: int | None) -> Options:
    return {
        "model": model_dir.resolve(),
        "served-model-name": config.model_name,
        "dtype": config.dtype,
        "max-model-len": config.max_model_len,
        "enable-scale-out": True,  # /inference/v1/generate: token ids and version spans
        "logprobs-mode": "processed_logprobs",
        "seed": seed,
        "tensor-parallel-size": _gpus_to_split_over(config),
        "enforce-eager": True if on_cpu(config) else None,  # compiling costs minutes there
    }


def _sglang(config: EngineConfig, model_dir: Path, version: int, seed: int | None) -> Options:
    cpu: Options = {
        "device": "cpu",
        "attention-backend": "torch_native",
        "sampling-backend": "pytorch",
        "disable-cuda-graph": True,
        "sleep-on-idle": True,  # its scheduler spins otherwise, and takes a core from the others
    }
    return {
        "model-path": model_dir.resolve(),
        "served-model-name": config.model_name,
        "weight-version": version,
        "dtype": config.dtype,
        "context-length": config.max_model_len,
        "enable-metrics": True,
        "random-seed": seed,
        "tp-size": _gpus_to_split_over(config),
        **(cpu if on_cpu(config) else {}),
    }


def _gpus_to_split_over(config: EngineConfig) -> int | None:
    return config.gpus_per_engine if config.gpus_per_engine > 1 else None
