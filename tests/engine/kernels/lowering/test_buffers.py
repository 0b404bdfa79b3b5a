"""Memory of a step's buffers, as it is planned for before they are made."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine.config import ModelConfig
from engine.kernels.decoder import DecoderModel, recognise
from engine.kernels.exchange.exchange import ExpertExchange, LocalExchange
from engine.kernels.lowering.buffers import BufferRoom, Buffers, num_bytes
from engine.model.checkpoint import read_model_info
from engine.model.weights import load_model
from tests.engine.tiny_models import make_tiny_model


def exchange_of(decoder: DecoderModel, rows: int) -> ExpertExchange | None:
    return None if decoder.exchanged is None else LocalExchange(decoder.exchanged, rows)


@pytest.mark.parametrize(
    ("family", "tokens", "settings"),
    [("qwen3", 300, {"head_dim": 16}), ("mixtral", 2048, {"intermediate_size": 128})],
)
def test_memory_for_the_largest_step_is_planned_for(
    family: str, tokens: int, settings: dict[str, int], tmp_path: Path
) -> None:
    directory = make_tiny_model(tmp_path, family, dtype=torch.bfloat16, **settings)
    model = load_model(
        read_model_info(directory), ModelConfig(), dtype=torch.bfloat16, device=torch.device("cpu")
    )
    decoder = recognise(model.module, model.layers, model.dtype)
    room = BufferRoom().grown(BufferRoom(tokens, 100, tokens))
    exchange = exchange_of(decoder, room.own)
    buffers = Buffers(decoder.needs, room, exchange)
    taken = buffers.num_bytes + (0 if buffers.gathered is None else buffers.gathered.nbytes)
    taken += 0 if exchange is None else exchange.layout.num_bytes
    planned = num_bytes(decoder.needs, BufferRoom(tokens, 100, tokens))
    assert taken <= planned * 1.1 + 65536
    assert planned <= taken * 1.2 + 65536
