"""What `tpu_static` counts: the kernels of a memory, under the chunk form."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from absl import flags

from memcomp_kernels import dispatch
from memcomp_kernels.chunking import form as form_lib
from memcomp_kernels.chunking import layout as layout_lib
from memcomp_kernels.delta_rule import mosaic_tpu as delta_tpu
from memcomp_kernels.delta_rule import tile as delta_rule
from memcomp_kernels.key_value_means import budgets
from memcomp_kernels.lattice import tile as lattice
from memcomp_kernels.lattice import tilings as lattice_tilings
from memcomp_kernels.lattice.pallas_tpu import call as lattice_calls
from memcomp_kernels.lattice.pallas_tpu import engine as lattice_tpu
from memcomp_kernels.pallas_tpu.affine import call
from memcomp_kernels.pallas_tpu.affine import engine as engine_lib
from memcomp_kernels.state_space_duality import mosaic_tpu as duality_tpu
from memcomp_kernels.state_space_duality import tile as duality
from memcomp_kernels.tensor_cache import affine_form as tensor_cache
from memcomp_kernels.tensor_cache import mosaic_tpu as tensor_cache_tpu
from memcomp_kernels.testing import memories
from memcomp_kernels.trellis import tile as trellis
from memcomp_kernels.trellis import tilings
from memcomp_kernels.trellis.pallas_tpu import engine as engine_pallas_tpu

SLOTS = flags.DEFINE_integer("slots", 64, "Of a memory that has them.")
HEADS = flags.DEFINE_integer("heads", 12, "Of a layer.")
SIZES = flags.DEFINE_string(
  "sizes", "", "Of `KernelTiling`, such as group=2,skew=1; default the table's."
)

LATTICE_BATCH = flags.DEFINE_integer(
  "lattice_batch", 32, "Rows, of Lattice per token."
)

BATCH, TIME = 2, 2048
KVM_ROWS = 256  # of Key-Value Means' memory
DECAYS = {
  "trellis": ("separable", "safe"),
  "trellis-token": ("safe",),
  "delta_rule": ("safe",),
  "state_space_duality": ("safe",),
  "tensor_cache": ("safe",),
  "tensor_cache-delta": ("safe",),
  "lattice": ("safe",),
  "lattice-token": ("safe",),
  "key_value_means": ("safe",),
}
"""The memories with kernels, and their forms of decay."""

LEFT_OUT = {
  ("key_value_means", "training"),
  ("key_value_means", "backward"),
}
"""Memories and directions whose kernel is another's, or that have none."""

