"""Replaces the mixers in layers of a trained model and keeps the rest.

Embeddings, norms, channel mixers and head stay. The new mixer inherits the old
projections that match in name and shape (query, key, value, output). Key and
value heads that several queries share are repeated, unless the new mixer shares
them as well. Everything else starts as in a new model. T2R (arXiv 2103.13076)
converts softmax to linear attention in this way.
"""

import dataclasses
import itertools
import json
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from memcomp import config as config_lib
from memcomp import errors, prng
from memcomp.export import names
from memcomp.layers import options, registry
from memcomp.models import abstract, decoder

# Fields whose value the new mixer needs for the old projections to mean the
# same in it.
_INHERITED = (
  "heads",
  "key_dim",
  "value_dim",
  "rotary_dim",
  "rotary_base",
  "rotary_frequencies",
  "rotary_scale",
  "rotary_reversed",
  "projection_bias",
)

# What would change the function of inherited projections, or read other layers.
_PLAIN = {"value_residual": "none", "token_shift": False}
_WITHOUT_CONVOLUTIONS = ("bounded_memory", "test_time_training")

# Other sources for a new projection that the old mixer lacks: keys write a
# memory.
_FALLBACK_ROLES = {"query_key": "key"}


class Swapped(NamedTuple):
  """A model with new mixers.

  Attributes:
    config: config of the new model.
    params: parameters of the new model.
    copied: flat names of the new mixers' inherited arrays.
    left: flat names of the old mixers' arrays that no new mixer inherited.
  """

  config: decoder.DecoderConfig
  params: Any
  copied: list[str]
  left: list[str]


def swap(
  config: decoder.DecoderConfig,
  params: Any,
  mixer: options.MixerConfig,
  *,
  layers: Sequence[int] | None = None,
  fresh: Any = None,
  seed: int = 0,
  mesh: Mesh | None = None,
) -> Swapped:
  """Returns a model with `mixer` in `layers`.

  Args:
    config: config of the old model.
    params: parameters of the old model, nested dicts of arrays or an
      `nnx.State`.
    mixer: config of the new mixer.
    layers: depths to convert; None is all.
    fresh: initial parameters of the new model, for arrays that are not
      inherited; None draws them.
    seed: seed for drawing them.
    mesh: mesh for the parameters; None is one device.

  Raises:
    UserError: there is no such layer, or the new config is invalid.
  """
  params = abstract.plain(params)
  if layers is None:
    layers = range(config.num_layers)
  changed = config_with(config, mixer, layers)
  if fresh is None:
    fresh = initial_params(changed, seed)
  ours = names.flatten(config, params)
  theirs = names.flatten(changed, fresh)
  old_mixers = config.layer_mixers()
  new_layers = set(layers)
  copied, used, found = [], set(), {}
  for name, array in theirs.items():
    depth, path = _mixer_path(name)
    found[name] = array
    if depth is None or depth not in new_layers:
      found[name] = ours[name]
      continue
    source = _source(ours, depth, path)
    if source is not None:
      inherited = ours[source]
      if inherited.shape != array.shape:
        inherited = _repeat_shared_heads(inherited, path, old_mixers[depth])
      if inherited.shape == array.shape:
        found[name] = inherited
        copied.append(name)
        used.add(source)
  left = [n for n in ours if n not in used and _mixer_path(n)[0] in new_layers]
  params = names.unflatten(changed, found.__getitem__, mesh)
  return Swapped(changed, params, copied, left)


def config_with(
  config: decoder.DecoderConfig,
  mixer: options.MixerConfig,
  layers: Sequence[int],
) -> decoder.DecoderConfig:
  """Returns the config of a model with `mixer` in `layers`.

  Raises:
    UserError: there is no such layer, or a bad field.
  """
  depths = range(config.num_layers)
  if not layers or set(layers) - set(depths):
    raise errors.UserError(
      f"layers {','.join(map(str, layers))}: give some of 0 to {depths[-1]}"
    )
  value_residual = getattr(mixer, "value_residual", "none")
  if value_residual != "none":
    raise errors.UserError(
      f"value_residual={value_residual!r}: a new mixer is given its own"
      " layer's input only; leave value_residual at 'none'"
    )
  old = config.layer_names()
  kept = {old[depth] for depth in depths if depth not in layers}
  _check_first_values(config, layers)
  kind = registry.name_of(mixer)
  numbered = (f"{kind}_{number}" for number in itertools.count(2))
  name = next(n for n in itertools.chain([kind], numbered) if n not in kept)
  mixers = {n: config.mixers[n] for n in config.mixers if n in kept}
  changed = dataclasses.replace(
    config,
    mixers=mixers | {name: mixer},
    pattern=_pattern([name if d in layers else old[d] for d in depths]),
  )
  try:
    config_lib.check_types(changed)
    changed.validate()
  except ValueError as error:
    raise errors.UserError(f"--mixer: {error}") from error
  return changed


