#!/usr/bin/env python3
"""Write a checkpoint in 8 or 4 bits, in the format of compressed-tensors.

    python examples/training/quantize_model.py engine/models/lockstep-moe /tmp/lockstep-moe-int4 --kind int4

int8 is W8A8: a scale for each output, and activations of 8 bits with a scale for each token. int4 is W4A16: a
scale for 32 inputs of an output. Each weight is rounded to the nearest code; no data is needed. `serve
lockstep-moe-int8` and `lockstep-moe-int4` make the shipped model so at first use.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))  # where this is not installed

from engine.model.quantization.making import quantize_checkpoint


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0], allow_abbrev=False)
    parser.add_argument("source", type=Path, help="directory with config.json and model.safetensors")
    parser.add_argument("target", type=Path, help="directory to write")
    parser.add_argument("--kind", choices=["int8", "int4"], default="int4", help="(default: %(default)s)")
    args = parser.parse_args()
    quantize_checkpoint(args.source, args.target, args.kind)
    size = sum(path.stat().st_size for path in args.target.iterdir())
    print(f"{args.target}: {size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
