"""Measurements that others published, and where they are from."""

from specmill.expected import Estimate

KIMI_SPEEDS = {
    (0, 1): (91.5, 112.5), (0, 8): (350.0, 454.5), (0, 16): (492.7, 729.7),
    (0, 32): (858.8, 1104.0), (0, 64): (1398.0, 1602.0), (0, 128): (2165.0, 2044.0),
    (16, 1): (84.6, 99.4), (16, 64): (1018.1, 905.9), (16, 128): (1398.0, 1143.0),
    (32, 64): (764.0, 603.0), (64, 1): (70.5, 99.5), (64, 64): (509.0, 454.0),
    (128, 1): (56.7, 73.6), (128, 64): (318.0, 215.0),
}  # fmt: skip
"""Kimi-K2.6, INT4, on 8 RTX PRO 6000 (rtx6kpro, models/kimi-k26*.md): vLLM, TP8, fp8 KV cache,
TRITON_MLA, no context parallelism. By 1,024 tokens of context and requests in flight, tokens/s of
all requests without speculation and with the head kimi-k2.5-eagle3-mla at K = 3."""
KIMI_LENGTHS = Estimate(2.18, 1.95, 2.41)
"""Acceptance length that the server reported there, least and most (the middle is not used); of
which cells is not said."""

LLAMA_MS = {2: (2.36, 4.32), 3: (2.79, 4.09), 4: (3.08, 4.05), 5: (3.32, 4.13), 6: (3.46, 4.20),
            7: (3.54, 4.29)}  # fmt: skip
"""Llama-3.1-8B with its EAGLE-3 head on one H100, one request, MT-Bench (vllm#20780): acceptance
length and milliseconds per token by K."""
LLAMA_NONE_MS = 7.07

GOLDEN = {1: 1.83, 2: 2.43, 3: 2.88, 4: 3.24, 5: 3.46, 8: 3.77}
"""Acceptance length of an EAGLE-3 head for Kimi-K2.5 by K, thinking on (InferenceX,
golden_al_distribution/kimik2.5_eagle3.yaml)."""
REDUCED = 0.515
"""Share of decode time in all-reduces, Kimi-K2.5 on 8 RTX PRO 6000, one request, no drafts."""
REDUCED_TOKENS_PER_S = 78.0
"""Tokens per second there, of the prompt in the middle."""

PCIE5 = 63e9
"""Bytes/s of sixteen lanes of PCIe 5.0 in one direction."""
H100 = 3.35e12
"""Bytes/s of an H100 SXM's memory, by its data sheet."""

TOKENS = (1, 2, 3, 4, 6, 8)
QWEN_EXPERTS = {1: (8.0, 15.47, 22.53, 29.16, 41.34, 51.97),
                8: (51.03, 82.38, 100.56, 111.53, 122.03, 125.56)}  # fmt: skip
"""Experts of 128 loaded in a layer by requests and tokens of each, a 30B-A3B shape with random
weights, vLLM 0.26 on one H200."""
QWEN_MS = {1: (3.9, 4.7296, 5.6049, 6.2806, 7.9083, 8.7948),
           8: (8.911, 12.2902, 14.1183, 15.2463, 16.5522, 17.1643),
           32: (15.6432, 17.2768, 17.3608, 17.4769, 18.3402, 18.9268)}  # fmt: skip
"""Milliseconds of its forward pass."""
DENSE_MS = {1: (4.6292, 4.6324, 4.6303, 4.6337, 4.6374, 4.6471),
            8: (4.7326, 4.8114, 4.85, 4.8911, 5.0378, 5.0163),
            32: (5.1687, 5.2695, 5.4934, 5.6, 6.5423, 7.1184)}  # fmt: skip
"""The same of Llama-3.1-8B's shape, prompts of 256 tokens."""
H200_COPY, H200_MATMUL = 4.28e12, 802.6e12
"""Bytes/s of a copy and FLOP/s of a bf16 product, measured there."""

NGRAM_AT_8 = {
    "coding": (0.1764, 1.2379, 0.7860), "dialogue": (0.5421, 1.9307, 0.7714),
    "explanation": (0.0933, 1.0727, 0.7865), "maths": (0.1927, 1.2358, 0.8364),
    "reasoning": (0.1547, 1.2026, 0.8092), "structured": (0.3594, 1.6188, 0.8965),
}  # fmt: skip
"""n-gram, K = 3, eight requests in flight, SmolLM2-135M on two cores (a run of this repository):
draft coverage, tokens per step and speed-up by prompt type."""
EAGLE3_STEP_AT_8 = 1.4834 / 0.7195
"""There, what a step in which all requests drafted cost, the head's part in it, over one without:
acceptance length over speed-up of EAGLE-3 at K = 3."""
