"""Batch-invariant torch operators on the CPU: computed in blocks of fixed size.

So a row's bits do not depend on the rows beside it. A library chooses how it sums by the number of rows of a
product. So each product is computed in blocks of :data:`BLOCK_ROWS` rows, the last one filled up with zeros:
all products with a weight have one shape. In a product of one shape each row is summed alike, wherever it
stands. An elementwise function is computed in vectors, but for the last few numbers, which may round
otherwise. So tensors are filled up to whole vectors. Sums, norms and orders along a row are computed row by
row in any case.

:class:`FixedBlocks` sees each operator that a model calls. While a model is tried
(:mod:`engine.compute.invariance`) it refuses operators of which it is not known how they compute a row.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

BLOCK_ROWS = 16
"""Rows per block of a matrix product."""
LARGE_ROWS = 128
"""Rows per block where so many give the same bits."""
COLUMNS = 16
"""Outputs of a product are computed in multiples of this, the rest apart.

MKL shares others out among threads in the middle of a vector.
"""
VECTOR = 64
"""Numbers that an elementwise function computes in whole vectors, in any type."""
TILE = 1 << 14
"""Most numbers of an elementwise call: torch's threads would share more of them."""
ALIGNMENT = 64
"""Bytes at whose multiples the rows of a product begin, as in torch's own memory."""

EXACT = frozenset((
    "_local_scalar_dense", "_reshape_alias", "_scaled_dot_product_flash_attention_for_cpu",
    "_to_copy", "_unsafe_view", "abs", "alias", "all", "any", "arange", "argwhere", "as_strided",
    "bincount", "bitwise_and", "bitwise_not", "bitwise_or", "broadcast_to", "cat", "ceil", "chunk",
    "clamp", "clamp_", "clamp_max", "clamp_min", "clone", "constant_pad_nd", "contiguous", "copy_",
    "detach", "detach_", "div", "div_", "divide", "dropout", "embedding", "empty", "empty_like",
    "eq", "equal", "expand", "expand_as", "expand_copy", "eye", "feature_dropout", "fill_",
    "flatten", "flip", "floor", "floor_divide", "full", "full_like", "gather", "ge", "gt", "histc",
    "hstack", "index", "index_add", "index_add_", "index_copy", "index_copy_", "index_fill",
    "index_put", "index_put_", "index_select", "is_nonzero", "isfinite", "isinf", "isnan", "item",
    "le", "leaky_relu", "lift_fresh", "logical_and", "logical_not", "logical_or", "lt",
    "masked_fill", "masked_fill_", "masked_scatter", "maximum", "minimum", "moveaxis", "movedim",
    "mul_", "narrow", "ne", "neg", "neg_", "new_empty", "new_full", "new_ones", "new_zeros",
    "nonzero", "numel", "numpy_T", "one_hot", "ones", "ones_like", "pad", "permute", "relu",
    "relu_", "remainder", "repeat", "repeat_interleave", "reshape", "resolve_conj", "resolve_neg",
    "roll", "round", "rsub", "scalar_tensor", "scatter", "scatter_", "scatter_add", "scatter_add_",
    "select", "sign", "size", "slice", "split", "split_with_sizes", "square", "squeeze", "stack",
    "subtract", "swapaxes", "swapdims", "t", "tensor_split", "threshold", "tile", "to", "transpose",
    "tril", "tril_", "triu", "triu_", "true_divide", "trunc", "type_as", "unbind", "unflatten",
    "unfold", "unsafe_chunk", "unsafe_split", "unsqueeze", "view", "view_as", "view_as_complex",
    "view_as_real", "view_dtype", "vstack", "where", "zero_", "zeros", "zeros_like",
))  # fmt: skip
"""Operators that move numbers, or whose result the standard of floating-point numbers defines."""
BY_ROW = frozenset((
    "_fused_rms_norm", "_log_softmax", "_softmax", "amax", "amin", "aminmax", "argmax", "argmin",
    "argsort", "cummax", "cumprod", "cumsum", "layer_norm", "linalg_vector_norm", "log_softmax",
    "logsumexp", "max", "mean", "min", "native_layer_norm", "norm", "prod", "rms_norm", "softmax",
    "sort", "std", "std_mean", "sum", "topk", "var", "var_mean",
))  # fmt: skip
"""Operators along a row: torch computes each row by itself, one vector after the other."""
ELEMENTWISE = frozenset((
    "acos", "asin", "atan", "celu", "cos", "cosh", "elu", "erf", "erfc", "exp", "exp2", "expm1",
    "gelu", "hardsigmoid", "hardswish", "hardtanh", "log", "log10", "log1p", "log2", "log_sigmoid",
    "logit", "mish", "pow", "reciprocal", "rsqrt", "selu", "sigmoid", "silu", "sin", "sinh",
    "softplus", "sqrt", "tan", "tanh",
))  # fmt: skip
"""Functions of one number each, which vectors may round otherwise than single numbers."""


