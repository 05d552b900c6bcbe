"""Checks kernels on a GPU, then times every form of the memories on it.

  python benchmarks/gpu.py --all                  # checks, forms, rivals, steps
  python benchmarks/gpu.py --cases=gated_delta --shapes=B4_T4096_H16_D64
  python benchmarks/gpu.py --all --json=gpu.jsonl # may be cut off and repeated

Checks are first: values and gradients in bfloat16 against float32, where a
kernel may err twice as much as the XLA form (both on the CPU). A form that
fails is not timed, and the exit status is then 1; nor is one that does not do
the call.

Then each form, forward and forward with gradients of all inputs: compiled,
warmed up, medians of single calls, each waited for; inputs are larger than the
second level cache. Ceilings, a product of matrices and a copy, are measured in
the same call. Flops are those of the XLA form's matrix products, bytes those of
inputs and outputs, once (twice with gradients). Rivals (flash-linear-attention
on PyTorch) are timed where they can be imported: `gpu_rivals.py`. Training
steps of whole models: `gpu_steps.py`. Last, what is reached of the goals:
`gpu_goals.py`. With --json rows are kept as they are made; what a file has is
not measured again. Most of the time goes to compiling: without XLA's search for
the fastest matrix products it is a fraction, and the XLA form may be slower,
XLA_FLAGS="--xla_gpu_autotune_level=0 --xla_gpu_enable_triton_gemm=false".
Processes of one case each compile side by side, and with the same --lock=FILE
take turns at what is timed (XLA_PYTHON_CLIENT_PREALLOCATE=false leaves memory
to the others).

Without a GPU everything runs as far as it goes, small, kernels interpreted:
times are then of no use. What a GPU would run is known, though: with --static
(extra `aot-gpu`) kernels are compiled for an H100, forward and backward, and
what NVIDIA's assembler says of their registers is printed; with --static
--steps whole training steps, and what memory they need (half an hour or more).
"""

import contextlib
import fcntl
import functools
import itertools
import statistics
import sys
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import gpu_goals
import gpu_rivals
import gpu_rows
import hopper
import jax
import jax.numpy as jnp
from absl import app, flags

from memcomp.compiling import flops
from memcomp_kernels import dispatch
from memcomp_kernels.pallas_gpu import tile_kernel
from memcomp_kernels.testing import errors, gradients, memories

_HOLDS_ALL = {"softmax_attention"}
_TOLD_SEEN = {"softmax_attention", "key_value_means", "tensor_cache"}
"""Whose `chunk` takes `max_position`: 0, as states are fresh here."""


class Case(NamedTuple):
  """A memory and its meaning; `rival` is of `gpu_rivals.RIVALS`."""

  memory: str
  options: dict[str, Any] | str
  rival: str | None = None


CASES = {
  "gated_delta": Case("delta_rule", "gated", "chunk_gated_delta_rule"),
  "duality": Case("state_space_duality", "shared", "chunk_simple_gla"),
  "tensor_cache": Case("tensor_cache", {"window_size": 128, "chunk_size": 64}),
  "trellis": Case("trellis", {"num_slots": 64, "chunk_size": 64}, "chunk_gsa"),
  "trellis_token": Case("trellis", {"num_slots": 64, "gradient_at": "token"}),
  "lattice": Case("lattice", {"num_slots": 64, "chunk_size": 64}),
  "lattice_16": Case("lattice", {"num_slots": 64}),
  "key_value_means": Case("key_value_means", {"rotary_dim": 32}),
  "attention": Case("softmax_attention", {"window_size": None}),
}
SHAPES = {
  "B4_T4096_H16_D64": (4, 4096, 16, 64),
  "B1_T32768_H16_D64": (1, 32768, 16, 64),
  "B4_T4096_H16_D128": (4, 4096, 16, 128),
}
_SMALL = {"B1_T70_H2_D64": (1, 70, 2, 64)}
_CHECKED = {"few": (2, 200, 2), "many": (9, 70, 16)}
"""Rows, tokens, heads; many are more than there are multiprocessors, which
kernels may go about in another way. On a GPU only: interpreting takes long."""

