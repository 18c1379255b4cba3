"""Put what was predicted beside what was measured.

Reads    reports/predicted.json, reports/curves.json
         reports/replay/NAME.json, data/replay/NAME.parquet
         reports/bench/NAME.json, data/bench/NAME
         data/prepared/bench.parquet
Metrics  reports/check.json     errors of acceptance and of speed-ups
Params   methods

Run      dvc repro check
"""

from typing import Any

import numpy as np

from specmill import paths
from specmill.check import Request, compare_acceptance, compare_speed, errors_of
from specmill.files import read_json
from specmill.methods.ngram import Settings
from specmill.params import Method
from specmill.proposers import ngram_runs
from specmill.records import read_requests
from specmill.runs import read_runs
from specmill.samples import Sample, read_samples
from specmill.stage import open_stage
from specmill.walk import Runs


def main() -> None:
    """Run the stage."""
    with open_stage("check", ["methods"]) as stage:
        methods = stage.params.methods
        samples = {one.sample_key: one for one in read_samples(paths.PREPARED / "bench.parquet")}
        max_len = read_json(paths.HEAD_IDENTITY)["max_model_len"]
        acceptance = [
            {"method": name, **row}
            for name, chosen in methods.items()
            if read_json(paths.REPORTS / "replay" / f"{name}.json")["replayed"]
            for row in _acceptance(name, chosen, samples, max_len)
        ]
        measured = {name: read_json(paths.BENCH / f"{name}.json") for name in methods}
        speed = compare_speed(
            read_json(paths.REPORTS / "predicted.json")["rows"],
            measured,
            read_json(paths.REPORTS / "curves.json")["points"],
        )
        stage.write_metrics(
            paths.REPORTS / "check.json",
            errors_of(speed) | {"acceptance": acceptance, "speed": speed},
        )


def _acceptance(
    name: str, chosen: Method, samples: dict[str, Sample], max_len: int
) -> list[dict[str, Any]]:
    requests = read_requests(paths.BENCH_RAW / name / "requests.parquet")
    if chosen.method != "ngram":
        recorded = read_runs(paths.REPLAY / f"{name}.parquet")
        return compare_acceptance(requests, lambda request: recorded[request["sample_key"]])
    settings = Settings.model_validate(chosen.settings)
    window = (settings.prompt_lookup_min, settings.prompt_lookup_max)

    def as_served(request: Request) -> tuple[list[int], Runs]:
        prompt, output = samples[request["sample_key"]].prompt_token_ids, request["output_ids"]
        ids = np.array([*prompt, *output], dtype=np.int32)
        return output, ngram_runs(ids, len(prompt), window, request["k"], max_len)

    return compare_acceptance(requests, as_served)


if __name__ == "__main__":
    main()
