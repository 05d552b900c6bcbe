"""What a language model is made of: the fields of its configuration."""

import dataclasses
import keyword

import jax

from memcomp.layers import mlp, norm, options, trellis
from memcomp.models import letters
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
"""What a block keeps for its backward pass: everything, nothing but its input,
its input and the mixer's output, these and what the memory's own backward pass
needs (so that its kernel runs forward once), or the results of its linear
maps."""

DTYPES = ("float32", "bfloat16")


@letters.accepted
@dataclasses.dataclass(kw_only=True, slots=True)
class DecoderConfig:
  """A decoder of blocks: a sequence mixer and a channel mixer each.

  Attributes:
    vocab_size: token ids.
    d_model: width of the residual stream.
    num_layers: blocks.
    mlp_dim: hidden features of the channel mixer.
    mixers: the sequence mixers, each under a name. The name stands in
      `pattern` and in flags (--config.model.mixers.NAME.FIELD), so it is an
      identifier, and no attribute of a dict.
    pattern: which mixer stands in which layer, see `memcomp.models.pattern`:
      "memory" is every layer, "memory*3+window" three of memory, one of window
      and so on, "8*window,4*memory" eight of window and then four of memory.
      May be left empty with one mixer: it stands in every layer.
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
    # Configs that `dataclasses.replace` makes of each other share no dict.
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
    """Raises ValueError where `mixers` is no dict of named configurations."""
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
      ValueError: `pattern` is none, or does not make `num_layers` layers.
    """
    text = self.pattern
    if not text and len(self.mixers) == 1:
      (text,) = self.mixers
    return pattern_lib.parse(text, self.num_layers, self.mixers)

  def layer_names(self) -> list[str]:
    """The name of every layer's mixer, in order."""
    return [name for part in self.parts() for name in part.names * part.repeats]

  def at_width(self) -> "DecoderConfig":
    """The same with mixers whose sizes follow from `d_model` filled in.

    Raises:
      ValueError: a mixer's heads do not divide its features.
    """
    filled = {n: m.at_width(self.d_model) for n, m in self.mixers.items()}
    return dataclasses.replace(self, mixers=filled)

  def layer_mixers(self) -> list[options.MixerConfig]:
    """The mixer of every layer, in order, with its sizes filled in."""
    filled = self.at_width().mixers
    return [filled[name] for name in self.layer_names()]


def _is_name(name: str) -> bool:
  """Whether a flag's path can hold `name` and means the mixer by it."""
  is_word = name.isascii() and name.isidentifier()
  return is_word and not keyword.iskeyword(name) and not hasattr(dict, name)
