"""Write down what this machine is; runs always, and an unchanged answer reruns nothing.

Being first, it also refuses a params.yaml that is not valid: later, DVC would already have removed
the outputs of the stage that finds out.

Writes   reports/hardware.json  CPU, cores, memory, GPUs, engine versions, salted machine id

Run      dvc repro hardware
"""

import sys

from specmill import paths
from specmill.files import write_json
from specmill.hardware import describe_machine
from specmill.params_file import load_params
from specmill.stage import show_help
from specmill.tested import warn_if_untested


def main() -> None:
    """Run the stage; without an MLflow run, since it measures nothing."""
    show_help()
    try:
        load_params(paths.PARAMS)
        machine = describe_machine()
        warn_if_untested(machine["versions"], "cuda" if machine["gpus"] else "cpu")
        write_json(paths.HARDWARE, machine)
    except (ValueError, OSError) as error:
        sys.exit(f"hardware: {error}")


if __name__ == "__main__":
    main()
