"""What a language model is made of: the fields of its configuration."""

import dataclasses

import jax

from memcomp.layers import mlp, norm, options, trellis
from memcomp.models import pattern as pattern_lib
from memcomp_kernels.primitives import chunked

REMAT = {
  "none": None,
  "block": jax.checkpoint_policies.nothing_saveable,
  "mixer_out": jax.checkpoint_policies.save_only_these_names("mixer_out"),
  "memories": jax.checkpoint_policies.save_only_these_names(
    "mixer_out", chunked.SAVED
  ),
  "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
}
"""What a block keeps for its backward pass: everything, nothing but its input,
its input and the mixer's output, these and what the memory's own backward pass
needs (so that its kernel runs forward once), or the results of its linear
maps."""

DTYPES = ("float32", "bfloat16")


@dataclasses.dataclass(kw_only=True, slots=True)
class DecoderConfig:
  """A decoder of blocks: a sequence mixer and a channel mixer each.

  Attributes:
    vocab_size: token ids.
    d_model: width of the residual stream.
    num_layers: blocks.
    mlp_dim: hidden features of the channel mixer.
    mixer: the sequence mixer of the layers that `pattern` calls a.
    mixer_b: that of the layers called b; None without.
    mixer_c: that of the layers called c; None without.
    pattern: which mixer stands in which layer, see `memcomp.models.pattern`:
      "a" is every layer, "aab" two of a, one of b and so on, "8*b,4*a" eight
      of b and then four of a.
    channel_mixer: "swiglu", "gelu" or "relu2_shift" (squared ReLU after a token
      shift).
    norm: "rms" or "layer" (with bias).
    norm_eps: added to the mean square in the norms of the residual stream.
    residual_scale: c of x + c f(norm(x)).
    embedding_norm: a norm on the embeddings.
    embedding_convolution: taps of a convolution on the embeddings; 0 for none.
    tied_embeddings: the head is the embedding table.
    init_std: of the weights at the start.
    embedding_std: of the embedding table at the start.
    head_std: of an untied head (orthogonal) at the start; 0 takes `init_std`
      (normal).
    zero_init_out: every block starts as the identity.
    dtype: of activations and matrix products, "float32" or "bfloat16";
      parameters, states, norms, gates and logits are float32 always.
    remat: what a block keeps for its backward pass, see `REMAT`.
  """

  vocab_size: int = 256
  d_model: int = 768
  num_layers: int = 12
  mlp_dim: int = 2048
  mixer: options.MixerConfig = dataclasses.field(
    default_factory=trellis.TrellisConfig
  )
  mixer_b: options.MixerConfig | None = None
  mixer_c: options.MixerConfig | None = None
  pattern: str = "a"
  channel_mixer: str = "swiglu"
  norm: str = "rms"
  norm_eps: float = 1e-6
  residual_scale: float = 1.0
  embedding_norm: bool = False
  embedding_convolution: int = 0
  tied_embeddings: bool = True
  init_std: float = 0.02
  embedding_std: float = 0.02
  head_std: float = 0.0
  zero_init_out: bool = False
  dtype: str = "float32"
  remat: str = "none"

  def validate(self) -> None:
    """Raises ValueError naming the field that is out of range."""
    for name in ("vocab_size", "d_model", "num_layers", "mlp_dim"):
      if getattr(self, name) < 1:
        raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
    for name, choices in (
      ("dtype", DTYPES),
      ("remat", REMAT),
      ("channel_mixer", mlp.CHANNEL_MIXERS),
      ("norm", norm.NORMS),
    ):
      if getattr(self, name) not in choices:
        raise ValueError(
          f"{name}={getattr(self, name)!r} is not one of: {', '.join(choices)}"
        )
    width = self.embedding_convolution
    if width < 0 or width == 1:
      raise ValueError(f"embedding_convolution={width} must be 0 or at least 2")
    for name in ("init_std", "embedding_std", "norm_eps", "residual_scale"):
      if not getattr(self, name) > 0:
        raise ValueError(f"{name}={getattr(self, name)} must be positive")
    if self.head_std < 0:
      raise ValueError(f"head_std={self.head_std} must not be negative")
    used = set(pattern_lib.letters(self.pattern, self.num_layers))
    for letter, mixer in self._mixers().items():
      if mixer is None and letter in used:
        raise ValueError(
          f"pattern={self.pattern!r} names {letter}, but mixer_{letter} is None"
        )
      if mixer is not None:
        mixer.validate()
        mixer.at_width(self.d_model)

  def _mixers(self) -> dict[str, options.MixerConfig | None]:
    return {"a": self.mixer, "b": self.mixer_b, "c": self.mixer_c}

  def mixer_of(self, letter: str) -> options.MixerConfig:
    """The mixer that `pattern` calls `letter`."""
    mixer = self._mixers()[letter]
    if mixer is None:
      raise ValueError(f"mixer_{letter} is None")
    return mixer

  def layer_mixers(self) -> list[options.MixerConfig]:
    """The mixer of every layer, in order, with its sizes filled in."""
    letters = pattern_lib.letters(self.pattern, self.num_layers)
    return [self.mixer_of(x).at_width(self.d_model) for x in letters]
