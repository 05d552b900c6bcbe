"""What NVIDIA's assembler makes of the kernels, for an H100."""

from collections.abc import Callable, Iterable

import hopper
import jax
import jax.numpy as jnp

from memcomp_kernels.pallas_gpu import tile_kernel


def report(calls: Iterable[tuple[str, str, Callable, Callable]]) -> None:
  """Prints a table.

  Args:
    calls: names of a case and of a shape, (state, inputs) -> outputs, and what
      returns state and inputs.
  """
  print(f"H100, jax {jax.__version__}; registers and spills are of a thread\n")
  print(
    "| case | shape | kernel | instructions | registers | spilled, bytes"
    " | shared memory, KiB | blocks a multiprocessor |\n" + "|---" * 8 + "|"
  )
  for name, shape, run, arguments in calls:

    def loss(state, inputs, run=run):
      return jnp.sum(jnp.square(run(state, inputs).astype(jnp.float32)))

    given = jax.eval_shape(arguments)
    with tile_kernel.lowered():
      found = hopper.compile_for(jax.grad(loss, argnums=1), *given)
    # Called with chunks under way and without: one row each.
    for kernel in dict.fromkeys(found):
      print(
        f"| {name} | {shape} | {kernel.name} | {kernel.instructions}"
        f" | {kernel.registers} | {kernel.spilled} | {kernel.shared / 1024:.0f}"
        f" | {kernel.resident()} |",
        flush=True,
      )
