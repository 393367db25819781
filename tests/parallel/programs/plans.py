"""Messages and bytes that each rank hands to MPI are those that were planned."""
import numpy as np
from common import COMM, DTYPES, RANK, SIZE, Cases

import fastmha
from fastmha.parallel import Link, gather, plan_shards, shard

cases = Cases()
LINK = Link(1e-6, 1e10)
for dtype in DTYPES:
    for H, Hkv, D, bias in ((8, 8, None, False), (8, 2, None, True), (6, 3, 5, "qkv"), (4, 1, None, "out"), (5, 5, 3, True)):
        whole = fastmha.MultiHeadAttention(40, H, num_kv_heads=Hkv, head_dim=D or 40 // H, use_bias=bias, dtype=dtype, rng=0)
        for backward, overlap_rows in ((False, None), (True, None), (False, 7), (True, 100)):
            sharded = shard(whole, COMM, overlap_rows=overlap_rows)
            plan = plan_shards(3, 13, 40, H, SIZE, num_kv_heads=Hkv, head_dim=D, use_bias=bias, dtype=dtype, backward=backward,
                               overlap_rows=overlap_rows, flops_per_second=1e9, link=LINK)
            team, mine = sharded.team, plan.ranks[RANK]
            team.messages = team.bytes = 0
            out = sharded.forward(np.ones((3, 13, 40)), is_causal=True)
            if backward:
                sharded.backward(out)
            cases.true((team.messages, team.bytes) == (mine.messages, mine.bytes),
                       f"{team.messages} messages of {team.bytes} bytes, planned {mine.messages} of {mine.bytes}")
            held = sum(value.nbytes for value in sharded.parameters().values())
            cases.true(held == mine.held_bytes, f"{held} bytes of weights, planned {mine.held_bytes}")
            cases.true(sharded.own.num_heads == mine.heads, "heads")
        team.messages = 0
        gather(sharded)
        cases.true(team.messages == (0 if SIZE == 1 else 4), f"gather of parameters and gradients: {team.messages} messages")
cases.done()
