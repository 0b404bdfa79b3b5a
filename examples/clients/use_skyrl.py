"""The ``skyrl`` package's client of inference servers, unchanged: rollouts, control, new weights."""

from __future__ import annotations

import asyncio
import importlib.metadata
import typing
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from typing import Any

import checks
import typing_extensions
from checks import check
from trained_files import trained

typing.TypedDict = typing_extensions.TypedDict  # pydantic asks for it before Python 3.12

from skyrl.backends.skyrl_train.inference_servers.remote_inference_client import (
    RemoteInferenceClient,
)

VERSION = importlib.metadata.version("skyrl")
GREEDY = {"temperature": 0.0, "max_tokens": 12, "logprobs": 0}


@asynccontextmanager
async def client(**more: Any) -> AsyncIterator[Any]:
    async with RemoteInferenceClient(
        proxy_url=checks.TRAINER_URL,
        server_urls=[checks.TRAINER_URL],
        data_parallel_size=1,
        model_name=checks.model(),
        **more,
    ) as made:
        yield made


async def rollouts(made: Any) -> Any:
    ids = await made.tokenize([checks.OPENING, "The road"])
    return await made.generate({"prompt_token_ids": ids, "sampling_params": GREEDY})


@check
async def rollouts_with_logprobs() -> None:
    async with client() as made:
        found = await rollouts(made)
        ids = await made.tokenize([checks.OPENING])
        batch = {"prompt_token_ids": ids, "sampling_params": GREEDY}
        again = await made.generate(batch | {"session_ids": ["trajectory-1"], "cache_salt": "1"})
        await made.finish_session("trajectory-1")
    assert [len(ids) for ids in found["response_ids"]] == [12, 12]
    assert [len(each) for each in found["response_logprobs"]] == [12, 12]
    assert found["stop_reasons"] == ["length", "length"]
    assert all(found["responses"])
    for name in ("response_ids", "response_logprobs"):
        assert again[name][0] == found[name][0]


@check
async def experts_of_each_token() -> None:
    async with client(enable_return_routed_experts=True) as made:
        found = await rollouts(made)
        ids = await made.tokenize([checks.OPENING])
    assert len(found["rollout_expert_indices"][0]) == len(ids[0]) + 11


@check
async def samples_as_tinker_asks() -> None:
    async with client() as made:
        (ids,) = await made.tokenize([checks.OPENING])
        body = {
            "prompt": {"chunks": [{"type": "encoded_text", "tokens": ids}]},
            "num_samples": 2,
            "sampling_params": {"max_tokens": 5, "seed": 3},
            "include_prompt_logprobs": True,
            "topk_prompt_logprobs": 2,
        }
        found = await made.sample({"json": body})
    assert [len(each["tokens"]) for each in found["sequences"]] == [5, 5]
    assert [len(each["logprobs"]) for each in found["sequences"]] == [5, 5]
    assert len(found["prompt_logprobs"]) == len(ids)
    assert found["prompt_logprobs"][0] is None
    assert all(len(each) == 2 for each in found["topk_prompt_logprobs"][1:])


@check
async def chats_completions_and_rendering() -> None:
    messages = [{"role": "user", "content": "Who was at the ball?"}]
    async with client() as made:
        body = {"messages": messages, "temperature": 0.0, "max_tokens": 8, "return_token_ids": True}
        chat = await made.chat_completion({"json": body | {"session_id": "s"}})
        rendered = await made.render_chat_completion({"json": body})
        ids, params = rendered["token_ids"], rendered["sampling_params"]
        again = await made.generate({"prompt_token_ids": [ids], "sampling_params": params})
        completion = await made.completion({"json": {"prompt": ids, "temperature": 0.0, "max_tokens": 8}})
    assert ids == chat["prompt_token_ids"]
    assert again["response_ids"][0] == chat["choices"][0]["token_ids"]
    assert completion["usage"]["completion_tokens"] == 8


@check
async def pauses_keep_requests() -> None:
    async with client() as made:
        before = await rollouts(made)
        await made.pause_generation()
        waiting = asyncio.create_task(rollouts(made))
        await made.resume_generation()
        assert (await waiting)["response_ids"] == before["response_ids"]
        await made.pause("abort", clear_cache=True)
        await made.resume()
        await made.reset_prefix_cache()


@check
async def sleep_and_wake() -> None:
    async with client() as made:
        before = await rollouts(made)
        await made.sleep(level=2)
        await made.wake_up(tags=["weights"])
        await made.wake_up(tags=["kv_cache"])
        assert (await rollouts(made))["response_ids"] == before["response_ids"]


@check
async def new_weights_by_its_calls() -> None:
    async with client() as made:
        total, each = await made.get_world_size()
        assert total == each >= 1
        before = await rollouts(made)
        for scale in (1.5, 1.0):
            part = trained(scale)
            await made.start_weight_update()
            await made.update_weights_ipc({"path": str(part)})
            await made.finish_weight_update()
            made.increment_weight_version()
            after = await rollouts(made)
            is_same = after["response_logprobs"] == before["response_logprobs"]
            assert is_same == (scale == 1.0)


@check
async def pickles_are_refused_by_name() -> None:
    async with client() as made:
        await made.start_weight_update()
        info = {"names": ["a"], "dtype_names": ["float32"], "shapes": [[1]], "sizes": [1]}
        refusal = await _refusal(made.update_weights_ipc(info | {"ipc_handles_pickled": "gASV"}))
        assert "ipc_handles_pickled" in refusal, refusal
        await made._call_all_servers("/shutdown_weight_transfer_engine")
        refusal = await _refusal(made._call_all_servers("/collective_rpc", {"method": "load_model"}))
        assert "no method" in refusal, refusal


async def _refusal(call: Awaitable[Any]) -> str:
    try:
        await call
    except Exception as error:
        return str(error)
    raise AssertionError("it was not refused")


checks.run(f"skyrl {VERSION}")
