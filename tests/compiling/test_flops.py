"""Flops of traced programs, by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.sharding import Mesh, PartitionSpec

from memcomp.compiling import flops

A, B = jnp.ones((3, 4)), jnp.ones((4, 5))
ONCE = 2 * 3 * 4 * 5


def counted(function, *arguments):
  return flops.count(jax.make_jaxpr(function)(*arguments))


def test_a_product():
  assert counted(jnp.matmul, A, B) == ONCE
  assert (
    counted(lambda a, b: jnp.einsum("bij,bjk->bik", a, b), A[None], B[None])
    == ONCE
  )


def test_a_gradient_is_two_more_products():
  def loss(a, b):
    return jnp.sum((a @ b) ** 2)

  assert counted(jax.grad(loss, argnums=(0, 1)), A, B) == 3 * ONCE


def test_a_scan_counts_every_trip():
  def body(carry, _):
    return carry, A @ B

  assert counted(lambda: lax.scan(body, 0.0, length=7)[1]) == 7 * ONCE


def test_a_conditional_counts_its_costliest_branch():
  def function(x):
    return lax.cond(x > 0, lambda: A @ B, lambda: (A @ B) * (A @ B))

  assert counted(function, 1.0) == 2 * ONCE


def test_a_loop_of_unknown_length_counts_once():
  def function(n):
    return lax.fori_loop(0, n, lambda _, x: x + jnp.sum(A @ B), 0.0)

  assert counted(function, 3) == ONCE


def test_recomputation_counts():
  def loss(a):
    return jnp.sum(jax.checkpoint(lambda a: jnp.sin(a @ B) @ B.T)(a))

  # Forward, backward of both in a, and the first once more.
  assert counted(jax.grad(loss), A) == 5 * ONCE


@pytest.mark.skipif(len(jax.devices()) < 2, reason="needs two devices")
def test_what_is_sharded_counts_on_every_device():
  mesh = Mesh(np.array(jax.devices()[:2]), ("x",))
  spec = PartitionSpec("x")
  function = jax.shard_map(
    lambda a: a @ B, mesh=mesh, in_specs=spec, out_specs=spec
  )
  assert counted(function, jnp.ones((6, 4))) == 2 * ONCE


def test_a_kernel_counts_its_grid():
  def kernel(a, b, out):
    out[...] = jnp.dot(a[...], b[...])

  def function(a, b):
    return pl.pallas_call(
      kernel,
      grid=(6,),
      out_shape=jax.ShapeDtypeStruct((3, 5), a.dtype),
    )(a, b)

  assert counted(function, A, B) == 6 * ONCE


def test_a_convolution():
  x, w = jnp.ones((2, 3, 16)), jnp.ones((8, 3, 4))
  # 13 places of 8 features, each of 3 * 4 products.
  assert counted(lambda x, w: lax.conv(x, w, (1,), "VALID"), x, w) == 2 * (
    2 * 8 * 13
  ) * (3 * 4)
