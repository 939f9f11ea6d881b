"""Provide the decode program of "NanoGPT: CUDA Graph Replay" (source: `results/published.json`), written fresh.

A character model that generates one token per step over a key-value cache of fixed size: the prompt runs in eager mode,
then each step is one call of `NanoGPT.decode`, whose shapes and addresses never change.

What differs from the published program:

* Weights are random, drawn as that program initialises them; it trains them for 1,000 steps on text that would have to
  be downloaded. Prompts are drawn from a seed instead of taken from that text. Neither changes what a step computes.
* Its graph path feeds the first sampled token at the position after its own, because the position is advanced after the
  warm-up run as well; its paths therefore generate different texts. Here all paths must generate the same tokens.
* It captures a graph in each generation. Here a path captures (or compiles) once, which is its warm-up, and generates
  many times after. Both leave that time out of tokens per second.
"""
