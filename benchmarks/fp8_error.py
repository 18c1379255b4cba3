"""What fp8 costs in accuracy: relative error by layer, ours and one scale a token.

For every sample of a bf16 view, its states x are stored as fp8 and read back as x':

    error(layer) = ||x' - x|| / ||x||      over all tokens of the layer

`token and layer` is what extract.dtype=fp8_e4m3 keeps (specmill.states); `token` has one scale a
token over all layers, as hs_connectors' fp8 has. `small` is the share of values that become 0.

Run      python -m benchmarks.fp8_error --view data/hidden_states
"""

import argparse
from pathlib import Path

import torch
from hs_connectors.fp8_utils import dequantize_fp8_tensor, quantize_tensor_to_fp8

from specmill import paths
from specmill.files import write_json
from specmill.states import quantise, restore
from specmill.view import StateView


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--view", type=Path, default=paths.HIDDEN_STATES)
    parser.add_argument("--samples", type=int, default=100)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    view = StateView(options.view)
    layers = view.spec.layer_ids
    total = torch.zeros(len(layers), dtype=torch.float64)
    errors = {name: total.clone() for name in ("token and layer", "token")}
    zeros = {name: total.clone() for name in errors}
    count = 0
    for key in list(view.places)[: options.samples]:
        _, states, _ = view.load(key)
        exact = states.double()
        total += exact.square().sum((0, 2))
        count += len(states) * states.shape[2]
        kept, scales = quantise(states)
        other, one_scale = quantize_tensor_to_fp8(states)
        for name, quantised, back in (
            ("token and layer", kept, restore(kept, scales, torch.bfloat16)),
            ("token", other, dequantize_fp8_tensor(other, one_scale)),
        ):
            errors[name] += (back.double() - exact).square().sum((0, 2))
            zeros[name] += ((quantised.float() == 0) & (exact != 0)).sum((0, 2))
    print("| layer | " + " | ".join(f"{name}: error | small" for name in errors) + " |")
    print("| ---: |" + " ---: | ---: |" * len(errors))
    rows = []
    for index, layer in enumerate(layers):
        row: dict[str, float] = {"layer_id": layer}
        for name in errors:
            row[f"{name}: error"] = round(float((errors[name][index] / total[index]).sqrt()), 5)
            row[f"{name}: small"] = round(float(zeros[name][index]) / count, 5)
        rows.append(row)
        cells = [f"{100 * value:.2f}%" for name, value in row.items() if name != "layer_id"]
        print(f"| {layer} | " + " | ".join(cells) + " |")
    if options.json:
        write_json(options.json, rows)


if __name__ == "__main__":
    main()
