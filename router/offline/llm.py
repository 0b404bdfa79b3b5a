"""The offline class ``LLM``: a mesh for one Python program, with vLLM's names.

    from lockstep import LLM, SamplingParams

    with LLM("lockstep-moe", data_parallel_size=2) as llm:
        for output in llm.generate(["It is a truth", "Elizabeth"], SamplingParams(max_tokens=40)):
            print(output.outputs[0].text)

Behind it run the processes of ``serve``; prompts take the way of HTTP requests without the HTTP. So an
instance that dies costs no token here either.
"""

from __future__ import annotations

import copy
import itertools
import logging
import random
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import msgspec

from engine.settings import resolve
from router.config import ServeConfig
from router.errors import ApiError
from router.mesh import served_model
from router.offline.adapters import Adapters, PromptAdapters
from router.offline.config import llm_config
from router.offline.inputs import Job, JobMaker, as_conversations, as_prompts, in_users_terms, one_per_prompt
from router.offline.mesh import PrivateMesh
from router.offline.outputs import RequestOutput, scores_of
from router.offline.params import SamplingParams
from router.offline.pooled import PoolingCalls
from router.offline.progress import progress_bar
from router.offline.run import run_jobs
from router.offline.weights import update_command
from router.text.chat_template import ChatTemplateError, load_chat_templates
from router.text.text_model import TextModel, load_text_model

if TYPE_CHECKING:
    from coordinator.messages import Settings

logger = logging.getLogger(__name__)

QUEUED_PER_RUNNING = 2
"""Samples in flight per slot of the running batches.

With so many, no batch waits for the next prompt.
"""

Message = Mapping[str, Any]


