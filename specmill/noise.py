"""Noise on a weight matrix, relative to the matrix's own spread.

W + noise * std(W) * N(0, 1)
"""

import torch

from specmill.files import digest


def noised(name: str, weight: torch.Tensor, noise: float, seed: int) -> torch.Tensor:
    """A matrix with noise on it, in its own dtype; what is no matrix of floats stays as it is.

    Args:
        name: Of the tensor. Each has noise of its own, drawn from `seed` and this, so that the
            order of files and tensors does not matter.
        weight: The tensor; not changed.
        noise: Standard deviation of the noise, relative to that of all values of `weight`.
        seed: The same gives the same noise.
    """
    if weight.ndim < 2 or not weight.is_floating_point():
        return weight
    values = weight.float()
    return (values + noise * values.std() * drawn(name, values.shape, seed)).to(weight.dtype)


def drawn(name: str, shape: torch.Size, seed: int) -> torch.Tensor:
    """Standard normal values, float32 of `shape`, from a generator for this name and seed."""
    generator = torch.Generator().manual_seed(int(digest([seed, name])[:15], 16))
    return torch.randn(shape, generator=generator)
