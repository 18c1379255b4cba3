"""Write down what this machine is; runs always, and an unchanged answer reruns nothing.

Writes   reports/hardware.json  CPU, cores, memory, GPUs, engine versions, salted machine id

Run      dvc repro hardware
"""

from specmill import paths
from specmill.files import write_json
from specmill.hardware import describe_machine


def main() -> None:
    """Run the stage; without an MLflow run, since it measures nothing."""
    write_json(paths.HARDWARE, describe_machine())


if __name__ == "__main__":
    main()
