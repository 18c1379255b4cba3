"""Where the time of a decode step goes on a GPU, by kind of kernel, for every K, load and size.

    step       milliseconds of a step without a profiler, and in its trace
    by kind    of the GPU's kernels in it: attention, matrix products, all-reduces, ...; and idle
    link       of one all-reduce of NCCL between the GPUs, small and large; what the communication
               term of prediction (specmill/roofline.py) makes of it is beside the measured one

`pipeline` serves the verifier of params.yaml and models/eagle3 (`dvc repro train` makes them);
`8b` a Llama of 8 billion random weights and a random EAGLE-3 head of one layer, whose steps take as
long. K = 0 is decoding without speculation. Needs a GPU; `--gpus 2` two of them, joined by tensor
parallelism.

Run      python -m benchmarks.decode_step --json FILE
         python -m benchmarks.decode_step --model 8b --gpus 1 2 --k 0 1 3 5 --batch 1 8 32
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.kernels import per_step, read_rank, read_trace
from specmill import compat, paths
from specmill.files import read_json, write_json
from specmill.geometry import read_geometry
from specmill.hardware import describe_machine
from specmill.params import TRAINED_HEAD, Method
from specmill.roofline import Link, all_reduce_ms

_WARM, _TRACED = 24, 32
"""Steps before those that are traced, the prompts' among them, and those."""
_PROMPT = 128
"""Tokens of each prompt, random ones."""

LLAMA_8B: dict[str, Any] = {
    # Llama-3.1-8B's config.json
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "rope_theta": 500000.0,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_HEAD_8B = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "num_hidden_layers": 1,
    "draft_vocab_size": 32000,
}


def measure(asked: dict[str, Any]) -> list[dict[str, Any]]:
    """One engine, and what its steps take at every load.

    Args:
        asked: `engine`, the arguments of vLLM's LLM; `batches`; `k`; `traces`, an empty folder.
    """
    from vllm import LLM, SamplingParams

    vocabulary = asked["vocab_size"]
    traces = Path(asked["traces"])
    profiler = {
        "profiler": "torch",
        "torch_profiler_dir": str(traces),
        "torch_profiler_with_stack": False,
        "torch_profiler_dump_cuda_time_total": False,
        "ignore_frontend": True,
        "delay_iterations": _WARM,
        "max_iterations": _TRACED,
    }
    llm = LLM(
        **asked["engine"],
        skip_tokenizer_init=True,
        enable_prefix_caching=False,
        disable_log_stats=False,
        profiler_config=profiler,
        max_num_seqs=max(asked["batches"]),
    )
    found = []
    for batch in asked["batches"]:
        prompts: list[Any] = [
            {"prompt_token_ids": [(7 * i + 13 * j) % (vocabulary - 10) + 5 for i in range(_PROMPT)]}
            for j in range(batch)
        ]

        def answer(steps: int, prompts: list[Any] = prompts) -> tuple[float, float]:
            """Seconds, and steps; a step with drafts gives one token or more."""
            most = SamplingParams(
                temperature=0.0, ignore_eos=True, detokenize=False, max_tokens=steps
            )
            before, start = _num_drafts(llm), time.perf_counter()
            llm.generate(prompts, most, use_tqdm=False)
            seconds = time.perf_counter() - start
            return seconds, (_num_drafts(llm) - before) / len(prompts) if asked["k"] else steps

        answer(_WARM)
        times = []
        for _ in range(3):
            (few, few_steps), (many, many_steps) = answer(_WARM), answer(_WARM + 4 * _TRACED)
            times.append(1e3 * (many - few) / (many_steps - few_steps))
        llm.start_profile()
        answer((_WARM + 2 * _TRACED) * (1 + asked["k"]))
        llm.stop_profile()
        time.sleep(1)
        files = sorted(traces.rglob("*rank*.json*"))
        step = per_step([read_rank(read_trace(file)) for file in files])
        for file in files:
            file.unlink()
        found.append({"batch": batch, "step_ms": times, "traced": step})
    return found


def _num_drafts(llm: Any) -> float:
    """Requests times steps that verified drafts, so far."""
    values = [one.value for one in llm.get_metrics() if one.name == "vllm:spec_decode_num_drafts"]
    return sum(values)


def measure_link() -> dict[str, float]:
    """One all-reduce of bf16 numbers by NCCL, as one of the processes of torchrun."""
    import torch
    import torch.distributed as dist

    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    found = {}
    for name, numbers in (("small", 64), ("large", 2**27)):
        values = torch.zeros(numbers, dtype=torch.bfloat16, device="cuda")
        for _ in range(5):
            dist.all_reduce(values)
        torch.cuda.synchronize()
        repeats = 200 if name == "small" else 20
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(repeats):
            dist.all_reduce(values)
        end.record()
        torch.cuda.synchronize()
        found[name] = start.elapsed_time(end) / repeats
    gpus = dist.get_world_size()
    dist.destroy_process_group()
    moved = 2**27 * 2 * 2 * (gpus - 1) / gpus
    return {
        "latency_us": 1e3 * found["small"],
        "bandwidth_bytes_per_s": moved / (found["large"] / 1e3),
    }


