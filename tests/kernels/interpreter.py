"""Options with which the interpreter of kernels finds faults.

Races are errors, and memory that was never written is NaN.
"""

STRICT_GPU = {"detect_races": True, "uninitialized_memory": "nan"}
STRICT_TPU = {**STRICT_GPU, "out_of_bounds_reads": "raise"}
