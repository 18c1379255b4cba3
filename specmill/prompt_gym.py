"""Questions of reasoning-gym's generators, without the formats that it asks answers in."""

import re
from collections.abc import Callable
from typing import Any

MATHS = {
    "advanced_geometry": 150, "base_conversion": 80, "basic_arithmetic": 130, "chain_sum": 80,
    "coin_flip": 100, "complex_arithmetic": 130, "count_bits": 30, "count_primes": 50,
    "decimal_chain_sum": 60, "dice": 100, "fraction_simplification": 110, "gcd": 90, "lcm": 90,
    "intermediate_integration": 130, "leg_counting": 80, "number_format": 30,
    "polynomial_equations": 150, "prime_factorization": 90,
    "products": 90, "simple_equations": 250, "simple_geometry": 150, "simple_integration": 180,
    "time_intervals": 150,
}  # fmt: skip
REASONING = {
    "aiw": 240, "caesar_cipher": 50, "color_cube_rotation": 150, "countdown": 80,
    "course_schedule": 90, "cryptarithm": 60, "family_relationships": 260, "group_anagrams": 60,
    "letter_counting": 90, "letter_jumble": 50, "number_filtering": 70,
    "number_sequence": 140, "number_sorting": 70, "palindrome_generation": 50,
    "palindrome_partitioning": 50, "propositional_logic": 90, "puzzle24": 40,
    "self_reference": 80, "sentence_reordering": 90, "spell_backward": 60, "syllogism": 300,
    "tower_of_hanoi": 50, "word_ladder": 70, "word_sequence_reversal": 50, "word_sorting": 110,
    "zebra_puzzles": 60,
}  # fmt: skip
"""Questions wanted of each generator. Left out: gsm_symbolic (reworded test questions of GSM8K),
codeio and list_functions (other text at every run), isomorphic_strings, ransom_note and
polynomial_multiplication (other text by the hashes of strings, which Python salts), those whose
puzzles the bench has (jugs, knights and knaves, calendars), and games on boards: no prose."""

FORMAT = re.compile(
    r"\s*(?:(?:final answer )?(?:format(?:ting)? (?:instructions|guidelines))"
    r"|when performing calculations|in solving equations|for all geometry problems"
    r"|please follow the instruction|output format|provide a comma separated"
    r"|provide your answer as|provide you answer|your output should be|the output is a"
    r"|return your final answer|(?:please )?(?:answer|respond|reply|return|give|provide)"
    r"(?: with)? only|please respond with|answer (?:with|in|as)|\(answer yes or no\)"
    r"|provide only|only reply|do not give the units|return the (?:new|conclusion))",
    re.IGNORECASE,
)


def without_format(question: str) -> str:
    """The question up to the first demand on the answer's format; all of it if that comes first.

    An answer of one number teaches a head next to nothing: users of an assistant get sentences.
    """
    found = FORMAT.search(question)
    cut = question[: found.start()] if found and found.start() >= 12 else question
    rest = question[found.end() :] if found else ""
    asks_later = re.search(r"\n\s*(?:Now,|Given:|Here is)", rest) is not None
    return (question if asks_later else cut).strip()


def questions(make: Callable[..., Any], wanted: dict[str, int], seed: int) -> list[dict[str, str]]:
    """Values for the slot `question`, generator by generator.

    Args:
        make: `reasoning_gym.create_dataset`.
        wanted: How many of each generator.
        seed: For every generator.
    """
    return [
        {"question": without_format(row["question"])}
        for name, number in wanted.items()
        for row in make(name, size=number, seed=seed)
    ]
