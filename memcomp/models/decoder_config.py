"""The config of a language model."""

import dataclasses
import keyword

import jax

from memcomp.layers import mlp, norm, options, trellis
from memcomp.models import legacy_mixers
from memcomp.models import pattern as pattern_lib
from memcomp_kernels.chunking import chunked

REMAT = {
  "none": None,
  "block": jax.checkpoint_policies.nothing_saveable,
  "mixer_out": jax.checkpoint_policies.save_only_these_names("mixer_out"),
  "memories": jax.checkpoint_policies.save_only_these_names(
    "mixer_out", chunked.SAVED
  ),
  "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
}
"""What a block keeps for its backward pass: everything, only its input, also
the mixer's output, also what the memory's backward pass needs (so that its
kernel runs forward only once), or the results of its linear maps."""

DTYPES = ("float32", "bfloat16")


@legacy_mixers.accept_old_fields
@dataclasses.dataclass(kw_only=True, slots=True)
class DecoderConfig:
  """A decoder whose blocks have a sequence mixer and a channel mixer each.

  Attributes:
    vocab_size: number of token ids.
    d_model: width of the residual stream.
    num_layers: number of blocks.
    mlp_dim: hidden features of the channel mixer.
    mixers: sequence mixers by name. `pattern` and flags use the names
      (--config.model.mixers.NAME.FIELD), so a name must be an identifier, but
      not an attribute of dict.
    pattern: the mixer of each layer, see `memcomp.models.pattern`. "memory"
      uses it in every layer; "memory*3+window" repeats three memory layers and
      one window layer; "8*window,4*memory" has eight window layers, then four
      memory layers. With a single mixer, it may be empty.
    channel_mixer: "swiglu", "gelu" or "relu2_shift" (squared ReLU after a token
      shift).
    norm: "rms" or "layer" (with bias).
    norm_eps: added to the mean square in the norms of the residual stream.
    residual_scale: c of x + c f(norm(x)).
    embedding_norm: whether a norm follows the embeddings.
    embedding_convolution: taps of a convolution on the embeddings; 0 for none.
    tied_embeddings: whether the head uses the embedding table.
    init_std: initial standard deviation of the weights.
    embedding_std: initial standard deviation of the embedding table.
    head_std: initial standard deviation of an untied orthogonal head; 0 uses a
      normal head with `init_std`.
    zero_init_out: whether every block starts as the identity.
    dtype: dtype of activations and matrix products, "float32" or "bfloat16".
      Parameters, states, norms, gates and logits are always float32.
    remat: what a block keeps for its backward pass, see `REMAT`.
  """

  vocab_size: int = 256
  d_model: int = 768
  num_layers: int = 12
  mlp_dim: int = 2048
  mixers: dict[str, options.MixerConfig] = dataclasses.field(
    default_factory=lambda: {"memory": trellis.TrellisConfig()}
  )
  pattern: str = ""
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

  def __post_init__(self):
    self._check_mixers()
    # `dataclasses.replace` must not share the dict between configs.
    self.mixers = dict(self.mixers)

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
    self._check_mixers()
    for name, mixer in self.mixers.items():
      try:
        mixer.validate()
        mixer.at_width(self.d_model)
      except ValueError as error:
        raise ValueError(f"mixers.{name}: {error}") from error
    self.parts()

  def _check_mixers(self) -> None:
    """Raises ValueError if `mixers` is not a dict of named configs."""
    if not isinstance(self.mixers, dict) or not self.mixers:
      raise ValueError(
        f"mixers={self.mixers!r}; give one or more by name, {{'memory': ...}}"
      )
    for name, mixer in self.mixers.items():
      if not isinstance(name, str) or not _is_name(name):
        raise ValueError(
          f"mixers: {name!r} cannot be set by a flag; name the mixer by an"
          " identifier that is no method of dict, as 'memory'"
        )
      if not isinstance(mixer, options.MixerConfig):
        raise ValueError(
          f"mixers.{name}={mixer!r} is no mixer's configuration; give one, as"
          " TrellisConfig()"
        )

  def parts(self) -> tuple[pattern_lib.Part, ...]:
    """The parts of `pattern`, see `memcomp.models.pattern`.

    Raises:
      ValueError: `pattern` is invalid, or does not make `num_layers` layers.
    """
    text = self.pattern
    if not text and len(self.mixers) == 1:
      (text,) = self.mixers
    return pattern_lib.parse(text, self.num_layers, self.mixers)

  def layer_names(self) -> list[str]:
    """The name of each layer's mixer, in order."""
    return [name for part in self.parts() for name in part.names * part.repeats]

  def at_width(self) -> "DecoderConfig":
    """Returns a copy with the mixer sizes that follow from `d_model` filled in.

    Raises:
      ValueError: a mixer's heads do not divide its features.
    """
    filled = {n: m.at_width(self.d_model) for n, m in self.mixers.items()}
    return dataclasses.replace(self, mixers=filled)

  def layer_mixers(self) -> list[options.MixerConfig]:
    """The mixer of each layer, in order, with its sizes filled in."""
    filled = self.at_width().mixers
    return [filled[name] for name in self.layer_names()]


def _is_name(name: str) -> bool:
  """Whether a flag can contain `name` and refers to the mixer by it."""
  is_word = name.isascii() and name.isidentifier()
  return is_word and not keyword.iskeyword(name) and not hasattr(dict, name)
