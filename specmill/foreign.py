"""Another version of the verifier, to train a head for: a copy with noise on its weights.

Noise on every weight matrix (specmill.noise) leaves architecture, tokenizer and vocabulary the
same, and answers that are still language. A head trained on the copy is to the verifier what a head
found for a model's earlier version is.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

from specmill.compat import trusted_code
from specmill.cut import copy_companions, weight_files
from specmill.engines import engines
from specmill.extract import extract_missing
from specmill.noise import noised
from specmill.params import Runtime
from specmill.params_heads import ForeignHead
from specmill.params_parallel import Parallel
from specmill.samples import Sample
from specmill.shards import StateSpec
from specmill.store import HiddenStateStore
from specmill.verifier import identify, write_head_slice
from specmill.view import StateView

_SHARD_BYTES = 16 * 2**20


def noised_states(
    model: Path,
    verifier: dict[str, Any],
    chosen: ForeignHead,
    samples: list[Sample],
    spec: StateSpec,
    scratch: Path,
    *,
    store: Path,
    staging: Path,
    parallel: Parallel,
    runtime: Runtime,
) -> tuple[dict[str, Any], StateView]:
    """What a noised copy's hidden states are where the verifier's answers are put in its mouth.

    Args:
        model: The verifier's checkpoint.
        verifier: Its identity.json.
        chosen: Noise and its seed.
        samples: Prompts with the verifier's answers.
        spec: What is kept of the verifier; the same is kept of the copy.
        scratch: Receives the copy (`model`), what training needs of it (`verifier_head`) and a
            view of its states (`view`).
        store: Folder of the store, where the states stay.
        staging: As for `extract_missing`.
        parallel: Of params.yaml.
        runtime: Its extract_endpoints are not asked: they serve the verifier.

    Returns:
        The copy's identity and the view.
    """
    identity = noised_copy(model, scratch / "model", chosen.noise, chosen.seed, verifier)
    write_head_slice(scratch / "model", scratch / "verifier_head")
    spec = replace(spec, verifier=identity["fingerprint"])
    here = runtime.model_copy(update={"extract_endpoints": []})
    with HiddenStateStore.alone(store) as held:
        extract_missing(
            samples,
            spec,
            held,
            engines(spec, scratch / "model", staging, identity, parallel, here),
            shard_bytes=_SHARD_BYTES,
            staging=staging,
            window=runtime.extract_window,
        )
        keys = [sample.sample_key for sample in samples]
        held.write_view(scratch / "view", spec, keys, _SHARD_BYTES)
    return identity, StateView(scratch / "view")


def noised_copy(
    model: Path, folder: Path, noise: float, seed: int, verifier: dict[str, Any]
) -> dict[str, Any]:
    """Write a checkpoint with noise on its matrices, file by file; the same for the same seed.

    Args:
        model: The verifier's checkpoint.
        folder: Receives the copy.
        noise: Standard deviation of the noise, relative to each matrix's own.
        seed: Of the noise.
        verifier: Its identity.json.

    Returns:
        The copy's identity.
    """
    folder.mkdir(parents=True)
    copy_companions(model, folder)
    for file in weight_files(model):
        weights = {
            name: noised(name, weight, noise, seed) for name, weight in load_file(file).items()
        }
        save_file(weights, folder / file.name, metadata={"format": "pt"})
    description = {
        "name": f"{verifier['name']} + noise {noise:g}",
        "origin": f"noise of seed {seed} on every matrix of {verifier['fingerprint']}",
        **trusted_code(verifier),
    }
    return identify(folder, description, verifier["max_model_len"], verifier["dtype"])
