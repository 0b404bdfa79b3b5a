"""Child process of ``lockstep bench machine --model``, which times decode steps of a model.

    python -m engine.roofline '{"model": "DIRECTORY"}'

The argument is a :class:`RooflineRequest`. Standard output is a :class:`RooflineFacts` in JSON. Errors go to
standard error.
"""

from __future__ import annotations

import logging
import sys
from pathlib import Path

import msgspec
import torch

from engine.config import ModelConfig
from engine.kernels.cache.native_cache import NativeCache
from engine.kernels.core import library
from engine.kernels.core.stand_ins import NotRecognised
from engine.kernels.decoder import recognise
from engine.kernels.make import let_go_of_weights
from engine.kernels.program import Program
from engine.model.checkpoint import read_model_info
from engine.model.errors import CheckpointError
from engine.model.weights import load_model
from engine.roofline.facts import RooflineFacts, RooflineRequest, StepFacts
from engine.roofline.work import BLOCK, consecutive, is_counted, vocabulary_of, work_of

CONTEXT = 160
"""Tokens of context that each sequence has."""


def measure(request: RooflineRequest) -> RooflineFacts:
    """Time decode steps of each number of rows.

    Raises:
        NotRecognised: the kernels do not compute the model, or its work is not counted.
    """
    kernels = library.load()
    if kernels is None:
        raise NotRecognised("there are no native kernels here")
    torch.set_num_threads(request.threads)
    dtype = getattr(torch, request.dtype)
    settings = ModelConfig(model=request.model, quantization=request.quantization)
    model = load_model(
        read_model_info(Path(request.model)), settings, dtype=dtype, device=torch.device("cpu")
    )
    decoder = recognise(model.module, model.layers, dtype)
    if not is_counted(decoder):
        raise NotRecognised("the work of layers with recurrent states is not counted")
    program, vocabulary = Program(kernels, decoder), vocabulary_of(decoder)
    steps = {batch: [(CONTEXT + BLOCK // 2, 1)] * batch for batch in request.batches}
    work = {batch: work_of(decoder, program, rows, batch) for batch, rows in steps.items()}
    let_go_of_weights(model, decoder)
    blocks = max(request.batches) * (CONTEXT // BLOCK + 2)
    cache = NativeCache(model.layers, num_blocks=blocks, block_size=BLOCK, dtype=dtype)
    for stored in (*cache.keys, *cache.values):
        stored.fill_(0.5)  # memory that nobody has written is one page of zeros, read from the first cache
    program.use(cache)
    found = []
    with torch.inference_mode():
        for batch, least in work.items():
            seconds, _ = consecutive(program, vocabulary, [(CONTEXT, 1)] * batch, request.times)
            found.append(StepFacts(batch, seconds, least.read_bytes, least.operations))
    kind = kernels.kind(bfloat16=dtype == torch.bfloat16)
    return RooflineFacts(kind, program.weight_bytes, found)


def main(argv: list[str]) -> int:
    """Measure what the argument asks for; returns 1 for a reason on standard error."""
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr, format="%(message)s")
    request = msgspec.json.decode(argv[0], type=RooflineRequest)
    try:
        found = measure(request)
    except (NotRecognised, CheckpointError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    print(msgspec.json.encode(found).decode())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
