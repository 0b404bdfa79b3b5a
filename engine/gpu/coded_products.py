"""Packed weights on a GPU, and launches of their products (loads triton)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

from engine.gpu import coded_kernels as kernels
from engine.gpu.coded_kernels import FLOAT4, INT4, INT8
from engine.gpu.coded_kernels import FLOAT8 as E4M3

if TYPE_CHECKING:
    from engine.gpu.grouped_products import Pairs

WORD = 32
"""Inputs of codes of 4 bits that are packed together."""
GROUP_STEP = 16
"""Number that divides the inputs of each group."""
TILE_INPUTS = 128
"""Most inputs that a program multiplies at once."""
SMALL_TILE, LARGE_TILE = 16, 64
"""Rows of a tile."""
FEW_OUTPUTS, MANY_OUTPUTS = 32, 64
"""Outputs of a small tile, and of a large one."""
MANY_ROWS = 48
"""Rows of a matrix, on average, from which tiles are large."""
WIDENED_ROWS = 128
"""Rows from which one matrix is widened as a whole, and torch multiplies.

Measured on an H100 (12,288 x 4,096): 256 rows took 0.18 to 0.33 ms with codes that are widened tile by tile,
and 0.04 in bfloat16; to write that many weights takes 0.04.
"""
WIDENED_BYTES = 256 << 20
"""Most bytes of a matrix that is widened so."""
WANTED_PROGRAMS = 528
"""Programs that keep a device busy: four for each of 132 multiprocessors.

