"""The section `parallel` of params.yaml: GPUs that every engine of the verifier is spread over."""

from specmill.section import Count, Section


class Parallel(Section):
    """How engines of the verifier are spread over GPUs: it decides speeds, so it is tracked.

    Answers and hidden states are the same up to rounding: prepare and extract keep theirs. vLLM
    gives a draft model or head the verifier's tensor parallelism.
    """

    tensor_parallel_size: Count = 1
    """GPUs that share every layer of an engine; divides the verifier's attention heads."""
    data_parallel_size: Count = 1
    """Copies of the engine behind one server, each on GPUs of its own (prepare, bench, serve.sh).
    Extract has runtime.extract_engines; curves are of one copy."""
    enable_expert_parallel: bool = False
    """Give each GPU whole experts of a mixture of experts instead of a part of each."""
