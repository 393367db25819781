"""What `plan_ring` says of messages and bytes is what the ranks send; what it says of keys is what they hold."""
import itertools

import numpy as np
from common import COMM, DTYPES, RANK, SIZE, Cases

from fastmha.parallel import Link, Team
from fastmha.parallel.ring import ring_attention, ring_attention_backward, ring_positions
from fastmha.parallel.ring_plan import plan_ring

cases = Cases()
rng = np.random.default_rng(17)
EACH = [5, 0, 9, 2][:SIZE]
for dtype, order, length, Hkv, sinks in itertools.product(DTYPES, ("zigzag", "contiguous"), (23, EACH), (1, 4), (False, True)):
    B, H, D = 2, 4, 6
    rules = {"sinks": np.ones(H, dtype)} if sinks else {}
    n = sum(stop - start for start, stop in ring_positions(length, SIZE, RANK, order))
    q, k, g = (rng.standard_normal((B, heads, n, D)).astype(dtype) for heads in (H, Hkv, H))
    plans = [plan_ring(B, length, H, D, SIZE, num_kv_heads=Hkv, order=order, dtype=dtype, sinks=sinks, backward=backward,
                       is_causal=True, flops_per_second=1e10, link=Link(1e-6, 1e10)).ranks[RANK] for backward in (False, True)]
    team = Team(COMM)
    out, lse = ring_attention(q, k, k, team, order=order, is_causal=True, return_lse=True, **rules)
    cases.true((team.messages, team.bytes) == (plans[0].messages, plans[0].bytes), f"forward {team.messages}, {team.bytes}")
    ring_attention_backward(g, q, k, k, out, lse, team, order=order, is_causal=True, **rules)
    cases.true((team.messages, team.bytes) == (plans[1].messages, plans[1].bytes), f"backward {team.messages}, {team.bytes}")
    cases.true(plans[0].tokens == n and plans[0].held_bytes == 2 * k.nbytes, "what the rank holds")
cases.done()
