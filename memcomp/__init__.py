"""memcomp: compressive-memory sequence layers for JAX and TPU."""

__version__ = "0.1.0"
