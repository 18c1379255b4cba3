"""One file per speculative method, one row here.

A method is a function of K, the `spec` section and the artefact it serves; it returns vLLM's
`--speculative-config`, or None to serve without speculation.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from specmill import paths
from specmill.methods import eagle3, ngram, none
from specmill.params import Method, Spec

SpeculativeConfig = Callable[[int, Spec, Path, dict[str, Any]], dict[str, Any] | None]
"""(num_speculative_tokens, spec section, head, verifier identity) -> speculative config"""

METHODS: dict[str, SpeculativeConfig] = {
    "none": none.speculative_config,
    "ngram": ngram.speculative_config,
    "eagle3": eagle3.speculative_config,
}


def check_methods(methods: dict[str, Method]) -> None:
    """Refuse entries of params.yaml that no stage could serve.

    Raises:
        ValueError: naming the method that is not known, or the head that is not there.
    """
    made_here = {str(paths.EAGLE3), str(paths.IDENTITY)}
    for name, method in methods.items():
        if name not in METHODS:
            raise ValueError(
                f"methods.{name}: there is no such method; there are {', '.join(METHODS)} "
                "(specmill/methods)"
            )
        if method.head not in made_here and not Path(method.head).exists():
            raise ValueError(f"methods.{name}.head is {method.head}, which is not there")
