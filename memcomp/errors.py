"""Errors that are the user's to fix, as opposed to bugs.

Command-line programs print a `UserError` as one line and exit with
`EXIT_BAD_INPUT`; every other exception keeps its traceback.
"""

EXIT_BAD_INPUT = 2
"""Exit code: the input (config, data, checkpoint, disk) needs a fix."""

EXIT_DOES_NOT_FIT = 3
"""Exit code: compiled for devices whose memory it exceeds."""

EXIT_RESUMABLE = 42
"""Exit code: interrupted by a signal, saved; the same command resumes."""

EXIT_DIVERGED = 43
"""Exit code: training was stopped because its numbers stopped being finite."""

EXIT_LOST = 44
"""Exit code: another process of the run died; the same command resumes."""

EXIT_HUNG = 45
"""Exit code: no step ended for `training.watchdog_seconds`."""


class UserError(Exception):
  """Something the user can fix; the message names the cause and the fix."""
