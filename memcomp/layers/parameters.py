"""Makes the parameters of a mixer with its random streams and scales."""

from typing import Any

from flax import nnx

from memcomp.layers import linear, short_convolution


class Make:
  """Makes the parameters of a mixer with common random streams and scales."""

  def __init__(self, rngs: nnx.Rngs, d_model: int, std: float, out_std: float):
    self.rngs, self.d_model = rngs, d_model
    self.std, self.out_std = std, out_std

  def project(
    self, width: int, bias: float | None = None, name: str | None = "heads"
  ) -> linear.Linear:
    """A linear map from d_model to `width` features; `name` is their axis."""
    return linear.Linear(
      self.d_model,
      width,
      ("embed", name),
      std=self.std,
      bias=bias,
      rngs=self.rngs,
    )

  def out(self, width: int, std: float | None = None) -> linear.Linear:
    """A linear map from the features of all heads to d_model."""
    return linear.Linear(
      width,
      self.d_model,
      ("heads", "embed"),
      std=self.out_std if std is None else std,
      rngs=self.rngs,
    )

  def convolution(
    self, channels: int, width: int, **keywords: Any
  ) -> short_convolution.ShortConvolution | None:
    """A short convolution of `width` taps; None if `width` is 0."""
    if not width:
      return nnx.data(None)
    return short_convolution.ShortConvolution(
      channels, width, rngs=self.rngs, **keywords
    )
