"""A mesh with low-rank adapters: PEFT's tokens on all instances, over deaths."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import torch

from engine.config import SHIPPED_MODEL
from engine.kernels.core import library
from lockstep import LLM, LoRARequest, SamplingParams
from router.capsule import FIELD
from router.dispatch.roles import LONG
from router.tools.operate import main_role
from router.tools.replay.command import main as replay
from tests.engine.adapters.made_adapters import PROJECTIONS, make_adapter
from tests.engine.states.models import make_servable_model
from tests.mesh.faults.test_transfers import of
from tests.mesh.harness import Command, Ports, serve, wait_until
from tests.mesh.running.test_roles import router_sees

pytestmark = [
    pytest.mark.mesh,
    pytest.mark.skipif(library.load() is None, reason="no AVX2, or no C++ compiler, here"),
]

NAMES = ("one", "two", "three")
TOKENS = 120
EVERYWHERE = {"target_modules": [*PROJECTIONS, "embed_tokens", "lm_head"]}


class Adapted:
    """A tiny model, three adapters, and what transformers and PEFT generate with each."""

    def __init__(self, directory: Path, family: str = "llama", **settings: Any) -> None:
        self.model = make_servable_model(directory / "model", family)
        self.places = {name: directory / name for name in NAMES}
        self.adapted = {
            name: make_adapter(self.model, place, seed=number, **settings)
            for number, (name, place) in enumerate(self.places.items())
        }

    def truth(self, name: str, prompt: list[int], tokens: int) -> list[int]:
        model = self.adapted[name or "one"]
        given = {"input_ids": torch.tensor([prompt]), "max_new_tokens": tokens, "do_sample": False}
        given |= {"eos_token_id": None, "pad_token_id": 2}
        torch.set_num_threads(1)
        if name:
            found = model.generate(**given)
        else:
            with model.disable_adapter():
                found = model.generate(**given)
        ids: list[int] = found[0, len(prompt) :].tolist()
        return ids

    def serve(self, log: Path, ports: Ports, *flags: str) -> Command:
        adapters = [f"{name}={place}" for name, place in self.places.items()]
        lora = ["--enable-lora", "--max-loras", "2", "--lora-modules", *adapters]
        common = ["--dtype", "float32", "--num-gpu-blocks-override", "600", "--max-num-seqs", "16"]
        named = ["--served-model-name", SHIPPED_MODEL]
        return serve(log, str(self.model), *ports.head(), *common, *named, *lora, *flags)


@pytest.fixture(scope="module")
def adapted(tmp_path_factory: pytest.TempPathFactory) -> Adapted:
    return Adapted(tmp_path_factory.mktemp("adapted"), **EVERYWHERE)


def prompts(length: int = 40) -> list[tuple[str, list[int]]]:
    """The same prompts for each adapter and the model, so that all would share blocks."""
    shared = [[4 + (31 * each + 7 * index) % 300 for index in range(length)] for each in range(3)]
    return [(name, prompt) for prompt in shared for name in (*NAMES, "")]


async def stream(ports: Ports, name: str, prompt: list[int], tokens: int) -> list[int]:
    body: dict[str, Any] = {"model": name or SHIPPED_MODEL, "prompt": prompt, "max_tokens": tokens}
    body |= {"temperature": 0, "ignore_eos": True, "stream": True, "return_token_ids": True}
    ids: list[int] = []
    asked = {"url": f"{ports.url}/v1/completions", "json": body, "raise_for_status": True}
    async with aiohttp.ClientSession() as http, http.post(**asked) as answer:
        async for line in answer.content:
            if line.startswith(b"data: {"):
                chunk = json.loads(line[6:])
                assert "error" not in chunk, chunk
                ids += chunk["choices"][0]["token_ids"] if chunk["choices"] else []
    return ids


async def all_streams(
    ports: Ports, act: Callable[[], object] | None = None, length: int = 40
) -> list[list[int]]:
    tasks = [asyncio.create_task(stream(ports, *each, TOKENS)) for each in prompts(length)]
    if act is not None:
        await asyncio.sleep(0.3)
        await asyncio.to_thread(act)
    return await asyncio.gather(*tasks)


DRAFTS = ("--speculative-config", '{"method": "ngram", "num_speculative_tokens": 3, "adaptive": false}')


@pytest.mark.parametrize("flags", [(), pytest.param(DRAFTS, marks=pytest.mark.nightly)])
def test_answers_are_their_adapters_when_an_instance_dies(
    flags: tuple[str, ...], adapted: Adapted, tmp_path: Path
) -> None:
    ports = Ports()
    with adapted.serve(tmp_path / "log", ports, "-dp", "2", *flags) as command:
        command.wait_for("2 instances ready")
        expected = [adapted.truth(name, prompt, TOKENS) for name, prompt in prompts()]
        assert len({tuple(each) for each in expected}) == len(expected)
        assert asyncio.run(all_streams(ports)) == expected
        assert asyncio.run(all_streams(ports, command.child("Engine_1").kill)) == expected
        wait_until(lambda: "2 instances ready" in command.log or len(ports.view().members) == 2, 60)
        assert asyncio.run(all_streams(ports)) == expected
        assert "Traceback" not in command.log
        command.stop()


@pytest.mark.parametrize(
    "flags",
    [("-tp", "2"), pytest.param(("-pp", "2", "-tp", "2"), marks=pytest.mark.nightly)],
    ids=" ".join,
)
def test_ranks_and_stages_have_their_parts_of_adapters(
    flags: tuple[str, ...], adapted: Adapted, tmp_path: Path
) -> None:
    ports = Ports()
    with adapted.serve(tmp_path / "log", ports, "-dp", "1", *flags) as command:
        command.wait_for("1 instance ready")
        expected = [adapted.truth(name, prompt, TOKENS) for name, prompt in prompts()]
        assert asyncio.run(all_streams(ports)) == expected
        answer = asyncio.run(answer_of(ports, "/v1/completions", model="one"))
        assert answer["system_fingerprint"].endswith("-tp2")
        assert "Traceback" not in command.log
        assert command.stop() == 0


EXPERTS = {
    "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj", "embed_tokens", "lm_head"],
    "target_parameters": ["experts.gate_up_proj", "experts.down_proj"],
}
DP, TP, PP, SPREAD = ("-dp", "2"), ("-dp", "1", "-tp", "2"), ("-dp", "1", "-pp", "2"), ("-dp", "2", "-ep")
WHOLE, BOTH = (*DP, "--no-enable-expert-parallel"), (*DP, "-tp", "2", "-ep")
OF_FAMILIES: list[tuple[str, dict[str, Any], tuple[str, ...]]] = [
    *(("granitemoe", EXPERTS, where) for where in (PP, SPREAD, WHOLE, TP)),
    *(("qwen3_moe", EXPERTS, where) for where in (WHOLE, PP, TP, SPREAD)),
    *(("llama", EVERYWHERE, where) for where in (DP, TP, PP)),
    *(("qwen3", EVERYWHERE, where) for where in (DP, TP, PP)),
    *(("gemma3_text", EVERYWHERE, where) for where in (DP, TP, PP)),
    ("granitemoe", EXPERTS, BOTH),
]
"""Families, what adapters change there, and layouts."""
EACH_PUSH = 2
"""The first of these cases."""
AT_NIGHT = [pytest.mark.nightly]  # PEFT computes experts slowly


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("family", "settings", "flags"),
    [
        pytest.param(*each, marks=AT_NIGHT * (number >= EACH_PUSH), id=" ".join((each[0], *each[2])))
        for number, each in enumerate(OF_FAMILIES)
    ],
)
def test_answers_of_families_are_those_of_peft(
    family: str, settings: dict[str, Any], flags: tuple[str, ...], tmp_path: Path
) -> None:
    adapted, ports = Adapted(tmp_path, family, **settings), Ports()
    with adapted.serve(tmp_path / "log", ports, *flags) as command:
        command.wait_for("2 instances ready" if "2" in flags[:2] else "1 instance ready")
        expected = [adapted.truth(name, prompt, TOKENS) for name, prompt in prompts()]
        assert asyncio.run(all_streams(ports)) == expected
        assert "Traceback" not in command.log
        assert command.stop() == 0


def test_adapters_are_models_with_a_parent(adapted: Adapted, tmp_path: Path) -> None:
    ports = Ports()
    with adapted.serve(tmp_path / "log", ports, "-dp", "1") as command:
        command.wait_for("1 instance ready")
        cards = asyncio.run(answer_of(ports, "/v1/models"))["data"]
        assert {card["id"]: card["parent"] for card in cards} == {
            SHIPPED_MODEL: None,
            **dict.fromkeys(NAMES, SHIPPED_MODEL),
        }
        prints = [
            asyncio.run(answer_of(ports, "/v1/completions", model=name))["system_fingerprint"]
            for name in (SHIPPED_MODEL, "one", "two")
        ]
        assert [each.startswith(prints[0]) for each in prints] == [True] * 3
        assert len(set(prints)) == 3
        recorded = {"X-Lockstep-Capsule": "1"}
        answer = asyncio.run(answer_of(ports, "/v1/completions", recorded, model="one"))
        assert answer[FIELD]["adapter"]["ranks"] == 1
        (tmp_path / "answer.json").write_text(json.dumps(answer))
        assert replay([str(tmp_path / "answer.json"), "--url", ports.url]) == 0
        metrics = asyncio.run(text_of(ports, "/metrics"))
        assert 'vllm:lora_requests_info{engine="0",max_lora="2"' in metrics
        missing = asyncio.run(answer_of(ports, "/v1/completions", model="four"))
        assert missing["error"]["code"] == 404
        assert command.stop() == 0


async def answer_of(ports: Ports, path: str, headers: dict[str, str] | None = None, **body: Any) -> Any:
    body |= {"prompt": [5, 6, 7], "max_tokens": 3} if body else {}
    async with aiohttp.ClientSession() as http:
        send = (
            http.post(f"{ports.url}{path}", json=body, headers=headers)
            if body
            else http.get(f"{ports.url}{path}")
        )
        async with send as answer:
            return await answer.json()


async def text_of(ports: Ports, path: str) -> str:
    async with aiohttp.ClientSession() as http, http.get(f"{ports.url}{path}") as answer:
        return await answer.text()


def test_an_adapter_that_cannot_be_served_ends_the_start(adapted: Adapted, tmp_path: Path) -> None:
    ports = Ports()
    with adapted.serve(tmp_path / "log", ports, "-dp", "1", "--max-lora-rank", "4") as command:
        assert command.end() != 0
        assert "has rank 8: --max-lora-rank is 4" in command.log
        assert "Traceback" not in command.log


@pytest.mark.nightly
def test_prompts_of_adapters_go_on_at_an_instance_that_decodes(adapted: Adapted, tmp_path: Path) -> None:
    """Their keys and values move from one instance to the other, under their adapter's names."""
    ports = Ports()
    moves = ("--kv-transfer-config", '{"kv_connector": "NixlConnector", "kv_role": "kv_both"}')
    with adapted.serve(tmp_path / "log", ports, "-dp", "2", *moves) as command:
        command.wait_for("2 instances ready")
        for rank, role in (("0", "decode"), ("1", "prefill")):
            assert main_role([rank, role, *ports.join()]) == 0
        wait_until(lambda: router_sees(ports), 20)
        length = LONG + 44  # shorter prompts are computed where their tokens are
        expected = [adapted.truth(name, prompt, TOKENS) for name, prompt in prompts(length)]
        assert asyncio.run(all_streams(ports, length=length)) == expected
        assert of(ports, "vllm:external_prefix_cache_hits_total", 0) > 0
        assert "Traceback" not in command.log
        command.stop()


@pytest.mark.nightly
def test_a_python_program_loads_an_adapter_by_its_directory(adapted: Adapted) -> None:
    given = prompts()
    requests = [LoRARequest(name, 1, str(adapted.places[name])) if name else None for name, _ in given]
    ids = [{"prompt_token_ids": prompt} for _, prompt in given]
    params = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)
    flags: dict[str, Any] = {"dtype": "float32", "num_gpu_blocks_override": 600, "max_loras": 2}
    with LLM(str(adapted.model), data_parallel_size=2, enable_lora=True, log_level="error", **flags) as llm:
        outputs = llm.generate(ids, params, use_tqdm=False, lora_request=requests)
        broken = LoRARequest("broken", 2, str(adapted.model))
        with pytest.raises(ValueError, match="is no adapter"):
            llm.generate(ids[:1], params, lora_request=broken)
    found = [list(output.outputs[0].token_ids) for output in outputs]
    assert found == [adapted.truth(name, prompt, TOKENS) for name, prompt in given]
