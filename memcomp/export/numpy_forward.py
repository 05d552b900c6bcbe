"""Logits of an exported model by numpy alone, to show that the files suffice.

  python numpy_forward.py FOLDER "def main"

It reads a safetensors export of `memcomp export`, for models of Trellis or
softmax attention with RMS norm and SwiGLU. It runs token by token in float64,
simple and slow, and imports nothing of memcomp. The command above needs a bytes
tokenizer; `forward` takes any ids.
"""

import json
import pathlib
import re
import sys

import numpy as np


def read_safetensors(path):
  """Returns the arrays of a file: 8 bytes of length, JSON, then the data."""
  content = pathlib.Path(path).read_bytes()
  start = 8 + int.from_bytes(content[:8], "little")
  arrays = {}
  for name, about in json.loads(content[8:start]).items():
    if name == "__metadata__":
      continue
    begin, end = (start + offset for offset in about["data_offsets"])
    if about["dtype"] == "F32":
      array = np.frombuffer(content[begin:end], "<f4")
    elif about["dtype"] == "BF16":  # the upper half of a float32
      half = np.frombuffer(content[begin:end], "<u2").astype(np.uint32)
      array = (half << 16).view(np.float32)
    else:
      raise ValueError(f"{name} is {about['dtype']}, not F32 or BF16")
    arrays[name] = array.reshape(about["shape"]).astype(np.float64)
  return arrays


def read(folder):
  """Returns the model's config (nested dict) and its arrays by flat name."""
  folder = pathlib.Path(folder)
  config = json.loads((folder / "config.json").read_text())["config"]["model"]
  index = folder / "model.safetensors.index.json"
  files = {"model.safetensors"}
  if index.exists():
    files = set(json.loads(index.read_text())["weight_map"].values())
  arrays = {}
  for name in files:
    arrays |= read_safetensors(folder / name)
  return config, arrays


class Arrays:
  """The arrays of a module: `part("query", x)` is its linear map `query`."""

  def __init__(self, arrays, prefix):
    self.arrays, self.prefix = arrays, prefix

  def get(self, name):
    """Returns an array of the module, or None."""
    return self.arrays.get(f"{self.prefix}.{name}")

  def __call__(self, name, x):
    """Applies the linear map `name`: x W^T + b, `[time, features]`."""
    y = x @ self.get(f"{name}.weight").T
    bias = self.get(f"{name}.bias")
    return y if bias is None else y + bias

  def convolve(self, name, x):
    """Applies the convolution `name` of the module."""
    return convolve(x, self.arrays, f"{self.prefix}.{name}")


def convolve(x, arrays, name):
  """A causal depthwise convolution over time; x if there is none."""
  weight = arrays.get(f"{name}.weight")
  if weight is None:
    return x
  padded = np.concatenate([np.zeros((len(weight) - 1, x.shape[1])), x])
  y = sum(padded[j : j + len(x)] * weight[j] for j in range(len(weight)))
  return y + arrays[f"{name}.bias"]


def sigmoid(x):
  """1 / (1 + e^-x)."""
  return 1 / (1 + np.exp(-x))


def silu(x):
  """Returns x * sigmoid(x)."""
  return x * sigmoid(x)


def gelu(x):
  """GELU in the tanh approximation."""
  return x / 2 * (1 + np.tanh((2 / np.pi) ** 0.5 * (x + 0.044715 * x**3)))


def rms_norm(x, scale, eps):
  """Returns x / rms(x) * scale."""
  return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps) * scale


def layer_norm(x, eps):
  """(x - mean) / std."""
  return rms_norm(x - x.mean(axis=-1, keepdims=True), 1, eps)


def unit(x):
  """Returns x / |x|, with the norm over the last axis."""
  return x / np.sqrt(np.sum(x * x, axis=-1, keepdims=True) + 1e-6)


