"""Gradients per token on what the memories of a byte model are given.

Text repeats its keys: short cuts that pass on random inputs fail here.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs import smoke
from memcomp import sharding
from memcomp.data import sources, tokenizer
from memcomp.evaluation import activations
from memcomp.models import abstract
from memcomp.training import feed as feed_lib
from memcomp.training import state as state_lib
from memcomp.training import step as step_lib
from memcomp_kernels.testing import errors, memories

UPDATES = 60


def byte_model_inputs(memory: str):
  """[(state, inputs)] of all layers, at initialisation and trained."""
  config = smoke.get_config(memory)
  config.model.mixers["memory"].gradient_at = "token"
  mesh = sharding.make_mesh(config.mesh)
  bytes_ = tokenizer.load(config.data.tokenizer)
  store = sources.open_split(config.data, "train", tokenizer=bytes_)
  graphdef = abstract.model_of(config.model).graphdef
  rows = config.training.batch_size
  with jax.set_mesh(mesh):
    state = state_lib.initial_state(config, mesh)
    update = jax.jit(step_lib.make_train_step(config))
    models, losses = [abstract.merge(graphdef, state.params)], []
    with feed_lib.Feed(config, store, mesh, rows=rows, shuffle=True) as feed:
      for batch, _ in itertools.islice(feed, UPDATES):
        state, metrics = update(state, batch)
        losses.append(float(metrics["loss"]))
    assert losses[-1] < losses[0] - 1  # trained
    models.append(abstract.merge(graphdef, state.params))
    spec = config.model.mixers["memory"].spec()
    found = [activations.memory_inputs(m, batch.tokens) for m in models]
  return spec, jax.device_get(list(itertools.chain(*found)))


def differentiated(function, spec):
  def loss(state, inputs):
    after, y = function(state, inputs, spec=spec)
    rng = np.random.default_rng(0)
    results = [y, *jax.tree.leaves(after)]
    floats = [x for x in results if jnp.issubdtype(x.dtype, jnp.floating)]
    return sum(jnp.sum(x * rng.standard_normal(x.shape)) for x in floats)

  gradient = jax.jit(jax.grad(loss, argnums=(0, 1), allow_int=True))

  def floats(state, inputs, dtype):
    def cast(x):
      return x.astype(dtype) if x.dtype.kind == "f" else x

    found = gradient(*jax.tree.map(cast, (state, inputs)))
    leaves = jax.tree.leaves(found)
    return [np.asarray(x) for x in leaves if x.dtype.kind == "f"]

  return floats


@pytest.mark.slow
@pytest.mark.parametrize("name", ["trellis", "lattice"])
def test_gradients_on_a_byte_models_activations(name):
  spec, cases = byte_model_inputs(name)
  assert spec.gradient_at == "token" and len(cases) == 4
  api = memories.MEMORIES[name].op
  chunk = functools.partial(api.chunk, implementation="xla_chunked")
  with jax.enable_x64(True):
    chunked = differentiated(chunk, spec)
    scanned = differentiated(api.reference, spec)
    for state, inputs in cases:
      true = scanned(state, inputs, np.float64)
      for dtype, bound in ((np.float64, 1e-10), (np.float32, 1e-4)):
        found = chunked(state, inputs, dtype)
        for a, b in zip(found, true, strict=True):
          assert errors.relative_rms(a, b) < bound
