"""Runs many command lines of one program, each in a fork.

`python forks.py` reads what to run from stdin and writes exit code, output and
errors of each; `run` starts it. Imports are done once. Forks are safe as long
as nothing has been computed.
"""

import importlib
import json
import os
import pathlib
import resource
import signal
import subprocess
import sys
import tempfile
import traceback

ROOT = pathlib.Path(__file__).parents[1]
CPU_SECONDS = 120
LATER = {
  "memcomp.__main__": "memcomp.models.decoder",
  "memcomp.commands.chat": "memcomp.evaluation.run",
  "memcomp.commands.evaluate": "memcomp.evaluation.run",
  "memcomp.commands.train": "memcomp.training.run",
  "memcomp.convert.__main__": "memcomp.convert.convert",
  "memcomp.export.__main__": "memcomp.export.write",
}
"""What programs import once their flags are sound: seconds of each fork."""


def run(module, folder, paths=(), devices=1, **asked):
  """Runs command lines of a program in `folder`.

  Args:
    module: of the program; it has a function `main`.
    folder: where they run, also their home.
    paths: what they can import from, beside memcomp.
    devices: number of fake devices.
    **asked: `commands`, lists of arguments; or `names=True` for the names of
      the program's flags.

  Returns:
    For each command [exit code, stdout, stderr]; or the names.
  """
  found = [ROOT, ROOT / "kernels", *paths]
  done = subprocess.run(
    [sys.executable, __file__],
    input=json.dumps({"module": module, **asked}),
    cwd=folder,
    env=os.environ
    | {
      "PYTHONPATH": os.pathsep.join(map(str, found)),
      "HOME": str(folder),
      "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
    },
    capture_output=True,
    text=True,
    check=False,
  )
  assert (done.returncode, done.stderr) == (0, "")
  return json.loads(done.stdout)


def main() -> None:
  asked = json.load(sys.stdin)
  os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
  sys.argv[:] = [asked["module"]]
  module = importlib.import_module(asked["module"])
  if "names" in asked:
    from absl import flags

    found = flags.FLAGS.get_key_flags_for_module(asked["module"])
    json.dump([flag.name for flag in found], sys.stdout)
    return
  if asked["module"] in LATER:
    importlib.import_module(LATER[asked["module"]])
  results = [_run(module, argv) for argv in asked["commands"]]
  json.dump(results, sys.stdout)


def _run(module, argv: list[str]) -> tuple[int, str, str]:
  with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
    child = os.fork()
    if not child:
      os.dup2(out.fileno(), 1)
      os.dup2(err.fileno(), 2)
      resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS))
      signal.signal(signal.SIGXCPU, signal.SIG_DFL)
      sys.argv[:] = ["program", *argv]
      code = 1
      try:
        code = module.main()
      except SystemExit as error:
        code = error.code
      except BaseException:
        traceback.print_exc()
      sys.stdout.flush()
      sys.stderr.flush()
      os._exit(code or 0)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    out.seek(0)
    err.seek(0)
    texts = (x.read().decode(errors="backslashreplace") for x in (out, err))
    return code, *texts


if __name__ == "__main__":
  main()
