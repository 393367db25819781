"""fastmha.transformers: the eager attention of each model is the oracle, for random weights."""

import copy
import inspect
import itertools
import warnings

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason='needs torch: pip install "fastmha[torch]"')
transformers = pytest.importorskip("transformers", reason='needs transformers: pip install "fastmha[transformers]"')

import fastmha.transformers as face  # noqa: E402
from fastmha import reference  # noqa: E402

pytestmark = pytest.mark.filterwarnings("default")      # what transformers warns of is its own affair
transformers.logging.set_verbosity_error()
face.register()

VOCABULARY, LENGTH = 96, 11
SMALL = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
         "max_position_embeddings": 64, "initializer_range": 0.2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
GROUPED = SMALL | {"num_key_value_heads": 2}
WIDE = GROUPED | {"head_dim": 16}
DECODERS = {
    "llama": GROUPED,
    "mistral": GROUPED | {"sliding_window": 4},
    "mixtral": GROUPED | {"num_local_experts": 2, "sliding_window": 5},
    "qwen2": GROUPED,
    "qwen3": WIDE,
    "gemma": WIDE,
    "gemma2": WIDE | {"sliding_window": 4, "attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 16},
    "gemma3_text": WIDE | {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]},
    "gpt2": {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "initializer_range": 0.2,
             "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
    "gpt_neox": SMALL,
    "gpt_oss": WIDE | {"num_local_experts": 2, "num_experts_per_tok": 1, "sliding_window": 4,
                       "layer_types": ["sliding_attention", "full_attention"]},
    "phi3": GROUPED,
    "olmo2": GROUPED,
    "cohere": GROUPED,
    "opt": {"vocab_size": VOCABULARY, "hidden_size": 32, "ffn_dim": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
            "max_position_embeddings": 64, "word_embed_proj_dim": 32, "init_std": 0.2, "pad_token_id": 0, "bos_token_id": 1,
            "eos_token_id": 2},
}  # fmt: skip
ENCODERS = {
    "bert": SMALL,
    "roberta": SMALL,
    "modernbert": SMALL | {"local_attention": 6, "global_attn_every_n_layers": 2, "cls_token_id": 1, "sep_token_id": 2},
}
PAIRS = {
    "t5": {"vocab_size": VOCABULARY, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "pad_token_id": 0,
           "eos_token_id": 2, "decoder_start_token_id": 0, "initializer_factor": 2.0, "dropout_rate": 0.0},
    "bart": {"vocab_size": VOCABULARY, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
             "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "max_position_embeddings": 64,
             "init_std": 0.2,
             "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2, "dropout": 0.0,
             "forced_eos_token_id": 2},
}  # fmt: skip
OWN = {     # models that compute attention themselves, each reading its mask in a way of its own
    "bloom": {"vocab_size": VOCABULARY, "hidden_size": 32, "n_layer": 2, "n_head": 4, "initializer_range": 0.2, "pad_token_id": 0,
              "bos_token_id": 1, "eos_token_id": 2},
    "mpt": {"vocab_size": VOCABULARY, "d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 64, "initializer_range": 0.2,
            "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
    "xglm": {"vocab_size": VOCABULARY, "d_model": 32, "ffn_dim": 48, "num_layers": 2, "attention_heads": 4, "init_std": 0.2,
             "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
}  # fmt: skip
OWN_ENCODERS = {
    "megatron-bert": SMALL,
    "roformer": SMALL,
    "longformer": SMALL | {"attention_window": [4, 4]},
    "canine": SMALL | {"num_hash_buckets": 64},
}


def build(name, implementation):
    kinds = ((transformers.AutoModelForCausalLM, DECODERS | OWN), (transformers.AutoModel, ENCODERS | OWN_ENCODERS),
             (transformers.AutoModelForSeq2SeqLM, PAIRS))
    kind, settings = next((kind, of[name]) for kind, of in kinds if name in of)
    config = transformers.AutoConfig.for_model(name, **settings)
    torch.manual_seed(0)
    model = kind.from_config(config, attn_implementation=implementation).eval()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if key.endswith(("sinks", "relative_attention_bias.weight")):
                parameter.normal_(generator=torch.Generator().manual_seed(1))
    return model


@pytest.fixture(scope="module")
def models():
    made = {}

    def of(name):
        if name not in made:
            made[name] = build(name, "eager"), build(name, "fastmha")
        return made[name]

    return of


def batch(padding, rows=3):
    ids = torch.randint(3, VOCABULARY, (rows, LENGTH), generator=torch.Generator().manual_seed(2))
    if padding == "none":
        return {"input_ids": ids}
    counts = torch.tensor([LENGTH, 4, 7])[:rows, None]
    places = torch.arange(LENGTH)
    valid = places < counts if padding == "right" else places >= LENGTH - counts
    return {"input_ids": torch.where(valid, ids, 0), "attention_mask": valid.long()}


def close(ours, theirs, tolerance=2e-5):
    assert (ours - theirs).abs().max() <= tolerance * max(1, theirs.abs().max())


@pytest.fixture
def written(monkeypatch):
    """The masks that have been written out."""
    made = []
    dense = face._written_out
    monkeypatch.setattr(face, "_written_out", lambda said: made.append(said) or dense(said))
    return made


@pytest.mark.parametrize("padding", ["none", "right", "left"])
@pytest.mark.parametrize("name", [*DECODERS, *ENCODERS])
def test_outputs_without_a_mask_of_all_pairs(name, padding, models, written):
    inputs = batch(padding)
    valid = inputs.get("attention_mask", torch.ones_like(inputs["input_ids"])).bool()
    with torch.no_grad():
        eager, ours = (model(**inputs) for model in models(name))
    close(ours[0][valid], eager[0][valid])
    assert not written


@pytest.mark.parametrize("padding", ["none", "right", "left"])
@pytest.mark.parametrize("name", [*OWN, *OWN_ENCODERS])
def test_models_that_compute_attention_themselves_give_what_they_gave(name, padding, models):
    inputs = batch(padding)
    valid = inputs.get("attention_mask", torch.ones_like(inputs["input_ids"])).bool()
    with torch.no_grad():
        eager, ours = (model(**inputs)[0][valid] for model in models(name))
    assert torch.equal(ours, eager)


@pytest.mark.parametrize("name", [*OWN, "megatron-bert", "roformer"])
def test_models_that_compute_attention_themselves_compiled(name, models):
    inputs = batch("left")
    valid = inputs["attention_mask"].bool()
    eager, ours = models(name)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.compiler.reset()
        close(torch.compile(ours, backend="eager")(**inputs)[0][valid], eager(**inputs)[0][valid])


@pytest.mark.parametrize("padding", ["none", "right"])
@pytest.mark.parametrize("name", PAIRS)
def test_outputs_of_encoder_and_decoder(name, padding, models, written):
    inputs = batch(padding) | {"decoder_input_ids": batch("none")["input_ids"][:, :5]}
    with torch.no_grad():
        eager, ours = (model(**inputs) for model in models(name))
    close(ours.logits, eager.logits)
    assert not written


def gradients(model, inputs):
    """Of all parameters, by name, of a sum of the outputs at valid places, each with a weight of its own."""
    model.zero_grad()
    out = model(**inputs)[0]
    if "attention_mask" in inputs and "decoder_input_ids" not in inputs:
        out = out[inputs["attention_mask"].bool()]
    (out * torch.linspace(-1, 1, out.numel(), dtype=out.dtype).reshape(out.shape)).sum().backward()
    return {key: p.grad for key, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("padding", ["none", "left"])
@pytest.mark.parametrize("name", [*DECODERS, *ENCODERS])
def test_gradients_of_a_training_step(name, padding, models):
    theirs, ours = (gradients(model, batch(padding)) for model in models(name))
    assert theirs.keys() == ours.keys()
    largest = max(g.abs().max() for g in theirs.values())
    for key, g in theirs.items():
        assert (ours[key] - g).abs().max() <= 2e-5 * largest, key


@pytest.mark.parametrize("padding", ["none", "left"])
@pytest.mark.parametrize("name", PAIRS)
def test_gradients_of_a_training_step_of_pairs_err_no_more_than_eager_ones_against_float64(name, padding, models):
    """T5's scores are not scaled: eager gradients in float32 are up to 4e-5 of the largest away from those in float64."""
    inputs = batch(padding) | {"decoder_input_ids": batch("none")["input_ids"][:, :5]}
    eager, ours = models(name)
    exact, of_eager, of_ours = (gradients(model, inputs) for model in (copy.deepcopy(eager).double(), eager, ours))
    assert exact.keys() == of_eager.keys() == of_ours.keys()
    largest = max(g.abs().max() for g in exact.values())
    error = max((of_eager[key] - g).abs().max() for key, g in exact.items())
    for key, g in exact.items():
        assert (of_ours[key] - g).abs().max() <= max(error, 2e-6 * largest), key


@pytest.mark.parametrize("how", ["greedy", "padded", "beams", "static", "padded static", "sampled"])
@pytest.mark.parametrize("name", [*DECODERS, *PAIRS, *OWN])
def test_generated_tokens(name, how, models):
    if "static" in how and name not in OWN and not models(name)[0]._can_compile_fullgraph:
        with pytest.raises(ValueError, match=r"(?i)static"):        # transformers has none for it
            models(name)[0].generate(**batch("none"), max_new_tokens=2, cache_implementation="static")
        return
    inputs = batch(("right" if name in PAIRS else "left") if "padded" in how else "none")
    settings = {"max_new_tokens": 9, "do_sample": how == "sampled", "disable_compile": True,
                "num_beams": 3 if how == "beams" else 1}
    if "static" in how:
        settings["cache_implementation"] = "static"
    tokens = []
    for model in models(name):
        torch.manual_seed(3)
        tokens.append(model.generate(**inputs, **settings))
    assert torch.equal(*tokens)


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss", "bert", "t5"])
def test_weights_on_request(name, models):
    inputs = batch("right") | ({"decoder_input_ids": batch("none")["input_ids"][:, :5]} if name in PAIRS else {})
    with torch.no_grad():
        eager, ours = (model(**inputs, output_attentions=True) for model in models(name))
    keys = [key for key in eager if key.endswith("attentions")]
    assert keys
    valid = inputs["attention_mask"].bool()
    for key in keys:
        for theirs, mine in zip(eager[key], ours[key], strict=True):
            if mine.shape[2] == LENGTH:     # rows of padding may have nothing to attend: zeros here, one over all keys there
                mine, theirs = mine.transpose(1, 2)[valid], theirs.transpose(1, 2)[valid]
            close(mine, theirs)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss", "t5"])
def test_other_dtypes_err_no_more_than_eager(name, dtype, models):
    if (name, dtype) == ("gpt_oss", torch.float64):
        dtype = torch.float32       # PyTorch has no grouped product of its experts in float64
    inputs = batch("none") | ({"decoder_input_ids": batch("none")["input_ids"][:, :5]} if name in PAIRS else {})
    with torch.no_grad():
        exact = models(name)[0](**inputs).logits
        eager, ours = (build(name, implementation).to(dtype)(**inputs).logits for implementation in ("eager", "fastmha"))
    assert ours.dtype is dtype
    error, bound = ((x.double() - exact).abs().mean() for x in (ours, eager))
    assert error <= 1.3 * bound + 1e-6 * exact.abs().max()


def of_48_tokens(model, how):
    """What a model gives, by padding, token by token over its cache, or as gradients of all parameters together."""
    ids = torch.randint(3, VOCABULARY, (3, 48), generator=torch.Generator().manual_seed(4))
    valid = torch.arange(48) < torch.tensor([[48], [30], [41]])
    if how == "cached":
        outs, past = [], None
        for start, stop in ((0, 40), (40, 41), (41, 42), (42, 48)):
            made = model(ids[:, start:stop], past_key_values=past, use_cache=True)
            outs, past = [*outs, made.logits], made.past_key_values
        return torch.cat(outs, dim=1)
    if how == "padded":
        return model(torch.where(valid, ids, 0), attention_mask=valid.long())[0][valid]
    out = model(ids)[0]
    if how == "gradients":
        (out * torch.linspace(-1, 1, out.numel()).reshape(out.shape).to(out.dtype)).sum().backward()
        return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    return out


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("name", "how"), [*itertools.product(("llama", "gemma2", "bert"), ("plain", "padded", "gradients")),
                                           ("llama", "cached"), ("gemma2", "cached")])  # fmt: skip
def test_models_of_half_precision_err_no_more_than_eager_ones_against_float32(name, how, dtype):
    with torch.set_grad_enabled(how == "gradients"):
        exact = of_48_tokens(build(name, "eager").to(dtype).float(), how).double()      # of the same parameters
        eager, ours = (of_48_tokens(build(name, implementation).to(dtype), how) for implementation in ("eager", "fastmha"))
    assert ours.dtype is dtype
    error, bound = ((x.double() - exact).abs().mean() for x in (ours, eager))
    assert error <= 1.1 * bound + 1e-6 * exact.abs().max()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_heads_of_half_precision_are_not_converted(dtype, monkeypatch):
    if dtype not in face.face.TYPES:
        pytest.skip('needs ml_dtypes: pip install "fastmha[bfloat16]"')
    seen = []
    attend = face.face.attend
    monkeypatch.setattr(face.face, "attend", lambda *operands: seen.append(operands) or attend(*operands))
    q, k, v = (heads(1, 2, 5, 8).to(dtype) for _ in range(3))
    bias, sinks = heads(1, 2, 5, 5).to(dtype), heads(2).float()
    out, _ = face.attention(torch.nn.Module(), q, k, v, None, position_bias=bias, s_aux=sinks)
    assert out.dtype is dtype
    assert all(x is y for x, y in zip(seen[0], (q, k, v), strict=False))
    assert [x.dtype for x in seen[0][3:5]] == [dtype, torch.float32]
    added = heads(1, 1, 5, 5).flip(-1).to(dtype)
    face.attention(torch.nn.Module(), q, k, v, added, position_bias=bias)
    assert torch.equal(seen[1][3], bias.float() + added.float())        # a sum that is rounded nowhere


def test_bfloat16_without_its_package_is_computed_from_copies(monkeypatch):
    q, k, v = (heads(1, 2, 5, 8).bfloat16() for _ in range(3))
    bias, sinks = heads(1, 2, 5, 5).bfloat16(), heads(2).bfloat16()
    expected, _ = face.attention(torch.nn.Module(), *(x.float() for x in (q, k, v)), None, position_bias=bias, s_aux=sinks)
    monkeypatch.setattr(face.face, "TYPES", face.face.TYPES - {torch.bfloat16})
    monkeypatch.setattr(face.face, "_BFLOAT16", None)
    out, weights = face.attention(torch.nn.Module(), q, k, v, None, position_bias=bias, s_aux=sinks, output_attentions=True)
    assert weights.dtype is torch.bfloat16
    assert torch.equal(out, expected.bfloat16())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_neox", "bert"])
def test_autocast_errs_no_more_than_eager(name, dtype, models):
    inputs = batch("left" if name in DECODERS else "right")
    valid = inputs["attention_mask"].bool()
    with torch.no_grad():
        exact = models(name)[0](**inputs)[0][valid]
        with torch.autocast("cpu", dtype=dtype):
            eager, ours = (model(**inputs)[0][valid] for model in models(name))
    assert ours.dtype is eager.dtype
    error, bound = ((x.double() - exact).abs().mean() for x in (ours, eager))
    assert error <= 1.3 * bound + 1e-6 * exact.abs().max()


def test_dropout_in_training(models):
    config = transformers.AutoConfig.for_model("bert", **SMALL, attention_probs_dropout_prob=0.5, hidden_dropout_prob=0.0)
    model = transformers.AutoModel.from_config(config, attn_implementation="fastmha").train()
    inputs = batch("right")
    torch.manual_seed(1)
    first, other = model(**inputs)[0], model(**inputs)[0]
    torch.manual_seed(1)
    assert torch.equal(model(**inputs)[0], first)
    assert not torch.equal(first, other)


# --------------------------------------------------------------------------------------------------------- the masks

FUNCTIONS = {
    "causal": transformers.masking_utils.causal_mask_function,
    "bidirectional": transformers.masking_utils.bidirectional_mask_function,
    "window": transformers.masking_utils.sliding_window_causal_mask_function(3),
}
if hasattr(transformers.masking_utils, "sliding_window_bidirectional_mask_function"):       # not from the first that works
    FUNCTIONS["both ways"] = transformers.masking_utils.sliding_window_bidirectional_mask_function(2)
OF_POSITIONS = "cache_position" in inspect.signature(transformers.masking_utils.sdpa_mask).parameters


def in_words(q_length, q_offset=0, batch_size=1, **more):
    """What transformers says when it asks for a mask; at first it named all positions of the queries."""
    places = {"q_length": q_length, "q_offset": q_offset}
    if OF_POSITIONS:
        places = {"cache_position": torch.arange(q_length) + q_offset}
    return {"batch_size": batch_size, **places, **more}


VALID = {
    "none": None,
    "right": [[1, 1, 1, 1, 1, 1], [1, 1, 0, 0, 0, 0]],
    "left": [[0, 0, 0, 1, 1, 1], [0, 1, 1, 1, 1, 1]],
    "gaps": [[1, 0, 1, 1, 0, 1], [1, 1, 1, 1, 1, 1]],
    "nothing": [[0, 0, 0, 0, 0, 0], [0, 0, 1, 1, 0, 0]],
    "short": [[0, 1, 1, 1], [1, 1, 1, 0]],
}


@pytest.mark.parametrize(("function", "valid"), list(itertools.product(FUNCTIONS, VALID)))
@pytest.mark.parametrize(("q_length", "q_offset", "kv_offset"),
                         [(6, 0, 0), (1, 5, 0), (3, 2, 0), (2, 6, 2), (6, torch.tensor(0), 0)], ids=str)
def test_a_pattern_says_what_the_written_mask_says(function, valid, q_length, q_offset, kv_offset):
    padding = None if VALID[valid] is None else torch.tensor(VALID[valid]).bool()
    said = in_words(q_length, q_offset, 2, kv_length=6, kv_offset=kv_offset, mask_function=FUNCTIONS[function],
                    attention_mask=padding)
    made = face.mask(**said)
    assert isinstance(made, face.Mask)
    expected = transformers.masking_utils.sdpa_mask(**said, allow_is_causal_skip=False)
    pattern = made.pattern
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((2, 1, n, 4)) for n in (q_length, 6, 6))
    removed = None if pattern.keys is None else ~pattern.keys.numpy()
    ours = reference.attention(q, k, v, mask=removed, is_causal=pattern.is_causal, window=pattern.window, offset=pattern.offset,
                               key_ranges=pattern.key_ranges)
    np.testing.assert_allclose(ours, reference.attention(q, k, v, mask=~expected.numpy()), rtol=0, atol=1e-14)
    assert made.shape == expected.shape == (2, 1, q_length, 6)
    for look in (lambda x: x.sum(), lambda x: torch.where(x, 1.0, 0.0), lambda x: ~x, lambda x: x & True, lambda x: x.long(),
                 lambda x: ~x[:, :, :1], lambda x: x[..., 1:].sum()):
        assert type(look(made)) is torch.Tensor
        assert torch.equal(look(made), look(expected))
    scores = heads(2, 3, q_length, 6)
    removed = scores.masked_fill(~expected, torch.finfo(torch.float32).min)
    for added in (scores + made, made + scores, scores + made[:, :, :, :6], torch.add(scores, made), scores.clone().add_(made),
                  *(scores + view(made) for view in VIEWS), *(scores + cast(view(made)) for view in VIEWS for cast in CASTS)):
        assert type(added) is torch.Tensor
        assert torch.equal(added.softmax(-1), removed.softmax(-1))
    assert torch.equal(made < 0, ~expected)


VIEWS = [lambda x: x, lambda x: x.clone(), lambda x: x.contiguous(), lambda x: x.to("cpu"), lambda x: x.to(torch.bool),
         lambda x: x.detach(), lambda x: x.bool(), lambda x: x.expand(-1, 3, -1, -1), lambda x: x.repeat(1, 3, 1, 1),
         lambda x: x.squeeze(1).unsqueeze(1),
         lambda x: x.mT.contiguous().transpose(2, 3), lambda x: torch.cat([x[:1], x[1:]]), lambda x: torch.stack(x.unbind()),
         lambda x: x.reshape(-1).view(x.shape)]  # fmt: skip
CASTS = [lambda x: x.to(torch.float32), lambda x: x.float(), lambda x: x.type(torch.float32), lambda x: x.to(dtype=torch.float32),
         lambda x: x.type_as(torch.zeros(()))]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_what_is_added_is_of_the_models_dtype(dtype):
    made = face.mask(**in_words(3, kv_length=3, dtype=dtype))
    for added in (torch.zeros(3, 3, dtype=dtype) + made, made.to(dtype)):
        assert added.dtype is dtype
        assert torch.equal(added, torch.full((1, 1, 3, 3), torch.finfo(dtype).min, dtype=dtype).triu(1))


@pytest.mark.parametrize("read", [lambda x: 1.0 - x, lambda x: x * 2.0, lambda x: x == 0, lambda x: torch.ne(x, 1)])
def test_what_masks_of_two_kinds_would_answer_apart_is_refused(read):
    made = face.mask(**in_words(3, kv_length=3))
    for x in (made, made[:, 0], made.contiguous()):
        with pytest.raises(NotImplementedError, match=r"^a mask of fastmha does not tell whether \w+ takes it as one of bool or"):
            read(x)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_what_is_written_into_a_mask_holds(mode):
    q = heads(1, 1, 3, 4)
    with mode():
        for write in (lambda x: x.__setitem__((..., 0), False), lambda x: x[:, 0, :, 0].fill_(False),
                      lambda x: x.logical_and_(torch.arange(3) > 0)):
            made = face.mask(**in_words(3, kv_length=3, attention_mask=torch.tensor([[1, 1, 1]]).bool()))
            write(made)
            expected = torch.ones(3, 3, dtype=torch.bool).tril()
            expected[:, 0] = False
            assert torch.equal(made & True, expected[None, None])
            close(face.attention(torch.nn.Module(), q, q, q, made)[0],
                  face.attention(torch.nn.Module(), q, q, q, expected[None, None])[0], 0)


def test_a_look_at_a_mask_leaves_it_the_rules_it_says(monkeypatch):
    made = face.mask(**in_words(3, kv_length=3))
    made.sum()
    seen = []
    monkeypatch.setattr(face.face, "attend", lambda q, k, v, mask, *more: seen.append(mask) or q)
    for x in (made, made.clone(), made.detach()):
        face.attention(torch.nn.Module(), *[heads(1, 1, 3, 4)] * 3, x)
    assert seen == [None] * 3


def test_a_model_that_overrides_the_attention_of_another_still_adds_a_mask():
    class Own(transformers.models.llama.modeling_llama.LlamaAttention):
        def forward(self, hidden_states, attention_mask=None, **more):
            q, k, v = (f(hidden_states).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
                       for f in (self.q_proj, self.k_proj, self.v_proj))
            scores = q @ k.repeat_interleave(2, 1).mT
            if attention_mask is not None:
                scores = scores + attention_mask[:, :, :, :k.shape[2]].expand(-1, 4, -1, -1).to(scores.dtype)
            return self.o_proj((scores.softmax(-1) @ v.repeat_interleave(2, 1)).transpose(1, 2).flatten(2)), None

    results = []
    for implementation in ("eager", "fastmha"):
        model = build("llama", implementation)
        for i, layer in enumerate(model.model.layers):
            own = Own(model.config, i)
            own.load_state_dict(layer.self_attn.state_dict())
            layer.self_attn = own
        with torch.no_grad():
            results.append(model(**batch("right")).logits)
    assert torch.equal(*results)


class Configuration(transformers.LlamaConfig):
    """One of whose models nothing is known beside those of Llama."""


class Unknown(transformers.PreTrainedConfig):
    """One of whose models nothing is known."""


def test_masks_are_rules_where_models_are_known_to_look_their_attention_up():
    for config, kind in ((Configuration(), face.Mask), (transformers.LlamaConfig(), face.Mask), (Unknown(), torch.Tensor),
                         (transformers.BloomConfig(), torch.Tensor)):
        made = face.mask(**in_words(3, kv_length=3, config=config, dtype=torch.float32))
        assert type(made) is kind
        assert made.dtype is (torch.bool if kind is face.Mask else torch.float32)


def test_other_patterns_are_written_out():
    function = transformers.masking_utils.chunked_causal_mask_function(2, torch.zeros(1, dtype=torch.int64))
    said = in_words(5, kv_length=5, mask_function=function)
    assert face.mask(**said).pattern is None
    expected = transformers.masking_utils.sdpa_mask(**said, allow_is_causal_skip=False)
    assert torch.equal(face.mask(**said), expected)
    assert torch.equal((face.mask(**said).clone() + torch.zeros(5, 5)).exp(), expected.float())


def heads(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def test_masks_of_the_users_own(models):
    """Of four axes, which transformers hands on: of bool and of floats, with a gap."""
    ids = batch("none")["input_ids"]
    allowed = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
    allowed[5:, 2] = False
    added = torch.zeros(LENGTH, LENGTH).masked_fill(~allowed, torch.finfo(torch.float32).min)
    eager, ours = models("llama")
    with torch.no_grad():
        expected = eager(ids, attention_mask=added[None, None].expand(3, 1, -1, -1)).logits
        for mask in (added, allowed):
            close(ours(ids, attention_mask=mask[None, None].expand(3, 1, -1, -1)).logits, expected)


def test_a_mask_of_another_length_is_refused():
    made = face.mask(**in_words(3, kv_length=3))
    with pytest.raises(ValueError, match=r"^attention_mask is one of 3 queries and 3 keys, but there are 3 and 4$"):
        face.attention(torch.nn.Module(), heads(1, 1, 3, 4), heads(1, 1, 4, 4), heads(1, 1, 4, 4), made)


def test_keys_that_are_not_there_are_not_counted():
    made = face.mask(**in_words(3, kv_length=6, attention_mask=torch.tensor([[0, 1, 1, 1, 1, 1]]).bool()))
    q, k = heads(1, 1, 3, 4), heads(1, 1, 4, 4)
    out, _ = face.attention(torch.nn.Module(), q, k, k, made)
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, k, made[..., :4])
    close(out, expected.transpose(1, 2).nan_to_num(), 1e-6)


# ----------------------------------------------------------------------------------------------------------- register

@pytest.mark.parametrize("name", ["", "a/b", "a:b", "paged|x", "flash_mha"])
def test_names_of_other_kernels_are_refused(name):
    with pytest.raises(ValueError, match=r'^name must have none of "/"'):
        face.register(name)


def test_names_that_are_taken_are_refused():
    for name in ("eager", "sdpa", "flex_attention"):
        with pytest.raises(ValueError, match=r"is that of an implementation which transformers has already$"):
            face.register(name)
    with pytest.raises(TypeError, match=r"^name must be a str, got int$"):
        face.register(3)


def test_registered_twice_and_under_another_name(models):
    face.register()
    face.register("mine")
    model = build("llama", "mine")
    with torch.no_grad():
        close(model(**batch("left")).logits[0], models("llama")[0](**batch("left")).logits[0])


def test_other_devices_are_refused():
    x = heads(1, 1, 3, 4).to("meta")
    with pytest.raises(TypeError, match=r"^query must be .* on meta: attn_implementation of Module is fastmha's$"):
        face.attention(torch.nn.Module(), x, x, x, None)


def test_compiled_with_written_masks(models):
    model = models("llama")[1]
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        close(compiled(**batch("none")).logits, model(**batch("none")).logits)
