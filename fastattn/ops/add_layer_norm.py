"""Dropout + residual + layer normalisation, and the same with RMSNorm.

For the backends RMSNorm is a call without bias: they then neither subtract the mean nor add a bias.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from fastattn import backends
from fastattn.backends import Backend, Implementation
from fastattn.backends.calls import NormCall
from fastattn.backends.reference import add_layer_norm as reference
from fastattn.backends.reference.philox import draw_rng_state
from fastattn.ops import _autocast, _checks, _watch
from fastattn.ops._autograd import Grads, Needs, Operator


def _validate(
    x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor, **options: Any
) -> tuple[torch.device, tuple[Any, ...]]:
    """Check a call's arguments. Returns (device, inputs): the inputs are what unsupported_reason takes."""
    if bias is None:
        _checks.check_float("bias", bias)
    return _checked(x, residual, weight, bias, **options)


def _validate_rms(
    x: Tensor, residual: Tensor | None, weight: Tensor, **options: Any
) -> tuple[torch.device, tuple[Any, ...]]:
    return _checked(x, residual, weight, None, **options)


def _checked(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    *,
    eps: float = 1e-6,
    dropout_p: float = 0.0,
    x_bias: Tensor | None = None,
    eps_on_std: bool = False,
    **options: Any,
) -> tuple[torch.device, tuple[Any, ...]]:
    x, residual, weight, bias, x_bias = _autocast.stream_inputs(x, residual, weight, bias, x_bias)
    is_uniform = _checks.same_dtype_and_device(
        x, x if residual is None else residual, weight, weight if bias is None else bias
    )
    if not is_uniform:
        _checks.check_float("x", x)
    if x.dim() == 0:
        raise ValueError("x has no dimensions, expected (..., hidden)")
    hidden = x.shape[-1]
    if hidden == 0:
        raise ValueError(f"x has shape {tuple(x.shape)}: the last dimension, hidden, is empty")
    if residual is not None:
        if not is_uniform:
            _checks.check_like("residual", residual, "x", x)
        if residual.shape != x.shape:
            _checks.check_shape("residual", residual, tuple(x.shape), "the shape of x")
    shape = (hidden,)
    if not (is_uniform and x_bias is None and weight.shape == shape and (bias is None or bias.shape == shape)):
        for name, t in (("weight", weight), ("bias", bias), ("x_bias", x_bias)):
            if t is not None or name == "weight":
                _checks.check_parameter(name, t, shape, "(hidden,)", "x", x)
        if bias is not None:
            _checks.check_like("bias", bias, "weight", weight)
    _checks.check_flags(eps_on_std=eps_on_std)
    if eps_on_std and hidden == 1:
        raise ValueError(f"x has shape {tuple(x.shape)}: with eps_on_std hidden must be at least 2")
    _checks.check_eps(eps)
    _checks.check_dropout(dropout_p)
    return x.device, (x, residual, weight, bias, float(dropout_p), x_bias)


@backends.register("add_layer_norm", _validate)
def dropout_add_layer_norm(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    bias: Tensor,
    *,
    eps: float = 1e-6,
    dropout_p: float = 0.0,
    return_sum: bool = False,
    x_bias: Tensor | None = None,
    eps_on_std: bool = False,
    backend: Backend | None = None,
) -> Any:
    """out = layer_norm(residual + dropout(x + x_bias)) * weight + bias, in one pass over the data each way.

    x (..., hidden): float32, bfloat16, float16 (float64 in the backends reference and aten).
    residual: as x, or None for layer_norm(dropout(x)). Under torch.autocast it keeps its dtype, to which x is cast.
    weight, bias (hidden,): float32 or x's dtype.      eps: added to the variance.
    dropout_p: the probability of dropping an element; 0.0 in eval. The rule: fastattn/backends/reference/philox.py.
    return_sum: also return z = residual + dropout(x + x_bias), which a pre-norm model carries on; differentiable.
        Where nothing is added or dropped, z may share memory with x.
    x_bias (hidden,): float32 or x's dtype, whatever weight's is; or None. The bias of the linear layer that made x and
        left it out. Kernels add it, and sum its gradient over the rows, without another pass over the data.
    eps_on_std: eps is added to the standard deviation with Bessel's correction, as in "The Annotated Transformer":
        out = weight * (z - mean) / (std + eps) + bias, std = sqrt(sum((z - mean)^2) / (hidden - 1)), hidden >= 2.
    backend: "reference", "aten", "triton" or "cuda"; default the first that supports the call, see ``explain``.

    Returns out, or (out, z), shaped and typed as x. Sums and statistics run in float32, of z before it is rounded.
    Raises TypeError or ValueError naming the argument, RuntimeError if the backend asked for does not support it.
    Source: Ba et al. 2016, "Layer Normalization", arXiv:1607.06450; Vaswani et al. 2017, section 3.1.
    """
    _checks.check_flags(return_sum=return_sum)
    options = {"eps": eps, "dropout_p": dropout_p, "x_bias": x_bias, "eps_on_std": eps_on_std}
    device, inputs = _validate(x, residual, weight, bias, **options)
    return _run("add_layer_norm", device, inputs, eps, eps_on_std, return_sum, backend)