Linear = Callable[..., torch.Tensor]
"""Product of rows [..., inputs], a matrix [outputs, inputs] and a bias, as ``torch.nn.functional.linear``."""


class UnknownOperator(Exception):
    """Error: an operator that may compute a row differently beside other rows."""


class FixedBlocks(TorchDispatchMode):  # type: ignore[misc]
    """Context in which this thread's operators compute in blocks of fixed size."""

    def __init__(self, linear: Linear | None = None) -> None:
        """``linear``: computes each row of a product alike; None: in blocks of rows."""
        super().__init__()
        self.is_strict = False
        """Whether unknown operators are refused."""
        self._rules: dict[Any, Callable[..., Any]] = {}
        self._products = _products_by(linear or _linear)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Torch hook that skips compiler checks: saves microseconds per operator."""
        return False

    def __repr__(self) -> str:
        return f"FixedBlocks({BLOCK_ROWS} rows)"

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Compute an operator; called by torch."""
        rule = self._rules.get(func)
        if rule is None:
            rule = self._rules[func] = self._rule(func)
        return rule(*args, **kwargs) if kwargs else rule(*args)

    @contextmanager
    def in_one_shape(self) -> Iterator[None]:
        """Context for calls that always have the same shapes: any operator may be used there."""
        was, self.is_strict = self.is_strict, False
        try:
            yield
        finally:
            self.is_strict = was

    def _rule(self, func: Any) -> Callable[..., Any]:
        """Choose how an operator is computed: by blocks, rows, tiles, or decomposed."""
        space, _, name = str(func.overloadpacket).partition(".")
        overload = str(func).rpartition(".")[2]
        if space == "aten":
            if name in self._products and overload != "out":
                return self._products[name]
            if name == "mm":
                linear = self._products["linear"]
                return lambda left, right, *, out: out.copy_(linear(left, right.t()))
            if name == "einsum":
                return self._decomposed(func)
            if name in ("add", "sub", "add_", "sub_"):
                return lambda a, b, alpha=1: func(a, b if alpha == 1 else b * alpha)
            if name in ("mul", "multiply"):
                return lambda a, b: _complex_product(a, b) if _are_complex(a, b) else func(a, b)
            if name == "polar":
                return _polar
            if name == "pow" and overload == "Scalar":
                return lambda base, powers: _elementwise(lambda tile: func(base, tile), powers)
            if name.removesuffix("_") in ELEMENTWISE and overload not in ("out", "Tensor_Tensor", "Scalar"):
                return _in_place(func) if name.endswith("_") else lambda *a, **k: _elementwise(func, *a, **k)
            by_row = name in BY_ROW and not (overload == "default" and name in ("mean", "sum", "prod"))
            if name in EXACT or by_row:
                return func  # type: ignore[no-any-return]
        return lambda *args, **kwargs: self._unknown(func, args, kwargs)

    def _decomposed(self, func: Any) -> Callable[..., Any]:
        """Compute an operator through its decomposition into simpler ones."""

        def compute(*args: Any, **kwargs: Any) -> Any:
            with self:
                return func.decompose(*args, **kwargs)

        return compute

    def _unknown(self, func: Any, args: Any, kwargs: Any) -> Any:
        """An operator without a rule: refused while a model is tried, unless on integers."""
        has_floats = any(isinstance(each, torch.Tensor) and each.is_floating_point() for each in args)
        if self.is_strict and has_floats:
            raise UnknownOperator(str(func))
        return func(*args, **kwargs)


