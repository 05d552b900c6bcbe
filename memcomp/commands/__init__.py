"""The commands without a package of their own: train, eval and chat.

`memcomp.__main__` lists all commands. The `main()` of each module reads
`sys.argv` and exits.
"""

from memcomp import lazy

__all__ = ["chat", "evaluate", "train"]

__getattr__, __dir__ = lazy.modules(__name__, __all__)