@backends.register("add_rms_norm", _validate_rms, backend_module="add_layer_norm")
def dropout_add_rms_norm(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    *,
    eps: float = 1e-6,
    dropout_p: float = 0.0,
    return_sum: bool = False,
    x_bias: Tensor | None = None,
    backend: Backend | None = None,
) -> Any:
    """out = z / sqrt(mean(z^2) + eps) * weight, where z = residual + dropout(x + x_bias), in one pass each way.

    Arguments, results and errors are those of ``dropout_add_layer_norm``; there is no bias.
    Source: Zhang and Sennrich 2019, "Root Mean Square Layer Normalization", arXiv:1910.07467.
    """
    _checks.check_flags(return_sum=return_sum)
    device, inputs = _validate_rms(x, residual, weight, eps=eps, dropout_p=dropout_p, x_bias=x_bias)
    return _run("add_rms_norm", device, inputs, eps, False, return_sum, backend)


def _run(
    op_name: str,
    device: torch.device,
    inputs: tuple[Any, ...],
    eps: float,
    eps_on_std: bool,
    return_sum: bool,
    backend: Backend | None,
) -> Tensor | tuple[Tensor, Tensor]:
    chosen = backends.choose(op_name, device, inputs, backend)
    x, residual, weight, bias, dropout_p, x_bias = inputs
    rng_state = draw_rng_state(device, chosen.name) if dropout_p > 0 else None
    op_args = x, residual, weight, bias, float(eps), dropout_p, rng_state, x_bias, eps_on_std
    with _autocast.no_autocast(device):
        compute, formula = partial(_add_norm, return_sum), reference.add_layer_norm
        out, z = _watch.run("add_layer_norm", compute, chosen, formula, op_args)
    return (out, z) if return_sum else out


def _add_norm(return_sum: bool, chosen: Implementation, *op_args: Any) -> tuple[Tensor, Tensor | None]:
    """out, and z if it is returned, of a call that is known to be valid, by the chosen backend."""
    if chosen.differentiable:
        out, z = chosen.module.add_layer_norm(*op_args)
        return out, z if return_sum else None
    *tensors, eps, dropout_p, rng_state, x_bias, eps_on_std = op_args
    tensors = [None if t is None else t.contiguous() for t in (*tensors, x_bias)]
    out, z = _AddLayerNorm.apply(NormCall._make((*tensors, rng_state, eps, dropout_p, eps_on_std)), chosen)
    return out, z if return_sum else None


class _AddLayerNorm(Operator, name="add_layer_norm"):
    """Saved is what the backend's forward leaves for its backward. The backward gets z in the place of x.

    x and residual keep their shape up to the backend. As views of them for autograd, they would get gradients that
    are views of one tensor, and PyTorch lets two leaves share it as their .grad.
    """

    results, outputs, inputs, call = 2, 3, 5, NormCall

    @staticmethod
    def forward(call: NormCall, backend: Implementation) -> tuple[Tensor, Tensor, Tensor]:
        x, residual = call.x, call.residual
        rows, residual = _checks.as_matrix(x), None if residual is None else _checks.as_matrix(residual)
        out, z, statistics = backend.module.add_layer_norm_fwd(NormCall(rows, residual, *call[2:]))
        return out.view(x.shape), x if z is rows else z.view(x.shape), statistics

    @staticmethod
    def forward_fake(call: NormCall, backend: Implementation) -> tuple[Tensor, Tensor, Tensor]:
        x = call.x
        size = (3 if call.eps_on_std else 2) * _checks.as_matrix(x).shape[0] + backend.module.TICKETS
        return torch.empty_like(x), torch.empty_like(x), x.new_empty(size, dtype=torch.float32)

    @staticmethod
    def keep(call: NormCall, outputs: tuple[Tensor, ...]) -> tuple[NormCall, Grads]:
        _, z, statistics = outputs
        return NormCall(z, None, *call[2:]), (statistics,)

    @staticmethod
    def gradients(dresults: Grads, call: NormCall, saved: Grads, needs: Needs, backend: Implementation) -> Grads:
        (dout, dz), z = dresults, call.x
        dout, dz = torch.zeros_like(z) if dout is None else dout, dz if dz is None else _checks.as_matrix(dz)
        given = _checks.as_matrix(dout), dz, NormCall(_checks.as_matrix(z), *call[1:]), *saved, needs[1]
        dx, dresidual, *sums = backend.module.add_layer_norm_bwd(*given)
        if dresidual is dx:  # one tensor for both, of which PyTorch gives two leaves a copy each
            dx = dresidual = dx.view(z.shape)
        else:
            dx, dresidual = dx.view(z.shape), None if dresidual is None else dresidual.view(z.shape)
        return dx, dresidual, *sums

    @staticmethod
    def gradients_fake(dresults: Grads, call: NormCall, saved: Grads, needs: Needs, backend: Implementation) -> Grads:
        sums = (None if t is None else torch.empty_like(t) for t in call[2:5])
        return torch.empty_like(call.x), torch.empty_like(call.x) if needs[1] else None, *sums
