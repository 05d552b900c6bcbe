"""Reads a Llama or Qwen2 checkpoint in the Hugging Face layout.

The folder has `config.json`, the arrays as safetensors, and `tokenizer.json`.
The model is a decoder with softmax attention (Transformer++). Its logits equal
the library's up to rounding. A config feature that this decoder lacks raises an
error that names it.
"""

import os
import pathlib
from collections.abc import Callable
from typing import Any

import numpy as np
from jax.sharding import Mesh

from memcomp import config as config_lib
from memcomp import errors, limits, sharding
from memcomp.data import chat_template
from memcomp.data import tokenizer as tokenizer_lib
from memcomp.export import names, read, tensors
from memcomp.layers import softmax_attention
from memcomp.models import abstract, decoder

MODEL_TYPES = ("llama", "qwen2")

MAX_WINDOW = 2048
"""Maximum length at which a checkpoint is scored. Its positions may go far
beyond what a default evaluation should read at once."""

_TOP = {
  "embedding.weight": "model.embed_tokens.weight",
  "head.weight": "lm_head.weight",
  "norm.weight": "model.norm.weight",
}
# `layers.N` here -> `model.layers.N` there.
_LAYER = {
  "mixer_norm": "input_layernorm",
  "mixer.projection.query": "self_attn.q_proj",
  "mixer.projection.key": "self_attn.k_proj",
  "mixer.projection.value": "self_attn.v_proj",
  "mixer.out": "self_attn.o_proj",
  "mlp_norm": "post_attention_layernorm",
  "mlp.gate": "mlp.gate_proj",
  "mlp.up": "mlp.up_proj",
  "mlp.down": "mlp.down_proj",
}
_ROTATED = ("mixer.projection.query", "mixer.projection.key")


def is_checkpoint(path: str | os.PathLike) -> bool:
  """Whether a folder has a model in the Hugging Face layout."""
  return "model_type" in read.settings(path)


def config_of(path: str | os.PathLike) -> config_lib.Config:
  """Returns a config with a checkpoint's model and tokenizer.

  It is the config of a run to train; the rest of it is as in any new one.

  Raises:
    UserError: a field of its config.json is wrong or unsupported.
  """
  folder = pathlib.Path(path).absolute()
  model, _ = _config(folder, read.settings(folder))
  config = config_lib.Config(name=folder.name, model=model)
  config.data.tokenizer = str(folder / read.TOKENIZER)
  return config


def load(path: str | os.PathLike, mesh: Mesh | None = None) -> read.Exported:
  """Reads a checkpoint with its tokenizer.

  The length of its rows is the number of its positions, at most `MAX_WINDOW`,
  because it is evaluated in windows of that.

  Args:
    path: the folder.
    mesh: mesh for the parameters; None is one device.

  Raises:
    UserError: see `load_params`; or tokenizer.json is missing, or has more ids
      than the model.
  """
  folder = pathlib.Path(path).absolute()
  if not (folder / read.TOKENIZER).exists():
    raise errors.UserError(
      f"{folder} has no {read.TOKENIZER}; save the tokenizer there too (its"
      " save_pretrained)"
    )
  tokenizer = tokenizer_lib.load(str(folder / read.TOKENIZER))
  model, params = load_params(folder, mesh)
  if tokenizer.vocab_size > model.vocab_size:
    raise errors.UserError(
      f"{folder / read.TOKENIZER} has {tokenizer.vocab_size} ids, more than the"
      f" model's {model.vocab_size}; put the tokenizer there that the model was"
      " trained with"
    )
  tokenizer.ends = _ends(folder, tokenizer.vocab_size) or tokenizer.ends
  config = config_of(folder)
  _, mixer = _config(folder, read.settings(folder))
  config.data.sequence_length = min(mixer.max_length, MAX_WINDOW)
  graphdef = abstract.model_of(model).graphdef
  meta = {
    "config": config_lib.to_dict(config),
    "param_count": sum(int(np.prod(e.shape)) for e in names.entries(model)),
    "tokenizer": tokenizer.fingerprint,
    "ends": tokenizer.ends,
    "step": 0,
  }
  if spec := chat_template.spec_in(folder):
    meta["chat_template"] = spec
  return read.Exported(
    abstract.merge(graphdef, params), tokenizer, config, meta
  )


def load_params(
  path: str | os.PathLike, mesh: Mesh | None = None
) -> tuple[decoder.DecoderConfig, Any]:
  """Reads a checkpoint's config and parameters, without its tokenizer.

  Raises:
    UserError: not such a checkpoint, an unsupported feature, or missing or
      surplus arrays.
  """
  folder = pathlib.Path(path).absolute()
  config, mixer = _config(folder, read.settings(folder))
  with tensors.opened(folder) as arrays:
    mapping = _mapping(config, mixer.key_dim)
    known = {name for name, _ in mapping.values()}
    # Older versions saved these tables, and sometimes a tied head.
    known |= {x for x in arrays.names if x.endswith("rotary_emb.inv_freq")}
    if config.tied_embeddings:
      known.add(_TOP["head.weight"])
    arrays.check_all_in(known, f"a {'/'.join(MODEL_TYPES)} model")

    def get(name: str) -> np.ndarray:
      theirs, change = mapping[name]
      with errors.malformed(f"{folder}: {theirs}", "restore it from a copy"):
        return change(arrays(theirs))

    return config, names.unflatten(config, get, mesh or sharding.one_device())


