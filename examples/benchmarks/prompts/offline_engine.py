"""Process of ``bench_offline.py`` with one system's class ``LLM``, ours or vLLM's.

The Python of that system runs it. It reads a JSON object a line from standard input: the first has the
arguments of ``LLM``, each further one prompts of token ids and the length of their answers. It answers each
with a line on standard output, once it is done; what the libraries print goes to standard error.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from typing import Any


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def answer(**fields: Any) -> None:
        print(json.dumps(fields), file=answers, flush=True)

    library = importlib.import_module(sys.argv[1])
    llm = library.LLM(**json.loads(sys.stdin.readline()))
    answer(ready=True)
    for line in sys.stdin:
        asked = json.loads(line)
        params = library.SamplingParams(temperature=0.0, max_tokens=asked["answer"], ignore_eos=True)
        prompts = [{"prompt_token_ids": ids} for ids in asked["prompts"]]
        began = time.perf_counter()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - began
        answer(seconds=seconds, tokens=sum(len(one.outputs[0].token_ids) for one in outputs))


if __name__ == "__main__":
    main()
