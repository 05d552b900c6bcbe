"""Compares our functions with numbers that public definitions computed.

`data/torch_definitions.py` writes the files, docs/agreement.md has the story.
"""

import pathlib

import jax
import jax.numpy as jnp
import numpy as np

from memcomp_kernels.testing import errors

DATA = pathlib.Path(__file__).parent / "data"
BOUND = 1e-5


def _part(arrays, kind):
  return {
    name.partition("/")[2]: jnp.asarray(x)
    for name, x in arrays.items()
    if name.startswith(kind + "/")
  }


def errors_of(path, function):
  """Relative RMS errors of outputs and of the gradient of every input.

  Args:
    path: of a file of numbers.
    function: {name: array} of inputs -> {name: array} of outputs.
  """
  arrays = np.load(path)
  inputs, outputs, cotangents, gradients = (
    _part(arrays, kind) for kind in ("in", "out", "cotangent", "gradient")
  )

  def objective(inputs):
    found = function(inputs)
    assert set(found) == set(outputs)
    total = sum(jnp.sum(cotangents[name] * found[name]) for name in outputs)
    return total, found

  got, found = jax.jit(jax.grad(objective, has_aux=True))(inputs)
  result = {
    name: errors.relative_rms(found[name], outputs[name]) for name in outputs
  }
  return result | {
    f"gradient of {name}": errors.relative_rms(got[name], gradients[name])
    for name in inputs
  }


def assert_agrees(path, function):
  """Asserts that all errors are under BOUND, in float32."""
  for name, error in errors_of(path, function).items():
    assert error < BOUND, f"{name}: {error:.1e}"
