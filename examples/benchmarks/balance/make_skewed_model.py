#!/usr/bin/env python3
"""Make a mixture-of-experts model whose prompts decide which experts are busy.

    python examples/benchmarks/balance/make_skewed_model.py build/models/moe-skewed
    serve build/models/moe-skewed -dp 2 -ep --enable-eplb

The model of ``make_moe_model.py`` with classes of tokens: token t is of class t modulo ``CLASSES``. Tokens of
class c go to experts c * n to c * n + n - 1 most of the time, where n is the number of experts over that of
classes, and the next token is of the same class. So a prompt of one class keeps these experts busy as long as
it is answered, and prompts of all classes keep all busy alike. Weights are random besides.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[3]))  # where this is not installed

from examples.benchmarks.make_moe_model import make

CLASSES = 4
"""Classes of tokens; that of a token is its number modulo this."""
MARK = 12.0
"""Size of the part of a token's vector that says its class.

All other parts are about 1.
"""
PULL = 3.0
"""What the experts of a class gain in the router from it."""


def skew(directory: Path) -> None:
    """Give each class one of the first entries of all vectors, which nothing else writes."""
    import torch
    from safetensors.torch import load_file, save_file

    file = directory / "model.safetensors"
    weights = load_file(file)
    for name, weight in weights.items():
        if name.endswith("embed_tokens.weight"):
            weight[:, :CLASSES] = MARK * _of_class(len(weight))
        elif name.endswith("lm_head.weight"):
            weight[:, :CLASSES] = _of_class(len(weight))
        elif name.endswith("mlp.gate.weight"):
            each = len(weight) // CLASSES
            weight[:, :CLASSES] = PULL * torch.eye(CLASSES).repeat_interleave(each, 0)
        elif name.endswith(("o_proj.weight", "down_proj.weight")):
            weight[..., :CLASSES, :] = 0.0
        weights[name] = weight.to(torch.bfloat16).contiguous()
    save_file(weights, file, metadata={"format": "pt"})


def _of_class(count: int) -> Any:
    """1 where a token is of a class, else 0: [count, classes]."""
    import torch

    return torch.eye(CLASSES).repeat(-(-count // CLASSES), 1)[:count]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("directory", type=Path, help="where to write it")
    add("--layers", type=int, default=4, help="(default: %(default)s)")
    add("--hidden", type=int, default=512, help="a multiple of 128 (default: %(default)s)")
    add("--experts", type=int, default=16, help="a multiple of 4 (default: %(default)s)")
    add("--top-k", type=int, default=3, help="experts per token (default: %(default)s)")
    add("--width", type=int, default=2048, help="of one expert (default: %(default)s)")
    add("--seed", type=int, default=0, help="of the weights (default: %(default)s)")
    args = vars(parser.parse_args())
    if args["hidden"] < 128 or args["hidden"] % 128 or args["experts"] % CLASSES:
        parser.error(f"--hidden must be a multiple of 128, and --experts one of {CLASSES}")
    count = make(**args)
    skew(args["directory"])
    print(f"{count / 1e6:.1f} M parameters -> {args['directory']}")


if __name__ == "__main__":
    main()
