"""The delta rule's triangular system, against plain loops."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import rotation

from memcomp_kernels.math import delta

solve = jax.jit(delta.solve)


pytestmark = pytest.mark.usefixtures("float64")


def loop(coupling, target, numpy=np):
  u = []
  for t in range(target.shape[-2]):
    row = target[..., t, :]
    for i in range(t):
      row = row - coupling[..., t, i, None] * u[i]
    u.append(row)
  return numpy.stack(u, axis=-2)


def drawn(time):
  rng = np.random.default_rng(0)
  coupling = rng.standard_normal((2, 3, time, time))
  return coupling, rng.standard_normal((2, 3, time, 4))


def test_by_hand():
  coupling = jnp.array([[9.0, 9.0], [0.5, 9.0]])
  u = solve(coupling, jnp.array([[2.0], [6.0]]))
  np.testing.assert_allclose(u, [[2.0], [5.0]])


@pytest.mark.parametrize("time", rotation.cases([1, 2, 9, 16, 39], [9, 39]))
def test_it_solves_the_system(time):
  coupling, target = drawn(time)
  np.testing.assert_allclose(
    solve(coupling, target), loop(coupling, target), rtol=1e-10
  )


@pytest.mark.parametrize("time", [5, pytest.param(20, marks=pytest.mark.slow)])
def test_gradients_are_those_of_the_loop(time):
  coupling, target = drawn(time)
  arguments = 0.3 * coupling, target

  def gradient(solve):
    total = jax.grad(lambda *x: jnp.sum(jnp.sin(solve(*x))), (0, 1))
    return jax.jit(total)(*arguments)

  by_loop = functools.partial(loop, numpy=jnp)
  for got, expected in zip(
    gradient(delta.solve), gradient(by_loop), strict=True
  ):
    np.testing.assert_allclose(got, expected, atol=1e-9)


def test_repeated_keys_do_not_cancel():
  """Coupling 2 everywhere: u alternates, powers of the matrix do not."""
  coupling = jnp.full((64, 64), 2.0, jnp.float32)
  u = solve(coupling, jnp.ones((64, 1), jnp.float32))
  np.testing.assert_allclose(u[:, 0], (-1.0) ** np.arange(64), atol=1e-4)
