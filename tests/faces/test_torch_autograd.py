"""fastmha.torch in autograd, torch.func and torch.compile: gradients against torch's and differences, and what is refused."""

import pytest

torch = pytest.importorskip("torch", reason='needs torch: pip install "fastmha[torch]"')

from torch_support import B, E, Ev, H, L, S, check, close, operands, own, sdpa  # noqa: E402

import fastmha.torch as face  # noqa: E402
from fastmha.validate import Rules  # noqa: E402


@pytest.mark.parametrize("case", ["plain", "causal", "groups", "mask", "bool"])
def test_gradients_by_differences(case, draw):
    heads = 1 if case == "groups" else 2
    tensors = [draw(1, 2, 3, 4), draw(1, heads, 5, 4), draw(1, heads, 5, 3)]
    more = {"mask": (draw(1, 2, 3, 5),), "bool": (torch.tensor([[1, 0, 1, 1, 0]]).bool(),)}.get(case, ())
    keywords = {"causal": {"is_causal": True}, "groups": {"enable_gqa": True}}.get(case, {})
    assert torch.autograd.gradcheck(lambda *x: sdpa(*x, **keywords), (*tensors, *more))


def test_second_derivatives_are_refused(draw):
    tensors = operands(draw)
    grad = torch.autograd.grad(sdpa(*tensors).square().sum(), tensors[0], create_graph=True)[0]
    with pytest.raises(RuntimeError, match="no second derivative"):
        grad.sum().backward()


@pytest.mark.filterwarnings("ignore:.torch.jit")       # PyTorch's own, of its decompositions
def test_derivatives_forward_are_refused(draw):
    q, k, v, mask = (x.detach() for x in (*operands(draw), draw(L, S)))
    refused = pytest.raises(NotImplementedError, match=r"^fastmha.torch has no derivatives forward: an operand has a tangent, ")
    for grad in (False, True):
        for i in range(4):
            tensors = [q.clone().requires_grad_(grad), k, v, mask]
            with torch.autograd.forward_ad.dual_level(), refused:
                tensors[i] = torch.autograd.forward_ad.make_dual(tensors[i], tensors[i].detach())
                sdpa(*tensors)
    for f in (lambda q: sdpa(q, k, v), torch.func.vmap(lambda q: sdpa(q, k[0], v[0])),
              torch.func.grad(lambda q: sdpa(q, k, v).sum())):
        with refused:
            torch.func.jvp(f, (q,), (q,))
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(q, q)
        with refused:
            torch.func.vmap(lambda x: sdpa(x, k[0], v[0]))(dual)
        close(sdpa(q, k, v), own(q, k, v))      # no operand has one


@pytest.mark.filterwarnings("ignore")
def test_what_traces_a_program_records_the_call(draw):
    fx = pytest.importorskip("torch.fx.experimental.proxy_tensor")
    tensors, others = operands(draw), [x.detach().sin().requires_grad_() for x in operands(draw)]

    def f(q, k, v):
        return sdpa(q, k, v, is_causal=True)

    expected = torch.autograd.grad(f(*others).sin().sum(), others)
    for traced in (torch.jit.trace(f, tensors, check_trace=False),
                   *(fx.make_fx(f, tracing_mode=mode)(*[x.detach() for x in tensors]) for mode in ("real", "fake", "symbolic"))):
        close(traced(*others), f(*others))
        for ours, theirs in zip(torch.autograd.grad(traced(*others).sin().sum(), others), expected, strict=True):
            close(ours, theirs)
    gradient = torch.func.grad(lambda q, k, v: f(q, k, v).sin().sum())
    close(fx.make_fx(gradient)(*[x.detach() for x in tensors])(*[x.detach() for x in others]), expected[0])
    mapped = torch.func.vmap(lambda q: f(q, *(x.detach() for x in others[1:])))
    q = others[0].detach()
    close(fx.make_fx(mapped)(torch.zeros(1, *q.shape, dtype=q.dtype))(q[None]), mapped(q[None]))
    dropped = torch.jit.trace(lambda q, k, v: sdpa(q, k, v, dropout_p=0.5), tensors, check_trace=False)
    assert not torch.equal(dropped(*others), dropped(*others))

    def weights(q, k, v):
        return face.weights(q, k, v, None, None, Rules())

    with pytest.raises(NotImplementedError, match=r"^fastmha.torch gives no weights to what traces a program"):
        torch.jit.trace(weights, tensors)


def test_a_mode_of_torchs_dispatch_sees_the_operator(draw):
    from torch.utils._python_dispatch import TorchDispatchMode
    seen = []

    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    tensors = [x.detach() for x in operands(draw)]
    with Seen():
        out = sdpa(*tensors)
    assert torch.ops.fastmha.attention.default in seen
    close(out, own(*tensors))