def ln_silu_gradient(z, target, eps):
  """J^T (phi(z) - target) of phi(z) = layer_norm(silu(z)), `[heads, slots]`."""
  s = silu(z)
  centred = s - s.mean(axis=-1, keepdims=True)
  scale = 1 / np.sqrt(np.mean(centred**2, axis=-1, keepdims=True) + eps)
  y = centred * scale
  error = y - target
  slope = error - error.mean(axis=-1, keepdims=True)
  slope = scale * (slope - y * np.mean(error * y, axis=-1, keepdims=True))
  gate = sigmoid(z)
  return slope * gate * (1 + z * (1 - gate))


def split(x, heads):
  """Reshapes `[time, heads * dim]` to `[time, heads, dim]`."""
  return x.reshape(len(x), heads, -1)


def trellis(part, config, x):
  """The Trellis mixer, from `[time, d_model]` to the same shape."""
  require(
    config,
    phi="ln_silu",
    read_activation="ln_silu",
    value_readout_phi=False,
    learn_phi_eps=False,
    learned_memory=True,
    rate_bound=0.0,
  )
  heads, eps = config["heads"], config["phi_eps"]
  shared = part("query_key", x)
  q = split(part.convolve("query_convolution", shared), heads)
  k = split(part.convolve("key_convolution", shared), heads)
  v = split(part.convolve("value_convolution", part("value", x)), heads)
  if config["normalize"] != "none":
    q, k = unit(q), unit(k)
  if config["normalize"] == "qkv":
    v = unit(v)
  alpha = split(part("target", x), heads)
  # One gate for both passes, or one for each.
  beta = split(sigmoid(part("log_decay", x)), heads)
  if not config["forget_gate"]:
    beta = np.ones_like(beta)
  rate = sigmoid(part("write_rate", x)) * config["write_rate_scale"]
  rate = split(rate, heads)

  chunked = config["gradient_at"] == "chunk_start"
  chunk = config["chunk_size"] if chunked else 1
  M_K, M_V = part.get("key_memory"), part.get("value_memory")
  start_K, start_V = M_K, M_V
  outputs = []
  for t in range(len(x)):
    if t % chunk == 0:
      start_K, start_V = M_K, M_V

    def write(M, start, w, which, t=t):
      z = np.einsum("hmd,hd->hm", start, w)
      u = ln_silu_gradient(z, alpha[t], eps)
      step = rate[t, :, which, None, None] * u[:, :, None] * w[:, None]
      return beta[t, :, which, None, None] * M - step

    M_K = write(M_K, start_K, k[t], 0)
    M_V = write(M_V, start_V, v[t], -1)
    found = np.einsum("hmd,hd->hm", M_K, q[t])
    found = layer_norm(silu(found), config["read_eps"])
    outputs.append(np.einsum("hmd,hm->hd", M_V, found).reshape(-1))
  y, scale = np.stack(outputs), part.get("post_norm.weight")
  if config.get("head_norm", False):  # older exports do not have the option
    y = rms_norm(split(y, heads), 1.0, 1e-6).reshape(y.shape) * scale
  else:
    y = layer_norm(y, 1e-6) * scale + part.get("post_norm.bias")
  return part("out", y * gelu(part("gate", x)))


