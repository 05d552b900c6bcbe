"""Compiles for TPUs on any machine; requires the extra `aot` (libtpu)."""

import importlib.util
import os
from collections.abc import Callable
from typing import Any

import jax


def available() -> bool:
  """Whether the TPU compiler is installed."""
  return importlib.util.find_spec("libtpu") is not None


def devices(topology: str, slices: int = 1) -> list[jax.Device]:
  """Returns the chips of a topology; the TPUs need not be present.

  Args:
    topology: name of a TPU topology, such as "v5e:2x2", "v5p:2x2x1" or
      "v6e:2x2".
    slices: number of slices of that topology, connected by a network, >= 1.

  Raises:
    RuntimeError: no TPU compiler is installed, or the topology is unknown.
  """
  from jax.experimental import topologies

  # Several processes may compile at once, and libtpu must not look for a TPU.
  os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
  os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
  if not available():
    raise RuntimeError("no TPU compiler here: install the extra aot")
  try:
    description = topologies.get_topology_desc(
      platform="tpu", topology_name=topology, num_slices=slices
    )
  except Exception as error:
    raise RuntimeError(f"no TPU topology {topology!r}: {error}") from error
  return list(description.devices)


def compile_for(topology: str, function: Callable, *arguments: Any) -> Any:
  """Compiles for one chip of a topology.

  Args:
    topology: see `devices`.
    function: a function of arrays.
    *arguments: pytrees of `jax.ShapeDtypeStruct`.

  Returns:
    The compiled program: `as_text`, `memory_analysis`, `cost_analysis`.

  Raises:
    RuntimeError: no TPU compiler is installed, or the topology is unknown.
  """
  placed = jax.sharding.SingleDeviceSharding(devices(topology)[0])
  arguments = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=placed), arguments
  )
  return jax.jit(function).lower(*arguments).compile()
