"""The section `bench` of params.yaml: what is measured, how often, and what counts as good."""

from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from specmill.section import Count, Section, Size


class Bench(Section):
    """How the served verifier is measured."""

    reference: Literal["beside", "bracket"]
    """Where a method's own `none` runs. `beside`: both servers are up and every cell is sent to one
    and then the other, which needs memory for two engines. `bracket`: one engine at a time, none,
    method, method, none ... in mirrored rounds."""
    concurrency: list[Count]
    """Requests in flight (closed loop); one set of cells each."""
    rates: list[Annotated[float, Field(gt=0)]]
    """Requests per second that arrive whatever is in flight (open loop, Poisson), of all prompt
    types mixed; one set of cells each."""
    seconds: Annotated[float, Field(gt=0)]
    """How long requests arrive in a cell of an open loop; queues take time to form."""
    context: Annotated[list[Size], Field(min_length=1)]
    """Tokens of earlier conversation before every prompt; one set of cells each, 0 adds none."""
    requests: Count
    """Requests per prompt type, concurrency and round, one full wave where more are in flight;
    cells per rate and round."""
    rounds: Count
    """Most rounds; each sends other prompts while there are enough."""
    precision: Annotated[float, Field(gt=0)]
    """Rounds end when the 95% interval of every load's overall speed-up is no wider than this: 0.1
    is from 1.00 to 1.10."""
    max_tokens: Count
    """Longest answer, in tokens."""
    max_ttft_ms: Annotated[float, Field(gt=0)]
    """Goodput counts requests whose first token came within this ..."""
    max_itl_ms: Annotated[float, Field(gt=0)]
    """... and whose further tokens took no longer than this each, on average."""
    enforce_eager: bool
    """Serve uncompiled: only for quick tests, and the row says so."""

    @field_validator("concurrency", "rates", "context")
    @classmethod
    def _is_a_set(cls, given: list[float]) -> list[float]:
        if len(set(given)) != len(given):
            raise ValueError(f"lists a value twice: {given}")
        return given

    @model_validator(mode="after")
    def _some_load(self) -> "Bench":
        if not self.concurrency and not self.rates:
            raise ValueError("neither concurrency nor rates has a value: nothing is measured")
        return self
