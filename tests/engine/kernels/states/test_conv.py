"""Convolutions: torch's numbers, and equal bits however a context is cut."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

import pytest
import torch

from engine.kernels.cache.native_states import NativeStates
from engine.kernels.cache.state_shape import StateShape
from engine.kernels.core import library
from engine.kernels.core.library import KernelLibrary
from engine.kernels.core.operations import ACTIVATED, OperationKind, OperationList, StepArguments
from engine.kernels.core.rows import pitch_of, spaced
from engine.kernels.core.stand_ins import made_up
from engine.kernels.states.conv import Conv
from engine.states.grid import NATIVE_GRID
from engine.states.held import StateRows
from engine.step import RowPieces

pytestmark = pytest.mark.skipif(library.load() is None, reason="no AVX2, or no C++ compiler, here")

TOKENS = 70
SLOTS_EACH = TOKENS // NATIVE_GRID + 1
"""Slots of a request, one for each boundary."""
REQUESTS = 3
WIDTH = 37
"""Numbers of a token, which fill no vector."""


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=[False, True], ids=["fastest", "avx2"])
def kernels(request: pytest.FixtureRequest) -> KernelLibrary:
    return library.opened("avx2" if request.param else None)


class Layer:
    """One convolution between two gates, over contexts of several requests."""

    def __init__(self, kernels: KernelLibrary, conv: Conv, dtype: torch.dtype) -> None:
        self.kernels, self.conv, self.dtype = kernels, conv, dtype
        shape = StateShape(kernel=conv.kernel, width=conv.width)
        self.states = NativeStates([shape], dtype)
        self.states.allocate(REQUESTS * SLOTS_EACH)
        assert self.states.pool is not None
        for tensor in self.states.pool.stored:
            tensor.view(torch.uint8).fill_(0xFF)  # NaN in any type
        self.given = made_up(REQUESTS, TOKENS, 3 * conv.width, seed=7, dtype=dtype)

    def expected(self) -> torch.Tensor:
        """Results [requests, tokens, width] as torch computes them."""
        one, gate, other = self.given.chunk(3, dim=-1)
        sums = torch.stack([self.conv.of_rows(rows) for rows in one * other])
        return sums * gate.float()

    def run(self, rows: Sequence[tuple[int, int, int]]) -> list[torch.Tensor]:
        """Results [count, width] of rows (request, start, count) of one step."""
        width, pieces = self.conv.width, {}
        for index, (request, start, count) in enumerate(rows):
            fills = {
                end: [request * SLOTS_EACH + end // NATIVE_GRID]
                for end in range(NATIVE_GRID, TOKENS + 1, NATIVE_GRID)
                if start < end <= start + count
            }
            pieces[index] = RowPieces((0, []) if start == 0 else None, fills)
        given = [self.given[request, start : start + count] for request, start, count in rows]
        starts, counts = [start for _, start, _ in rows], [count for _, _, count in rows]
        out = torch.zeros(sum(counts), pitch_of(width, self.dtype), dtype=self.dtype)
        operations = OperationList(1)
        operations.add(
            OperationKind.CONV,
            into=spaced(torch.cat(given)),
            out=out,
            weights=self.conv.weights,
            more=self.conv.bias,
            extra=self.states.records[0],
            flags=ACTIVATED if self.conv.is_activated else 0,
            n=3 * width,
            a=0,
            b=2 * width,
            c=width,
        )
        begins = torch.tensor(counts).cumsum(0) - torch.tensor(counts)
        with self.states.step(StateRows([request for request, _, _ in rows], starts, counts, pieces)):
            arguments = StepArguments(
                tokens=sum(counts),
                starts=torch.tensor(starts),
                counts=torch.tensor(counts),
                offsets=begins,
                **self.states.arguments(),
            )
            assert operations.run(self.kernels, arguments, self.dtype)
        return [*out[:, :width].split(counts)]


def made_conv(kernel: int, *, has_bias: bool, is_activated: bool) -> Conv:
    weights = made_up(kernel, WIDTH, seed=kernel, dtype=torch.float32)
    bias = made_up(WIDTH, seed=1, dtype=torch.float32) if has_bias else None
    return Conv(weights, bias, is_activated)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("kernel", [2, 3, 4, 7, NATIVE_GRID + 1])
@pytest.mark.parametrize(("has_bias", "is_activated"), [(False, False), (True, True)])
def test_any_cuts_give_the_numbers_of_torch_and_the_same_bits(
    kernels: KernelLibrary, kernel: int, has_bias: bool, is_activated: bool, dtype: torch.dtype
) -> None:
    layer = Layer(kernels, made_conv(kernel, has_bias=has_bias, is_activated=is_activated), dtype)
    whole = torch.stack(layer.run([(request, 0, TOKENS) for request in range(REQUESTS)])).float()
    close = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 0.01, "atol": 0.01}
    torch.testing.assert_close(whole, layer.expected(), **close)
    numbers = random.Random(kernel)
    for most in (1, 7, 16, 50):
        ends = [0] * REQUESTS
        while min(ends) < TOKENS:
            going = [request for request in range(REQUESTS) if ends[request] < TOKENS]
            some = numbers.sample(going, numbers.randint(1, len(going)))
            rows = [(each, ends[each], min(TOKENS - ends[each], numbers.randint(1, most))) for each in some]
            for _ in range(numbers.choice([1, 1, 2])):  # some steps run again
                results = layer.run(rows)
            for (request, start, count), found in zip(rows, results, strict=True):
                assert torch.equal(found.float(), whole[request, start : start + count]), f"chunks of {most}"
                ends[request] = start + count