_ALL = flags.DEFINE_bool("all", False, "All cases, rivals and training steps.")
_CASES = flags.DEFINE_list("cases", [], f"Of {', '.join(CASES)}.")
_SHAPES = flags.DEFINE_list("shapes", [], f"Of {', '.join(SHAPES)}.")
_FORMS = flags.DEFINE_list(
  "forms",
  ["mosaic_gpu", "library_gpu", "xla_chunked"],
  "Those that are timed, the fastest first; reference is one, too.",
)
_LOCK = flags.DEFINE_string("lock", "", "A file; its users take turns.")
_CHECKS = flags.DEFINE_bool("checks", False, "Check kernels, time nothing.")
_STEPS = flags.DEFINE_bool("steps", False, "Training steps of whole models.")
_JSON = flags.DEFINE_string("json", "", "Rows are kept here, and found again.")
_STATIC = flags.DEFINE_bool("static", False, "Compile for an H100 only.")
_REPEATS = flags.DEFINE_integer("repeats", 20, "Timed calls of each.", 1)


def spec_of(case: Case) -> Any:
  memory = memories.MEMORIES[case.memory]
  if isinstance(case.options, str):
    return memory.specs[case.options]
  return memory.op.Spec(**case.options)


def arguments(case: Case, shape: tuple[int, ...], dtype: Any) -> Any:
  """A fresh state and ordinary inputs, those of products in `dtype`."""
  batch, length, heads, dim = shape
  memory, spec = memories.MEMORIES[case.memory], spec_of(case)
  sizes = {"batch": batch, "heads": heads, "key_dim": dim, "value_dim": dim}
  inputs = memory.make_inputs(jax.random.key(0), spec, time=length, **sizes)
  inputs = gradients.cast(inputs, jnp.float32)
  if case.memory in _HOLDS_ALL:
    sizes["length"] = length
  return memory.op.init_state(spec, **sizes), gradients.cast_operands(
    inputs, dtype
  )


def function(case: Case, form: str):
  """(state, inputs) -> outputs."""
  memory, spec = memories.MEMORIES[case.memory], spec_of(case)

  fresh = {"max_position": 0} if case.memory in _TOLD_SEEN else {}

  def run(state, inputs):
    chunk = memory.op.chunk
    return chunk(state, inputs, spec=spec, implementation=form, **fresh)[1]

  return run


def forms(case: Case) -> list[str]:
  """Those of --forms that the memory has."""
  functions = memories.MEMORIES[case.memory].op.implementations.functions
  return [name for name in _FORMS.value if name in functions]


def check(case: Case, form: str, heads: str, dim: int) -> str | None:
  """Says what is wrong with a form, or None; `heads` is of `_CHECKED`."""
  shape = (*_CHECKED[heads], dim)

  def both(form, dtype):
    state, inputs = arguments(case, shape, dtype)
    run = function(case, form)
    return jax.jit(
      lambda inputs: gradients.value_and_gradients(
        lambda inputs: run(state, inputs), (inputs,)
      )
    )(inputs)

  on_cpu = gradients.on_cpu(both)
  truth = on_cpu("xla_chunked", jnp.float32)
  own = on_cpu("xla_chunked", jnp.bfloat16)
  ours = both(form, jnp.bfloat16)
  try:
    errors.assert_no_worse(ours, own, truth)
  except AssertionError as error:
    return str(error)
  return None


@contextlib.contextmanager
def turn() -> Iterator[None]:
  """Waits until no other process with the same --lock times anything."""
  if not _LOCK.value:
    yield
    return
  with open(_LOCK.value, "w") as file:
    fcntl.flock(file, fcntl.LOCK_EX)
    yield


def seconds(run: Any) -> float:
  """The median of single calls, waited for, after two that are not timed."""
  jax.block_until_ready(run())  # compiles
  found = []
  with turn():
    for i in range(_REPEATS.value + 1):
      start = time.perf_counter()
      jax.block_until_ready(run())
      found.append(time.perf_counter() - start)
      if i == 1 and found[-1] > 1:  # slow enough to be steady
        break
  return statistics.median(found[1:])


def ceilings(small: bool) -> dict[str, float]:
  """Flops and bytes a second of a product of matrices and of a copy."""
  n = 256 if small else 8192
  a = jnp.ones((n, n), jnp.bfloat16)
  product = jax.jit(lambda a: jnp.dot(a, a, preferred_element_type=jnp.float32))
  words = jnp.ones(n * n * 4, jnp.float32)
  copy = jax.jit(lambda x: x + 1)
  return {
    "flops": 2 * n**3 / seconds(lambda: product(a)),
    "bytes": 2 * words.nbytes / seconds(lambda: copy(words)),
  }


