#!/usr/bin/env python3
"""Generate without a server: the ``LLM`` class starts what it needs and ends it again.

python examples/offline.py
python examples/offline.py --model ./my-model --data-parallel-size 2
"""

from __future__ import annotations

import argparse

from lockstep import LLM, SamplingParams

PROMPTS = [
    "It is a truth universally acknowledged, that",
    "Elizabeth",
    "Mr. Darcy",
    "The ball at Netherfield",
]

parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
parser.add_argument("--model", help="directory or repository id; unset: the model that ships with Lockstep")
parser.add_argument("--data-parallel-size", type=int, default=1, help="instances (default: %(default)s)")
args = parser.parse_args()

with LLM(args.model, data_parallel_size=args.data_parallel_size, log_level="warning") as llm:
    for output in llm.generate(PROMPTS, SamplingParams(temperature=0.8, top_p=0.95, seed=1, max_tokens=24)):
        print(f"Prompt: {output.prompt!r}\nOutput: {output.outputs[0].text!r}\n")

    (answer,) = llm.chat(
        [{"role": "user", "content": "Tell me about Mr. Darcy."}],
        SamplingParams(temperature=0, max_tokens=40),
        use_tqdm=False,
    )
    print("Answer:", answer.outputs[0].text)
