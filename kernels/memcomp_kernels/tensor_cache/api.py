"""Tensor Cache."""

from memcomp_kernels import dispatch
from memcomp_kernels import op as op_lib
from memcomp_kernels.tensor_cache import over_time as _over_time
from memcomp_kernels.tensor_cache import reference as _reference
from memcomp_kernels.tensor_cache import types, xla_chunked

Inputs, Spec, State = types.Inputs, types.Spec, types.State
over_time = _over_time.over_time
unit = _reference.unit

IMPLEMENTATIONS = dispatch.Implementations(
  "tensor_cache",
  options={"seen": ("reference", "xla_chunked", "mosaic_tpu", "mosaic_gpu")},
  reference=_reference.reference,
  xla_chunked=xla_chunked.chunk,
  mosaic_tpu=dispatch.Kernel("memcomp_kernels.tensor_cache.mosaic_tpu"),
  mosaic_gpu=dispatch.Kernel("memcomp_kernels.tensor_cache.mosaic_gpu"),
)


def _check(spec, sizes, state):
  del state
  key_dim, value_dim = sizes.get("key_dim"), sizes.get("value_dim")
  if spec.rule == "wedge" and key_dim != value_dim:
    raise ValueError(
      f'tensor_cache: rule="wedge" needs key_dim={key_dim} and'
      f" value_dim={value_dim} equal"
    )


tensor_cache = op_lib.Op(
  name="tensor_cache",
  about="""
  Tensor Cache (arXiv 2605.22884): a window beside a decayed memory.

  `y` has local attention over the window in its first value_dim numbers, and
  what the memory answers in its last value_dim.
  """,
  Spec=Spec,
  Inputs=Inputs,
  State=State,
  token_step=_reference.step,
  implementations=IMPLEMENTATIONS,
  check=_check,
)

init_state, step = tensor_cache.init_state, tensor_cache.step
chunk, reference = tensor_cache.chunk, tensor_cache.reference
