"""Products, norms and activations: on what the codes mean, in float32."""

import torch
import torch.nn.functional as F

from .enums import TORCH
from .layouts import values
from .quantize import quantize

ACTIVATIONS = {
    "relu": F.relu,
    "silu": F.silu,
    "gelu": lambda x: F.gelu(x, approximate="tanh"),
    "swiglu": lambda x: F.silu(x.chunk(2, -1)[0]) * x.chunk(2, -1)[1],
    "geglu": lambda x: F.gelu(x.chunk(2, -1)[0], approximate="tanh") * x.chunk(2, -1)[1],
}


def activation(name):
    """Forward, backward, and backward with the gradient of a bias."""
    function = ACTIVATIONS[name]

    def forward(input, quantizer=None, **_):
        return quantize(function(input.float()).to(input.dtype), quantizer)

    def backward(grad, fwd_input, quantizer=None, **_):
        return quantize(_gradient(function, fwd_input, grad).to(grad.dtype), quantizer)

    def with_bias(grad, fwd_input, quantizer=None):
        dx = _gradient(function, fwd_input, grad).to(grad.dtype)
        return dx.reshape(-1, dx.shape[-1]).sum(0), quantize(dx, quantizer)

    return forward, backward, with_bias


def _gradient(function, x, grad):
    with torch.enable_grad():
        leaf = x.detach().float().requires_grad_()
        return torch.autograd.grad(function(leaf), leaf, grad.float())[0]


def _product(a, transa, b, transb):
    """A column-major product: TN reads both operands rowwise, N of A and T of B read columnwise codes."""
    a, b = values(a, not transa), values(b, transb)
    return (b.t() if transb else b) @ (a.t() if transa else a), b


def generic_gemm(
    A, transA, B, transB, D, quantizer, output_dtype, bias, bias_type, gelu, gelu_in, grad, workspace, workspace_size,
    accumulate, use_split_accumulator, comm_overlap=None, comm_type=None, extra_output=None, bulk_overlap=False,
    alpha=1.0, beta=None,
):  # fmt: skip
    out, b = _product(A, transA, B, transB)
    dtype = TORCH[int(output_dtype)] if output_dtype is not None else torch.bfloat16 if D is None else D.dtype
    bias_grad = before = None
    if bias is not None and bias.numel():
        if grad:
            bias_grad = b.sum(0).to(bias.dtype)
        else:
            out = out + bias.float()
    if gelu and grad:
        out = _gradient(ACTIVATIONS["gelu"], gelu_in, out)
    elif gelu:
        before = out.to(dtype)
        out = ACTIVATIONS["gelu"](before.float())
    out = out.to(dtype)
    leading = tuple(B.shape if isinstance(B, torch.Tensor) else B.size())[:-1]
    if not transB and len(leading) > 1:
        out = out.view(*leading, out.shape[-1])
    if D is not None:
        out = D.copy_(D + out if accumulate else out)
    return quantize(out, quantizer), bias_grad, before, extra_output


def te_general_grouped_gemm(
    A, transa, B, transb, D, D_type, m_splits, bias, bias_type, single_output, pre_gelu_out, grad, workspace,
    workspace_size, accumulate, use_split_accumulator, math_sm_count=0,
):  # fmt: skip
    first = 0
    for i, pair in enumerate(zip(A, B, strict=True)):
        out, b = _product(pair[0], transa, pair[1], transb)
        if bias and bias[i].numel():
            if grad:
                bias[i].copy_(b.sum(0))
            else:
                out = out + bias[i].float()
        if single_output:
            D[0].view(-1, out.shape[1])[first : first + out.shape[0]].copy_(out)
            first += out.shape[0]
        else:
            into = D[i]
            into.copy_((into + out.view(into.shape)) if accumulate else out.view(into.shape))
    return bias


def _normed(x, weight, bias, eps, zero_centered, centred):
    h = x.float()
    mean = h.mean(-1) if centred else torch.zeros(h.shape[0])
    inverse = torch.rsqrt((h - mean[:, None]).square().mean(-1) + eps)
    y = (h - mean[:, None]) * inverse[:, None] * (weight.float() + float(zero_centered))
    return y if bias is None else y + bias.float(), mean, inverse


def layernorm_fwd(input, weight, bias, eps, ln_out, quantizer, otype, sm_margin, zero_centered_gamma):
    y, mean, inverse = _normed(input, weight, bias, eps, zero_centered_gamma, True)
    return quantize(y.to(TORCH[int(otype)]), quantizer), mean, inverse


def rmsnorm_fwd(input, weight, eps, ln_out, quantizer, otype, sm_margin, zero_centered_gamma):
    y, _, inverse = _normed(input, weight, None, eps, zero_centered_gamma, False)
    return quantize(y.to(TORCH[int(otype)]), quantizer), None, inverse


def layernorm_bwd(dz, x, mu, rsigma, gamma, sm_margin, zero_centered_gamma):
    with torch.enable_grad():
        leaf, weight = x.detach().float().requires_grad_(), gamma.detach().float().requires_grad_()
        bias = torch.zeros_like(weight, requires_grad=True)
        y, *_ = _normed(leaf, weight, bias, 1e-5, zero_centered_gamma, True)
        dx, dw, db = torch.autograd.grad(y, (leaf, weight, bias), dz.float())
    return dx.to(x.dtype), dw.to(gamma.dtype), db.to(gamma.dtype)


def rmsnorm_bwd(dz, x, rsigma, gamma, sm_margin, zero_centered_gamma):
    with torch.enable_grad():
        leaf, weight = x.detach().float().requires_grad_(), gamma.detach().float().requires_grad_()
        y, *_ = _normed(leaf, weight, None, 1e-5, zero_centered_gamma, False)
        dx, dw = torch.autograd.grad(y, (leaf, weight), dz.float())
    return dx.to(x.dtype), dw.to(gamma.dtype)
