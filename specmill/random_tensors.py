"""Does a weight matrix look as it was drawn, never trained?

Entries drawn independently from one distribution, whichever it is, leave three figures where theory
puts them, and training moves at least one of them far away. Each is a number of standard
deviations, for m rows of n entries of mean 0 and variance 1:

    largest singular value    its square has mean mu and deviation sd, and follows the Tracy-Widom
                              law, -1.21 +- 1.27 (Johnstone, Annals of Statistics 29, 2001, theorem
                              1.1; mu is Marchenko and Pastur's edge):
                                  mu = (sqrt(m - 1) + sqrt(n))^2
                                  sd = (sqrt(m - 1) + sqrt(n)) (1/sqrt(m - 1) + 1/sqrt(n))^(1/3)
    energy of rows, columns   the mean squares of the rows vary by (k - 1) / n, k the mean fourth
                              power of all entries; their variance over that is 1 +- sqrt(2/(m - 1))
                              (chi-squared)

Measured: 450 drawn matrices (normal, uniform and cut-off normal, rounded to bfloat16) stay below
3.5 in all three; of ten matrices of a briefly trained head the least has 17 in one (o_proj).
Singular values alone would not do: its q_proj has 1.4 there, and 443 in its columns.
"""

import math

import torch

LARGEST_DRAWN = 6.0
"""Standard deviations that no drawn matrix reaches, and every trained one passes."""
_SIDE = 1024
"""Rows and columns looked at, evenly spaced: a part of a drawn matrix is one too."""
_SMALLEST = 128
"""Matrices with a shorter side are too small to tell."""


def looks_drawn(weight: torch.Tensor) -> bool:
    """Whether a tensor is a matrix as its initialisation left it; False when one cannot tell."""
    if weight.dim() != 2 or min(weight.shape) < _SMALLEST:
        return False
    return distance_from_drawn(weight) < LARGEST_DRAWN


def distance_from_drawn(weight: torch.Tensor) -> float:
    """The largest of the three figures above, in standard deviations.

    Args:
        weight: [m, n], not all zero.
    """
    steps = [math.ceil(side / _SIDE) for side in weight.shape]
    values = weight[:: steps[0], :: steps[1]].double()
    values = values / values.square().mean().sqrt()
    return max(
        _largest_singular_value(values),
        _energy_spread(values.square()),
        _energy_spread(values.square().T),
    )


def _largest_singular_value(values: torch.Tensor) -> float:
    """Of a matrix of mean square 1."""
    rows, columns = values.shape
    gram = values @ values.T if rows < columns else values.T @ values
    largest = float(torch.linalg.eigvalsh(gram)[-1])
    left, right = math.sqrt(rows - 1), math.sqrt(columns)
    deviation = (left + right) * math.cbrt(1 / left + 1 / right)
    return (largest - (left + right) ** 2) / deviation


def _energy_spread(squares: torch.Tensor) -> float:
    """Of the rows of a matrix of squares of mean 1, in either direction.

    Rows of equal energy, as of an orthogonal matrix, were not drawn entry by entry either.
    """
    rows, columns = map(int, squares.shape)
    expected = (float(squares.square().mean()) - 1) / columns
    ratio = float(squares.mean(1).var()) / expected if expected > 0 else 0.0
    return abs(ratio - 1) * math.sqrt((rows - 1) / 2)