def test_tensors_of_other_classes_decide_what_the_call_means(draw):
    asked = []

    class Asked(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            asked.append(func)
            return super().__torch_function__(func, types, args, kwargs or {})

    class Plain(torch.Tensor):
        pass

    tensors = [x.detach() for x in operands(draw)]
    for i in range(3):
        asked.clear()
        out = sdpa(*[x.as_subclass(Asked) if i == j else x for j, x in enumerate(tensors)])
        assert asked == [sdpa]
        assert type(out) is Asked
        close(out.as_subclass(torch.Tensor), own(*tensors))
    with face.patch():
        asked.clear()
        torch.nn.functional.scaled_dot_product_attention(tensors[0].as_subclass(Asked), *tensors[1:])
        assert asked == [own]
    assert type(sdpa(tensors[0].as_subclass(Plain), *tensors[1:])) is Plain
    traced = torch.fx.symbolic_trace(lambda q, k, v: sdpa(q, k, v, is_causal=True))
    assert [node.target for node in traced.graph.nodes if node.op == "call_function"] == [sdpa]
    close(traced(*tensors), own(*tensors, is_causal=True))


def test_gradients_of_some_tensors_alone(draw):
    q, k, v = operands(draw)
    for wanted in ((q,), (k,), (v,), (q, v)):
        tensors = [x if any(x is w for w in wanted) else x.detach() for x in (q, k, v)]
        check(tensors)
        check(tensors, draw(L, S))
        check(tensors, draw(L, S, grad=False))
    check([x.detach() for x in (q, k, v)], draw(L, S))


def test_no_grad_gives_the_bits_of_grad(draw):
    tensors = operands(draw, torch.float32)
    with torch.no_grad():
        out = sdpa(*tensors, is_causal=True)
    assert not out.requires_grad
    assert (sdpa(*tensors, is_causal=True) == out).all()


def test_vmap(draw):
    q, k, v = draw(3, B, H, L, E), draw(B, H, S, E), draw(B, 3, H, S, Ev)
    mask, masks = draw(L, S), draw(3, 1, 1, L, S)
    for m, of_m, dim in ((None, lambda i: None, None), (mask, lambda i: mask, None), (masks, lambda i: masks[i], 0)):
        mapped = torch.func.vmap(sdpa, in_dims=(0, None, 1, dim))(q, k, v, m)
        close(mapped, torch.stack([sdpa(q[i], k, v[:, i], of_m(i)) for i in range(3)]))


@pytest.mark.parametrize("batch", [1, 2])
def test_gradients_of_each_result(batch, draw):
    """Each sees one lse, which is laid out over all of them."""
    q, k, v = draw(batch, H, L, E), draw(batch, H, S, E), draw(batch, H, S, Ev)
    expected = torch.autograd.functional.jacobian(lambda q: own(q, k, v)[0, 0, :2], q)
    for _ in range(20):     # what lies behind an lse is not always another one
        close(torch.func.jacrev(lambda q: sdpa(q, k, v)[0, 0, :2])(q.detach()), expected)


def test_several_gradients_at_once_are_refused(draw):
    q, k, v = draw(1, H, L, E), draw(1, H, S, E), draw(1, H, S, Ev)
    with pytest.raises(NotImplementedError, match=r"^fastmha.torch computes one gradient at a time: .*torch.func.jacrev do$"):
        torch.autograd.functional.jacobian(lambda q: sdpa(q, k, v), q, vectorize=True)


def test_gradients_of_each_sample(draw):
    q, k, v, mask = draw(3, B, H, L, E), draw(B, H, S, E), draw(B, H, S, Ev), draw(1, 1, L, S)

    def loss(q, k, v, mask):
        return sdpa(q, k, v, mask).square().sum()

    mapped = torch.func.vmap(torch.func.grad(loss, argnums=(0, 1, 2, 3)), in_dims=(0, None, None, None))(q, k, v, mask)
    each = [torch.autograd.grad(loss(x, k, v, mask), (x, k, v, mask)) for x in (y.detach().requires_grad_() for y in q)]
    for i, ours in enumerate(mapped):
        close(ours, torch.stack([grads[i] for grads in each]))


@pytest.mark.parametrize("case", ["plain", "causal", "mask", "five axes"])
def test_compiled_whole(case, draw):
    tensors = operands(draw)
    more = (draw(L, S),) if case == "mask" else ()
    keywords = {"is_causal": True} if case == "causal" else {}
    if case == "five axes":
        tensors = [draw(2, *x.shape) for x in tensors]

    def f(*tensors):
        return sdpa(*tensors, **keywords).sin()

    compiled = torch.compile(f, fullgraph=True, backend="aot_eager")
    out, expected = compiled(*tensors, *more), f(*tensors, *more)
    close(out, expected)
    leaves = (*tensors, *more)
    for ours, theirs in zip(*(torch.autograd.grad(x.sum(), leaves) for x in (out, expected)), strict=True):
        close(ours, theirs)


def test_operators_pass_torchs_own_checks(draw):
    q, k, v = operands(draw)
    plain = False, None, None, None, None, None, 0.0
    torch.library.opcheck(face._operator, (q, k, v, None, None, None, *plain))
    across = draw(B, L, H, E, grad=False).transpose(1, 2).requires_grad_()
    torch.library.opcheck(face._operator, (across, k, v, None, None, None, *plain))
    torch.library.opcheck(face._operator, (q, k, v, draw(1, 1, L, S), draw(H), None, True, 2, 3, None, 0.3, 2.0, 0.0))