class LLM(PoolingCalls):
    """Language model for one program, served by a mesh of its own.

    Arguments are the long flags of ``serve``: every flag of the mesh, the model, the scheduler, the KV cache
    and the devices works as a keyword argument. A context manager; closed at the latest when the program
    ends.

    Raises:
        TypeError: there is no such argument.
        ValueError: an argument out of range, a model that is not there or cannot be served.
        EngineDeadError: a process ended while it started; its log says why.
    """

    def __init__(
        self,
        model: str | None = None,
        *,
        tokenizer: str | None = None,
        tensor_parallel_size: int = 1,
        pipeline_parallel_size: int = 1,
        data_parallel_size: int | None = None,
        enable_expert_parallel: bool | None = None,
        dtype: Any = "auto",
        seed: int | None = 0,
        max_model_len: int | str | None = None,
        max_num_seqs: int | None = None,
        max_num_batched_tokens: int | None = None,
        gpu_memory_utilization: float | None = None,
        enforce_eager: bool = False,
        trust_remote_code: bool = False,
        **flags: Any,
    ) -> None:
        """``model``: a directory or a Hugging Face repository id.

        None is the model that ships with Lockstep. ``enable_expert_parallel``: None spreads experts where
        ``serve`` does. ``seed`` makes samples without a seed of their own repeatable, call by call; None:
        unpredictable.
        """
        config = llm_config(
            {
                "model": model,
                "tokenizer": tokenizer,
                "tensor_parallel_size": tensor_parallel_size,
                "pipeline_parallel_size": pipeline_parallel_size,
                "data_parallel_size": data_parallel_size,
                "enable_expert_parallel": enable_expert_parallel,
                "dtype": dtype,
                "seed": seed,
                "max_model_len": max_model_len,
                "max_num_seqs": max_num_seqs,
                "max_num_batched_tokens": max_num_batched_tokens,
                "gpu_memory_utilization": gpu_memory_utilization,
                "enforce_eager": enforce_eager,
                "trust_remote_code": trust_remote_code,
                **flags,
            }
        )
        named = {"data_parallel_address", "data_parallel_rpc_port"} & flags.keys()
        self._start(config, port_is_free_choice=not named)

    @classmethod
    def of(cls, config: ServeConfig) -> LLM:
        """The same with settings of ``serve``; its coordinator gets any port."""
        made = cls.__new__(cls)
        made._start(config, port_is_free_choice=True)
        return made

    def _start(self, config: ServeConfig, *, port_is_free_choice: bool) -> None:
        began = time.monotonic()
        settings, text_model = local_model(config)
        self._mesh = PrivateMesh(config, settings, port_is_free_choice=port_is_free_choice)
        self._finalizer = weakref.finalize(self, self._mesh.close, waits_for_others=False)
        self._mesh.start()
        served = self._mesh.client.model
        assert served is not None
        self._config = config
        self._model = text_model or load_text_model(served, config.http)
        self._chance = random.SystemRandom() if config.http.seed is None else random.Random(config.http.seed)
        self._adapters = PromptAdapters(self._mesh.load_adapter, is_enabled=config.engine.lora.enable_lora)
        self._preparing = threading.Lock()
        self._numbers = itertools.count()
        logger.info("%r ready after %.1f s", self, time.monotonic() - began)

    def __repr__(self) -> str:
        return f"<LLM {self._model.name} {self._mesh!r}>"

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close(waits_for_others=kind is None)

    def close(self) -> None:
        """End all processes; harmless twice.

        The first of several nodes waits for the others to close.
        """
        self._close(waits_for_others=True)

    # ---- generation

    def generate(
        self,
        prompts: str | Mapping[str, Any] | Sequence[Any],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool | Callable[..., Any] = True,
        lora_request: Adapters = None,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Generate for one prompt or many; outputs in the order of the prompts.

        ``prompts``: a text, a list of token ids, ``{"prompt": text}``, ``{"prompt_token_ids": ids}`` (both
        with an optional ``cache_salt``), or a list of any of those. ``sampling_params``: one for all, or one
        per prompt; None: the model's defaults. ``use_tqdm``: a progress bar, or a class that makes one.
        ``lora_request``: the low-rank adapter of all prompts, or one for each; with a ``lora_path`` it is
        loaded, if it is not served.

        Raises:
            ValueError, TypeError: a prompt or parameter that cannot be used; nothing has been generated then.
            GenerationError, EngineDeadError: the mesh could not finish.
        """
        given = as_prompts(prompts)
        adapters = self._adapters_of(lora_request, len(given))
        params = self._params_of(sampling_params, len(given))
        priorities = one_per_prompt(0 if priority is None else priority, len(given), "priority")
        maker = self._maker(self._model)
        return self._run(
            len(given),
            lambda index, id: maker.from_prompt(
                id, given[index], params[index], priorities[index], adapters[index]
            ),
            use_tqdm,
        )

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool | Callable[..., Any] = True,
        lora_request: Adapters = None,
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation or many, as :meth:`generate` does with prompts.

        ``chat_template``: a Jinja file, or the template itself, instead of the model's.
        """
        conversations = as_conversations(messages)
        adapters = self._adapters_of(lora_request, len(conversations))
        params = self._params_of(sampling_params, len(conversations))
        maker = self._maker(self._model if chat_template is None else self._with_template(chat_template))

        def make(index: int, id: str) -> Job:
            return maker.from_messages(
                id,
                conversations[index],
                params[index],
                adapters[index],
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                tools=tools,
                chat_template_kwargs=chat_template_kwargs,
            )

        return self._run(len(conversations), make, use_tqdm)

    def score_tokens(
        self, prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]]
    ) -> list[list[float]]:
        """Log-probabilities of answers' tokens, each behind its prompt, by the weights in use.

        They cost one prefill: of the answer, and of what no instance has cached of the prompt. In an
        invariant numerics class they are, to the bit, those that the tokens had when the same weights sampled
        them (``SamplingParams(logprobs=0)``). A prompt and its answer must be shorter than the context.

        Raises:
            ValueError: a prompt or an answer is empty or too long, or has no partner.
            GenerationError, EngineDeadError: the mesh could not finish.
        """
        if len(prompts) != len(answers):
            raise ValueError(f"{len(prompts)} prompts have {len(answers)} answers: give one for each")
        if not all(map(len, prompts)) or not all(map(len, answers)):
            raise ValueError("prompts and answers must have at least one token each")
        params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0, detokenize=False)
        texts = [[*prompt, *answer] for prompt, answer in zip(prompts, answers, strict=True)]
        maker = self._maker(self._model)
        outputs = self._run(
            len(texts),
            lambda index, id: maker.from_prompt(id, texts[index], params, 0, scored_from=len(prompts[index])),
            False,
        )
        return [
            [entry[token].logprob for entry, token in zip(scored, answer, strict=True) if entry is not None]
            for scored, answer in zip(map(scores_of, outputs, map(len, prompts)), answers, strict=True)
        ]

    def update_weights(self, path: str | Path, *, label: str = "", in_flight: str = "keep") -> str:
        """Have all instances go over to the weights of a directory; returns a report.

        They prepare while they serve, then all go over. The directory has safetensors files with the tensors
        of this model, in its format, and must stay until a later update. Instances that start later read it.
        ``label``: name of the version. ``in_flight``: what becomes of requests of other threads: ``keep``
        (they go on, with the keys and values that they have), ``recompute`` (they go on, computed again by
        the new weights) or ``abort``.

        Raises:
            ValueError: the weights cannot be used, or another update is under way; the old ones go on.
            TimeoutError: not all instances have gone over yet, though they may.
            EngineDeadError: the mesh has ended.
        """
        wish = update_command(str(Path(path).absolute()), label, in_flight)
        return self._mesh.update_weights(wish)

    # ---- what there is

    def get_tokenizer(self) -> Any:
        """The model's tokenizer as a class of transformers."""
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(self._config.http.tokenizer or self._model.served.directory)

    def get_default_sampling_params(self) -> SamplingParams:
        """The model's generation_config.json as parameters, neutral where it has none."""
        whole = {"top_k", "max_tokens"}
        known = self._model.defaults.keys() & set(SamplingParams.__struct_fields__)
        given = {name: self._model.defaults[name] for name in known}
        return msgspec.convert(
            {name: int(value) if name in whole else value for name, value in given.items()}, SamplingParams
        )

    # ---- helpers

    def _adapters_of(self, given: Adapters, count: int) -> list[str]:
        """Name of each prompt's adapter; empty for none."""
        names, served = self._adapters.names(given, count, self._model.served)
        self._model.follow(served)
        return names

    def _params_of(
        self, given: SamplingParams | Sequence[SamplingParams] | None, count: int
    ) -> list[SamplingParams]:
        params = one_per_prompt(
            self.get_default_sampling_params() if given is None else given, count, "sampling_params"
        )
        for one in params:
            if not isinstance(one, SamplingParams):
                raise TypeError(f"sampling_params must be SamplingParams, or a list of them, not {one!r:.60}")
        return params

    def _maker(self, model: TextModel) -> JobMaker:
        return JobMaker(model, self._config.http.max_logprobs, self._chance)

    def _with_template(self, source: str) -> TextModel:
        model = self._model
        directory = self._config.http.tokenizer or model.served.directory
        try:
            templates = load_chat_templates(Path(directory), model.tokenizer, source)
        except ChatTemplateError as error:
            raise ValueError(str(error)) from error
        changed = copy.copy(model)
        changed.templates = templates
        return changed

    def _run(
        self, count: int, make: Callable[[int, str], Job], use_tqdm: bool | Callable[..., Any]
    ) -> list[RequestOutput]:
        """Make all jobs, then run them: a bad prompt raises before anything is generated."""
        if not self._mesh.is_alive:
            raise self._mesh.dead()
        if (pooling := self._model.served.pooling) is not None:
            raise ValueError(f"this model generates no text, it does {', '.join(pooling.tasks)}")
        jobs = []
        with self._preparing:  # several threads may call; each draws its seeds in one go
            for index in range(count):
                try:
                    jobs.append(make(index, str(next(self._numbers))))
                except ApiError as error:
                    raise in_users_terms(error, index, count) from error
        with progress_bar(count, use_tqdm) as on_output:
            mesh = self._mesh
            return mesh.call(
                run_jobs(
                    mesh.client,
                    mesh.metrics,
                    self._model.tokenizer,
                    jobs,
                    most_samples(self._config),
                    on_output,
                )
            )

    def _close(self, *, waits_for_others: bool) -> None:
        self._finalizer.detach()
        self._mesh.close(waits_for_others=waits_for_others)


def most_samples(config: ServeConfig) -> int:
    """Samples in flight at once, for as many instances as this program started.

    Other nodes fill theirs.
    """
    return samples_per_instance(config) * max(1, config.mesh.local_size)


def samples_per_instance(config: ServeConfig) -> int:
    """Samples in flight for one instance, far fewer than its queue holds."""
    scheduler = config.engine.scheduler
    return min(QUEUED_PER_RUNNING * scheduler.most_requests(), max(1, scheduler.max_num_queued_reqs))


def local_model(config: ServeConfig) -> tuple[Settings | None, TextModel | None]:
    """Settings and tokenizer of the model.

    None where a headless program learns the model from the mesh.
    """
    if config.engine.model.model is None and config.mesh.headless:
        return None, None
    info, settings = resolve(config.engine, config.mesh.known_size)
    return settings, load_text_model(served_model(settings, info.directory), config.http)
