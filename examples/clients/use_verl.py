"""The ``verl`` package's client of SGLang servers, unchanged: rollouts, sleep, caches, tensors.

Its file is loaded by itself: the package imports Ray, and the file names of SGLang's server, which it would
start. Stand-ins have these names; what is used of them is an address.
"""

from __future__ import annotations

import asyncio
import base64
import importlib.metadata
import importlib.util
import logging
import sys
import types
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import checks
from checks import check
from trained_files import trained

VERSION = importlib.metadata.version("verl")


@dataclass
class ServerArgs:
    """Fields of SGLang's settings that the client uses."""

    host: str
    port: int
    node_rank: int = 0
    is_embedding: bool = False
    api_key: str | None = None


@dataclass
class TensorsRequest:
    """Fields of SGLang's request to update weights."""

    serialized_named_tensors: list[bytes] = field(default_factory=list)
    load_format: str | None = None
    flush_cache: bool = True


def _client_module() -> Any:
    names: dict[str, dict[str, Any]] = {
        "sglang": {},
        "sglang.srt": {},
        "sglang.srt.entrypoints": {},
        "sglang.srt.entrypoints.EngineBase": {"EngineBase": object},
        "sglang.srt.entrypoints.http_server": {"launch_server": None},
        "sglang.srt.managers": {},
        "sglang.srt.managers.io_struct": {"UpdateWeightsFromTensorReqInput": TensorsRequest},
        "sglang.srt.server_args": {"ServerArgs": ServerArgs},
        "sglang.srt.utils": {"kill_process_tree": None},
    }
    for name, has in names.items():
        stand_in = types.ModuleType(name)
        stand_in.__dict__.update(has)
        sys.modules[name] = stand_in
    found = importlib.metadata.distribution("verl").locate_file(
        "verl/workers/rollout/sglang_rollout/http_server_engine.py"
    )
    spec = importlib.util.spec_from_file_location("verl_client", str(found))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


THEIRS = _client_module()
PLACE = urlsplit(checks.TRAINER_URL)
ADDRESS = {"host": PLACE.hostname, "port": PLACE.port, "launch_server": False}
SYNC = THEIRS.HttpServerAdapter(**ADDRESS)
ASYNC = THEIRS.AsyncHttpServerAdapter(**ADDRESS)
GREEDY = {"temperature": 0.0, "max_new_tokens": 12}


def greedy() -> tuple[list[int], list[float]]:
    found = SYNC.generate(prompt=checks.OPENING, sampling_params=GREEDY, return_logprob=True)
    return found["output_ids"], [chance[0] for chance in found["meta_info"]["output_token_logprobs"]]


@check
def both_clients_have_one_answer() -> None:
    ids, chances = greedy()
    assert len(ids) == len(chances) == 12
    found = asyncio.run(ASYNC.generate(prompt=checks.OPENING, sampling_params=GREEDY, return_logprob=True))
    assert found["output_ids"] == ids
    assert found["meta_info"]["finish_reason"] == {"type": "length", "length": 12}


@check
async def many_rollouts_at_once() -> None:
    params = GREEDY | {"temperature": 1.0}
    answers = await asyncio.gather(
        *(ASYNC.generate(input_ids=[65 + each, 66, 67], sampling_params=params) for each in range(16))
    )
    assert all(len(answer["output_ids"]) == 12 for answer in answers)


@check
async def models_caches_and_aborts() -> None:
    assert (await ASYNC.available_models())["data"]
    await ASYNC.flush_cache()
    SYNC.flush_cache()
    await ASYNC.abort_request(abort_all=True)


@check
async def memory_is_given_back() -> None:
    before = greedy()
    for tags in (None, ["weights", "kv_cache"]):
        assert (await ASYNC.release_memory_occupation(tags))["success"]
        assert (await ASYNC.resume_memory_occupation(tags))["success"]
        assert greedy() == before


@check
async def tensors_that_are_safetensors() -> None:
    before = greedy()
    for scale in (1.5, 1.0):
        part = trained(scale).read_bytes()
        request = TensorsRequest([part], load_format="safetensors")
        assert (await ASYNC.update_weights_from_tensor(request))["success"]
        assert (greedy() == before) == (scale == 1.0)


@check
async def pickled_tensors_are_refused_by_name() -> None:
    logging.disable(logging.ERROR)  # it logs the answer, as asked below
    pickled = base64.b64decode("gASVAAAA")
    try:
        await ASYNC.update_weights_from_tensor(TensorsRequest([pickled]))
    except Exception as error:
        assert getattr(error, "status", None) == 400, error
    else:
        raise AssertionError("they were taken")
    finally:
        logging.disable(logging.NOTSET)


checks.run(f"verl {VERSION}")
