"""What could be done about the head trained here: train longer, take another, train on more.

Each is worth what a better head would bring, which is predicted (specmill.predicted) for every
number of tokens per step up to K + 1, all drafts accepted. Where not even that is faster at any
load, all three are ruled out. Training longer is ruled out too when the last epoch no longer raised
the held-out length by 1%.
"""

from specmill.evidence import flaws
from specmill.gates import break_even
from specmill.grounds import Grounds, in_flight, plain_load
from specmill.intervals import FASTER
from specmill.options import MEASURED, PENDING, PREDICTED, RULED_OUT, Judgement, Option
from specmill.params import TRAINED_HEAD
from specmill.rows import Row, load_order, load_sentence
from specmill.tables import change

LONGER, OTHER, MORE = "train longer", "other head", "more on-policy data"

_RISING = 1.01
"""Least ratio of held-out lengths of the last two epochs that counts as rising. A few thousand
held-out tokens tell lengths apart to about this."""


def head_options(grounds: Grounds) -> list[Option]:
    """What could be done about the head that the stage train makes; none when no row serves it."""
    rows = [name for name, chosen in grounds.methods.items() if chosen.head == TRAINED_HEAD]
    if not rows:
        return []
    name = rows[0]
    k = int(grounds.results[name]["num_speculative_tokens"])
    worth = _worth(grounds, name, k)
    status, gate = worth
    other = [*_other_heads(grounds), *_better_heads(grounds, name, k)]
    return [
        _train_longer(grounds, name, k, worth),
        Option(OTHER, name, k, status, other, gate, PREDICTED, _against(grounds, name)),
        Option(MORE, name, k, status, _data(grounds), gate, PREDICTED, _against(grounds, name)),
    ]


def _against(grounds: Grounds, name: str) -> list[str]:
    """Of something that was not tried, with the method of the head at hand."""
    return ["not measured", *flaws(grounds, name)]


def _worth(grounds: Grounds, name: str, k: int) -> Judgement:
    """Whether any head would pay at K, and what it would have to reach."""
    heads = grounds.heads(name, k)
    perfect = [rows[-1] for rows in heads.values()]
    if perfect and all(row["speedup"] <= 1 for row in perfect):
        best = max(perfect, key=lambda row: float(row["speedup"]))
        return RULED_OUT, (
            f"a step costs less: at K={k} a head whose drafts are all accepted is predicted "
            f"{change(best)} at best"
        )
    faster = [row for row in grounds.measured(name, k) if row["verdict"] == FASTER]
    if not faster:
        return PENDING, break_even(grounds, name, k)
    row = max(faster, key=lambda row: float(row["speedup"]))
    now = row.get("tokens_per_step")
    further = heads.get(plain_load(row) or 0, [])
    above = [head for head in further if now is not None and head["tokens_per_step"] > now]
    if not above:
        return PENDING, "it pays as it is; what a better head would bring is not predicted"
    return PENDING, (
        f"more is wanted: {above[0]['tokens_per_step']:.1f} tokens per step instead of {now:.2f} "
        f"would be {change(above[0])} at {load_sentence(row)}"
    )


def _train_longer(grounds: Grounds, name: str, k: int, worth: Judgement) -> Option:
    lengths = held_out_lengths(grounds.training or [], k)
    if len(lengths) < 2:
        status, gate = worth
        known = "Only one epoch was trained" if lengths else "There is no reports/plots/train.json"
        evidence = [f"{known}: whether the head was still getting better is not known."]
        return Option(LONGER, name, k, status, evidence, gate, PREDICTED, _against(grounds, name))
    ratio = lengths[-1] / lengths[-2]
    by_epoch = ", ".join(f"{length:.2f}" for length in lengths)
    evidence = [
        f"Held-out acceptance length with K={k} by epoch: {by_epoch}.",
        f"The last epoch changed it by {100 * (ratio - 1):+.1f}%.",
    ]
    status, gate = worth
    by, lacks = PREDICTED, _against(grounds, name)
    if ratio < _RISING and status != RULED_OUT:
        status, gate = RULED_OUT, "other data or parameters make it rise in the last epoch again"
        by, lacks = MEASURED, ["held-out length no longer rises", *flaws(grounds, name)]
    return Option(LONGER, name, k, status, evidence, gate, by, lacks)


def held_out_lengths(training: list[Row], k: int) -> list[float]:
    """Acceptance length by epoch.

    Args:
        training: Rows of reports/plots/train.json, by `epoch` and `position`.
        k: Tokens drafted; of a head trained for fewer, those.

    Returns:
        As replayed where the rows say so, else 1 + the sum of accuracies, which is agreement
        within the draft vocabulary (specmill.head).
    """
    epochs: dict[int, list[Row]] = {}
    for row in sorted(training, key=lambda row: (row["epoch"], row["position"])):
        if row["position"] < k:
            epochs.setdefault(row["epoch"], []).append(row)
    return [
        rows[-1]["replayed_length"]
        if rows[-1].get("replayed_length") is not None
        else 1 + sum(row["accuracy"] for row in rows)
        for rows in epochs.values()
    ]


def _other_heads(grounds: Grounds) -> list[str]:
    found = []
    for name, result in grounds.results.items():
        head, k = result["head"], result["num_speculative_tokens"]
        rows = sorted(grounds.measured(name, k), key=load_order)
        if head.get("trained_for") != head.get("run_on") and rows:
            found.append(
                f"{name}, trained for {head['trained_for'] or 'nobody says which verifier'}: "
                f"{change(rows[0])} at {load_sentence(rows[0])}."
            )
    return found or ["No head from elsewhere is a row (`heads` in params.yaml)."]


def _better_heads(grounds: Grounds, name: str, k: int) -> list[str]:
    found = []
    for load, rows in grounds.heads(name, k).items():
        steps = ", ".join(f"{row['tokens_per_step']:.1f} {change(row)}" for row in rows)
        found.append(
            f"Predicted by tokens per step at K={k} and {load_sentence(in_flight(load))}: {steps}."
        )
    return found or ["What a better head would bring is not predicted."]


def _data(grounds: Grounds) -> list[str]:
    found = []
    if grounds.prepared:
        train = grounds.prepared["train"]
        found.append(
            f"It was trained on up to {train['num_kept']} answers with "
            f"{train['num_trained_tokens']:,} trained tokens."
        )
    coverage = (grounds.vocab or {}).get("heldout_coverage")
    if coverage is not None:
        found.append(
            f"Its draft vocabulary has {coverage:.1%} of the held-out answers' tokens: acceptance "
            "at position 0 cannot be more."
        )
    return found or ["How much it was trained on is not known: no reports/prepare.json."]
