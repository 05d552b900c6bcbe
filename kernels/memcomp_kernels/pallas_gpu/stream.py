"""Arrays taken tile by tile through shared memory, the next one on its way.

`plgpu.emit_pipeline` does this too, but the interpreter does not know how it
copies results.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu


class Stream(NamedTuple):
  """One array of a stream.

  Attributes:
    source: (step) -> the reference to a step's part in the device's memory.
    buffer: shared memory, `[slots, ...]`.
  """

  source: Callable[[jax.Array], Any]
  buffer: Any


def run(
  body: Callable[[jax.Array, dict[str, Any], Any], Any],
  carry: Any,
  *,
  steps: int,
  inputs: dict[str, Stream],
  outputs: dict[str, Stream],
  replaced: dict[str, Stream],
  arrived: Any,
) -> Any:
  """Returns the carry after all steps; all outputs are written then.

  Args:
    body: (step, references to this step's parts by name, carry) -> carry.
    carry: before the first step.
    steps: how many.
    inputs: by name; all have as many slots.
    outputs: likewise.
    replaced: further outputs, by name, that are written where an input was.
    arrived: `[slots]` barriers, each of as many arrivals as there are inputs.
  """
  slots, out_slots = (
    next((x.buffer.shape[0] for x in streams.values()), 1)
    for streams in (inputs, outputs)
  )

  def fetch(step, slot):
    for stream in inputs.values():
      plgpu.copy_gmem_to_smem(
        stream.source(step), stream.buffer.at[slot], arrived.at[slot]
      )

  for i in range(min(slots, steps)):
    fetch(jnp.int32(i), i)

  def one(step, carry):
    slot = lax.rem(step, jnp.int32(slots))
    plgpu.barrier_wait(arrived.at[slot])
    # What was in the slot of this step's results has left.
    plgpu.wait_smem_to_gmem(out_slots - 1, wait_read_only=True)
    out_slot = lax.rem(step, jnp.int32(out_slots))
    refs = {name: x.buffer.at[slot] for name, x in inputs.items()}
    refs |= {name: x.buffer.at[slot] for name, x in replaced.items()}
    refs |= {name: x.buffer.at[out_slot] for name, x in outputs.items()}
    carry = body(step, refs, carry)
    plgpu.commit_smem()
    for name, stream in (outputs | replaced).items():
      plgpu.copy_smem_to_gmem(
        refs[name], stream.source(step), commit_group=False
      )
    plgpu.commit_smem_to_gmem_group()
    if replaced:  # before the next inputs come there
      plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    lax.cond(
      step + slots < steps,
      lambda: fetch(step + slots, slot),
      lambda: None,
    )
    return carry

  carry = lax.fori_loop(0, steps, one, carry)
  plgpu.wait_smem_to_gmem(0)
  return carry
