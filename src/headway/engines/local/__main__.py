"""`python -m headway.engines.local`: the embedded engine as a process.

Exit codes: 0 after SIGTERM or SIGINT, 1 when generation keeps failing, 2 when it cannot start
(port in use, no such model, sizes that do not fit). GPU is written for but untested.
"""

import argparse
import asyncio
import logging
import os
import signal
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from headway.sockets import bound_socket

logger = logging.getLogger("headway.engines.local")

EXIT_FAILED = 1
EXIT_CANNOT_START = 2


class CannotStart(Exception):
    """What is wrong, and what to do."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse, bind, load, serve. Returns the exit code."""
    options = _parse(arguments)
    logging.basicConfig(
        level=options.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    # Before torch is imported: the generation thread would take every core otherwise, since
    # torch.set_num_threads holds for the calling thread only.
    for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[variable] = str(options.num_threads)
    try:
        # Bound first, in the second before torch is there: a port in use should not cost a load.
        with _bind(options.host, options.port) as listener:
            model = _load_model(options)
            return asyncio.run(_run(options, model, listener))
    except CannotStart as error:
        logger.error("cannot start: %s", error)
        return EXIT_CANNOT_START


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m headway.engines.local", description="The embedded inference engine."
    )
    add = parser.add_argument
    add("--model", required=True, help="Hugging Face folder of a causal language model")
    add("--host", default="127.0.0.1")
    add("--port", type=int, default=8000, help="0: any free one, named in the log")
    add("--served-model-name", default="policy")
    add("--dtype", default="float32", choices=["float32", "bfloat16", "float16"])
    add("--device", default="auto", help="auto: cuda when there is one (untested), otherwise cpu")
    add("--num-threads", type=_positive, default=1, help="CPU threads of the forward pass")
    add("--num-blocks", type=_positive, default=512, help="key/value cache blocks")
    add("--page-size", type=_positive, default=16, help="tokens per block, at least 4")
    add("--max-batch-tokens", type=_positive, default=1024, help="tokens per forward pass")
    add("--max-model-len", type=_positive, default=1024, help="longest prompt plus completion")
    add("--weight-version", default="0", help="label of the weights in --model")
    add("--seed", type=int, default=None, help="of the sampling; default: a random one")
    add(
        "--logprobs-mode",
        default="raw_logprobs",
        choices=["raw_logprobs", "processed_logprobs"],
        help="log-probabilities before or after temperature",
    )
    add("--log-level", default="info", choices=["debug", "info", "warning", "error"])
    return parser.parse_args(arguments)


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} must be at least 1")
    return value


def _bind(host: str, port: int) -> socket.socket:
    try:
        return bound_socket(host, port)
    except socket.gaierror as error:
        raise CannotStart(f"host {host!r}: {error}") from error
    except OSError as error:
        raise CannotStart(
            f"port {port} of {host} cannot be used: {error.strerror}; choose another "
            "--port (engine.port in a run)"
        ) from error


def _load_model(options: argparse.Namespace) -> Any:
    folder = Path(options.model)
    if not (folder / "config.json").is_file():
        raise CannotStart(
            f"--model {folder} is not a Hugging Face model folder (it has no config.json)"
        )
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging as transformers_logging

    # The end of the log is what a dead engine leaves behind: nothing in it but news.
    transformers_logging.disable_progress_bar()
    logging.getLogger("ContinuousBatchingLogger").setLevel(logging.WARNING)
    torch.set_num_threads(options.num_threads)
    device = options.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        model, report = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=getattr(torch, options.dtype),
            local_files_only=True,
            output_loading_info=True,
        )
    except Exception as error:  # every architecture has its own ways to refuse a folder
        raise CannotStart(f"--model {folder} cannot be loaded: {error}") from error
    try:
        model = model.to(device).eval().requires_grad_(False)
    except (RuntimeError, AssertionError) as error:
        raise CannotStart(
            f"--device {device} cannot be used (engine.device in a run): {error}"
        ) from error
    if missing := sorted(report["missing_keys"]):
        raise CannotStart(f"--model {folder} lacks the tensors {', '.join(missing[:5])}")
    return model


async def _run(options: argparse.Namespace, model: Any, listener: socket.socket) -> int:
    from headway.engines.local.batching import BatchingSettings
    from headway.engines.local.server import Server, serve
    from headway.engines.local.service import LocalService

    loop = asyncio.get_running_loop()
    stop: asyncio.Future[int] = loop.create_future()

    def end(code: int, reason: str) -> None:
        logger.log(logging.ERROR if code else logging.INFO, "ending: %s", reason)
        if not stop.done():
            stop.set_result(code)

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, end, 0, number.name)
    try:
        service = LocalService(
            model,
            BatchingSettings(
                num_blocks=options.num_blocks,
                page_size=options.page_size,
                max_batch_tokens=options.max_batch_tokens,
                seed=options.seed,
                processed_logprobs=options.logprobs_mode == "processed_logprobs",
            ),
            version=options.weight_version,
            on_fatal=lambda reason: end(EXIT_FAILED, reason),
        )
    except (ValueError, MemoryError, RuntimeError) as error:
        raise CannotStart(f"continuous batching of this model: {error}") from error
    try:
        limits = _limits(options, model, service.max_request_tokens)
        return await serve(Server(service, limits), listener, stop, name=str(options.model))
    finally:
        await service.aclose()


def _limits(options: argparse.Namespace, model: Any, max_request_tokens: int) -> Any:
    from headway.engines.local.server import Limits

    if max_request_tokens < options.max_model_len:
        raise CannotStart(
            f"--num-blocks {options.num_blocks} of --page-size {options.page_size} hold a sequence "
            f"of {max_request_tokens} tokens, fewer than --max-model-len {options.max_model_len}: "
            "raise the former or lower the latter"
        )
    config = model.config.get_text_config()
    max_model_len = options.max_model_len
    positions = getattr(config, "max_position_embeddings", None)
    if positions is not None and positions < max_model_len:
        logger.warning(
            "--max-model-len %d is cut to the model's own limit of %d", max_model_len, positions
        )
        max_model_len = positions
    eos = model.generation_config.eos_token_id
    return Limits(
        model_name=options.served_model_name,
        vocabulary_size=config.vocab_size,
        max_model_len=max_model_len,
        eos_token_ids=frozenset([eos] if isinstance(eos, int) else eos or ()),
    )


if __name__ == "__main__":
    code = main()
    logging.shutdown()
    # A forward pass in flight must not hold up the end of the process.
    sys.stdout.flush()
    os._exit(code)
