"""State space duality under the contract suite."""

import jax

from memcomp_kernels import state_space_duality
from memcomp_kernels.testing import memory


def _inputs(key, spec, *, batch, time, heads, key_dim, value_dim):
  keys = iter(jax.random.split(key, 6))

  def normal(heads, last):
    return jax.random.normal(next(keys), (batch, time, heads, last))

  groups = heads // spec.heads_per_group
  inputs = state_space_duality.Inputs(
    query=normal(groups, key_dim),
    key=normal(groups, key_dim),
    value=normal(heads, value_dim),
    log_decay=jax.nn.log_sigmoid(3 + normal(heads, 1)),
    write_rate=jax.nn.softplus(normal(heads, 1) - 1),
  )
  return inputs._replace(skip=normal(heads, 1)) if spec.skip else inputs


def _state(key, spec, **sizes):
  state = memory.fresh(state_space_duality, spec, **sizes)
  drawn = 0.5 * jax.random.normal(key, state.memory.shape)
  return state._replace(memory=drawn)


def _edges(inputs):
  return memory.edges(inputs, *memory.GATES, *memory.KEYS, "zero queries")


_SPECS = {
  # The first Spec is also checked over a mesh, so each head has its own group.
  "own": state_space_duality.Spec(skip=False),
  "shared": state_space_duality.Spec(heads_per_group=2),
}

MEMORY = memory.Memory(
  name="state_space_duality",
  op=state_space_duality,
  specs=_SPECS,
  typical=("shared",),
  make_inputs=_inputs,
  make_state=_state,
  edges=_edges,
)
