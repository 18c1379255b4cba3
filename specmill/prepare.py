"""From prompts to the three sample sets: which answers to ask for, which to keep."""

from typing import Any

from specmill.generate import Job, greedy, sampled
from specmill.params import Prepare
from specmill.prompts import Prompt, check_disjoint, split_prompts
from specmill.samples import Sample, keep_trainable

SPLITS = ("train", "heldout", "bench")


def plan_jobs(prompts: list[Prompt], bench: list[Prompt], chosen: Prepare) -> list[Job]:
    """Every conversation to answer: training ones as `chosen` samples them, the rest greedily.

    Raises:
        ValueError: when a bench prompt is also a training prompt, or too few prompts are there.
    """
    check_disjoint(prompts, bench)
    training, heldout = split_prompts(prompts, chosen.limit, chosen.heldout, chosen.seed)
    jobs: list[Job] = [
        (
            "train",
            prompt,
            sampled(prompt, chosen.max_tokens, chosen.temperature, chosen.top_p, chosen.seed),
        )
        for prompt in training
    ]
    jobs += [("heldout", prompt, greedy(chosen.max_tokens)) for prompt in heldout]
    jobs += [("bench", prompt, greedy(chosen.max_tokens)) for prompt in bench]
    return jobs


def split_and_filter(
    conversations: list[list[Sample]], min_tokens: int, max_model_len: int
) -> tuple[dict[str, list[Sample]], dict[str, Any]]:
    """Sort answered conversations into splits.

    Training and held-out splits have one row per assistant turn and are filtered; bench has the
    last turn of every conversation, unfiltered: what is measured must not depend on the answers.

    Returns:
        Samples by split, and counts by split.

    Raises:
        ValueError: when nothing is left of a split.
    """
    turns: dict[str, list[Sample]] = {split: [] for split in SPLITS}
    for conversation in conversations:
        split = conversation[0].split
        turns[split] += conversation[-1:] if split == "bench" else conversation
    metrics: dict[str, Any] = {}
    for split in ("train", "heldout"):
        # extraction has the engine write one token more, which must fit too
        turns[split], counts = keep_trainable(turns[split], min_tokens, max_model_len - 1)
        metrics[split] = counts
    metrics["bench"] = {"num_kept": len(turns["bench"])}
    for split, samples in turns.items():
        if not samples:
            raise ValueError(f"no {split} sample is left: {metrics[split]}")
        metrics[split]["num_tokens"] = sum(len(sample.input_ids) for sample in samples)
        metrics[split]["num_trained_tokens"] = sum(
            int(sample.loss_mask.sum()) for sample in samples
        )
    return turns, metrics
