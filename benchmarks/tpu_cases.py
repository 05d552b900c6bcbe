"""What `tpu_static` counts: the kernels of a memory, under the chunk form."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from absl import flags

from memcomp_kernels.delta_rule import xla_chunked as delta_rule
from memcomp_kernels.primitives import form as form_lib
from memcomp_kernels.primitives import tile_scan, tiles
from memcomp_kernels.primitives.mosaic import affine, affine_kernels
from memcomp_kernels.state_space_duality import xla_chunked as duality
from memcomp_kernels.tensor_cache import affine_tile as tensor_cache
from memcomp_kernels.tensor_cache import tile as tensor_cache_tile
from memcomp_kernels.testing import memories
from memcomp_kernels.trellis import mosaic_tpu, tilings
from memcomp_kernels.trellis import xla_chunked as trellis

SLOTS = flags.DEFINE_integer("slots", 64, "Of a memory that has them.")
HEADS = flags.DEFINE_integer("heads", 12, "Of a layer.")
SIZES = flags.DEFINE_string(
  "sizes", "", "Of `KernelTiling`, such as group=2,skew=1; default the table's."
)

BATCH, TIME = 2, 2048
DECAYS = {
  "trellis": ("separable", "safe"),
  "delta_rule": ("safe",),
  "state_space_duality": ("safe",),
  "tensor_cache": ("safe",),
  "tensor_cache-delta": ("safe",),
}
"""The memories with kernels, and their forms of decay."""

_WIDE = ("log_decay", "write_rate", "log_phi_eps", "skip")


@dataclasses.dataclass(frozen=True)
class Case:
  """What is counted.

  Attributes:
    memory: one of `DECAYS`.
    topology: of TPUs, such as "v5e:2x2".
    direction: "forward", "training" (forward, saving memories) or "backward".
    head_dim: of keys and values.
    chunk: tokens a tile.
    decay: its form.
  """

  memory: str
  topology: str
  direction: str
  head_dim: int
  chunk: int
  decay: str

  @property
  def spec(self) -> Any:
    """The memory's meaning."""
    known = memories.MEMORIES[self.memory.split("-")[0]]
    if self.memory.startswith("tensor_cache"):
      rule = "delta" if self.memory.endswith("delta") else "outer"
      return known.api.Spec(
        rule=rule, chunk_size=self.chunk, window_size=512
      )
    if self.memory == "trellis":
      return known.api.Spec(num_slots=SLOTS.value, chunk_size=self.chunk)
    if self.memory == "state_space_duality":  # one key for all heads
      return known.api.Spec(heads_per_group=HEADS.value)
    return known.api.Spec()

  @property
  def kernel(self) -> str:
    """The name of the kernel."""
    prefix = "trellis" if self.memory == "trellis" else "affine"
    way = "backward" if self.direction == "backward" else "forward"
    return f"{prefix}_{way}"

  @property
  def engine(self) -> form_lib.Engine:
    """What runs the kernels."""
    if self.memory.startswith("tensor_cache"):
      return affine.CHUNK_ENGINE
    return mosaic_tpu.ENGINE if self.memory == "trellis" else affine.ENGINE

  def form(self, engine: form_lib.Engine) -> form_lib.Form:
    """The memory under the chunk form."""
    if self.memory == "trellis":
      form = trellis.form(self.spec, self._tiling())
      return dataclasses.replace(form, engine=engine)
    forms = {
      "delta_rule": delta_rule,
      "state_space_duality": duality,
      "tensor_cache": tensor_cache,
    }
    return forms[self.memory.split("-")[0]].form(self.spec, self.chunk, engine)

  def _tiling(self) -> tilings.Tiling:
    sizes = dict(x.split("=") for x in SIZES.value.split(",") if x)
    sizes = {name: int(x) for name, x in sizes.items()}
    kernels = {
      direction: dataclasses.replace(
        tilings.kernel(direction, self.topology.split(":")[0]), **sizes
      )
      for direction in ("forward", "backward")
    }
    return tilings.Tiling(**kernels, decay=self.decay)

  def operands(
    self,
    dtype: Any = jnp.bfloat16,
    *,
    batch: int = BATCH,
    time: int = TIME,
    heads: int | None = None,
  ) -> form_lib.Operands:
    """Random operands of the chunk form."""
    sizes = {
      "batch": batch,
      "heads": heads or HEADS.value,
      "key_dim": self.head_dim,
      "value_dim": self.head_dim,
    }
    memory = memories.MEMORIES[self.memory.split("-")[0]]
    key = jax.random.key(0)
    inputs = memory.make_inputs(key, self.spec, time=time, **sizes)
    inputs = inputs._replace(
      **{
        name: x.astype(dtype)
        for name, x in inputs._asdict().items()
        if name not in _WIDE and x is not None
      }
    )
    state = memory.make_state(key, self.spec, **sizes)
    if self.memory == "trellis":
      held = state.key_memory, state.value_memory
    elif self.memory.startswith("tensor_cache"):
      held = (state.memories.memory[:, :, 0, 0],)
      inputs = tensor_cache_tile.Tokens(*inputs)
    else:
      held = (state.memory,)
    return form_lib.Operands(held, held, held, inputs)


def kernel_alone(case: Case) -> tuple[Callable, tuple] | None:
  """A function of one kernel call, and shapes of its arguments.

  None where the pass is little more than its kernel.
  """
  if case.memory == "trellis":
    return None
  form, layout = case.form(case.engine), tiles.aligned(case.chunk)

  def prepared():
    operands = case.operands()
    inputs, _, _ = tile_scan.lay(layout, operands)
    return tile_scan.prepare(form, inputs), operands.memories[0]

  tile, memory = jax.eval_shape(prepared)
  save = case.direction != "forward"

  def forward(tile, memory):
    return affine_kernels.forward(tile, memory, save=save)

  if case.direction != "backward":
    return forward, (tile, memory)
  results = jax.eval_shape(forward, tile, memory)
  adjoints = results["saved"], results["read"], memory
  return affine_kernels.backward, (tile, *adjoints)
