"""The config of a language model."""

import dataclasses
import keyword

import jax

from memcomp.layers import mlp, options, trellis
from memcomp.layers import norm as norm_lib
from memcomp.models import legacy_mixers
from memcomp.models import pattern as pattern_lib
from memcomp_kernels import derivative
from memcomp_kernels.options import (
  at_least,
  not_negative,
  one_of,
  option,
  positive,
)

REMAT = {
  "none": None,
  "block": jax.checkpoint_policies.nothing_saveable,
  "mixer_out": jax.checkpoint_policies.save_only_these_names("mixer_out"),
  "memories": jax.checkpoint_policies.save_only_these_names(
    "mixer_out", derivative.SAVED
  ),
  "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
}
"""What a block keeps for its backward pass: everything, only its input, also
the mixer's output, also what the memory's backward pass needs (so that its
kernel runs forward only once), or the results of its linear maps."""

DTYPES = ("float32", "bfloat16")


def _text(x: object) -> str | None:
  return None if isinstance(x, str) else f"is {type(x).__name__}, not text"


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

  vocab_size: int = option(256, at_least(1))
  d_model: int = option(768, at_least(1))
  num_layers: int = option(12, at_least(1))
  mlp_dim: int = option(2048, at_least(1))
  mixers: dict[str, options.MixerConfig] = dataclasses.field(
    default_factory=lambda: {"memory": trellis.TrellisConfig()}
  )
  pattern: str = option("", _text)
  channel_mixer: str = option("swiglu", one_of(mlp.CHANNEL_MIXERS))
  norm: str = option("rms", one_of(norm_lib.NORMS))
  norm_eps: float = option(1e-6, positive)
  residual_scale: float = option(1.0, positive)
  embedding_norm: bool = False
  embedding_convolution: int = option(0, options.taps)
  tied_embeddings: bool = True
  init_std: float = option(0.02, positive)
  embedding_std: float = option(0.02, positive)
  head_std: float = option(0.0, not_negative)
  zero_init_out: bool = False
  dtype: str = option("float32", one_of(DTYPES))
  remat: str = option("none", one_of(REMAT))

  def __post_init__(self):
    self._check_mixers()
    # `dataclasses.replace` must not share the dict between configs.
    self.mixers = dict(self.mixers)

  def validate(self) -> None:
    """Raises ValueError naming the field that is out of range."""
    options.check_fields(self)
    self._check_mixers()
    for name, mixer in self.mixers.items():
      try:
        mixer.validate()
        mixer.at_width(self.d_model)
      except ValueError as error:
        raise ValueError(f"mixers.{name}: {error}") from error
      except TypeError as error:
        raise ValueError(
          f"mixers.{name}: a field has a wrong type, or names a function that"
          f" takes other arguments ({error}); correct it"
        ) from error
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

  def parts(self) -> tuple[pattern_lib.Cycle, ...]:
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
