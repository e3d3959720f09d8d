"""Whole runs on two real servers in every update mode: the policy learns, every number is right."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from runs import STEPS, TOLERANCE, Run, check_conserved, check_log_probabilities
from servers import KIND, MODEL, Servers
from transformers import Qwen3ForCausalLM

from headway.config import UpdateMode
from headway.ports import PublishedWeights
from headway.weights.folder import publish


def reset(servers: Servers, initial: Path) -> None:
    """Make the servers what a new run expects: the initial model, labelled 0."""

    async def scenario() -> None:
        for index in range(len(servers.fleet.urls)):
            client = await servers.client(index, UpdateMode.KEEP, clear_cache=True)
            await client.update_weights(PublishedWeights(version=0, path=initial))
            await client.aclose()

    servers.run(scenario())


@pytest.fixture(scope="module")
def initial(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The initial model as it would be published."""
    model = Qwen3ForCausalLM.from_pretrained(MODEL)
    path = publish(tmp_path_factory.mktemp("initial"), 1, model, source=MODEL).path
    assert path is not None
    return path


@pytest.mark.parametrize("mode", ["keep", "interrupt", "finish"])
def test_a_run_on_running_servers_learns(
    servers: Servers, start: Callable[..., Run], mode: str, initial: Path
) -> None:
    reset(servers, initial)
    run = start({"kind": KIND, "urls": servers.fleet.urls, "update_mode": mode})
    summary = run.end()
    rewards = [row["reward_mean"] for row in run.rows("step")]
    assert len(rewards) == STEPS
    first, last = np.mean(rewards[:6]), np.mean(rewards[-6:])
    num_tokens, num_spanning, worst = check_log_probabilities(run, STEPS)
    print(
        f"{KIND}, {mode}: reward {first:.2f} -> {last:.2f} in {summary['loop_seconds']:.0f} s; "
        f"{num_tokens} tokens, {num_spanning} rollouts span versions, largest difference "
        f"{worst:.1e} nats, age {summary['age']}"
    )
    assert last > first + 0.1
    assert worst < TOLERANCE
    check_conserved(run, summary, STEPS)
    assert all(process.returncode is None for process in servers.fleet.processes)
