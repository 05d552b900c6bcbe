"""Places that cannot be and numbers out of range: one line, exit code 2."""

import pytest

LONG = "a" * 300
SAMPLE = ("--task=sample", "--tokens=2")
PERPLEXITY = ("--task=perplexity", "--lengths=1", "--rows=1")

BAD = {
  "out too long": ((*PERPLEXITY, f"--out={LONG}"), "File name too long"),
  "out below a file": ((*PERPLEXITY, "--out=file/x"), "file"),
  "out in /proc": ((*PERPLEXITY, "--out=/proc/x"), "/proc/x"),
  "out of nobody": ((*PERPLEXITY, "--out=~nobody-of-it/x"), "no home folder"),
  "out in a bucket": ((*PERPLEXITY, "--out=gs://b/x"), "--out=gs://b/x: only"),
  "out of runs": (("--task=compare", "--out=gs://b/x"), "--out=gs://b/x: only"),
  "source too long": ((*PERPLEXITY, f"--source={LONG}"), "File name too long"),
  "source below a file": ((*PERPLEXITY, "--source=file/x"), "file/x"),
  "source of nobody": ((*PERPLEXITY, "--source=~nobody-of-it"), "no home"),
  "prompt too long": ((*SAMPLE, f"--prompt_file={LONG}"), "File name too long"),
  "prompt of bytes": ((*SAMPLE, "--prompt=a\udcff"), "surrogate"),
  "stop of bytes": ((*SAMPLE, "--stop=a\udcff"), "surrogate"),
  "no such step": ((*SAMPLE, "--step=-1"), "no checkpoint of step -1"),
  "a step beyond int64": ((*SAMPLE, f"--step={10**30}"), "no checkpoint of"),
  "seed below 0": ((*SAMPLE, "--seed=-1"), "--seed=-1: give"),
  "seed too large": ((*SAMPLE, f"--seed={2**32}"), "--seed=4294967296: give"),
  "seed of digits": ((*SAMPLE, f"--seed={'9' * 5000}"), "--seed"),
  "tokens": (("--task=sample", "--tokens=9999999999"), "sample_tokens=9999"),
  "tokens of a chat": (("--task=chat", "--tokens=2147483648"), "or less"),
  "no tokens of a chat": (("--task=chat", "--tokens=0"), "tokens=0: give 1"),
  "rows": ((*PERPLEXITY, "--rows=9999999999"), "rows=9999999999: give"),
  "lengths": ((*PERPLEXITY, "--lengths=9999999999"), "lengths=9999999999"),
  "tensor": ((*SAMPLE, "--tensor=9999999999"), "9999999999 devices"),
  "no tensor": ((*SAMPLE, "--tensor=0"), "use 1 or more"),
  "contexts": (("--task=throughput", "--contexts=9999999999"), "or less"),
  "contexts of digits": (
    ("--task=throughput", f"--contexts={'9' * 5000}"),
    "whole numbers",
  ),
  "contexts of needles": (("--task=niah", "--contexts=9999999999"), "or less"),
  "samples": (("--task=niah", "--samples=9999999999"), "--samples=9999999999"),
  "essay": (("--task=niah", f"--essay_file={LONG}"), "File name too long"),
  "words": (("--task=niah", f"--word_list={LONG}"), "File name too long"),
  "limit": (
    ("--task=harness", "--tasks=a", "--limit=9999999999"),
    "--limit=9999999999",
  ),
  "task": (("--task=" + LONG,), "is unknown"),
}
SEEDS = ("throughput", "harness", "recall", "mqar", "niah", "perplexity")


@pytest.mark.parametrize("name", BAD)
def test_a_mistake_is_one_line(name, call, trained, tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  (tmp_path / "file").touch()
  given, said = BAD[name]
  code, out, err = call(f"--checkpoint={trained}", *given)
  assert (code, out) == (2, ""), err
  assert err.startswith("error: ") and err.count("\n") == 1
  assert said in err
  assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("seed", [-1, 5_000_000_000])
@pytest.mark.parametrize("task", SEEDS)
def test_seeds_of_every_task(task, seed, call, trained):
  code, _, err = call(
    f"--checkpoint={trained}", f"--task={task}", f"--seed={seed}"
  )
  assert code == 2 and f"--seed={seed}: give a whole number" in err
  code, _, err = call("--task=capacity", f"--seed={seed}")
  assert code == 2 and f"--seed={seed}: give a whole number" in err


@pytest.mark.parametrize(
  "checkpoint", [LONG, "file/x", "/proc/x", "~", "~no-one"]
)
def test_checkpoints_that_cannot_be(checkpoint, call, tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  monkeypatch.setenv("HOME", str(tmp_path))
  (tmp_path / "file").touch()
  for task in ("sample", "compare"):
    code, out, err = call(f"--checkpoint={checkpoint}", f"--task={task}")
    assert (code, out) == (2, ""), err
    assert err.count("\n") == 1


@pytest.mark.slow
def test_the_home_folder_in_flags(call, trained, tmp_path, monkeypatch):
  monkeypatch.setenv("HOME", str(trained.parent))
  monkeypatch.chdir(tmp_path)
  text = trained.parent / "essay.txt"
  text.write_text("Some text. " * 9)
  checkpoint = f"--checkpoint=~/{trained.name}"
  code, out, err = call(checkpoint, *SAMPLE, "--prompt_file=~/essay.txt")
  assert (code, err) == (0, "") and out.startswith("Some text. ")
  code, out, err = call(
    checkpoint, *PERPLEXITY, "--source=~/essay.txt", "--out=~/results"
  )
  assert (code, err) == (0, "")
  assert list((trained.parent / "results").glob("perplexity-*.json"))
  assert not list(tmp_path.iterdir())
