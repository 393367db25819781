"""The schedule of ring_attention for many ranks, run through without running it: how much of the time ranks compute.

    python benches/ring.py [--ranks 64,1024] [--lengths 131072,1048576] [--rate FLOP/s]

Prints a Markdown table. Nothing is measured but the rate of one rank, where none is given.
"""
from __future__ import annotations

import argparse
from itertools import product

from fastmha.parallel import Link, plan_ring, simulate_ring

H, HKV, D = 32, 8, 128
LINK = Link(20e-6, 25e9 / 8)
RULES = {"all pairs": {}, "causal": {"is_causal": True}, "causal, window 4096": {"is_causal": True, "window": (4096, 0)}}


def numbers(text: str) -> list[int]:
    return [int(n) for n in text.split(",")]


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--ranks", type=numbers, default=[64, 1024], metavar="N,…", help="numbers of ranks (64,1024)")
    options.add_argument("--lengths", type=numbers, default=[1 << 17, 1 << 20], metavar="L,…", help="tokens (131072,1048576)")
    options.add_argument("--rate", type=float, metavar="FLOP/s", help="of a rank (default: measured, of one thread)")
    given = options.parse_args()
    rate = given.rate or plan_ring(1, 1024, H, D, 1, num_kv_heads=HKV, link=Link(0, 1e9)).flops_per_second
    print(f"B 1, H {H}/{HKV}, D {D}, float32, forward and backward; {rate / 1e9:.3g} GF/s a rank; a link of 25 Gb/s, 20 µs\n\n"
          "| ranks | tokens | pairs | zig-zag, s | busy | contiguous, s | busy | no less by compute, s | by link, s |\n"
          "|--:|--:|---|--:|--:|--:|--:|--:|--:|")
    for ranks, length, (rule, rules) in product(given.ranks, given.lengths, RULES.items()):
        zigzag, contiguous = (simulate_ring(1, length, H, D, ranks, num_kv_heads=HKV, order=order, backward=True,
                                            flops_per_second=rate, link=LINK, **rules) for order in ("zigzag", "contiguous"))
        print(f"| {ranks} | {length:,} | {rule} | {zigzag.seconds:.4g} | {zigzag.busy:.1%} | {contiguous.seconds:.4g} | "
              f"{contiguous.busy:.1%} | {zigzag.compute_seconds:.4g} | {zigzag.link_seconds:.4g} |")


if __name__ == "__main__":
    main()
