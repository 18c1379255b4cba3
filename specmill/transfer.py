"""Hidden states for speculators' trainer: from a view, or online from a running verifier.

speculators asks a `HiddenStatesTransfer` for row i of a dataset and by default finds
`hs_<i>.safetensors`, whatever row i has become since. Here row i is looked up by its token ids; a
sample that is missing or damaged is an error, where speculators would warn and train on less.

Run      python -m specmill.transfer train --hidden-states-backend specmill \\
             --hidden-states-path data/hidden_states --data-path FOLDER ...

         speculators' own command line with this backend known to it; FOLDER is any dataset of its
         `prepare-data` whose rows were extracted here.
"""

import argparse
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import openai
import torch
from datasets import Dataset, load_from_disk
from hs_connectors import HiddenStatesBackend, HiddenStatesTransfer
from safetensors import safe_open
from speculators.train.data import ArrowDataset
from speculators.train.recovery import SampleUnavailable

from specmill import paths
from specmill.compat import API_KEY
from specmill.files import is_whole, seal
from specmill.samples import Sample, digest_of, key_of
from specmill.shards import SUFFIX, read_shard
from specmill.states import restore, wait_for
from specmill.view import StateView, read_row


class StoreTransfer(HiddenStatesTransfer):
    """Row i of a dataset is the sample `sample_keys[i]` of a view.

    fp8 states come back in `dtype`, others as they were kept.
    """

    def __init__(self, view: StateView, sample_keys: list[str], dtype: torch.dtype):
        self._view = view
        self._keys = sample_keys
        self._dtype = dtype
        if not view.online:
            view.require(sample_keys)

    def get_cached(self, file_idx: int) -> dict[str, torch.Tensor] | None:
        """Sample `file_idx`; None when the view is online.

        Returns:
            `token_ids` int64 [num_tokens], `hidden_states` [num_tokens, num_layers, hidden_size],
            maps of the shard's file unless they are fp8.

        Raises:
            ValueError: when its bytes are not those that were extracted.
        """
        if self._view.online:
            return None
        return self._unpacked(*self._view.load(self._keys[file_idx]))

    def get_generated(self, hs_transfer_params: dict[str, Any]) -> dict[str, torch.Tensor]:
        """What the verifier has staged for a request, once it is whole.

        Raises:
            ValueError: when it could not, when it stages elsewhere or other states than the view
                says, or when the file's bytes changed on the way.
        """
        path = _staged(hs_transfer_params["hidden_states_path"])
        wait_for(path)
        if (reason := path.with_suffix(".error")).is_file():
            raise ValueError(reason.read_text())
        shard = read_shard(path, named=False)
        if shard.spec != self._view.spec:
            raise ValueError(f"the verifier stages {shard.spec}, extract says {self._view.spec}")
        (piece,) = shard.pieces(path)
        with safe_open(path, framework="pt") as handle:
            tensors = read_row(handle, shard.spec, piece)
        return self._unpacked(tensors["ids"], tensors["states"], tensors.get("scales"))

    def delete(self, handle: str) -> None:
        """Remove what the verifier had staged.

        Raises:
            ValueError: when it lies elsewhere: a server must not choose what is deleted.
        """
        path = _staged(handle)
        for one in (path, path.with_name(path.name + ".lock"), path.with_suffix(".error")):
            one.unlink(missing_ok=True)

    def _unpacked(
        self, ids: torch.Tensor, states: torch.Tensor, scales: torch.Tensor | None
    ) -> dict[str, torch.Tensor]:
        return {
            "token_ids": ids.long(),
            "hidden_states": states if scales is None else restore(states, scales, self._dtype),
        }


def _staged(named: str) -> Path:
    """What a server names, if it lies in the staging folder, whatever links lead to it."""
    path, staging = Path(named).resolve(), paths.STAGING.resolve()
    if path.parent != staging or path.suffix != SUFFIX:
        raise ValueError(
            f"the verifier stages {path}, which is no shard in {staging}; start it with --staging "
            "set to that folder, under the same path on both machines"
        )
    return path


@HiddenStatesBackend.register("specmill")
class StoreBackend(HiddenStatesBackend):
    """The store as a backend of speculators' command line."""

    @staticmethod
    def add_train_args(parser: argparse.ArgumentParser) -> None:
        """None of its own: `--hidden-states-path`, the view, is there already."""

    @staticmethod
    def add_launch_args(parser: argparse.ArgumentParser) -> None:
        """None: `python -m specmill.serve_states` launches the verifier."""

    @staticmethod
    def from_train_args(args: argparse.Namespace, data_path: str) -> StoreTransfer:
        """The rows of the dataset in `data_path`, found by their ids in `--hidden-states-path`."""
        rows = load_from_disk(data_path).with_format("numpy")["input_ids"]
        keys = [key_of(np.asarray(ids)) for ids in rows]
        view = StateView(Path(args.hidden_states_path or "data/hidden_states"))
        return StoreTransfer(view, keys, torch.bfloat16)

    @staticmethod
    def build_kv_transfer_config(args: argparse.Namespace) -> dict[str, Any]:
        """Refused: what is staged needs the verifier's identity, which launching does not have."""
        raise ValueError("start the verifier with `python -m specmill.serve_states`")


