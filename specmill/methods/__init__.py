"""One file per speculative method, one row here.

A method is a function of K, the `spec` section and the artefact it serves; it returns vLLM's
`--speculative-config`, or None to serve without speculation.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from specmill.methods import eagle3, ngram, none
from specmill.params import Spec

SpeculativeConfig = Callable[[int, Spec, Path, dict[str, Any]], dict[str, Any] | None]
"""(num_speculative_tokens, spec section, head, verifier identity) -> speculative config"""

METHODS: dict[str, SpeculativeConfig] = {
    "none": none.speculative_config,
    "ngram": ngram.speculative_config,
    "eagle3": eagle3.speculative_config,
}
