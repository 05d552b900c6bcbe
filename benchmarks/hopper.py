"""Compiles for an H100 on any machine; requires the extra `aot-gpu`.

It shows what XLA, Mosaic GPU and NVIDIA's assembler make of a program. It does
not show how long the program takes. Kernels are lowered inside
`pallas_gpu.tile_kernel.lowered`.
"""

import contextlib
import importlib.util
import os
import pathlib
import re
import tempfile
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from unittest import mock

import jax

# NVIDIA H100 SXM, from its data sheet and from the CUDA C Programming Guide's
# table for compute capability 9.0, in the format of XLA's compiler.
_TARGET = """
gpu_device_info {
  name: "NVIDIA H100 80GB HBM3"
  device_vendor: "NVIDIA Corporation"
  platform_version: "Compute Capability 9.0a"
  cuda_compute_capability { major: 9 feature_extension: ACCELERATED_FEATURES }
  core_count: 132
  fpus_per_core: 128
  threads_per_warp: 32
  threads_per_block_limit: 1024
  threads_per_core_limit: 2048
  thread_dim_limit_x: 1024
  thread_dim_limit_y: 1024
  thread_dim_limit_z: 64
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  shared_memory_per_block: 49152
  shared_memory_per_block_optin: 232448
  shared_memory_per_core: 233472
  l2_cache_size: 52428800
  device_memory_size: 84942979072
  device_address_bits: 64
  memory_bandwidth: 3352320000000
  clock_rate_ghz: 1.98
  driver_version: "13.0.0"
  runtime_version: "12.8.0"
  compile_time_toolkit_version: "12.8.0"
  dnn_version: "9.10.0"
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 10 }
device_description_str: "NVIDIA H100 80GB HBM3"
"""


_THREADS = 128  # per block of our kernels, one warpgroup
_REGISTERS = 65536  # per multiprocessor, allocated in eights per thread
_SHARED, _RESERVED = 233472, 1024  # bytes per multiprocessor, and per block

_INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,}\*/ +\S")  # /*address*/ OPERATION


class Kernel(NamedTuple):
  """What the assembler reports about a kernel.

  Attributes:
    name: name given to `tile_kernel.run`.
    instructions: instructions of a warp, each counted once. Most belong to the
      body of one tile.
    registers: registers per thread, <= 255.
    spilled: bytes per thread that are stored for lack of registers.
    shared: bytes of shared memory per block of threads, the maximum over
      kernels of one name.
  """

  name: str
  instructions: int
  registers: int
  spilled: int
  shared: int

  def resident(self) -> int:
    """Returns how many blocks of 128 threads fit on a multiprocessor."""
    registers = -(-self.registers // 8) * 8 * _THREADS
    return min(_REGISTERS // registers, _SHARED // (self.shared + _RESERVED))


def available() -> bool:
  """Whether the GPU compiler is installed."""
  return importlib.util.find_spec("jax_cuda13_plugin") is not None


def device() -> jax.Device:
  """Returns an H100 device; the GPU need not be present.

  Raises:
    RuntimeError: no GPU compiler is installed.
  """
  from jax.experimental import topologies

  if not available():
    raise RuntimeError("no GPU compiler here: install the extra aot-gpu")
  description = topologies.get_topology_desc(
    "h100", platform="cuda", topology="1x1x1", target_config=_TARGET
  )
  return description.devices[0]


def compile_for(function: Callable, *arguments: Any) -> list[Kernel]:
  """Compiles for an H100.

  Args:
    function: a function of arrays.
    *arguments: pytrees of `jax.ShapeDtypeStruct`.

  Returns:
    Its Mosaic GPU kernels, sorted by name, except those that this process
    compiled before.

  Raises:
    RuntimeError: no GPU compiler is installed.
  """
  placed = jax.sharding.SingleDeviceSharding(device())
  arguments = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=placed), arguments
  )
  traced = jax.jit(function).trace(*arguments)
  with _dumped() as folder:
    traced.lower(lowering_platforms=("cuda",)).compile()
    shared = {}
    for path in folder.glob("*.resources.txt"):
      size = _number(r"smem_scratch_bytes=(\d+)", path)
      shared[_name(path)] = max(size, shared.get(_name(path), 0))
    return [
      Kernel(
        _name(path),
        len(_INSTRUCTION.findall(_text(path.with_suffix(".sass_ctrl")))),
        _number(r"Used (\d+) registers", path),
        _number(r"(\d+) bytes spill stores", path),
        shared[_name(path)],
      )
      for path in sorted(folder.glob("*.ptxas"))
    ]


def _name(path: pathlib.Path) -> str:
  """Returns the kernel's name; files are named NAME_NUMBER.KIND."""
  return path.name.partition(".")[0].rpartition("_")[0]


def _number(pattern: str, path: pathlib.Path) -> int:
  found = re.search(pattern, _text(path))
  if not found:
    raise RuntimeError(f"{path.name} does not say {pattern!r}")
  return int(found[1])


def _text(path: pathlib.Path) -> str:
  return path.read_text(encoding="utf-8")


@contextlib.contextmanager
def _dumped() -> Iterator[pathlib.Path]:
  """Yields a folder into which Mosaic GPU writes what it compiles."""
  with (
    tempfile.TemporaryDirectory() as folder,
    mock.patch.dict(os.environ, MOSAIC_GPU_DUMP_TO=folder),
  ):
    yield pathlib.Path(folder)
