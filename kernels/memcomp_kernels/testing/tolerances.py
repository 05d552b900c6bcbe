"""All bounds on relative root-mean-square errors.

Loosening a bound is a separate commit that gives the reason.
"""

VALUE = {"float64": 1e-12, "float32": 1e-5, "bfloat16": 1e-2}
"""Outputs and states against the float64 reference."""

GRADIENT = {"float64": 1e-10, "float32": 1e-4, "bfloat16": 2e-2}
"""Gradients of inputs and initial state against the float64 reference."""

FINITE_DIFFERENCE = 1e-6
"""Directional derivatives in float64 against central differences."""

SHARDED = 1e-5
"""Eight devices against one, in float32."""
