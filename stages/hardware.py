"""Write down what this machine is; runs always, and an unchanged answer reruns nothing.

Writes   reports/hardware.json  CPU, cores, memory, GPUs, engine versions, salted machine id

Run      dvc repro hardware
"""

from specmill import paths
from specmill.compat import warn_if_untested
from specmill.files import write_json
from specmill.hardware import describe_machine


def main() -> None:
    """Run the stage; without an MLflow run, since it measures nothing."""
    machine = describe_machine()
    warn_if_untested(machine["versions"], "cuda" if machine["gpus"] else "cpu")
    write_json(paths.HARDWARE, machine)


if __name__ == "__main__":
    main()