def _engines(
    model: str, gpus: int, ks: list[int], scratch: Path
) -> tuple[dict[str, Any], list[tuple[int, dict[str, Any]]]]:
    """config.json of what is served, and arguments of vLLM's LLM by K."""
    common: dict[str, Any] = {
        "tensor_parallel_size": gpus,
        "max_model_len": 2048,
        "gpu_memory_utilization": 0.6,
        "seed": 0,
    }
    if model == "8b":
        target, head = scratch / "8b", scratch / "8b-eagle3"
        for folder, config in ((target, LLAMA_8B), (head, LLAMA_8B | _HEAD_8B)):
            folder.mkdir(exist_ok=True)
            write_json(folder / "config.json", config)
        common |= {"model": str(target), "load_format": "dummy", "dtype": "bfloat16"}
        speculative: dict[int, dict[str, Any] | None] = {
            k: {"method": "eagle3", "model": str(head), "num_speculative_tokens": k} for k in ks
        }
    else:
        from specmill.methods import speculative_configs
        from specmill.verifier import model_path

        target = model_path(paths.VERIFIER)
        row = Method(method="eagle3", section="spec", head=TRAINED_HEAD, settings={})
        drafting = [k for k in ks if k]
        speculative = speculative_configs("eagle3", row, drafting, read_json(paths.IDENTITY))
        common |= {"model": str(target)}
    return read_json(target / "config.json"), [
        (k, common | ({"speculative_config": speculative[k]} if k else {})) for k in ks
    ]


def _run_engine(asked: dict[str, Any], scratch: Path) -> list[dict[str, Any]]:
    """`measure` in a process of its own, so that its memory is free afterwards."""
    asked_file, found_file = scratch / "asked.json", scratch / "found.json"
    write_json(asked_file, asked)
    found_file.unlink(missing_ok=True)
    subprocess.run(
        [sys.executable, "-m", "benchmarks.decode_step", "--one", str(scratch)],
        check=True,
        env=compat.engine_environment(compat.device(), 2) | dict(os.environ),
    )
    found: list[dict[str, Any]] = read_json(found_file)
    return found


def _link_between(gpus: int, scratch: Path) -> dict[str, float]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={gpus}", "-m", "benchmarks.decode_step", "--link", str(scratch)]
    subprocess.run(command, check=True)
    found: dict[str, float] = read_json(scratch / "link.json")
    return found


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.decode_step",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", choices=("pipeline", "8b"), default="pipeline")
    parser.add_argument("--gpus", type=int, nargs="+", default=[1])
    parser.add_argument("--k", type=int, nargs="+", default=[0, 1, 3, 5])
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--json", type=Path, help="receives what was found, after every engine")
    parser.add_argument("--one", type=Path, help=argparse.SUPPRESS)  # of a process with an engine
    parser.add_argument("--link", type=Path, help=argparse.SUPPRESS)  # of a process of torchrun
    options = parser.parse_args()
    if options.one:
        write_json(options.one / "found.json", measure(read_json(options.one / "asked.json")))
        return
    if options.link:
        seen = measure_link()
        if os.environ["RANK"] == "0":
            write_json(options.link / "link.json", seen)
        return
    found: dict[str, Any] = {
        "machine": describe_machine(),
        "versions": compat.engine_versions(),
        "model": options.model,
        "links": {},
        "runs": [],
    }
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        for gpus in options.gpus:
            if gpus > 1:
                found["links"][str(gpus)] = _link_between(gpus, scratch)
            config, engines = _engines(options.model, gpus, options.k, scratch)
            for k, engine in engines:
                traces = scratch / f"traces-{gpus}-{k}"
                traces.mkdir()
                asked = {
                    "engine": engine,
                    "batches": options.batch,
                    "k": k,
                    "traces": str(traces),
                    "vocab_size": config["vocab_size"],
                }
                for run in _run_engine(asked, scratch):
                    foreseen = None
                    if gpus > 1:
                        link = Link(**found["links"][str(gpus)])
                        tokens = run["batch"] * (k + 1)
                        foreseen = all_reduce_ms(read_geometry(config), link, gpus, tokens)
                    found["runs"].append({"gpus": gpus, "k": k, **run, "foreseen_ms": foreseen})
                if options.json:
                    write_json(options.json, found)
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
