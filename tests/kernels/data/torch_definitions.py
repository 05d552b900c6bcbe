"""Runs public PyTorch definitions; writes what they compute for our tests.

  python tests/kernels/data/torch_definitions.py NAME CHECKOUT OUT.npz \
    [--large]

NAME is one of DEFINITIONS below, CHECKOUT a checkout of the repository that it
is from (docs/agreement.md has commits), OUT a file of inputs, outputs and, for
random cotangents of the outputs, gradients of every input. Only the file of the
definition is loaded. Needs torch and einops, which the project itself does not.
"""

import argparse
import sys
import types

import numpy as np
import torch
from torch_inputs import Sizes, load, logsigmoid
from torch_recurrences import ovq, rwkv7, state_space, two_pass_delta


def gsa(checkout, draw, sizes):
  """Gated slot attention: time at axis 1."""
  naive = load(checkout, "fla/ops/gsa/naive.py")
  b, t, h = sizes.batch, sizes.time, sizes.heads
  inputs = {
    "query": draw(b, t, h, sizes.key),
    "key": draw(b, t, h, sizes.key),
    "value": draw(b, t, h, sizes.value),
    "log_decay": logsigmoid(draw(b, t, h, sizes.slots)),
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
    "write_rate": 2 * np.exp(logsigmoid(draw(b, t, h, 1))),
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
  inputs["log_decay"] = logsigmoid(3 + draw(*inputs["write_rate"].shape))

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
