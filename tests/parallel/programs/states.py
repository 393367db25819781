"""What one number of ranks saved, another loads. Arguments: "save" or "load", a file."""
import sys

import numpy as np
from common import COMM, RANK, Cases

import fastmha
from fastmha.parallel import shard

cases = Cases()
X = np.random.default_rng(2).standard_normal((2, 9, 24)).astype(np.float32)
doing, file = sys.argv[1:]
sharded = shard(fastmha.MultiHeadAttention(24, 6, num_kv_heads=2, use_bias=True, rng=5 if doing == "save" else 6), COMM)
if doing == "save":
    for _ in range(3):          # steps of training, so that it is not what a seed draws
        sharded.backward(sharded.forward(X, is_causal=True))
        for name, gradient in sharded.gradients().items():
            sharded.parameters()[name][...] -= np.float32(0.01) * gradient
    out, state = sharded.forward(X, is_causal=True), sharded.state_dict()
    if RANK == 0:
        np.savez(file, out=out, **state)
else:
    state = dict(np.load(file))
    out = state.pop("out")
    cases.true(float(np.abs(sharded.forward(X, is_causal=True) - out).max()) > 0.01, "another module before")
    sharded.load_state_dict(state)
    cases.close(sharded.forward(X, is_causal=True), out, 100, "the output of the ranks that saved")
    for name, value in sharded.state_dict().items():
        cases.true((value == state[name]).all(), f"{name} as it was saved")
cases.done()