def _ends(folder: pathlib.Path, vocab_size: int) -> tuple[int, ...]:
  """Returns the tokenizer's ids that end texts, preferring generation's."""
  for name in ("generation_config.json", read.CONFIG):
    given = read.settings(folder, name).get("eos_token_id")
    ids = given if isinstance(given, list) else [given]
    known = [i for i in ids if type(i) is int and 0 <= i < vocab_size]
    if known:
      return tuple(dict.fromkeys(known))
  return ()


def _mapping(
  config: decoder.DecoderConfig, width: int
) -> dict[str, tuple[str, Callable[[np.ndarray], np.ndarray]]]:
  """Maps each flat name to its name there, and the array's conversion.

  Args:
    config: config of the model.
    width: query and key features per head.
  """
  found = {}
  for entry in names.entries(config):
    theirs, change = _TOP.get(entry.name), _same
    if theirs is None:
      _, depth, *path, last = entry.name.split(".")
      module = ".".join(path)
      theirs = f"model.layers.{depth}.{_LAYER[module]}.{last}"
      if module in _ROTATED:
        change = _interleaver(width)
    found[entry.name] = theirs, change
  return found


def _same(array: np.ndarray) -> np.ndarray:
  return array


def _interleaver(width: int) -> Callable[[np.ndarray], np.ndarray]:
  """Reorders a head's features for rotary positions.

  Feature j is paired with j + width / 2 there, but 2 j with 2 j + 1 here.
  """

  def interleave(array: np.ndarray) -> np.ndarray:
    pairs = array.reshape(-1, 2, width // 2, *array.shape[1:])
    return pairs.swapaxes(1, 2).reshape(array.shape)

  return interleave


def _config(
  folder: pathlib.Path, found: dict[str, Any]
) -> tuple[decoder.DecoderConfig, softmax_attention.SoftmaxAttentionConfig]:
  """Translates a config.json.

  Raises:
    UserError: a field is missing or wrong, or a feature is unsupported.
  """
  path = folder / read.CONFIG
  with errors.malformed(f"{path}", "give one as save_pretrained writes it"):
    _check_supported(path, found)
    config, mixer = _translated(path, found)
    try:
      config_lib.check_types(config)
    except errors.UserError as error:
      raise errors.UserError(f"{path}: {error}") from error
    config.validate()
  return config, mixer


def _check_supported(path: pathlib.Path, found: dict[str, Any]) -> None:
  rope = _rope(found)
  kind = found.get("model_type")
  refused = {
    "model_type": kind not in MODEL_TYPES,
    "hidden_act": found.get("hidden_act", "silu") != "silu",
    "attention_bias": found.get("attention_bias", False),
    "mlp_bias": found.get("mlp_bias", False),
    "use_sliding_window": found.get("use_sliding_window", False),
    "quantization_config": found.get("quantization_config") is not None,
    "partial_rotary_factor": rope.get("partial_rotary_factor", 1) != 1
    or found.get("partial_rotary_factor", 1) != 1,
    "rope_scaling": rope.get("rope_type", rope.get("type", "default"))
    != "default",
    "layer_types": set(found.get("layer_types") or ()) - {"full_attention"},
  }
  for name, is_refused in refused.items():
    if is_refused:
      value = rope if name == "rope_scaling" else found.get(name)
      raise errors.UserError(
        f"{path}: {name}={value!r} is not supported; models of type"
        f" {' and '.join(MODEL_TYPES)} with plain attention can be read"
      )


def _translated(
  path: pathlib.Path, found: dict[str, Any]
) -> tuple[decoder.DecoderConfig, softmax_attention.SoftmaxAttentionConfig]:
  for name, most in (
    ("num_attention_heads", limits.COUNT),
    ("num_hidden_layers", 1 << 16),  # loops run over all layers
  ):
    limits.check(f"{path}: {name}", found[name], 1, most)
  rope = _rope(found)
  heads, d_model = found["num_attention_heads"], found["hidden_size"]
  width, kv_heads = found.get("head_dim"), found.get("num_key_value_heads")
  if width is None:
    width = d_model // heads
  mixer = softmax_attention.SoftmaxAttentionConfig(
    heads=heads,
    kv_heads=heads if kv_heads is None else kv_heads,
    key_dim=width,
    value_dim=width,
    rotary_dim=width,
    rotary_base=float(
      rope.get("rope_theta", found.get("rope_theta", 10_000.0))
    ),
    projection_bias=found["model_type"] == "qwen2",
    max_length=found.get("max_position_embeddings", 2048),
  )
  config = decoder.DecoderConfig(
    vocab_size=found["vocab_size"],
    d_model=d_model,
    num_layers=found["num_hidden_layers"],
    mlp_dim=found["intermediate_size"],
    mixers={"attention": mixer},
    norm_eps=found["rms_norm_eps"],
    tied_embeddings=found.get("tie_word_embeddings", False),
  )
  return config, mixer


def _rope(found: dict[str, Any]) -> dict[str, Any]:
  # In the order of transformers.
  return found.get("rope_scaling") or found.get("rope_parameters") or {}
