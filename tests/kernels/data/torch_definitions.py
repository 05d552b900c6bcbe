"""Runs public PyTorch definitions; writes what they compute for our tests.

  python tests/kernels/data/torch_definitions.py NAME CHECKOUT OUT.npz \
    [--large]

NAME is one of DEFINITIONS below, CHECKOUT a checkout of the repository that it
is from (docs/agreement.md has commits), OUT a file of inputs, outputs and, for
random cotangents of the outputs, gradients of every input. Only the file of the
definition is loaded. Needs torch and einops, which the project itself does not.
"""

import argparse
import importlib.util
import pathlib
import sys
import types

import numpy as np
import torch


def load(checkout, path):
  """The module at `path` of a checkout, without the package around it."""
  file = pathlib.Path(checkout) / path
  spec = importlib.util.spec_from_file_location(file.stem, file)
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  return module


class Sizes:
  """Axes of what is drawn; small enough to be stored, or as a layer has it."""

  def __init__(self, large):
    self.batch, self.time, self.heads = (2, 96, 3) if large else (1, 20, 2)
    self.key, self.value, self.slots = (32, 48, 24) if large else (4, 5, 3)


def _logsigmoid(x):
  return torch.nn.functional.logsigmoid(torch.tensor(x)).numpy()


def gsa(checkout, draw, sizes):
  """Gated slot attention: time at axis 1."""
  naive = load(checkout, "fla/ops/gsa/naive.py")
  b, t, h = sizes.batch, sizes.time, sizes.heads
  inputs = {
    "query": draw(b, t, h, sizes.key),
    "key": draw(b, t, h, sizes.key),
    "value": draw(b, t, h, sizes.value),
    "log_decay": _logsigmoid(draw(b, t, h, sizes.slots)),
    "key_memory": draw(b, h, sizes.slots, sizes.key),
    "value_memory": draw(b, h, sizes.slots, sizes.value),
  }

  def run(x):
    state = x["key_memory"].mT, x["value_memory"]
    y, (keys, values) = naive.naive_recurrent_gsa(
      x["query"],
      x["key"],
      x["value"],
      1 - x["log_decay"].exp(),
      x["log_decay"],
      scale=1.0,
      initial_state=state,
      output_final_state=True,
    )
    return {"y": y, "key_memory": keys.mT, "value_memory": values}

  return inputs, run


def abc(checkout, draw, sizes):
  """Attention with bounded-memory control, from empty memories."""
  naive = load(checkout, "fla/ops/abc/naive.py")
  b, t, h = sizes.batch, sizes.time, sizes.heads
  inputs = {
    "query": draw(b, t, h, sizes.key),
    "key": draw(b, t, h, sizes.key),
    "value": draw(b, t, h, sizes.value),
    "write_logit": draw(b, t, h, sizes.slots),
  }

  def run(x):
    q, k, v, s = (
      x[name].transpose(1, 2)
      for name in ("query", "key", "value", "write_logit")
    )
    y, (keys, values) = naive.naive_recurrent_abc(
      q, k, v, s, output_final_state=True
    )
    return {
      "y": y.transpose(1, 2),
      "key_memory": keys.mT,
      "value_memory": values,
    }

  return inputs, run


def _delta_inputs(draw, sizes):
  """Keys of length 1, write rates in (0, 2), an initial memory."""
  b, t, h = sizes.batch, sizes.time, sizes.heads
  key = draw(b, t, h, sizes.key)
  return {
    "query": draw(b, t, h, sizes.key),
    "key": key / np.linalg.norm(key, axis=-1, keepdims=True),
    "value": draw(b, t, h, sizes.value),
    "write_rate": 2 * np.exp(_logsigmoid(draw(b, t, h, 1))),
    "memory": draw(b, h, sizes.key, sizes.value),
  }


def delta(checkout, draw, sizes):
  """DeltaNet's rule: heads at axis 1."""
  naive = load(checkout, "fla/ops/delta_rule/naive.py")

  def run(x):
    q, k, v, rate = (
      x[name].transpose(1, 2)
      for name in ("query", "key", "value", "write_rate")
    )
    y, memory = naive.delta_rule_recurrence(q, k, v, rate, x["memory"])
    return {"y": y.transpose(1, 2), "memory": memory}

  return _delta_inputs(draw, sizes), run


def gated_delta(checkout, draw, sizes):
  """Gated DeltaNet's rule."""
  naive = load(checkout, "fla/ops/gated_delta_rule/naive.py")
  inputs = _delta_inputs(draw, sizes)
  inputs["log_decay"] = _logsigmoid(3 + draw(*inputs["write_rate"].shape))

  def run(x):
    y, memory = naive.naive_recurrent_gated_delta_rule(
      x["query"],
      x["key"],
      x["value"],
      x["write_rate"][..., 0],
      x["log_decay"][..., 0],
      initial_state=x["memory"],
      output_final_state=True,
    )
    return {"y": y, "memory": memory}

  return inputs, run


def _linear(checkout, draw, sizes, features, normalize):
  naive = load(checkout, "fla/ops/linear_attn/naive.py")
  b, t, h = sizes.batch, sizes.time, sizes.heads
  inputs = {
    "query": draw(b, t, h, sizes.key),
    "key": draw(b, t, h, sizes.key),
    "value": draw(b, t, h, sizes.value),
    "memory": draw(b, h, sizes.key, sizes.value),
  }
  if normalize:
    inputs["normalizer"] = 1 + abs(draw(b, h, sizes.key))

  def run(x):
    state = x["memory"]
    if normalize:
      state = state, x["normalizer"][:, None]
    y, state = naive.naive_recurrent_linear_attn(
      features(x["query"]),
      features(x["key"]),
      x["value"],
      initial_state=state,
      output_final_state=True,
      normalize=normalize,
    )
    if not normalize:
      return {"y": y, "memory": state}
    memory, total = state
    return {"y": y, "memory": memory, "normalizer": total[:, 0]}

  return inputs, run


