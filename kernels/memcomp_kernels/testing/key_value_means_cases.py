"""Key-Value Means under the contract suite."""

import dataclasses

import jax
import jax.numpy as jnp

from memcomp_kernels import key_value_means
from memcomp_kernels.key_value_means import budgets
from memcomp_kernels.testing import memory


def _inputs(key, spec, *, batch, time, heads, key_dim, value_dim):
  keys = iter(jax.random.split(key, 4))

  def normal(last):
    return jax.random.normal(next(keys), (batch, time, heads, last))

  # Neighbours are similar, as in text, so that some tokens join a row that
  # another token of their own chunk has just begun.
  key = normal(key_dim)
  return key_value_means.Inputs(
    query=normal(key_dim),
    key=key + jnp.roll(key, 1, axis=1),
    value=normal(value_dim),
    merge_gate=1 + jax.nn.elu(normal(1)),
  )


def _state(key, spec, *, batch, heads, key_dim, value_dim):
  keys = iter(jax.random.split(key, 3))

  def normal(last):
    return 0.3 * jax.random.normal(next(keys), (batch, heads, last))

  return memory.fresh(
    key_value_means,
    spec,
    batch=batch,
    heads=heads,
    key_dim=key_dim,
    value_dim=value_dim,
    temperatures=1 + normal(2),
    norm_scale=1 + normal(key_dim),
    norm_bias=normal(key_dim),
  )


def _edges(inputs):
  def repeated(x):
    return jnp.broadcast_to(x[:, :1], x.shape)

  return memory.edges(inputs, *memory.KEYS, "zero queries") | {
    "one token": jax.tree.map(repeated, inputs),
    "gates of almost nothing": inputs._replace(
      merge_gate=1e-30 * inputs.merge_gate
    ),
    "values that cancel": inputs._replace(
      value=inputs.value
      * (1 - 2 * (jnp.arange(inputs.value.shape[1]) % 2))[:, None, None],
      merge_gate=jnp.ones_like(inputs.merge_gate),
    ),
  }


def _tokens_over_three(tokens):
  return 1 + tokens // 3


def _specs():
  base = key_value_means.Spec(
    chunk_size=4,
    window_chunks=1,
    rotary_dim=2,
    budget=budgets.FixedBudget(4),
    max_length=64,
  )
  power = budgets.PowerLawBudget(scale=2.0, exponent=0.6, minimum=3)
  return {
    "power": dataclasses.replace(base, budget=power, window_chunks=2),
    "fixed": dataclasses.replace(base, chunk_size=3, window_chunks=2),
    "saturating": dataclasses.replace(
      base, budget=budgets.SaturatingBudget(12)
    ),
    "user": dataclasses.replace(base, budget=_tokens_over_three),
    "gated-appends": dataclasses.replace(base, budget=power, gate_appends=True),
    "no-radius": dataclasses.replace(base, budget=power, value_radius=False),
    "no-sink": dataclasses.replace(base, sink_rows=0),
  }


MEMORY = memory.Memory(
  name="key_value_means",
  op=key_value_means,
  specs=_specs(),
  typical=("power",),
  make_inputs=_inputs,
  make_state=_state,
  edges=_edges,
  composed=("user", "no-radius"),
)
