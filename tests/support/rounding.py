"""How far a computation in a short type may be from the exact one: bounds that hold in whatever order it is added up.

Every processor rounds its products' results to the type, and adds up in fp32; none adds up in the short type. What
they do between, in blocks, tiles or lanes, is covered by the worst case of any order of additions.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

_ADDITION = 2.0**-23  # one fp32 operation, rounded or cut off


@dataclass(frozen=True)
class Bounded:
    """Exact values, and by how much computed ones may differ.

    Attributes:
        exact: fp64.
        error: of the same shape, not negative.
    """

    exact: torch.Tensor
    error: torch.Tensor

    @classmethod
    def of(cls, given: torch.Tensor) -> Bounded:
        """Take values as they are."""
        return cls(given.double(), torch.zeros(given.shape, dtype=torch.float64))

    def linear(self, weight: torch.Tensor, dtype: torch.dtype) -> Bounded:
        """Multiply by a weight, add up in fp32, round to `dtype`."""
        weight = weight.double()
        sizes = (self.exact.abs() + self.error) @ weight.abs().T
        error = self.error @ weight.abs().T + (weight.shape[1] + 2) * _ADDITION * sizes
        return Bounded(self.exact @ weight.T, error).rounded(dtype)

    def silu_times(self, other: Bounded, dtype: torch.dtype) -> Bounded:
        """Return silu(this) * other, rounded to `dtype`. The slope of silu is below 1.1."""
        mine = torch.nn.functional.silu(self.exact)
        error = 1.1 * self.error
        product = error * (other.exact.abs() + other.error) + mine.abs() * other.error
        return Bounded(mine * other.exact, product + 8 * _ADDITION * (mine * other.exact).abs()).rounded(dtype)

    def rounded(self, dtype: torch.dtype) -> Bounded:
        """Round to `dtype`."""
        info = torch.finfo(dtype)
        return Bounded(self.exact, self.error + info.eps / 2 * (self.exact.abs() + self.error) + info.tiny)

    def plus(self, other: Bounded) -> Bounded:
        """Add in fp32."""
        total = self.exact + other.exact
        error = self.error + other.error
        return Bounded(total, error + _ADDITION * (self.exact.abs() + other.exact.abs() + error))

    def times(self, factor: torch.Tensor) -> Bounded:
        """Multiply in fp32."""
        factor = factor.double()
        error = factor.abs() * self.error
        return Bounded(factor * self.exact, error + _ADDITION * (factor.abs() * self.exact.abs() + error))

    def holds(self, computed: torch.Tensor) -> bool:
        """Say whether what was computed is within the bounds."""
        return bool(((computed.double() - self.exact).abs() <= self.error).all())
