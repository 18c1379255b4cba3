"""Check that sampling with the method has the distribution that it has without.

Reads    reports/hardware.json          the engine's version
Metrics  reports/sampling/NAME.json     is it lossless at temperature 1
Params   methods.NAME

What is served is no verifier but a small random model (specmill.sampling_twin), whose
distributions are known exactly; the method drafts with an artefact made for it.

Run      dvc repro sampling@NAME        (python -m stages.sampling NAME)
"""

import sys
import tempfile
from pathlib import Path

from specmill import paths
from specmill.methods import draft_on_twin, speculative_configs
from specmill.sampling import K, check_lossless
from specmill.sampling_drafts import TwinDrafts
from specmill.sampling_twin import write_twin
from specmill.section import DoesNotFit, entry
from specmill.stage import open_stage


def main(name: str) -> None:
    """Run the stage for the entry `name` of `methods`."""
    with (
        open_stage(f"sampling@{name}", ["methods"]) as stage,
        tempfile.TemporaryDirectory() as scratch,
    ):
        method = entry("methods", stage.params.methods, name)
        twin, draft = Path(scratch) / "twin", Path(scratch) / "draft"
        identity = write_twin(twin)
        about = {"method": name, "served_by": method.method}
        try:
            draft_on_twin(name, method, TwinDrafts(twin, identity, K), draft)
            on_twin = method.model_copy(update={"head": str(draft)})
            speculation = speculative_configs(name, on_twin, [K], identity)[K]
            log = paths.ROOT / "logs" / f"sampling-{name}.log"
            result = check_lossless(twin, speculation, log, stage.params.runtime)
        except DoesNotFit as reason:
            result = {"lossless": None, "not_checked": str(reason)}
        stage.write_metrics(paths.SAMPLING / f"{name}.json", about | result)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m stages.sampling NAME (an entry of params.yaml: methods)")
    main(sys.argv[1])
