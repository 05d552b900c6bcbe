"""Further definitions of `torch_definitions.py`, each of a memory of its own."""

import importlib.util
import pathlib
import sys
import types

import numpy as np
import torch
from torch_inputs import load, logsigmoid


def state_space(checkout, draw, sizes):
  """Mamba2's listing in chunks, with the gates and the skip around it."""
  # Its module imports a kernel, for a test at its end.
  for name in ("mamba_ssm", "mamba_ssm.ops", "mamba_ssm.ops.triton"):
    sys.modules[name] = types.ModuleType(name)
  stub = types.ModuleType("ssd_combined")
  stub.mamba_chunk_scan_combined = None
  sys.modules["mamba_ssm.ops.triton.ssd_combined"] = stub
  naive = load(checkout, "mamba_ssm/modules/ssd_minimal.py")
  b, t, h = sizes.batch, sizes.time, sizes.heads
  inputs = {
    "query": draw(b, t, 1, sizes.key),
    "key": draw(b, t, 1, sizes.key),
    "value": draw(b, t, h, sizes.value),
    "step": draw(b, t, h) - 2,
    "rate_log": draw(h),
    "skip": draw(h),
    "memory": draw(b, h, sizes.key, sizes.value),
  }

  def run(x):
    step = torch.nn.functional.softplus(x["step"])
    query, key = (x[name].expand(-1, -1, h, -1) for name in ("query", "key"))
    y, state = naive.ssd_minimal_discrete(
      x["value"] * step[..., None],
      -step * x["rate_log"].exp(),
      key,
      query,
      block_len=4,
      initial_states=x["memory"].mT[:, None],
    )
    y = y + x["skip"][:, None] * x["value"]
    return {"y": y, "memory": state.mT}

  return inputs, run


def two_pass_delta(checkout, draw, sizes):
  """The two-pass delta rule, out of two gated delta rules.

  Whose error is taken after the decay d: rates are theta / d, targets d k.
  """
  naive = load(checkout, "fla/ops/gated_delta_rule/naive.py")
  b, t, h = sizes.batch, sizes.time, sizes.heads
  inputs = {
    "query": draw(b, t, h, sizes.key),
    "source": draw(b, t, h, sizes.key) / sizes.key**0.5,
    "key": draw(b, t, h, sizes.key),
    "value": draw(b, t, h, sizes.value),
    "log_decay": logsigmoid(3 + draw(b, t, h, 1)),
    "write_rate": np.exp(logsigmoid(draw(b, t, h, 1))) / sizes.key,
    "key_memory": draw(b, h, sizes.key, sizes.key),
    "value_memory": draw(b, h, sizes.key, sizes.value),
  }

  def nsilu(z):
    z = torch.nn.functional.silu(z)
    length = ((z * z).sum(-1, keepdim=True) + 1e-6).sqrt()
    return z / length * z.shape[-1] ** 0.5

  def run(x):
    log_decay, rate = x["log_decay"][..., 0], x["write_rate"]
    kept = x["log_decay"].exp()

    def through(query, key, target, memory):
      return naive.naive_recurrent_gated_delta_rule(
        query,
        key,
        kept * target,
        (rate / kept)[..., 0],
        log_decay,
        scale=1.0,
        initial_state=memory,
        output_final_state=True,
      )

    first = x["source"], x["key"], x["key_memory"]
    codes, keys = through(x["source"], *first)
    asked, _ = through(x["query"], *first)
    y, values = through(
      nsilu(asked), nsilu(codes), x["value"], x["value_memory"]
    )
    return {"y": y, "key_memory": keys, "value_memory": values}

  return inputs, run


def rwkv7(checkout, draw, sizes):
  """RWKV-7, by the recurrence of diagonal plus low rank that it is."""
  naive = load(checkout, "fla/ops/generalized_delta_rule/dplr/naive.py")
  b, t, h = sizes.batch, sizes.time, sizes.heads
  removal = draw(b, t, h, sizes.key)
  inputs = {
    "query": draw(b, t, h, sizes.key),
    "key": draw(b, t, h, sizes.key),
    "value": draw(b, t, h, sizes.value),
    "removal_key": removal / np.linalg.norm(removal, axis=-1, keepdims=True),
    "log_decay": -0.6 * np.exp(logsigmoid(2 * draw(b, t, h, sizes.key))),
    "write_rate": np.exp(logsigmoid(2 * draw(b, t, h, sizes.key))),
    "memory": draw(b, h, sizes.key, sizes.value),
  }

  def run(x):
    q, k, v, kappa, log_decay, rate = (
      x[name].transpose(1, 2) for name in list(inputs)[:6]
    )
    q = q * q.shape[-1] ** 0.5  # it scales by the inverse
    y, memory = naive.dplr_recurrence(
      q, k, v, -kappa, rate * kappa, log_decay, x["memory"]
    )
    return {"y": y.transpose(1, 2), "memory": memory}

  return inputs, run


def ovq(checkout, draw, sizes):
  """Online vector quantisation; whole chunks, values as wide as keys."""
  # What surrounds the memory in that file is not needed, nor loaded.
  for name, attribute in (
    ("utils.opt", "set_label"),
    ("model.rwkv7_backbone", "StatesDictCache apply_rotary_embeddings"),
    ("model.value_residual_mixin", "ValueResidualMixin"),
  ):
    stub = sys.modules[name] = types.ModuleType(name)
    for each in attribute.split():
      setattr(stub, each, torch.nn.Module)
    package = name.partition(".")[0]
    sys.modules.setdefault(package, types.ModuleType(package)).__path__ = []
  file = pathlib.Path(checkout) / "model/ovq_mixer.py"
  spec = importlib.util.spec_from_file_location("model.ovq_mixer", file)
  mixer = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(mixer)
  b, t, h = sizes.batch, sizes.time, sizes.heads

  def unit(x):
    return x / np.linalg.norm(x, axis=-1, keepdims=True)

  inputs = {
    "query": unit(draw(b, t, h, sizes.key)),
    "key": unit(draw(b, t, h, sizes.key)),
    "value": draw(b, t, h, sizes.key),
    "beta": 1 + 0.5 * draw(h),
  }

  def run(x):
    q, k, v = (x[name].transpose(1, 2) for name in ("query", "key", "value"))
    y, keys, values, counts = mixer.ovq_attention(
      q,
      k,
      v,
      None,
      None,
      None,
      beta=x["beta"],
      chunk_size=t // 4,
      max_centroids=2 * sizes.slots + 1,
      normalize_centroids=False,
      use_min_state_size=False,
      use_counts_for_lr_only=False,
      use_delta_rule=False,
    )
    return {
      "y": y.transpose(1, 2),
      "keys": keys,
      "values": values,
      "counts": counts[..., 0],
    }

  return inputs, run
