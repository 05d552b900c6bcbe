"""Test-time training under the contract suite."""

import jax

from memcomp_kernels import test_time_training
from memcomp_kernels.test_time_training import reference
from memcomp_kernels.testing import memory


def _inputs(key, spec, *, batch, time, heads, key_dim, value_dim):
  del key_dim  # keys are as wide as values
  keys = iter(jax.random.split(key, 6))

  def normal(last):
    return jax.random.normal(next(keys), (batch, time, heads, last))

  scale = jax.nn.sigmoid(normal(1)) if spec.chunked else None
  # Steps that are too large for an inner model make gradients of any size.
  rate = {"linear": 0.1, "mlp": 0.03}[spec.model]
  return test_time_training.Inputs(
    query=memory.unit(normal(value_dim)),
    key=memory.unit(normal(value_dim)),
    value=memory.unit(normal(value_dim)),
    log_decay=jax.nn.log_sigmoid(3 + normal(1)),
    write_rate=rate * jax.nn.sigmoid(normal(1)),
    step_scale=scale,
  )


def _state(key, spec, *, batch, heads, key_dim, value_dim):
  del key_dim
  keys = iter(jax.random.split(key, 6))

  def normal(*shape):
    return 0.5 * jax.random.normal(next(keys), (heads, *shape))

  return memory.fresh(
    test_time_training,
    spec,
    batch=batch,
    heads=heads,
    key_dim=value_dim,
    value_dim=value_dim,
    layers=tuple(
      reference.Layer(normal(*width), normal(width[1]))
      for width in spec.widths(value_dim)
    ),
    norm_scale=1 + normal(value_dim),
    norm_bias=normal(value_dim),
  )


def _edges(inputs):
  return memory.edges(inputs, *memory.GATES, *memory.KEYS)


_SPECS = {
  "linear": test_time_training.Spec(chunk_size=8, norm_eps=0.1),
  "linear-token": test_time_training.Spec(
    gradient_at="token", forget_gate=True, norm_eps=0.1
  ),
  "mlp": test_time_training.Spec(
    model="mlp", chunk_size=8, expansion=2, forget_gate=True, norm_eps=0.1
  ),
  "mlp-token": test_time_training.Spec(
    model="mlp", gradient_at="token", expansion=2, norm_eps=1.0
  ),
}

MEMORY = memory.Memory(
  name="test_time_training",
  op=test_time_training,
  specs=_SPECS,
  typical=("linear",),
  make_inputs=_inputs,
  make_state=_state,
  edges=_edges,
  composed=("mlp-token",),
)
