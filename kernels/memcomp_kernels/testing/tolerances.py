"""All bounds on relative root-mean-square errors.

Loosening a bound is a separate commit that gives the reason.
"""

VALUE = {"float64": 1e-12, "float32": 1e-5, "bfloat16": 1e-2}
"""Bounds of outputs and states compared with the float64 reference."""

GRADIENT = {"float64": 1e-10, "float32": 1e-4, "bfloat16": 2e-2}
"""Bounds of gradients of inputs and initial state, compared in the same way."""

FINITE_DIFFERENCE = 1e-6
"""Bound of directional derivatives compared with central differences."""

SHARDED = 1e-5
"""Bound of results on eight devices compared with one, in float32."""
