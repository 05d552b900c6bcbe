"""Training: `run.run(config, workdir)` and the pieces it is made of.

`validate` reads the config before anything is built; `state` and `step` are
the pure part (also what a compile-only run lowers); `loop` is the part with
signals, files and clocks; `checkpoint` and `workdir` are what stays on disk.
"""
