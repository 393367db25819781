"""What tests of fastmha.torch share: its function and torch's own, operands, comparisons of results and gradients."""

import pytest
import torch

import fastmha.torch as face

own = torch.nn.functional.scaled_dot_product_attention
sdpa = face.scaled_dot_product_attention
without = pytest.mark.skipif(torch.bfloat16 not in face.TYPES, reason='needs ml_dtypes: pip install "fastmha[bfloat16]"')
halves = pytest.mark.parametrize("dtype", [torch.float16, pytest.param(torch.bfloat16, marks=without)], ids=str)
B, H, L, S, E, Ev = 2, 4, 7, 9, 8, 5


def close(ours, theirs):
    tolerance = {torch.float32: 2e-6, torch.float64: 1e-14}.get(theirs.dtype, 0)        # of half precision: where it must be one
    assert ours.dtype is theirs.dtype
    assert ours.shape == theirs.shape
    assert (ours - theirs).abs().max() <= tolerance * max(1, theirs.abs().max())


def check(tensors, *more, **keywords):
    """Outputs and gradients of every tensor that wants one."""
    results = []
    leaves = [x for x in (*tensors, *more) if isinstance(x, torch.Tensor) and x.requires_grad]
    for f in (sdpa, own):
        out = f(*tensors, *more, **keywords)
        grads = torch.autograd.grad((out * torch.linspace(-1, 1, out.numel(), dtype=out.dtype).reshape(out.shape)).sum(), leaves)
        results.append((out, *grads))
    for ours, theirs in zip(*results, strict=True):
        close(ours, theirs)


def operands(draw, dtype=torch.float64, heads=H):
    return [draw(B, h, n, w, dtype=dtype) for h, n, w in ((H, L, E), (heads, S, E), (heads, S, Ev))]
