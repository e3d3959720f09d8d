"""The embedded engine's inside, in this process: a full cache, a generation thread that dies."""

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import MixtralConfig, MixtralForCausalLM

from headway.core.rollout import FinishReason
from headway.core.versions import VersionRuns
from headway.engines.local.batching import BatchingSettings
from headway.engines.local.checkpoint import CheckpointError, apply_checkpoint, read_checkpoint
from headway.engines.local.sampling import Sampler
from headway.engines.local.service import Answer, LocalService, PauseMode, Prompt, ServiceError
from recompute import TOLERANCE, VOCABULARY, random_model, recompute_plain, save

torch.set_num_threads(1)
Scenario = Callable[[LocalService, list[str]], Awaitable[None]]


def run(model: Any, scenario: Scenario, *, num_blocks: int = 256) -> None:
    async def main() -> None:
        fatal: list[str] = []
        service = LocalService(
            model,
            BatchingSettings(num_blocks=num_blocks, page_size=16, max_batch_tokens=256, seed=1),
            version="0",
            on_fatal=fatal.append,
        )
        try:
            async with asyncio.timeout(60):
                await scenario(service, fatal)
        finally:
            await service.aclose()

    asyncio.run(main())


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110 - another thread sets no event
        await asyncio.sleep(0.002)


def has_sampled(service: LocalService, count: int) -> bool:
    return service.load().num_tokens >= count


def prompt(seed: int, max_tokens: int) -> Prompt:
    rng = np.random.default_rng(seed)
    return Prompt(
        client_id=str(seed),
        token_ids=rng.integers(0, VOCABULARY, 6).tolist(),
        max_tokens=max_tokens,
        temperature=1.0,
        stop_token_ids=frozenset(),
    )


def assert_exact(model: Any, prompt: Prompt, answer: Answer) -> None:
    runs = VersionRuns(((0, len(answer.token_ids)),))
    expected = recompute_plain({0: model}, prompt.token_ids, answer.token_ids, runs)
    assert np.abs(expected - np.array(answer.logprobs)).max() < TOLERANCE


def test_a_full_cache_delays_requests_but_changes_nothing() -> None:
    model = random_model(1)

    async def scenario(service: LocalService, fatal: list[str]) -> None:
        # 12 requests of 206 tokens want 156 blocks; there are 40.
        prompts = [prompt(seed, 200) for seed in range(12)]
        answers = await asyncio.gather(*(service.generate(p) for p in prompts))
        for p, answer in zip(prompts, answers, strict=True):
            assert len(answer.token_ids) == len(answer.logprobs) == 200
            assert answer.spans == [("0", 0, 200)]
            assert_exact(model, p, answer)
        assert service.load().cache_usage == 0 and not fatal

    run(model, scenario, num_blocks=40)


def test_requests_are_admitted_again_after_those_that_filled_the_cache_are_gone() -> None:
    async def scenario(service: LocalService, fatal: list[str]) -> None:
        for how in ("abort", "cancel"):
            tasks = [asyncio.create_task(service.generate(prompt(s, 600))) for s in range(6)]
            await until(lambda: service.load().num_running == 6)
            await until(lambda: service.load().num_waiting > 0)  # the cache ran dry: put back
            if how == "abort":
                await service.abort(None)
            else:
                for task in tasks:
                    task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            answer = await service.generate(prompt(9, 20))
            assert len(answer.token_ids) == 20

    run(random_model(1), scenario, num_blocks=40)


def test_partial_answers_survive_recomputation() -> None:
    """Tokens that a recomputation moved into the prompt still belong to the answer."""
    model = random_model(1)

    async def scenario(service: LocalService, fatal: list[str]) -> None:
        p = prompt(1, 500)
        task = asyncio.create_task(service.generate(p))
        for _ in range(3):
            enough = service.load().num_tokens + 40
            await until(partial(has_sampled, service, enough))
            await service.pause(PauseMode.KEEP)
            await service.resume()
        await until(lambda: service.load().num_tokens >= 150)
        await service.pause(PauseMode.ABORT)
        answer = await task
        assert answer.finish_reason is FinishReason.ABORT
        assert 150 <= len(answer.token_ids) < 500
        assert len(answer.token_ids) == service.load().num_tokens
        assert_exact(model, p, answer)

    run(model, scenario)


def test_a_dead_generation_thread_fails_its_requests_and_is_replaced(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = random_model(1)
    forward = model.forward

    def fail(*arguments: Any, **options: Any) -> Any:
        raise RuntimeError("out of memory")

    async def scenario(service: LocalService, fatal: list[str]) -> None:
        for death in range(3):
            model.forward = fail
            with pytest.raises(ServiceError, match="out of memory"):
                await service.generate(prompt(1, 10))
            model.forward = forward
            if death == 2:
                break
            while True:
                try:
                    answer = await service.generate(prompt(2, 10))
                    break
                except ServiceError as error:
                    assert error.status == 503  # between death and restart
                    await asyncio.sleep(0.01)
            assert_exact(model, prompt(2, 10), answer)
        await until(lambda: bool(fatal))
        assert "died 3 times" in fatal[0] and "out of memory" in fatal[0]
        assert not service.is_alive

    run(model, scenario)
    assert caplog.text.count("the generation thread died") == 3
    assert caplog.text.count("restarted the generation thread") == 2


def test_a_checkpoint_whose_names_transformers_converts_is_loaded_whole(tmp_path: Path) -> None:
    """Mixtral's experts are one tensor in the model and many in the file."""
    config = MixtralConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_local_experts=2,
    )
    torch.manual_seed(1)
    first, second = MixtralForCausalLM(config).eval(), MixtralForCausalLM(config).eval()
    folder = save(second, tmp_path / "moe")
    tokens = torch.tensor([[1, 2, 3]])
    with torch.no_grad():
        assert not torch.allclose(first(tokens).logits, second(tokens).logits)
        apply_checkpoint(first, read_checkpoint(first, folder))
        assert torch.equal(first(tokens).logits, second(tokens).logits)
    with pytest.raises(CheckpointError, match="missing tensors"):
        read_checkpoint(random_model(1, tied=False), folder)


def test_an_untied_model_needs_its_output_head(tmp_path: Path) -> None:
    tied, untied = random_model(1), random_model(2, tied=False)
    with pytest.raises(CheckpointError, match=r"missing tensors: lm_head\.weight"):
        read_checkpoint(untied, save(tied, tmp_path / "tied"))
    with pytest.raises(CheckpointError, match=r"lm_head\.weight differs"):
        read_checkpoint(tied, save(untied, tmp_path / "untied"))


@pytest.mark.parametrize("processed", [False, True])
def test_log_probabilities_are_before_or_after_temperature_as_asked(processed: bool) -> None:
    temperatures = torch.tensor([1.0, 0.5, 2.0, 0.0])
    scores = torch.randn(4, 9, generator=torch.Generator().manual_seed(0))
    sampler = Sampler(processed=processed)
    sampler(scores, temperatures.view(torch.int32))
    output = torch.zeros(2, 4, dtype=torch.int32)
    sampler.sample(scores[None], output)
    tokens, reported = output[0].tolist(), output[1].view(torch.float32)
    for row, temperature in enumerate(temperatures.tolist()):
        scale = temperature if processed and temperature > 0 else 1.0
        expected = torch.log_softmax(scores[row] / scale, -1)[tokens[row]]
        assert reported[row].item() == pytest.approx(expected.item(), abs=1e-5)
    assert tokens[3] == scores[3].argmax()
