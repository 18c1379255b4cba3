"""Muon where bfloat16 is emulated: its orthogonalisation in float32.

torch.optim.Muon (2.13) orthogonalises every weight's update by five Newton-Schulz iterations in
bfloat16, whatever the weight is. On a CPU without instructions for it that takes all the time of a
training: seconds a step for one decoder layer of width 576.
"""

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.optim import _muon

from specmill import compat


def orthogonalised(
    grad: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float
) -> Tensor:
    """The update with its singular values brought near 1, in float32.

    X <- a X + (b X X^T + c (X X^T)^2) X, from X = grad / its Frobenius norm (Jordan et al., Muon,
    2024; torch.optim._muon._zeropower_via_newtonschulz).

    Args:
        grad: [m, n].
        coefficients: a, b, c.
        steps: Iterations.
        eps: Least norm that is divided by.
    """
    a, b, c = coefficients
    is_tall = grad.shape[0] > grad.shape[1]
    found = grad.float().T if is_tall else grad.float()
    found = found / found.norm().clamp(min=eps)
    for _ in range(steps):
        gram = found @ found.T
        found = torch.addmm(found, torch.addmm(gram, gram, gram, beta=b, alpha=c), found, beta=a)
    return found.T if is_tall else found


@contextlib.contextmanager
def without_emulation() -> Iterator[None]:
    """Have torch.optim.Muon compute in float32 where bfloat16 would be emulated."""
    original = _muon._zeropower_via_newtonschulz
    if compat.compute_dtype("bfloat16", compat.device()) == "float32":
        _muon._zeropower_via_newtonschulz = orthogonalised
    try:
        yield
    finally:
        _muon._zeropower_via_newtonschulz = original