def linear(checkout, draw, sizes):
  """Linear attention with elu + 1, as its layer hands it in, and the sum."""

  def features(x):
    return torch.nn.functional.elu(x) + 1

  return _linear(checkout, draw, sizes, features, normalize=True)


def linear_no_sum(checkout, draw, sizes):
  """Linear attention with neither."""
  return _linear(checkout, draw, sizes, lambda x: x, normalize=False)


def _infini(checkout, draw, sizes, rule, segment, window):
  """Infini-attention's memory around a plain local attention of ours."""
  # Its module imports positions that its memory does not use.
  stub = types.ModuleType("rotary_embedding_torch")
  stub.RotaryEmbedding = None
  sys.modules["rotary_embedding_torch"] = stub
  path = "infini_transformer_pytorch/infini_transformer.py"
  naive = load(checkout, path)
  b, t, h = sizes.batch, sizes.time, sizes.heads
  inputs = {
    "query": draw(b, t, h, sizes.key),
    "key": draw(b, t, h, sizes.key),
    "value": draw(b, t, h, sizes.value),
    "memory_query": draw(b, t, h, sizes.key),
    "memory_key": draw(b, t, h, sizes.key),
    "gate_logit": draw(h),
    "memory": draw(b, h, sizes.key, sizes.value),
    "normalizer": 1 + abs(draw(b, h, sizes.key)),
  }
  place = torch.arange(t)
  first = place // segment * segment if window is None else place - window + 1
  seen = (place <= place[:, None]) & (place >= first[:, None])

  def run(x):
    q, k, v, memory_q, memory_k = (
      x[name].transpose(1, 2)
      for name in ("query", "key", "value", "memory_query", "memory_key")
    )
    local = torch.nn.functional.scaled_dot_product_attention(
      q, k, v, attn_mask=seen
    )
    fast = naive.FastweightMemory(h, use_mem_delta_rule=rule == "delta")
    # Its gate is the share of local attention.
    del fast.head_gates
    fast.head_gates = -x["gate_logit"]
    past = naive.Memories(x["memory"], x["normalizer"])
    outputs = []
    for start in range(0, t, segment):
      part = slice(start, start + segment)
      outputs.append(
        fast.retrieve_and_add_to_output(
          local[:, :, part], memory_q[:, :, part], past
        )
      )
      past = fast.create_new_memories(memory_k[:, :, part], v[:, :, part], past)
    y = torch.cat(outputs, dim=2).transpose(1, 2)
    return {"y": y, "memory": past.kv_mem, "normalizer": past.k_norm}

  return inputs, run


def infini(checkout, draw, sizes):
  """Segments of 8, the delta rule."""
  return _infini(checkout, draw, sizes, "delta", 8, None)


def infini_linear(checkout, draw, sizes):
  """Segments of 8, the linear rule, a window of 5."""
  return _infini(checkout, draw, sizes, "linear", 8, 5)


def infini_token(checkout, draw, sizes):
  """Per token, the delta rule, a window of 5."""
  return _infini(checkout, draw, sizes, "delta", 1, 5)


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
    "log_decay": _logsigmoid(3 + draw(b, t, h, 1)),
    "write_rate": np.exp(_logsigmoid(draw(b, t, h, 1))) / sizes.key,
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
    "log_decay": -0.6 * np.exp(_logsigmoid(2 * draw(b, t, h, sizes.key))),
    "write_rate": np.exp(_logsigmoid(2 * draw(b, t, h, sizes.key))),
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


DEFINITIONS = {
  "gsa": gsa,
  "abc": abc,
  "two_pass_delta": two_pass_delta,
  "rwkv7": rwkv7,
  "ovq": ovq,
  "delta": delta,
  "gated_delta": gated_delta,
  "infini": infini,
  "infini_linear": infini_linear,
  "infini_token": infini_token,
  "state_space": state_space,
  "linear": linear,
  "linear_no_sum": linear_no_sum,
}


def main():
  """Writes one file."""
  parser = argparse.ArgumentParser()
  parser.add_argument("name", choices=DEFINITIONS)
  parser.add_argument("checkout")
  parser.add_argument("out")
  parser.add_argument("--large", action="store_true")
  flags = parser.parse_args()
  rng = np.random.default_rng(0)

  def draw(*shape):
    return rng.standard_normal(shape).astype(np.float32)

  inputs, run = DEFINITIONS[flags.name](
    flags.checkout, draw, Sizes(flags.large)
  )
  leaves = {
    name: torch.tensor(np.asarray(x), requires_grad=True)
    for name, x in inputs.items()
  }
  outputs = run(leaves)
  cotangents = {name: draw(*x.shape) for name, x in outputs.items()}
  sum(
    (x * torch.tensor(cotangents[name])).sum() for name, x in outputs.items()
  ).backward()
  arrays = {f"in/{name}": x.detach() for name, x in leaves.items()}
  arrays |= {f"out/{name}": x.detach() for name, x in outputs.items()}
  arrays |= {f"cotangent/{name}": x for name, x in cotangents.items()}
  arrays |= {f"gradient/{name}": x.grad for name, x in leaves.items()}
  np.savez_compressed(
    flags.out, **{name: np.asarray(x) for name, x in arrays.items()}
  )


if __name__ == "__main__":
  main()
