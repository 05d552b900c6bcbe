"""The commands that have no package of their own: train, eval and chat.

`memcomp.__main__` lists all commands. A module of one has `main()`, which reads
`sys.argv` and exits.
"""

from memcomp import lazy

__all__ = ["chat", "evaluate", "train"]

__getattr__, __dir__ = lazy.modules(__name__, __all__)
