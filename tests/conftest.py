"""Flags for every test; set before jax is imported.

Eight fake devices, and no optimisation by XLA: tests compile far more than
they compute.
"""

import os

os.environ["JAX_PLATFORMS"] = os.environ.get("JAX_PLATFORMS", "cpu")
os.environ["XLA_FLAGS"] = " ".join(
  [
    "--xla_force_host_platform_device_count=8",
    "--xla_backend_optimization_level=0",
    os.environ.get("XLA_FLAGS", ""),
  ]
).strip()
