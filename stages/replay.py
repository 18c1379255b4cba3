"""Go through recorded answers as an engine would with a method: acceptance before serving.

Reads    data/prepared/bench.parquet     the verifier's greedy answers to the bench's prompts
         data/bench_states               its hidden states of them
         data/verifier_head, the head of the method
Writes   data/replay/NAME.parquet        right drafts at every place of every answer
Metrics  reports/replay/NAME.json        acceptance by K and prompt type
Params   bench, methods.NAME

Run      dvc repro replay@NAME
"""

import sys

from specmill import paths
from specmill.files import read_json
from specmill.methods import read_settings
from specmill.replay import replay_row, rows_of, window_rows
from specmill.runs import write_runs
from specmill.samples import read_samples
from specmill.section import DoesNotFit, entry
from specmill.stage import open_stage
from specmill.view import StateView


def main(name: str) -> None:
    """Run the stage for one row."""
    with open_stage(f"replay@{name}", ["bench"]) as stage:
        chosen = entry("methods", stage.params.methods, name)
        settings = read_settings(name, chosen)
        num_tokens = stage.params.bench.max_tokens
        verifier = read_json(paths.HEAD_IDENTITY)
        samples = read_samples(paths.PREPARED / "bench.parquet")
        result = paths.REPORTS / "replay" / f"{name}.json"
        about = {"method": name, "answer_tokens": num_tokens}
        try:
            runs = replay_row(
                chosen, settings, samples, verifier, paths.VERIFIER_HEAD,
                StateView(paths.BENCH_STATES),
            )  # fmt: skip
        except DoesNotFit as reason:
            write_runs(paths.REPLAY / f"{name}.parquet", [], [])
            stage.write_metrics(result, about | {"replayed": False, "reason": str(reason)})
            return
        write_runs(paths.REPLAY / f"{name}.parquet", samples, runs)
        about |= {"replayed": True, "reason": None, "num_sequences": len(samples)}
        about["rows"] = rows_of(runs, samples, num_tokens)
        if chosen.method == "ngram":
            about["windows"] = window_rows(samples, num_tokens, verifier["max_model_len"])
        stage.write_metrics(result, about)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m stages.replay NAME (an entry of params.yaml: methods)")
    main(sys.argv[1])
