"""Every op by its public name, with small arrays for a call in one line."""

import dataclasses
import functools
from typing import Any

import jax

import memcomp_kernels
from memcomp_kernels import arguments, shapes
from memcomp_kernels.testing import memories

TIME = 24

SIZES = {"batch": 2, "heads": 2, "key_dim": 5, "value_dim": 7}

# Fields of Specs that follow the arrays: the call leaves them out.
FOLLOW = {
  "lattice": ("forget_gate", "num_slots"),
  "linear_attention": ("forget_gate",),
  "slot_attention": ("num_slots", "rule"),
  "state_space_duality": ("heads_per_group", "skip"),
  "tensor_cache": ("num_slots", "timescales"),
  "test_time_training": ("forget_gate",),
  "trellis": ("forget_gate", "num_slots"),
}

# name -> (folder, the Spec of its contract suite); default as the name says,
# and the first typical Spec.
_OF = {
  "delta_rule": ("delta_rule", "not-gated"),
  "gated_delta_rule": ("delta_rule", "gated"),
  "gated_slot_attention": ("slot_attention", "gated"),
  "slot_attention": ("slot_attention", "softmax"),
}


@dataclasses.dataclass(frozen=True)
class Case:
  """An op with a Spec, and what makes arrays and states for it."""

  name: str
  op: memcomp_kernels.Op
  memory: Any
  spec: Any

  @functools.cache  # noqa: B019
  def inputs(self) -> Any:
    make = functools.partial(
      self.memory.make_inputs, spec=self.spec, time=TIME, **SIZES
    )
    # The default generator takes XLA a second to compile.
    return jax.device_get(jax.jit(make)(jax.random.key(0, impl="rbg")))

  def fresh(self) -> Any:
    """The state before the first token, made at the arrays' sizes."""
    inputs = self.inputs()
    widths = {"key_dim": inputs.key, "value_dim": inputs.value}
    if hasattr(inputs, "source"):
      widths["source_dim"] = inputs.source
    sizes = {name: x.shape[-1] for name, x in widths.items()}
    return self.op.init_state(self.spec, batch=2, heads=2, **sizes)

  def arrays(self, inputs: Any) -> dict[str, jax.Array]:
    """The arrays that a call reads: gates without their last axis."""
    found = {}
    for name, field in arguments.names(self.op).items():
      x = getattr(inputs, field)
      condition = shapes.fields(self.op.Inputs)[field].condition
      read = condition is None or condition.holds(self.spec)
      if x is not None and read:
        found[name] = x[..., 0] if x.shape[-1] == 1 else x
    return found

  def __call__(self, arrays: dict[str, jax.Array], **call: Any) -> Any:
    """The one-line call; fields of the Spec by keyword, but those that follow."""
    meaning = {
      f.name: getattr(self.spec, f.name)
      for f in dataclasses.fields(self.spec)
      if f.name not in (*FOLLOW.get(self.memory.name, ()), *self.op.fixed)
    }
    return self.op(**arrays, **meaning, **call)


FORWARD_MODE = ("key_value_means", "softmax_attention")
"""Ops whose usual form has derivatives in forward mode, too."""


def _case(name: str) -> Case:
  op = getattr(memcomp_kernels, name)
  folder, spec = _OF.get(name, (op.name, None))
  memory = memories.MEMORIES[folder]
  return Case(name, op, memory, memory.specs[spec or memory.typical[0]])


CASES = {
  name: _case(name)
  for name in memcomp_kernels.__all__
  if isinstance(getattr(memcomp_kernels, name), memcomp_kernels.Op)
  and name not in ("ssd", "ttt")  # second names
}