def _written(samples: list[Sample], folder: Path) -> Path:
    """The samples as an Arrow dataset, written once: a training that goes on finds them there.

    Returns:
        A folder in `folder` that is named after their ids and masks.
    """
    place = folder / digest_of(samples)
    if is_whole(place):
        return place
    begun = place.with_suffix(".tmp")
    for old in (place, begun):  # of a training that was interrupted here
        shutil.rmtree(old, ignore_errors=True)
    Dataset.from_dict(
        {
            "input_ids": [sample.input_ids for sample in samples],
            "loss_mask": [sample.loss_mask.astype(bool) for sample in samples],
            "seq_len": [len(sample.input_ids) for sample in samples],
        }
    ).with_format("torch").save_to_disk(begun)
    seal(begun)
    begun.replace(place)
    return place


class StoredSamples(ArrowDataset):
    """Samples with their hidden states, as speculators' trainer reads them.

    For a sample x0 ... x9 with states g (aux layers) and y (last layer), `shift_batch` of
    speculators then pairs the token *after* a state with it, since an EAGLE-3 or P-EAGLE draft
    model sees the token the verifier has just chosen:

        position         0   1   2  ...  8
        input_ids       x1  x2  x3  ... x9
        hidden_states   g0  g1  g2  ... g8     what the verifier knew when it chose that token
        verifier_last   y1  y2  y3  ... y9     target of step 0: the token after input_ids
    """

    def __init__(
        self,
        samples: list[Sample],
        view: StateView,
        folder: Path,
        max_len: int,
        dtype: torch.dtype,
        endpoints: list[str],
        timeout_s: float,
    ):
        """
        Args:
            samples: What trains, or what is held out.
            view: Their hidden states.
            folder: Receives the samples as speculators reads them, unless they are there already;
                needed as long as this object.
            max_len: Tokens of a step; longer samples are cut (train.tokens_per_step).
            dtype: Of the states in a batch.
            endpoints: The running verifier, if the view is online.
            timeout_s: Longest time it may take for one sample.

        Raises:
            ValueError: when hidden states are missing, when nothing of a sample would be trained,
                or when an online view comes without exactly one verifier.
        """
        if view.online and len(endpoints) != 1:
            raise ValueError(
                f"extract.mode is online, which takes one server in runtime.extract_endpoints, not "
                f"{len(endpoints)}; start it with `python -m specmill.serve_states`"
            )
        self.sample_keys = [sample.sample_key for sample in samples]
        self.num_cut = sum(len(sample.input_ids) > max_len for sample in samples)
        for sample in samples:
            if not sample.loss_mask[:max_len].any():
                raise ValueError(
                    f"train.tokens_per_step is {max_len}, which leaves no trained token of sample "
                    f"{sample.sample_key[:12]} ({len(sample.input_ids)} tokens); raise it"
                )
        self._ends = np.cumsum([len(sample.loss_mask) for sample in samples])
        self._masks = torch.from_numpy(np.concatenate([sample.loss_mask for sample in samples]) > 0)
        self._online = view.online
        super().__init__(
            max_len,
            _written(samples, folder),
            StoreTransfer(view, self.sample_keys, dtype),
            vllm_endpoint=f"{endpoints[0].rstrip('/')}/v1" if view.online else "",
            on_missing="generate" if view.online else "raise",
            hidden_states_dtype=dtype,
            request_timeout=timeout_s,
        )

    def _setup_client(self) -> None:
        self.client = openai.OpenAI(
            base_url=self.vllm_endpoint,
            api_key=os.environ.get(API_KEY) or "EMPTY",
            max_retries=0,
            # a proxy must not see the key and the samples
            http_client=openai.DefaultHttpxClient(trust_env=False),
        )
        self.model = "verifier"

    def _get_raw_data(self, index: int) -> dict[str, Any]:
        """Sample `index` as speculators gives it.

        Kept samples are told apart by their ids and checked against their checksum, so that the
        dataset itself, half of the time of a lookup, need not be asked again.
        """
        if not self._online:
            kept = self.transfer.get_cached(index)
            states, end = kept["hidden_states"], self._ends[index]
            return {
                "hidden_states": states[:, :-1].flatten(1),
                "input_ids": kept["token_ids"],
                "verifier_last_hidden_states": states[:, -1],
                "loss_mask": self._masks[end - len(states) : end],
            }
        found = super()._get_raw_data(index)
        if isinstance(found, SampleUnavailable):  # speculators would train without it
            raise RuntimeError(
                f"no hidden states of sample {self.sample_keys[index][:12]}: {found.reason}"
            )
        return dict(found)


if __name__ == "__main__":
    from speculators.cli import app

    app()
