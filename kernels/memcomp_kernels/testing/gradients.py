"""Compiled values and gradients of functions of pytrees."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def is_float(x: jax.Array) -> bool:
  """Whether a leaf has gradients."""
  return jnp.issubdtype(x.dtype, jnp.floating)


def cast(tree: Any, dtype: Any) -> Any:
  """Casts the floating leaves of a tree."""
  return jax.tree.map(lambda x: x.astype(dtype) if is_float(x) else x, tree)


def cast_operands(inputs: Any, dtype: Any) -> Any:
  """Casts what a memory multiplies as matrices; its gates stay as they are."""
  names = ("query", "key", "value", "target")
  found = {
    x: getattr(inputs, x).astype(dtype) for x in names if x in inputs._fields
  }
  return inputs._replace(**found)


def value_and_gradients(
  function: Callable, arguments: tuple, *, gradient: bool = True
) -> tuple[Any, Any]:
  """Returns function(*arguments), and its gradients; see `derivative`.

  Args:
    function: a function of pytrees.
    arguments: arguments of the function.
    gradient: whether to return gradients; if False, None takes their place.
  """
  if not gradient:
    return compiled(function)(*arguments), None
  return derivative(function)(arguments)


def derivative(function: Callable) -> Callable[..., tuple[Any, Any]]:
  """Returns (arguments, cotangents=None) -> (result, gradients).

  The gradients are those of <cotangents, result> with respect to every floating
  leaf of the arguments, and zero for other leaves. Cotangents are one array per
  floating leaf of the result. The default is random ones.
  """
  compiled_ = compiled(function, differentiated)

  def call(arguments, cotangents=None):
    if cotangents is None:
      cotangents = random_cotangents(function, arguments)
    found, result = compiled_(arguments, cotangents)
    gradients = jax.tree.map(
      lambda x, g: g if is_float(x) else jnp.zeros(()), arguments, found
    )
    return result, gradients

  return call


def random_cotangents(function: Callable, arguments: tuple) -> list[np.ndarray]:
  """Draws one per floating leaf of the result, the final state included."""
  outputs = jax.tree.leaves(jax.eval_shape(function, *arguments))
  # numpy draws them outside any compiled function, so that every function, mode
  # and precision computes the same derivative.
  rng = np.random.default_rng(9)
  return [
    rng.standard_normal(x.shape).astype(np.float32)
    for x in outputs
    if is_float(x)
  ]


def _itself(function: Callable) -> Callable:
  return function


def compiled(
  function: Callable, transform: Callable[[Callable], Callable] = _itself
) -> Callable:
  """Returns transform(function), compiled.

  If the function is a method whose object sets `keep`, the program is cached
  for the next caller. The cache holds the programs of the last few objects.
  """
  owner = getattr(function, "__self__", None)
  if getattr(owner, "keep", False):
    return _kept(transform, owner, function.__name__)
  return jax.jit(transform(function))


@functools.lru_cache(maxsize=16)
def _kept(transform: Callable, owner: Any, name: str) -> Callable:
  return jax.jit(transform(getattr(owner, name)))


def differentiated(function: Callable) -> Callable:
  """Returns (arguments, cotangents) -> (gradients, result); not compiled."""

  def objective(arguments, cotangents):
    result = function(*arguments)
    outputs = [x for x in jax.tree.leaves(result) if is_float(x)]
    total = 0.0
    for c, x in zip(cotangents, outputs, strict=True):
      wide = x.dtype if jnp.finfo(x.dtype).bits > 32 else jnp.float32
      total = total + jnp.sum(c.astype(wide) * x.astype(wide))
    return total, result

  return jax.grad(objective, has_aux=True, allow_int=True)


def on_cpu(function: Callable) -> Callable:
  """Returns `function`, run on the CPU also where there is a GPU.

  Use this for the definition that a GPU kernel is compared with. XLA compiles
  that in seconds for a CPU, but in minutes for a GPU. If JAX_PLATFORMS is set,
  it must name both: cuda,cpu.
  """

  @functools.wraps(function)
  def run(*args, **kwargs):
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
      return function(*args, **kwargs)

  return run