def rotate(x, dim, base, turn):
  """Rotates pairs (2 j, 2 j + 1) of the first `dim` channels by position.

  `turn` is 1, or -1 to rotate the other way.
  """
  frequencies = turn * base ** (-np.arange(dim // 2) / (dim // 2))
  angle = np.arange(len(x))[:, None, None] * frequencies
  even, odd = x[..., 0:dim:2], x[..., 1:dim:2]
  y = x.copy()
  y[..., 0:dim:2] = even * np.cos(angle) - odd * np.sin(angle)
  y[..., 1:dim:2] = even * np.sin(angle) + odd * np.cos(angle)
  return y


def softmax_attention(part, config, x):
  """Causal softmax attention, from `[time, d_model]` to the same shape."""
  require(
    config,
    window_size=0,
    sink_tokens=0,
    chunk_size=0,
    rotary_frequencies="standard",
    rotary_scale=1.0,
    normalize_key="none",
    token_shift=False,
    value_residual="none",
  )
  heads = config["heads"]
  kv_heads = config["kv_heads"] or heads
  q = split(part("projection.query", x), heads)
  k = split(part("projection.key", x), kv_heads)
  v = split(part("projection.value", x), kv_heads)
  dim, base = config["rotary_dim"], config["rotary_base"]
  turn = -1 if config.get("rotary_reversed", False) else 1
  q, k = rotate(q, dim, base, turn), rotate(k, dim, base, turn)
  # Query head h reads head h // (heads / kv_heads).
  k, v = (np.repeat(a, heads // kv_heads, axis=1) for a in (k, v))
  scores = np.einsum("qhd,khd->hqk", q, k) / config["key_dim"] ** 0.5
  scores = np.where(np.tri(len(x), dtype=bool), scores, -np.inf)
  weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
  weights /= weights.sum(axis=-1, keepdims=True)
  return part("out", np.einsum("hqk,khd->qhd", weights, v).reshape(len(x), -1))


MIXERS = {"trellis": trellis, "softmax_attention": softmax_attention}


def require(config, **fields):
  """Raises ValueError that names a field with another value."""
  for name, value in fields.items():
    found = config.get(name, value)  # older exports lack newer options
    if found != value:
      raise ValueError(f"{name}={found!r}: this reader has only {value!r}")


def forward(config, arrays, tokens):
  """Logits `[time, vocab]` of the ids `tokens` `[time]`."""
  require(
    config,
    channel_mixer="swiglu",
    norm="rms",
    embedding_norm=False,
    residual_scale=1.0,
  )
  # Old configs have three fields instead of `mixers`.
  old = (config.get(name) for name in ("mixer", "mixer_b", "mixer_c"))
  mixers = config.get("mixers", {})
  words = re.split(r"\W", config.get("pattern", ""))
  found = [mixers[name] for name in mixers if name in words]
  found = found or [*mixers.values()] or list(filter(None, old))
  if len(found) != 1 or found[0]["name"] not in MIXERS:
    raise ValueError(f"this reader has models of one mixer, of {[*MIXERS]}")
  options, eps = found[0], config["norm_eps"]
  x = arrays["embedding.weight"][np.asarray(tokens)]
  x = convolve(x, arrays, "convolution")
  for depth in range(config["num_layers"]):
    layer = Arrays(arrays, f"layers.{depth}")
    part = Arrays(arrays, f"layers.{depth}.mixer")
    y = rms_norm(x, layer.get("mixer_norm.weight"), eps)
    x = x + MIXERS[options["name"]](part, options, y)
    y = rms_norm(x, layer.get("mlp_norm.weight"), eps)
    x = x + layer("mlp.down", silu(layer("mlp.gate", y)) * layer("mlp.up", y))
  head = "embedding.weight" if config["tied_embeddings"] else "head.weight"
  return rms_norm(x, arrays["norm.weight"], eps) @ arrays[head].T


def main(folder, text):
  """Prints the most likely next bytes after a text."""
  for name in ("config.json", "model*.safetensors"):  # large ones in several
    if not list(pathlib.Path(folder).glob(name)):
      sys.exit(f"{folder} has no {name}; export a model there as safetensors")
  if not text:
    sys.exit("the text is empty; give at least one byte")
  saved = json.loads((pathlib.Path(folder) / "config.json").read_text())
  tokenizer = saved["config"]["data"]["tokenizer"]
  if tokenizer != "bytes":
    sys.exit(
      f"{folder} has the tokenizer {tokenizer!r}, not bytes; give `forward` ids"
    )
  try:
    logits = forward(*read(folder), list(text.encode()))[-1][:256]  # of bytes
  except ValueError as error:
    sys.exit(str(error))
  shares = np.exp(logits - np.logaddexp.reduce(logits))
  for token in np.argsort(-shares)[:5]:
    print(f"{bytes([token])!r:8} {shares[token]:.4f}")


if __name__ == "__main__":
  if len(sys.argv) != 3:
    sys.exit("usage: python numpy_forward.py FOLDER TEXT")
  main(*sys.argv[1:])