def measure(case: Case, form: str, shape: tuple[int, ...]) -> dict[str, Any]:
  """Times of a form; flops and bytes."""
  state, inputs = arguments(case, shape, jnp.bfloat16)
  run = function(case, form)
  forward = jax.jit(run)

  def loss(inputs):
    return jnp.sum(run(state, inputs).astype(jnp.float32))

  both = jax.jit(jax.grad(loss))
  xla = functools.partial(function(case, "xla_chunked"), state)
  moved = sum(x.nbytes for x in jax.tree.leaves(inputs))
  moved += inputs.value.nbytes  # outputs are as wide
  return {
    "forward_s": seconds(lambda: forward(state, inputs)),
    "both_s": seconds(lambda: both(inputs)),
    "flops": flops.count(jax.make_jaxpr(xla)(inputs)),
    "bytes": moved,
  }


def main(argv: list[str]) -> None:
  del argv
  on_gpu = dispatch.current_platform() == "gpu"
  device = jax.devices()[0].device_kind
  every = SHAPES if on_gpu or _STATIC.value else _SMALL
  names = _CASES.value or (list(CASES) if _ALL.value else [])
  if not names and not _STEPS.value:
    names = ["gated_delta"]
  shapes = _SHAPES.value or list(every)
  for kind, given, known in (
    ("cases", names, CASES),
    ("shapes", shapes, every),
  ):
    if wrong := [x for x in given if x not in known]:
      sys.exit(f"--{kind}={wrong[0]} is none of {', '.join(known)}")
  if _STATIC.value:
    if not hopper.available():
      sys.exit('--static needs the GPU compiler: pip install -e ".[aot-gpu]"')
    if names:
      import gpu_static

      gpu_static.report(
        (
          (
            name,
            shape,
            function(CASES[name], "mosaic_gpu"),
            functools.partial(
              arguments, CASES[name], SHAPES[shape], jnp.bfloat16
            ),
          )
          for name, shape in itertools.product(names, shapes)
          if "mosaic_gpu" in forms(CASES[name])
        )
      )
    if _STEPS.value:
      import gpu_steps

      gpu_steps.static()
    return
  print(f"{device}, jax {jax.__version__}", flush=True)
  if not on_gpu:
    print("no GPU: small, kernels interpreted; times are of no use")
  rows, failed = gpu_rows.Rows(_JSON.value), False
  with tile_kernel.tried():
    if names:
      failed = run_all(rows, device, names, shapes, every)
    if _ALL.value or _STEPS.value:
      try:  # kernels need jax alone, the trainer more
        import gpu_steps
      except ImportError as error:
        print(f"\ntraining steps left out: {error}; pip install -e .")
        failed = True
      else:
        gpu_steps.report(rows, device, turn, small=not on_gpu)
  if _ALL.value:
    gpu_goals.report(rows, device, shapes=list(SHAPES))
  sys.exit(1 if failed else 0)


def run_all(rows, device, names, shapes, every) -> bool:
  """Checks and times cases; returns whether a check failed."""
  skipped, failed = set(), False
  on_gpu = every is SHAPES
  for name in names:
    case = CASES[name]
    for form in ("mosaic_gpu", "library_gpu"):
      if form not in forms(case) or (form == "library_gpu" and not on_gpu):
        continue
      dims = sorted({every[shape][-1] for shape in shapes})
      for dim, heads in itertools.product(dims, _CHECKED):
        if heads == "many" and not on_gpu:
          continue
        run = functools.partial(check, case, form, heads, dim)
        row = rows.make(
          lambda run=run: {"wrong": run()},
          check=name,
          form=form,
          heads=heads,
          dim=dim,
          device=device,
        )
        said = row.get("error") or row["wrong"]
        print(
          f"  check {name} {form} {heads} {dim}: {said or 'right'}", flush=True
        )
        if said:
          skipped.add((name, form, dim))
          failed |= not said.startswith(NotImplementedError.__name__)
  if _CHECKS.value:
    return failed
  top = rows.make(lambda: ceilings(every is _SMALL), ceilings=device)
  timed = []  # rivals last: they try many variants before a first call
  for form, shape, name in itertools.product(
    (*_FORMS.value, "rival"), shapes, names
  ):
    case, sizes = CASES[name], every[shape]
    if form == "rival":
      if not case.rival:
        continue
      form = f"fla {case.rival}"
      make = functools.partial(
        gpu_rivals.measure, case.rival, sizes, _REPEATS.value, turn
      )
    elif form in forms(case) and (name, form, sizes[-1]) not in skipped:
      make = functools.partial(measure, case, form, sizes)
    else:
      continue
    key = {"case": name, "shape": shape, "form": form, "device": device}
    timed.append(rows.make(make, **key))
  timed.sort(key=lambda row: (shapes.index(row["shape"]), row["case"]))
  if "error" in top:
    print(f"ceilings: {top['error']}")
  else:
    gpu_rows.table(timed, top)
  return failed


if __name__ == "__main__":
  app.run(main)
