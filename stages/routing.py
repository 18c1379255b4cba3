"""Count the experts that tokens in a row share, where the verifier is a mixture of experts.

Reads    models/verifier                identity.json says whether it is one
         data/prepared/bench.parquet    answers it gave
Metrics  reports/routing.json   experts loaded by requests and tokens of a forward pass, beside what
                                independent tokens would load; of a dense verifier, experts: null

Run      dvc repro routing
"""

from specmill import paths
from specmill.files import read_json
from specmill.moe_counts import busiest_share, overlap
from specmill.routing import pick_answers, routed_experts
from specmill.samples import read_samples
from specmill.stage import open_stage
from specmill.verifier import model_path


def main() -> None:
    """Run the stage."""
    with open_stage("routing", ["parallel"]) as stage:
        verifier = read_json(paths.IDENTITY)
        result = paths.REPORTS / "routing.json"
        if "experts" not in verifier:
            stage.write_metrics(result, {"experts": None})
            return
        num_experts, top_k = verifier["experts"]["num_experts"], verifier["experts"]["top_k"]
        max_model_len = verifier["max_model_len"]
        answers = pick_answers(read_samples(paths.PREPARED / "bench.parquet"), max_model_len)
        routed = routed_experts(
            model_path(paths.VERIFIER),
            verifier,
            answers,
            stage.params.parallel,
            stage.params.runtime,
        )
        stage.write_metrics(
            result,
            {
                "num_experts": num_experts,
                "top_k": top_k,
                "num_answers": len(routed),
                "num_tokens": sum(len(ids) for ids in routed),
                "busiest_share": round(busiest_share(routed, num_experts), 4),
                "windows": overlap(routed, num_experts, top_k),
            },
        )


if __name__ == "__main__":
    main()