_BY_TOKEN = {
  "delta_rule": "delta",
  "state_space_duality": "outer",
  "tensor_cache": "by_chunk",
  "tensor_cache-delta": "by_chunk",
  "lattice": "lattice_chunk",
}
"""The kernels of those that read tokens where they lie (`mosaic.by_token`)."""

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
  def batch(self) -> int:
    """Rows: Lattice per token takes a row and head on each lane.

    Trellis per token takes 64 of them a step.
    """
    if self.memory == "trellis-token":
      return 5
    return LATTICE_BATCH.value if self.memory == "lattice-token" else BATCH

  @property
  def time(self) -> int:
    """Tokens of a row; Key-Value Means is counted by a tile."""
    return self.chunk if self.memory == "key_value_means" else TIME

  @property
  def layout(self) -> layout_lib.Layout:
    """The layout of rows of whole tiles."""
    return layout_lib.Layout(self.batch, self.time, self.chunk)

  @property
  def trips(self) -> int:
    """Of the loops in the kernel's body."""
    return self.chunk if self.memory == "lattice-token" else 1

  @property
  def spec(self) -> Any:
    """The memory's meaning."""
    known = memories.MEMORIES[self.memory.split("-")[0]]
    if self.memory.startswith("tensor_cache"):
      rule = "delta" if self.memory.endswith("delta") else "outer"
      return known.op.Spec(rule=rule, chunk_size=self.chunk, window_size=512)
    if self.memory == "trellis":
      return known.op.Spec(num_slots=SLOTS.value, chunk_size=self.chunk)
    if self.memory == "trellis-token":
      return known.op.Spec(num_slots=SLOTS.value, gradient_at="token")
    if self.memory.startswith("lattice"):
      at = "token" if self.memory.endswith("token") else "chunk_start"
      return known.op.Spec(
        num_slots=SLOTS.value, chunk_size=self.chunk, gradient_at=at
      )
    if self.memory == "key_value_means":
      return known.op.Spec(
        chunk_size=self.chunk,
        rotary_dim=self.head_dim // 2,
        budget=budgets.FixedBudget(KVM_ROWS),
      )
    if self.memory == "state_space_duality":  # one key for all heads
      return known.op.Spec(heads_per_group=HEADS.value)
    return known.op.Spec()

  @property
  def kernel(self) -> str:
    """The name of the kernel."""
    if self.memory == "key_value_means":
      return "kvm_tile"
    prefix = self.memory.split("-")[0]
    prefix = _BY_TOKEN.get(self.memory, prefix)
    way = "backward" if self.direction == "backward" else "forward"
    return f"{prefix}_{way}"

  @property
  def engine(self) -> form_lib.Engine:
    """What runs the kernels."""
    if self.memory == "state_space_duality":
      return duality_tpu.ENGINE
    if self.memory.startswith("tensor_cache"):
      return tensor_cache_tpu.ENGINES[True]
    if self.memory.startswith("lattice"):
      return lattice_tpu.ENGINE
    is_trellis = self.memory.startswith("trellis")
    return engine_pallas_tpu.ENGINE if is_trellis else delta_tpu.ENGINE

  def form(self, engine: form_lib.Engine) -> form_lib.Form:
    """The memory under the chunk form."""
    if self.memory.startswith("trellis"):
      form = trellis.form(self._call(self._tiling()))
      return dataclasses.replace(form, engine=engine)
    if self.memory.startswith("lattice"):
      if engine is lattice_tpu.ENGINE:
        tiling = lattice_tilings.Tiling(kernel_time=self.chunk)
        return lattice_tpu.form(self._call(tiling))
      return dataclasses.replace(lattice.form(self._call()), engine=engine)
    if self.memory.startswith("tensor_cache"):
      return tensor_cache.form(self.spec, self.chunk, engine)
    is_delta = self.memory == "delta_rule"
    tiling = form_lib.Tiling(tile_time=self.chunk)
    form = (delta_rule if is_delta else duality).form(self._call(tiling))
    return dataclasses.replace(form, engine=engine)

  def _call(self, tiling=None) -> dispatch.Call:
    """A call of shapes, without a state: what forms read."""
    inputs = jax.eval_shape(self.operands).inputs
    return dispatch.Call(None, inputs, self.spec, tiling=tiling)

  def _tiling(self) -> tilings.Tiling:
    sizes = dict(x.split("=") for x in SIZES.value.split(",") if x)
    sizes = {name: int(x) for name, x in sizes.items()}
    kernels = {
      direction: dataclasses.replace(
        tilings.kernel(
          direction,
          self.topology.split(":")[0],
          token=self.memory == "trellis-token",
        ),
        **sizes,
      )
      for direction in ("forward", "backward")
    }
    return tilings.Tiling(**kernels, decay=self.decay, tile_time=self.chunk)

  def operands(
    self,
    dtype: Any = jnp.bfloat16,
    *,
    batch: int | None = None,
    time: int = TIME,
    heads: int | None = None,
  ) -> form_lib.Operands:
    """Random operands of the chunk form."""
    sizes = {
      "batch": batch or self.batch,
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
    if self.memory.startswith("trellis"):
      held = state.key_memory, state.value_memory
    elif self.memory.startswith("tensor_cache"):
      held = (state.memories.memory[:, :, 0, 0],)
    else:
      held = (state.memory,)
    return form_lib.Operands(held, held, held, inputs)


def trips_of_xla(case: Case) -> tuple[int, ...]:
  """Of the loops of the XLA form, the outermost first."""
  if case.memory == "key_value_means":
    return (1,)
  tile = case.form(form_lib.ENGINE).tile_time
  inner = (tile,) if case.memory.endswith("-token") else ()
  return TIME // tile, *inner


def kernel_alone(case: Case) -> tuple[Callable, tuple] | None:
  """A function of one kernel call, and shapes of its arguments.

  None where the pass is little more than its kernel.
  """
  if case.memory == "lattice-token":
    return _lattice_alone(case)
  if case.memory == "lattice":
    return _lattice_chunk_alone(case)
  return None


def key_value_means_tile(case: Case, run: Callable) -> tuple[Callable, tuple]:
  """A function of one tile by `run`, and shapes of its arguments."""
  memory = memories.MEMORIES[case.memory]
  sizes = {
    "batch": case.batch,
    "heads": HEADS.value,
    "key_dim": case.head_dim,
    "value_dim": case.head_dim,
  }

  def given():
    state = memory.op.init_state(case.spec, length=TIME, **sizes)
    key = jax.random.key(0)
    inputs = memory.make_inputs(key, case.spec, time=case.chunk, **sizes)
    inputs = jax.tree.map(lambda x: jnp.swapaxes(x, 1, 2), inputs)
    low = {
      name: getattr(inputs, name).astype(jnp.bfloat16)
      for name in ("query", "key", "value")
    }
    present = jnp.ones((case.batch, case.chunk), bool)
    return state, inputs._replace(**low), present

  def tile(state, inputs, present):
    return run(state, inputs, present, case.spec, KVM_ROWS)

  return tile, jax.eval_shape(given)


def _lattice_alone(case: Case) -> tuple[Callable, tuple]:
  """As `kernel_alone`."""
  form, layout = case.form(case.engine), case.layout
  plans = []

  def packed():
    operands = case.operands()
    plan, tokens, _, flags = lattice_tpu.prepare(form, layout, operands)
    plans.append(plan)
    return tokens, flags, *lattice_tpu.pack_memories(plan, operands)

  tokens, flags, *held = jax.eval_shape(packed)
  (plan,) = plans
  save = case.direction != "forward"

  def forward(*operands):
    return lattice_calls.forward(plan, *operands, save)

  def backward(*operands):
    return lattice_calls.backward(plan, *operands)

  if case.direction != "backward":
    return forward, (tokens, flags, *held)
  results = jax.eval_shape(forward, tokens, flags, *held)
  _, reset, start = held
  final = results["final"]
  adjoints = results["output"], final, final
  return backward, (tokens, flags, results["saved"], reset, start, *adjoints)


def _lattice_chunk_alone(case: Case) -> tuple[Callable, tuple]:
  """As `kernel_alone`: the XLA form of decays out of range stands beside it."""
  form, layout = case.form(case.engine), case.layout
  plans = []

  def packed():
    operands = case.operands()
    (memory,), inputs = operands.memories, operands.inputs
    way = "backward" if case.direction == "backward" else "forward"
    plan = engine_lib.plan_of(lattice_tpu.tokens, form, inputs, way)
    assert plan is not None
    plans.append(plan)
    tokens, _, _ = engine_lib.prepare(
      lattice_tpu.tokens, plan, form, layout, inputs
    )
    return tokens, engine_lib.pack_memory(plan, memory)

  given = jax.eval_shape(packed)
  (plan,) = plans

  def forward(tokens, memory):
    save = case.direction != "forward"
    return call.forward(plan, tokens, memory, save=save)

  def backward(*operands):
    return call.backward(plan, *operands)

  if case.direction != "backward":
    return forward, given
  results = jax.eval_shape(forward, *given)
  tokens, memory = given
  return backward, (tokens, results["saved"], results["output"], memory)