def _linear(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """[..., inputs] by [outputs, inputs], in blocks of rows."""
    outputs, inputs = weight.shape
    flat = rows.reshape(-1, inputs)
    if not flat.is_contiguous():
        flat = flat.contiguous()
    if inputs <= 1 or not len(flat):  # nothing is summed
        return F.linear(rows, weight, bias)
    blocks = [_block(flat, begin) for begin in range(0, len(flat), BLOCK_ROWS)]
    whole = outputs - outputs % COLUMNS
    if whole == outputs:
        made = [F.linear(block, weight, bias) for block in blocks]
    else:
        missing = COLUMNS - outputs % COLUMNS
        last = F.pad(weight[whole:], (0, 0, 0, missing))
        more = None if bias is None else F.pad(bias[whole:], (0, missing))
        first, begin = weight[:whole], None if bias is None else bias[:whole]
        made = [
            torch.cat([F.linear(block, first, begin), F.linear(block, last, more)], dim=1)[:, :outputs]
            for block in blocks
        ]
    result = made[0] if len(made) == 1 else torch.cat(made)
    return result[: len(flat)].reshape(*rows.shape[:-1], outputs)


class LargeBlocks:
    """Products in blocks of more rows, where these give the bits of :data:`BLOCK_ROWS`.

    That is tried for each shape of weights and number of threads, on the weights themselves.
    """

    def __init__(self, shapes: Collection[tuple[int, int]]) -> None:
        """``shapes`` of the weights, [outputs, inputs]; other products are computed as ever."""
        self._shapes = frozenset(shapes)
        self._agrees: dict[tuple[int, int, torch.dtype, bool, int], bool] = {}

    def __repr__(self) -> str:
        return f"<LargeBlocks for {sum(self._agrees.values())} of {len(self._agrees)} shapes>"

    def __call__(
        self, rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """[..., inputs] by [outputs, inputs]."""
        outputs, inputs = weight.shape
        count = rows.numel() // inputs
        if count < LARGE_ROWS or (outputs, inputs) not in self._shapes or not weight.is_contiguous():
            return _linear(rows, weight, bias)
        if not self._tried(weight, bias):
            return _linear(rows, weight, bias)
        flat = rows.reshape(-1, inputs).contiguous()
        whole = count - count % LARGE_ROWS
        made = [
            F.linear(_aligned(flat[begin : begin + LARGE_ROWS]), weight, bias)
            for begin in range(0, whole, LARGE_ROWS)
        ]
        if whole < count:
            made.append(_linear(flat[whole:], weight, bias))
        return torch.cat(made).reshape(*rows.shape[:-1], outputs)

    def _tried(self, weight: torch.Tensor, bias: torch.Tensor | None) -> bool:
        outputs, inputs = weight.shape
        key = (outputs, inputs, weight.dtype, bias is None, torch.get_num_threads())
        if key not in self._agrees:
            numbers = (torch.arange(LARGE_ROWS * inputs) * 7919 % 1021).view(LARGE_ROWS, inputs)
            made_up = (numbers.float() / 511 - 1).to(weight.dtype)
            large, usual = F.linear(made_up, weight, bias), _linear(made_up, weight, bias)
            self._agrees[key] = outputs % COLUMNS == 0 and torch.equal(large, usual)
        return self._agrees[key]


def _aligned(block: torch.Tensor) -> torch.Tensor:
    """The block, at an address as in torch's own memory."""
    return block.clone() if block.data_ptr() % ALIGNMENT else block


def _block(flat: torch.Tensor, begin: int) -> torch.Tensor:
    """A block of rows from ``begin`` on, filled up with zeros."""
    block = flat[begin : begin + BLOCK_ROWS]
    if len(block) < BLOCK_ROWS:
        whole = flat.new_zeros(BLOCK_ROWS, flat.shape[1])
        whole[: len(block)] = block
        return whole
    return _aligned(block)


def _matmul(linear: Linear, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Matrix product like ``torch.matmul``, with stacked matrices computed one by one."""
    if left.dim() == 1:
        return _matmul(linear, left[None], right).squeeze(-2 if right.dim() > 1 else 0)
    if right.dim() == 1:
        return linear(left, right[None]).squeeze(-1)
    if right.dim() == 2:
        return linear(left, right.t())
    if left.shape[-1] <= 1:  # nothing is summed
        return torch.matmul(left, right)
    stack = torch.broadcast_shapes(left.shape[:-2], right.shape[:-2])
    lefts = left.expand(*stack, *left.shape[-2:]).reshape(-1, *left.shape[-2:])
    rights = right.expand(*stack, *right.shape[-2:]).reshape(-1, *right.shape[-2:])
    made = [linear(one, other.t()) for one, other in zip(lefts.unbind(), rights.unbind(), strict=True)]
    return torch.stack(made).reshape(*stack, left.shape[-2], right.shape[-1])


def _addmm(
    linear: Linear,
    bias: torch.Tensor,
    left: torch.Tensor,
    right: torch.Tensor,
    *,
    beta: float = 1,
    alpha: float = 1,
) -> torch.Tensor:
    if beta == alpha == 1 and bias.dim() == 1 and right.dim() == 2:
        return linear(left, right.t(), bias)
    return bias * beta + _matmul(linear, left, right) * alpha


def _products_by(linear: Linear) -> dict[str, Callable[..., torch.Tensor]]:
    """Operators that multiply matrices, by name, through one product."""
    matmul, addmm = partial(_matmul, linear), partial(_addmm, linear)
    return {
        "linear": linear,
        "matmul": matmul,
        "mm": matmul,
        "bmm": matmul,
        "addmm": addmm,
        "baddbmm": addmm,
    }


def _elementwise(func: Any, numbers: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Elementwise function, computed in tiles of whole vectors."""
    if not isinstance(numbers, torch.Tensor) or not numbers.is_floating_point():
        return func(numbers, *args, **kwargs)
    flat = numbers.contiguous().view(-1)
    count = flat.numel()
    if missing := -count % VECTOR:
        flat = F.pad(flat, (0, missing))
    if flat.numel() <= TILE:
        made = func(flat, *args, **kwargs)
    else:
        made = torch.cat([func(tile, *args, **kwargs) for tile in flat.split(TILE)])
    return made[:count].view(numbers.shape)


def _are_complex(*numbers: Any) -> bool:
    return all(isinstance(each, torch.Tensor) and each.is_complex() for each in numbers)


def _complex_product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Complex numbers multiplied, each product and sum rounded by itself."""
    real = left.real * right.real - left.imag * right.imag
    return torch.complex(real, left.real * right.imag + left.imag * right.real)


def _polar(sizes: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """Complex numbers of sizes and angles."""
    cosines, sines = (_elementwise(each, angles) for each in (torch.cos, torch.sin))
    return torch.complex(sizes * cosines, sizes * sines)


def _in_place(func: Any) -> Callable[..., Any]:
    """In-place operator computed through its out-of-place form."""
    plain = getattr(torch.ops.aten, str(func.overloadpacket).partition(".")[2].removesuffix("_"))

    def compute(numbers: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return numbers.copy_(_elementwise(plain, numbers, *args, **kwargs))

    return compute