def _check_first_values(
  config: decoder.DecoderConfig, layers: Sequence[int]
) -> None:
  """Raises UserError if a kept layer would read another first value.

  A value residual reads the value of the first layer of its mixer's name.
  """
  old = config.layer_names()
  for depth, name in enumerate(old):
    first = old.index(name)
    residual = getattr(config.mixers[name], "value_residual", "none")
    if residual != "none" and first in layers and depth not in layers:
      raise errors.UserError(
        f"--layers: layer {depth} is kept and reads the value of layer {first}"
        f" (value_residual={residual!r}); keep layer {first}, or convert layer"
        f" {depth} too"
      )


def parse(text: str, like: options.MixerConfig) -> options.MixerConfig:
  """Parses a mixer flag, `NAME` or `NAME:FIELD=VALUE,...`.

  Heads, widths, rotary positions and projection biases default to those of
  `like`. If the new mixer cannot rotate that many channels, its own default
  applies. Value residual and token shift are off by default, and so are the
  convolutions of `bounded_memory` and `test_time_training`.

  Raises:
    UserError: the mixer or field is unknown.
  """
  name, _, settings = text.partition(":")
  try:
    kind = registry.config_of(name)
  except ValueError as error:
    raise errors.UserError(f"--mixer={text}: {error}") from error
  fields = {field.name: field for field in dataclasses.fields(kind)}
  default = kind()
  values = {
    field: getattr(like, field)
    for field in _INHERITED
    if field in fields
    and hasattr(like, field)
    # Mixers without rotary positions by default stay without.
    and (field != "rotary_dim" or getattr(default, field) != 0)
  }
  values |= {f: x for f, x in _PLAIN.items() if f in fields}
  if name in _WITHOUT_CONVOLUTIONS:
    values["convolution_width"] = 0
  chosen = set()
  for setting in filter(None, settings.split(",")):
    field, _, value = setting.partition("=")
    if field not in fields:
      raise errors.UserError(
        f"--mixer={text}: {name} has no field {field!r}; it has"
        f" {', '.join(fields)}"
      )
    if not isinstance(getattr(default, field), str):
      try:
        value = json.loads(value.lower())
      except errors.BAD_JSON as error:
        kind_of = config_lib.type_name(type(getattr(default, field)))
        raise errors.UserError(
          f"--mixer={text}: {field} takes {kind_of}, not {value!r}"
        ) from error
    values[field] = value
    chosen.add(field)
  mixer = kind(**values)
  if "rotary_dim" in values.keys() - chosen and not _fits(mixer):
    own = dataclasses.replace(mixer, rotary_dim=None)
    return own if _fits(own) else mixer
  return mixer


def _fits(mixer: options.MixerConfig) -> bool:
  try:
    mixer.check()
  except (TypeError, ValueError):
    return False
  return True


def initial_params(config: decoder.DecoderConfig, seed: int) -> Any:
  """Returns the initial parameters of a model, on one device."""

  @jax.jit
  def init():
    return abstract.plain(
      nnx.split(decoder.Decoder(config, rngs=nnx.Rngs(prng.key(seed))))[1]
    )

  return init()


def _mixer_path(name: str) -> tuple[int | None, str]:
  """`layers.3.mixer.out.weight` -> (3, `out.weight`); others (None, "")."""
  parts = name.split(".")
  if parts[0] != "layers" or parts[2] != "mixer":
    return None, ""
  return int(parts[1]), ".".join(parts[3:])


def _source(ours, depth, path) -> str | None:
  """The flat name of the old mixer's array with this name or role."""
  path = path.removeprefix("projection.")
  role, dot, kind = path.partition(".")
  for name in (path, _FALLBACK_ROLES.get(role, role) + dot + kind):
    for prefix in ("", "projection."):
      if (found := f"layers.{depth}.mixer.{prefix}{name}") in ours:
        return found
  return None


def _repeat_shared_heads(array, path, old: options.MixerConfig) -> np.ndarray:
  """Repeats shared heads: query head h reads head h // (heads / kv_heads)."""
  shared = getattr(old, "kv_heads", 0)
  role = path.removeprefix("projection.").split(".")[0]
  if not shared or _FALLBACK_ROLES.get(role, role) not in ("key", "value"):
    return array
  heads = array.reshape(shared, -1, *array.shape[1:])
  repeated = np.repeat(heads, getattr(old, "heads", 0) // shared, axis=0)
  return repeated.reshape(-1, *array.shape[1:])


def _pattern(names: list[str]) -> str:
  """The pattern of these layers, periodic if possible."""
  count = len(names)
  for period in range(1, count):
    if names[:period] * (count // period) == names:
      runs = _runs(names[:period])
      return "+".join(n if many == 1 else f"{many}*{n}" for n, many in runs)
  return ",".join(f"{many}*{name}" for name, many in _runs(names))


def _runs(names: list[str]) -> list[tuple[str, int]]:
  """Each run of equal names, with its length."""
  return [(name, len(list(run))) for name, run in itertools.groupby(names)]
