#!/usr/bin/env python3
r"""Train the small mixture-of-experts language model that ships with Lockstep.

The model is a real ``Qwen3MoeForCausalLM`` (6 layers, 8 experts per layer, top-2 routing, 6.7 million
parameters), trained from nothing on the six complete novels of Jane Austen. The text is in the public domain
and comes out of the Debian package ``r-cran-janeaustenr``, so that the whole run needs nothing but a Debian
machine with ``torch`` and ``transformers``::

    apt-get update
    python examples/training/train_model.py --minutes 65 --work /tmp/lockstep-moe \
        --out engine/models/lockstep-moe

The stages (in ``examples/training/``) run in this order; any of them can be named on the command line to run
only these:

``text``       download and unpack the package, read its R database, write one plain text file per novel
``tokenizer``  train a byte-level BPE vocabulary of 4096 entries on these files
``train``      train the model; the learning rate follows the time budget (``--minutes``) or ``--steps``
``save``       write the checkpoint as a model directory in hub layout, reload it, check it, write its card
``sample``     print sample outputs of the saved model

Training may be stopped at any time (Ctrl-C or SIGTERM): it writes a checkpoint first, and ``save`` turns any
checkpoint into a model. ``--resume`` goes on from the checkpoint.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from transformers.utils import logging as transformers_logging

sys.path.insert(0, str(Path(__file__).parents[2]))

from examples.training.corpus import PACKAGE, stage_text
from examples.training.save import stage_sample, stage_save
from examples.training.tokenizer import stage_tokenizer
from examples.training.train import stage_train

STAGES = ("text", "tokenizer", "train", "save", "sample")


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Train the small mixture-of-experts model that ships with Lockstep.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument(
        "stages", nargs="*", metavar="stage", help=f"stages to run, of: {', '.join(STAGES)} (all)"
    )
    parser.add_argument(
        "--work", type=Path, default=Path("/tmp/lockstep-moe"), help="directory for text, checkpoints"
    )
    parser.add_argument(
        "--out", type=Path, default=Path("engine/models/lockstep-moe"), help="model directory to write"
    )
    parser.add_argument("--deb", type=Path, help=f"a {PACKAGE} package that is already here")
    parser.add_argument("--minutes", type=float, default=65, help="time budget of the training")
    parser.add_argument("--steps", type=int, default=0, help="train for so many steps instead of --minutes")
    parser.add_argument("--lr", type=float, default=2.5e-3, help="peak learning rate")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--experts", default="grouped_mm", choices=("eager", "grouped_mm", "batched_mm"))
    parser.add_argument(
        "--bf16", action=argparse.BooleanOptionalAction, default=True, help="bfloat16 autocast"
    )
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint")
    args = parser.parse_args()
    unknown = [stage for stage in args.stages if stage not in STAGES]
    if unknown:
        parser.error(f"unknown stage {unknown[0]}")
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    args.work.mkdir(parents=True, exist_ok=True)
    for stage in args.stages or STAGES:
        if stage == "text":
            stage_text(args.work, args.deb.resolve() if args.deb else None)
        elif stage == "tokenizer":
            stage_tokenizer(args.work)
        elif stage == "train":
            stage_train(args.work, args)
        elif stage == "save":
            stage_save(args.work, args.out, args)
        else:
            stage_sample(args.out)


if __name__ == "__main__":
    main()
