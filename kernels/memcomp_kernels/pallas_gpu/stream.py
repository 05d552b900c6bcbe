"""Streams arrays tile by tile through shared memory and prefetches the next.

`plgpu.emit_pipeline` does this too, but the interpreter does not support the
way in which it copies results.
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
    source: Maps a step to the reference of its part in global memory.
    buffer: Shared memory, `[slots, ...]`.
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
  """Returns the carry after all steps; by then all outputs are written.

  Args:
    body: Maps (step, references to this step's parts by name, carry) to carry.
    carry: Carry before the first step.
    steps: Number of steps.
    inputs: Inputs by name; all have the same number of slots.
    outputs: Outputs by name; all have the same number of slots.
    replaced: Further outputs by name, each of which overwrites an input.
    arrived: `[slots]` barriers; each expects one arrival per input.
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
    # The earlier results in this step's result slot have been copied out.
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
    if replaced:  # the next inputs must not overwrite them too early
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
