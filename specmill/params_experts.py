"""How a dense verifier is re-laid as a mixture of experts, as params.yaml says it."""

from typing import Annotated

from pydantic import Field, model_validator

from specmill.section import Count, Section, Seed


class Experts(Section):
    """A dense Llama re-laid as a Mixtral (specmill.relaid): a mixture of experts to try things on
    where none can be had."""

    num: Annotated[int, Field(ge=2)]
    """Experts of every layer, each a copy of the layer's MLP."""
    top_k: Count
    """Experts that a token is routed to."""
    noise: Annotated[float, Field(ge=0)]
    """Standard deviation of the noise on every expert's matrices, relative to the matrix's own; at
    0 all experts are equal and answers are the dense model's."""
    seed: Seed
    """Of the noise and the routers."""

    @model_validator(mode="after")
    def _no_more_are_chosen_than_there_are(self) -> "Experts":
        if self.top_k > self.num:
            raise ValueError(f"top_k is {self.top_k}, but there are {self.num} experts (num)")
        return self
