"""The ``trl`` package's client of vLLM servers, unchanged: rollouts, scores, and new weights.

Its own sender of weights needs CUDA, so the same calls are made by hand, with a file.
"""

from __future__ import annotations

import json
import warnings
from typing import Any

import checks
from checks import check
from trained_files import trained

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of versions of vLLM, whose address helper alone is used
    from trl import __version__
    from trl.generation.vllm_client import VLLMClient

CLIENT = VLLMClient(base_url=checks.TRAINER_URL)
PROMPTS = [checks.OPENING, "The road"]


def greedy(prompts: list[Any]) -> dict[str, Any]:
    found: dict[str, Any] = CLIENT.generate(prompts, temperature=0.0, max_tokens=12)
    return found


@check
def texts_and_token_ids_are_one() -> None:
    of_texts = greedy(PROMPTS)
    assert [len(ids) for ids in of_texts["completion_ids"]] == [12, 12]
    of_ids = greedy(of_texts["prompt_ids"])
    assert of_ids == of_texts
    for ids, named in zip(of_ids["completion_ids"], of_ids["logprob_token_ids"], strict=True):
        assert [[token] for token in ids] == named


@check
def samples_with_top_logprobs() -> None:
    found = CLIENT.generate(
        PROMPTS, n=2, max_tokens=6, logprobs=3, top_p=0.9, min_p=0.01, generation_kwargs={"seed": 7}
    )
    assert len(found["prompt_ids"]) == 2
    assert len(found["completion_ids"]) == 4
    for sample in found["logprobs"]:
        assert all(3 <= len(place) <= 4 and place == sorted(place, reverse=True) for place in sample)


@check
def a_regular_expression() -> None:
    found = CLIENT.generate(["Number:"], max_tokens=8, structured_outputs_regex="[0-9]{3}")
    assert len(found["completion_ids"]) == 1


@check
def chats_with_tools_in_the_prompt() -> None:
    def weather(city: str) -> str:
        """The weather of a city.

        Args:
            city: Its name.
        """
        return city

    messages = [[{"role": "user", "content": "Who was at the ball?"}]] * 2
    bare = CLIENT.chat(messages, temperature=0.0, max_tokens=6)
    with_tool = CLIENT.chat(messages, temperature=0.0, max_tokens=6, tools=[weather])
    assert bare["completion_ids"][0] == bare["completion_ids"][1]
    assert len(with_tool["prompt_ids"][0]) >= len(bare["prompt_ids"][0])


@check
def scores_are_the_sampled_logprobs() -> None:
    found = CLIENT.generate(PROMPTS, max_tokens=10, generation_kwargs={"seed": 3})
    pairs = list(zip(found["prompt_ids"], found["completion_ids"], strict=True))
    scored = CLIENT.get_sequence_logprobs(
        [prompt + answer for prompt, answer in pairs], [len(prompt) for prompt, _ in pairs], top_logprobs=5
    )
    assert all(len(sample) == 10 for sample in scored["logprobs"])
    for mine, theirs in zip(found["logprobs"], scored["actual_logprobs"], strict=True):
        assert [place[0] for place in mine] == [place[0] for place in theirs]


@check
def facts_and_caches() -> None:
    assert CLIENT.get_world_size() >= 1
    assert CLIENT.get_server_info()["weight_transfer_config"] is not None
    CLIENT.reset_prefix_cache()
    try:
        CLIENT.init_communicator(device="cpu")
    except NotImplementedError:
        return  # all that it asks of the server came before
    raise AssertionError("trl sends weights without CUDA now: use that here")


@check
def new_weights_by_its_calls() -> None:
    before = greedy(PROMPTS)
    for scale in (1.5, 1.0):
        part = trained(scale)
        with CLIENT.weight_update():
            info = {"update_info": {"path": str(part)}}
            CLIENT._post(f"{CLIENT.base_url}/update_weights", json=info)
        after = greedy(PROMPTS)
        assert (after == before) == (scale == 1.0), json.dumps([before, after])


checks.run(f"trl {__version__}")
