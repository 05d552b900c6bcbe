"""Checks fences of Pallas GPU kernels, which their interpreter does not check.

When registers write to shared memory, matrix units and copies to the device's
memory see the new values only after `commit_smem`.
"""

from collections.abc import Callable, Iterator
from typing import Any

import jax

_WRITES = "swap", "addupdate"
_FENCE = "commit_smem"
_NEEDS = "wgmma_ref", "copy_smem_to_gmem"
_KNOWN = "get", "load", "copy_gmem_to_smem"
"""Other primitives that may use shared memory."""


def missing(function: Callable[..., Any], *arguments: Any) -> list[str]:
  """Returns uses of shared memory that was not committed, each once.

  Bodies of loops are walked twice, and all branches are. Call it where kernels
  may be lowered, that is inside `pallas_gpu.tile_kernel.lowered`.

  Args:
    function: a function that calls kernels.
    *arguments: arguments of the function.

  Raises:
    ValueError: a primitive uses shared memory in an unknown way, or there is no
      kernel that uses matrix units.
  """
  walk = _Walk()
  walk.run(jax.make_jaxpr(function)(*arguments).jaxpr, {})
  if not walk.seen.issuperset(_NEEDS):
    raise ValueError("no kernel that uses matrix units is called")
  return list(dict.fromkeys(walk.found))


class _Walk:
  """Walks through a program in order.

  Attributes:
    open: references that were written and not committed.
    found: see `missing`.
    seen: names of primitives.
  """

  def __init__(self):
    self.open: set[Any] = set()
    self.found: list[str] = []
    self.seen: set[str] = set()

  def run(self, jaxpr: Any, outer: dict[Any, Any]) -> None:
    """Walks a program; `outer` maps its references to those of the caller."""
    for eqn in jaxpr.eqns:
      name = eqn.primitive.name
      self.seen.add(name)
      shared = [outer.get(x, x) for x in eqn.invars if _is_shared(x)]
      inside = list(_inside(eqn))
      if name == _FENCE:
        self.open.clear()
      elif name in _WRITES:
        self.open.update(shared[:1])
      elif name in _NEEDS:
        self.found += [f"{name} of {x.aval}" for x in shared if x in self.open]
      elif shared and not inside and name not in _KNOWN:
        raise ValueError(f"{name}: what it does to shared memory is not known")
      before, after = set(self.open), set(self.open)
      for inner, names in inside:
        names = {x: outer.get(y, y) for x, y in names if _is_shared(y)}
        self.open = set(before)
        for _ in range(2 if name in ("scan", "while") else 1):
          self.run(inner, names)
        after = after | self.open if name == "cond" else self.open
      if inside:
        self.open = after


def _is_shared(x: Any) -> bool:
  """Whether `x` is a reference to numbers in shared memory."""
  aval = getattr(x, "aval", None)
  space = getattr(aval, "memory_space", None)
  return str(space).lower().endswith("smem") and "barrier" not in str(aval)


def _inside(eqn: Any) -> Iterator[tuple[Any, list[tuple[Any, Any]]]]:
  """Yields programs in an equation, with (inner, outer) argument pairs."""
  given = list(eqn.invars)
  if eqn.primitive.name == "cond":
    given = given[1:]
  for key, value in eqn.params.items():
    for x in value if isinstance(value, (tuple, list)) else (value,):
      inner = getattr(x, "jaxpr", x)
      if not hasattr(inner, "eqns"):
        continue
      own = given
      if eqn.primitive.name == "while":
        first, second = (eqn.params[f"{x}_nconsts"] for x in ("cond", "body"))
        consts = given[:first] if key == "cond_jaxpr" else given[first:]
        own = consts[: second if key == "body_jaxpr" else first]
        own = own + given[first + second :]
      names = inner.constvars if inner.constvars else inner.invars
      yield inner, list(zip(names, own, strict=False))
