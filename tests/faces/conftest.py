"""Tensors for the tests of fastmha.torch, and asserts of what these share that say what was compared."""

import pytest

pytest.register_assert_rewrite("torch_support")


@pytest.fixture
def draw():
    torch = pytest.importorskip("torch")
    generator = torch.Generator().manual_seed(0)

    def normal(*shape, dtype=torch.float64, grad=True):
        return torch.randn(*shape, generator=generator, dtype=dtype).requires_grad_(grad)

    return normal
