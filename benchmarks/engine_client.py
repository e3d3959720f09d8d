"""CPU time of the engine clients per request, at many requests in flight.

A server process of a few lines answers every request with 2 KB after a fixed latency; the client
runs in a process of its own, through the pool as in a run, so that what is measured is Headway's
CPU time alone: routing, JSON both ways, HTTP, checks of tokens, log-probabilities and stamps.

    python -m benchmarks.engine_client [--json]
"""

import asyncio
import json
import os
import resource
import subprocess
import sys
import time
from typing import Any

from headway.collector import tame_collector
from headway.core.rollout import FinishReason
from headway.engines.contract import Contract
from headway.engines.pool import EnginePool
from headway.engines.server_engine import ServerEngine
from headway.engines.sglang import SglangEngine
from headway.engines.vllm import VllmEngine
from headway.ports import GenerateRequest

CLIENTS: dict[str, type[ServerEngine]] = {"vllm": VllmEngine, "sglang": SglangEngine}
IN_FLIGHT = (512, 2048)
LATENCY_SECONDS = 0.2
PROMPT_TOKENS = 64
ANSWER_BYTES = 2048
REQUIRED_MS = 0.35
"""At 512 in flight."""
_NUM_REQUESTS = 8192
_VOCABULARY = 50_000


def answer(kind: str) -> bytes:
    """An answer of about `ANSWER_BYTES` in the server's own shape."""

    def of(num_tokens: int) -> bytes:
        tokens = [1000 + 37 * i for i in range(num_tokens)]
        spans = [{"version": "0", "start": 0, "end": num_tokens}]
        if kind == "sglang":
            meta = {
                "id": "t000000001-0000-00-0000-000",
                "finish_reason": {"type": "length", "length": num_tokens},
                "output_token_logprobs": [[-1.2345678901, token, None] for token in tokens],
                "weight_versions": spans,
            }
            return json.dumps({"text": "", "output_ids": tokens, "meta_info": meta}).encode()
        content = [{"token_id": t, "logprob": -1.2345678901, "rank": 1} for t in tokens]
        choice = {
            "index": 0,
            "token_ids": tokens,
            "finish_reason": "length",
            "logprobs": {"content": content},
            "weight_versions": spans,
        }
        return json.dumps({"request_id": "t000000001", "choices": [choice]}).encode()

    num_tokens = 1
    while len(of(num_tokens + 1)) <= ANSWER_BYTES:
        num_tokens += 1
    return of(num_tokens)


class _Server(asyncio.Protocol):
    """HTTP/1.1 with keep-alive, as little of it as will do."""

    response = b""

    def __init__(self) -> None:
        self._buffer = b""
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        head, separator, rest = self._buffer.partition(b"\r\n\r\n")
        if not separator:
            return
        length = int(head.lower().partition(b"content-length:")[2].split(b"\r\n")[0])
        if len(rest) >= length:
            self._buffer = b""
            asyncio.get_running_loop().call_later(LATENCY_SECONDS, self._answer)

    def _answer(self) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(self.response)


async def _serve(kind: str) -> None:
    body = answer(kind)
    head = f"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
    _Server.response = head.encode() + b"\r\n" + body
    loop = asyncio.get_running_loop()
    server = await loop.create_server(_Server, "127.0.0.1", 0, backlog=4096)
    print(server.sockets[0].getsockname()[1], flush=True)
    parent = os.getppid()
    while os.getppid() == parent:  # noqa: ASYNC110 - ends with the benchmark, however that ends
        await asyncio.sleep(0.5)


async def _measure(kind: str, port: int, in_flight: int) -> dict[str, Any]:
    tame_collector()
    engine = CLIENTS[kind](
        name="engine-0",
        url=f"http://127.0.0.1:{port}",
        version=0,
        contract=Contract(vocabulary_size=_VOCABULARY),
    )
    pool = EnginePool([engine], update_seconds=10)
    prompt = list(range(PROMPT_TOKENS))
    num_requests = max(_NUM_REQUESTS, 4 * in_flight)
    number = 0
    num_tokens = 0

    async def worker(until: int) -> None:
        nonlocal number, num_tokens
        while number < until:
            number += 1
            completion = await pool.generate(
                GenerateRequest(
                    request_id=f"t{number:09d}-0000-00-0000", token_ids=prompt, max_tokens=1000
                )
            )
            assert completion.finish_reason is FinishReason.LENGTH
            num_tokens = len(completion.token_ids)

    async def run(until: int) -> None:
        async with asyncio.TaskGroup() as group:
            for _ in range(in_flight):
                group.create_task(worker(until))

    await run(in_flight)  # connections are made
    started, started_at = time.process_time(), time.monotonic()
    before = number
    await run(before + num_requests)
    seconds, wall = time.process_time() - started, time.monotonic() - started_at
    done = number - before
    await pool.aclose()
    return {
        "client": kind,
        "in_flight": in_flight,
        "requests": done,
        "cpu_ms_per_request": seconds / done * 1e3,
        "requests_per_second": done / wall,
        "tokens_per_answer": num_tokens,
        "peak_memory_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }


def _one(kind: str, in_flight: int) -> dict[str, Any]:
    """A server process, and a client process against it."""
    command = [sys.executable, "-m", "benchmarks.engine_client"]
    server = subprocess.Popen([*command, "--serve", kind], stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        port = server.stdout.readline().strip()
        client = [*command, "--client", kind, port, str(in_flight)]
        output = subprocess.run(client, check=True, capture_output=True, timeout=120).stdout
        row: dict[str, Any] = json.loads(output)
        return row
    finally:
        server.kill()
        server.wait()


def main() -> None:
    """Print a table, or JSON."""
    # Every request in flight is a connection.
    _, limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
    match sys.argv[1:]:
        case ["--serve", kind]:
            asyncio.run(_serve(kind))
            return
        case ["--client", kind, port, in_flight]:
            print(json.dumps(asyncio.run(_measure(kind, int(port), int(in_flight)))))
            return
    rows = [_one(kind, in_flight) for kind in CLIENTS for in_flight in IN_FLIGHT]
    if "--json" in sys.argv:
        print(json.dumps(rows))
        return
    print(f"Engine clients, answers of {ANSWER_BYTES} bytes after {LATENCY_SECONDS:g} s")
    print(
        f"{'client':>8} {'in flight':>10} {'CPU ms/request':>15} {'requests/s':>11} "
        f"{'peak memory MB':>15} {'requests':>9}"
    )
    for row in rows:
        print(
            f"{row['client']:>8} {row['in_flight']:>10,} {row['cpu_ms_per_request']:>15.3f} "
            f"{row['requests_per_second']:>11,.0f} {row['peak_memory_mb']:>15.0f} "
            f"{row['requests']:>9,}"
        )
    worst = max(row["cpu_ms_per_request"] for row in rows if row["in_flight"] == IN_FLIGHT[0])
    verdict = "within" if worst <= REQUIRED_MS else "OVER"
    print(f"at {IN_FLIGHT[0]} in flight: {worst:.3f} ms, {verdict} the required {REQUIRED_MS} ms")


if __name__ == "__main__":
    main()
