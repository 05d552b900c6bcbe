"""The commands that have no package of their own: train, eval and chat.

`memcomp.__main__` lists all commands. A module of one has `main()`, which reads
`sys.argv` and exits.
"""

__all__ = ["chat", "evaluate", "train"]
