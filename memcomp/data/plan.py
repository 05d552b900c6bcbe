"""The plan of a folder of `memcomp.data.prepare`: what it is made of.

`plan.json` is written first. The same command may go on in the folder. Another
may only while nothing is finished.
"""

import hashlib
import json
import os
import pathlib
from typing import Any

from memcomp import errors
from memcomp.data import formats, shards, units

LOCK = ".lock"
"""Name of the folder's lock."""


def entries(format: formats.Format) -> dict[str, Any]:
  """Returns the entries of plan and manifest about the format."""
  if format.template is None:
    return {"format": shards.FORMAT}
  return {
    "format": shards.FORMAT_MESSAGES,
    "chat_template": format.template.fingerprint,
    "sizes": "answers",  # before, they were those of the whole conversation
  }


def claim(corpus: units.Corpus, format: formats.Format) -> None:
  """Saves the plan of `out`, or rejects a folder with another plan.

  A plan of which nothing is finished is replaced: its text may have been
  corrected since. The caller holds the folder's `LOCK`.

  Raises:
    UserError: the folder has another plan of which something is finished, a
      plan that cannot be read, or other files.
  """
  stats = [(f.name, os.stat(f.path)) for f in corpus.files]
  listing = [[name, s.st_size, s.st_mtime_ns] for name, s in stats]
  plan = {
    "source": hashlib.sha256(json.dumps(listing).encode()).hexdigest()[:16],
    "tokenizer": format.tokenizer.fingerprint,
    "shard_tokens": corpus.shard_tokens,
    **entries(format),
  }
  out, path = pathlib.Path(corpus.out), os.path.join(corpus.out, shards.PLAN)
  if not os.path.exists(path):
    if others := _others(out, units.UNITS):
      raise errors.UserError(
        f"--out: {corpus.out} holds other files ({min(others)}); name a new "
        "folder"
      )
    units.save_json(path, plan)
    return
  try:
    with open(path, encoding="utf-8") as stream:
      found = dict(json.load(stream))
  except (OSError, *errors.BAD_JSON, TypeError) as error:
    raise errors.UserError(
      f"{path}: unreadable ({error}); name a new folder in --out"
    ) from error
  changed = [key for key, value in plan.items() if found.get(key) != value]
  if not changed:
    return
  if _others(out, units.UNITS, shards.PLAN) or _others(out / units.UNITS):
    raise errors.UserError(
      f"--out: {corpus.out} was begun with another {' and '.join(changed)} (or "
      "the source's files were changed since); name a new folder"
    )
  # The new plan may write fewer files, which would not replace all of these.
  for name in ("tokens-*", f"{units.UNITS}/*"):
    for half in out.glob(name + units.TEMPORARY):
      half.unlink()
  units.save_json(path, plan)


def _others(folder: pathlib.Path, *known: str) -> set[str]:
  """Returns the names in a folder but these, locks and half-written files."""
  return {
    name
    for name in os.listdir(folder)
    if name not in known
    and not name.startswith(LOCK)
    and not name.endswith(units.TEMPORARY)
  }
