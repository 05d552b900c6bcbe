"""Slot attention under the contract suite."""

import jax
import jax.numpy as jnp

from memcomp_kernels import slot_attention
from memcomp_kernels.testing import memory


def _inputs(key, spec, *, batch, time, heads, key_dim, value_dim):
  keys = iter(jax.random.split(key, 4))

  def normal(last):
    return jax.random.normal(next(keys), (batch, time, heads, last))

  inputs = slot_attention.Inputs(
    query=normal(key_dim), key=normal(key_dim), value=normal(value_dim)
  )
  logit = normal(spec.num_slots)
  if spec.rule == "gated":
    return inputs._replace(log_decay=jax.nn.log_sigmoid(1 + 2 * logit))
  return inputs._replace(write_logit=2 * logit)


def _state(key, spec, **sizes):
  empty = memory.fresh(slot_attention, spec, **sizes)
  keys = jax.random.split(key, 3)
  return memory.fresh(
    slot_attention,
    spec,
    **sizes,
    key_memory=jax.random.normal(keys[0], empty.key_memory.shape[1:]),
    value_memory=jax.random.normal(keys[1], empty.value_memory.shape[1:]),
    log_total=jax.random.normal(keys[2], empty.key_memory.shape[1:3]),
  )


def _edges(inputs):
  cases = memory.edges(inputs, *memory.KEYS) | {
    "long keys": inputs._replace(key=30 * inputs.key),
  }
  if inputs.log_decay is not None:
    some = jnp.ones_like(inputs.log_decay).at[:, ::2].set(0)
    cases |= memory.edges(inputs, "forgets all", "forgets nothing")
    return cases | {
      "forgets all now and then": inputs._replace(log_decay=-1e4 * some),
    }
  full = jnp.ones_like(inputs.write_logit)
  rises = jnp.arange(full.shape[1], dtype=full.dtype)[:, None, None]
  return cases | {
    "high logits": inputs._replace(write_logit=1e4 * full),
    "low logits": inputs._replace(write_logit=-1e4 * full),
    "slots that wait for their first write": inputs._replace(
      write_logit=inputs.write_logit.at[:, :3, :, 1].set(-jnp.inf)
    ),
    "rising logits": inputs._replace(write_logit=100 * rises * full),
    "falling logits": inputs._replace(write_logit=-100 * rises * full),
  }


_SPECS = {
  "gated": slot_attention.Spec(num_slots=6),
  "gated-scaled": slot_attention.Spec(num_slots=3, scale=None),
  "softmax": slot_attention.Spec(num_slots=6, rule="softmax", scale=None),
}

MEMORY = memory.Memory(
  name="slot_attention",
  op=slot_attention,
  specs=_SPECS,
  typical=("gated",),
  make_inputs=_inputs,
  make_state=_state,
  edges=_edges,
)
