#!/usr/bin/env python3
r"""Train the EAGLE-3 head that ships with Lockstep beside the shipped model.

The head is one decoder layer that drafts tokens from the model's hidden states. It learns from the novels
that the model was trained on, and from what the model itself writes behind pieces of them::

    apt-get update
    python examples/training/train_draft_head.py --minutes 40 --work /tmp/lockstep-moe \
        --out engine/models/lockstep-moe-eagle3

The stages run in this order; any of them can be named to run only these:

``text``     as in ``train_model.py``: download the novels
``write``    let the model write rows of its own text, and some behind text that was held out
``train``    train the head by the test-time loss of EAGLE-3: several steps, each on its own results
``save``     write the newest checkpoint as a model directory, in the format of SGLang and vLLM
``measure``  tokens a step on held-out text, by the saved head, for its card

Training may be stopped at any time (Ctrl-C or SIGTERM): it writes a checkpoint first.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from transformers.utils import logging as transformers_logging

sys.path.insert(0, str(Path(__file__).parents[2]))

from examples.training.corpus import PACKAGE, stage_text
from examples.training.draft_save import stage_measure, stage_save
from examples.training.draft_text import stage_write
from examples.training.draft_training import stage_train

STAGES = ("text", "write", "train", "save", "measure")


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Train the EAGLE-3 head that ships with Lockstep.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument(
        "stages", nargs="*", metavar="stage", help=f"stages to run, of: {', '.join(STAGES)} (all)"
    )
    parser.add_argument(
        "--work", type=Path, default=Path("/tmp/lockstep-moe"), help="directory for text, checkpoints"
    )
    parser.add_argument(
        "--out", type=Path, default=Path("engine/models/lockstep-moe-eagle3"), help="directory to write"
    )
    parser.add_argument("--deb", type=Path, help=f"a {PACKAGE} package that is already here")
    parser.add_argument("--rows", type=int, default=1500, help="rows of 1026 tokens that the model writes")
    parser.add_argument("--minutes", type=float, default=40, help="time budget of the training")
    parser.add_argument("--lr", type=float, default=1.5e-3, help="peak learning rate")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    unknown = [stage for stage in args.stages if stage not in STAGES]
    if unknown:
        parser.error(f"unknown stage {unknown[0]}")
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    torch.set_num_threads(args.threads)
    args.work.mkdir(parents=True, exist_ok=True)
    for stage in args.stages or STAGES:
        if stage == "text":
            stage_text(args.work, args.deb.resolve() if args.deb else None)
        elif stage == "write":
            stage_write(args.work, args.rows, args.seed)
        elif stage == "train":
            stage_train(args.work, args.minutes, args.lr, args.seed)
        elif stage == "save":
            stage_save(args.work, args.out)
        else:
            stage_measure(args.work, args.out)


if __name__ == "__main__":
    main()