With fewer, sums of few rows are cut along their inputs.
"""
MOST_CUTS, LEAST_CUT = 8, 512
"""Cuts of a sum, and inputs of a cut."""
ADDED_BLOCK = 1024
"""Outputs of a program that adds up cuts."""
WIDE_BLOCK = 1024
"""Bytes of a program that widens weights."""
FLOAT8_FACTOR = 256.0
"""Factor by which shifted bits of 8-bit floats are too small."""
TWICE_FLOAT4 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
"""Twice the numbers of floats of 4 bits (e2m1), by their bits."""


class InputRounding(Protocol):
    """Interface of :class:`engine.model.quantization.rounding.Rounding` for kernels."""

    @property
    def scale(self) -> float: ...

    @property
    def zero(self) -> int: ...

    @property
    def is_symmetric(self) -> bool: ...

    def product(
        self, x: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, parts: int = 1
    ) -> torch.Tensor: ...


@dataclass(frozen=True)
class DeviceCodes:
    """Packed weights of a linear layer, or of a layer's experts, on a device."""

    codes: torch.Tensor
    """uint8 [matrices, outputs, bytes]."""
    scales: torch.Tensor
    """float32 [matrices, groups, outputs]."""
    zeros: torch.Tensor | None
    """float32 like the scales; None: all are 0."""
    kind: int
    inputs: int
    order: torch.Tensor | None = None
    """int64 [inputs]: which input stands at each place; None: they stand in their order."""
    rounding: InputRounding | None = None
    """Rounding of inputs; None: not at all."""
    parts: int = 1
    """Parts of rounded inputs that have scales of their own."""
    sums: torch.Tensor | None = None
    """int32 [matrices, parts, outputs] of the codes; None where zero points of inputs are 0."""

    @property
    def outputs(self) -> int:
        return int(self.codes.shape[1])

    @property
    def numel(self) -> int:
        """Number of weights in all matrices."""
        return len(self.codes) * self.outputs * self.inputs

    @property
    def nbytes(self) -> int:
        """Bytes of memory of the device."""
        held = (self.codes, self.scales, self.zeros, self.order, self.sums)
        return sum(each.nbytes for each in held if each is not None)

    def widened(self, number: int, dtype: torch.dtype) -> torch.Tensor:
        """Weights [outputs, inputs] of one matrix, by torch's operators."""
        numbers = _unpacked(self.codes[number], self.kind)[:, : self.inputs]
        grouped = numbers.unflatten(-1, (self.scales.shape[1], -1))
        if self.zeros is not None:
            grouped = grouped - self.zeros[number].T[..., None]
        weights = (grouped * self.scales[number].T[..., None]).flatten(-2).to(dtype)
        if self.order is None:
            return weights
        return torch.empty_like(weights).index_copy_(1, self.order, weights)

    def expected(self, number: int, rows: torch.Tensor) -> torch.Tensor:
        """Product of one matrix and rows [n, inputs] by torch: float32 [n, outputs]."""
        if self.rounding is None:
            return rows.float() @ self.widened(number, rows.dtype).float().T
        codes = self.codes[number].view(torch.int8)
        return self.rounding.product(rows, codes, self.scales[number, 0], self.parts)

    def product(
        self,
        rows: torch.Tensor,
        bias: torch.Tensor | None = None,
        pairs: Pairs | None = None,
        *,
        gather: bool = False,
        dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        """Outputs [..., outputs] of rows [..., inputs], in ``dtype`` or that of the rows.

        ``pairs``: rows are sorted by expert, or with ``gather`` those of tokens.
        """
        flat = rows.reshape(-1, rows.shape[-1])
        if self.order is not None:
            flat = flat.index_select(1, self.order)
        elif flat.stride(1) != 1:
            flat = flat.contiguous()
        if self._is_widened_for(flat, pairs):
            found = torch.nn.functional.linear(flat, self._wide(rows.dtype))
            found = found if bias is None else found.add_(bias)
            return found.to(dtype or rows.dtype).view(*rows.shape[:-1], -1)
        count = len(flat) if pairs is None else len(pairs)
        outputs = flat.new_empty(count, self.outputs, dtype=dtype or rows.dtype)
        if count:
            if self.rounding is None:
                self._multiply(flat, bias, outputs, pairs, gather)
            else:
                self._multiply_whole(flat, bias, outputs, pairs, gather)
        return outputs.view(*rows.shape[:-1], -1) if pairs is None else outputs

    def _is_widened_for(self, rows: torch.Tensor, pairs: Pairs | None) -> bool:
        """Whether the matrix is widened as a whole before the product."""
        size = self.outputs * self.inputs * rows.element_size()
        return self.rounding is None and pairs is None and len(rows) >= WIDENED_ROWS and size <= WIDENED_BYTES

    def _wide(self, dtype: torch.dtype) -> torch.Tensor:
        """Widened weights [outputs, inputs] of one matrix, in the order of its codes."""
        weights = torch.empty(self.outputs, self.inputs, dtype=dtype, device=self.codes.device)
        width = self.codes.shape[2]
        kernels.widen[(self.outputs, -(-width // WIDE_BLOCK))](
            self.codes,
            self.scales,
            self.scales if self.zeros is None else self.zeros,
            weights,
            IN=self.inputs,
            OUT=self.outputs,
            BYTES=width,
            GROUPS=self.scales.shape[1],
            KIND=self.kind,
            BLOCK=min(WIDE_BLOCK, _power(width)),
            ZEROS=self.zeros is not None,
        )
        return weights

    def _multiply(
        self,
        rows: torch.Tensor,
        bias: torch.Tensor | None,
        outputs: torch.Tensor,
        pairs: Pairs | None,
        gather: bool,
    ) -> None:
        groups = self.scales.shape[1]
        is_packed = self.kind in (INT4, FLOAT4)
        fitting = _power(max(self.inputs, WORD)) if groups == 1 else _even(self.inputs // groups)
        block_k = min(TILE_INPUTS, max(WORD, fitting)) if is_packed else min(TILE_INPUTS // 2, fitting)
        grid, tiles = self._tiles(outputs, pairs)
        is_cut = pairs is None and tiles["BLOCK_M"] == SMALL_TILE
        cuts, cut = _cuts(grid[0], self.inputs) if is_cut else (1, self.inputs)
        sums = outputs if cuts == 1 else outputs.new_empty(cuts, *outputs.shape, dtype=torch.float32)
        kernels.coded_product[(*grid, cuts)](
            rows,
            self.codes,
            self.scales,
            self.scales if self.zeros is None else self.zeros,
            self.scales if bias is None else bias,
            sums,
            *self._sorted_by_expert(rows, pairs),
            rows.stride(0),
            IN=self.inputs,
            BYTES=self.codes.shape[2],
            GROUPS=groups,
            KIND=self.kind,
            BLOCK_K=block_k,
            CUT=cut,
            GATHER=gather,
            ZEROS=self.zeros is not None,
            BIAS=bias is not None,
            WIDEN=rows.dtype == torch.bfloat16 and rows.device.type == "cpu",
            **tiles,
        )
        if cuts > 1:
            numel = outputs.numel()
            kernels.added_up[(-(-numel // ADDED_BLOCK),)](sums, outputs, numel, cuts, BLOCK=ADDED_BLOCK)

    def _multiply_whole(
        self,
        rows: torch.Tensor,
        bias: torch.Tensor | None,
        outputs: torch.Tensor,
        pairs: Pairs | None,
        gather: bool,
    ) -> None:
        assert self.rounding is not None
        rounded, scales, zeros = round_rows(rows, self.rounding, self.parts)
        grid, tiles = self._tiles(outputs, pairs)
        part = self.inputs // self.parts
        kernels.integer_product[grid](
            rounded,
            scales,
            zeros,
            self.codes.view(torch.int8),
            self.scales,
            scales if self.sums is None else self.sums,
            self.scales if bias is None else bias,
            outputs,
            *self._sorted_by_expert(rows, pairs),
            PART=part,
            PARTS=self.parts,
            BLOCK_K=min(TILE_INPUTS, max(WORD, _power(part))),
            GATHER=gather,
            SYMMETRIC=self.sums is None,
            BIAS=bias is not None,
            enable_fp_fusion=False,
            **tiles,
        )

    def _sorted_by_expert(
        self, rows: torch.Tensor, pairs: Pairs | None
    ) -> tuple[torch.Tensor, torch.Tensor, int, int]:
        """Arguments ``ends``, ``order``, ``count`` and ``top_k`` of a product."""
        if pairs is None:
            return self.codes, self.codes, len(rows), 1
        return pairs.ends, pairs.order, len(rows), pairs.top_k

    def _tiles(self, outputs: torch.Tensor, pairs: Pairs | None) -> tuple[tuple[int, int], dict[str, int]]:
        """Grid of a product, and tile sizes of its programs."""
        count, width = outputs.shape
        matrices = 1 if pairs is None else len(self.codes)
        block_m = LARGE_TILE if count >= MANY_ROWS * matrices else SMALL_TILE
        if self.parts > 1:  # whose sums take twice the registers
            block_m = min(block_m, LARGE_TILE // 2)
        most = FEW_OUTPUTS if block_m == SMALL_TILE else MANY_OUTPUTS
        if self.rounding is not None and block_m == LARGE_TILE:
            most *= 2  # nothing is widened, which would take registers
        block_n = min(most, max(16, _power(width)))
        tiles = -(-count // block_m) if pairs is None else count // block_m + min(matrices, count)
        sizes = {
            "OUT": width,
            "EXPERTS": 0 if pairs is None else matrices,
            "BLOCK_E": _power(matrices),
            "BLOCK_M": block_m,
            "BLOCK_N": block_n,
            "num_warps": 4,
            "num_stages": 3,
        }
        return (-(-width // block_n), tiles), sizes


def round_rows(
    rows: torch.Tensor, rounding: InputRounding, parts: int = 1
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rows [n, k] as int8, with scales float32 and zero points int32 [n, parts]."""
    count, width = rows.shape
    codes = torch.empty(count, width, dtype=torch.int8, device=rows.device)
    scales = torch.empty(count, parts, dtype=torch.float32, device=rows.device)
    zeros = torch.empty(count, parts, dtype=torch.int32, device=rows.device)
    part = width // parts
    kernels.round_rows[(count, parts)](
        rows,
        codes,
        scales,
        zeros,
        rows.stride(0),
        float(rounding.scale),
        float(rounding.zero),
        PART=part,
        BLOCK=_power(part),
        FIXED=bool(rounding.scale),
        SYMMETRIC=rounding.is_symmetric,
        enable_fp_fusion=False,
    )
    return codes, scales, zeros


def _unpacked(codes: torch.Tensor, kind: int) -> torch.Tensor:
    """Numbers float32 [outputs, inputs] of codes [outputs, bytes]."""
    if kind == INT8:
        return codes.view(torch.int8).float()
    if kind == E4M3:
        return codes.view(torch.float8_e4m3fn).float() / FLOAT8_FACTOR
    words = codes.unflatten(-1, (-1, 1, WORD // 2))
    places = torch.cat((words & 15, words >> 4), dim=-2).flatten(-3)
    if kind == FLOAT4:
        return torch.tensor(TWICE_FLOAT4, device=codes.device)[places.int()].float()
    return (places ^ 8).float() - 8.0


def _cuts(programs: int, inputs: int) -> tuple[int, int]:
    """Number of cuts of a sum, and inputs of each.

    That is a multiple of what a program adds at once.
    """
    cuts = _power(min(MOST_CUTS, WANTED_PROGRAMS // programs, inputs // LEAST_CUT) // 2 + 1)
    cut = -(-inputs // cuts // TILE_INPUTS) * TILE_INPUTS
    return (-(-inputs // cut), cut) if cuts > 1 else (1, inputs)


def _even(size: int) -> int:
    """The greatest power of two that divides a number."""
    return size & -size


def _power(size: int) -> int:
    """The next power of two."""
    return 1 << (max(size, 1) - 1).bit_length()
