"""Places that cannot be and numbers out of range: one line, exit code 2."""

import pytest

from memcomp import errors

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
  "no source": (
    (*PERPLEXITY, "--source=no"),
    "no such file or folder; check -",
  ),
  "no paths": ((*PERPLEXITY, "--source=,"), "--source is empty"),
  "weights": (
    (*PERPLEXITY, "--source=0.5:file;0.5:file"),
    "--source=0.5:file;0.5:file: every text is scored once, whole, so weights",
  ),
  "a weight": ((*PERPLEXITY, "--source=1:file"), "give paths separated by co"),
  "source of nobody": ((*PERPLEXITY, "--source=~nobody-of-it"), "no home"),
  "prompt too long": ((*SAMPLE, f"--prompt_file={LONG}"), "File name too long"),
  "prompt of bytes": ((*SAMPLE, "--prompt=a\udcff"), "byte 0xff, which is not"),
  "stop of bytes": ((*SAMPLE, "--stop=a\udcff"), "not UTF-8"),
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
  "no tensor": (
    (*SAMPLE, "--tensor=0"),
    "--tensor=0 is not a size; use 1 or more\n",
  ),
  "two prompts": (
    (*SAMPLE, "--prompt=a", "--prompt_file=file"),
    "--prompt and --prompt_file are both given",
  ),
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


COMMANDS = [
  (["--task=perplexity"], "--checkpoint is missing"),
  (["--checkpoint=RUN"], "--task is missing"),
  (["--checkpoint=RUN", "--task=perplexty"], "--task=perplexty is unknown"),
  (["--checkpoint=TMP/none", "--task=sample"], "no checkpoint in"),
  (["--checkpoint=TMP/empty", "--task=sample"], "no checkpoint in"),
  (
    ["--checkpoint=RUN", "--task=sample", "--step=9"],
    "no checkpoint of step 9",
  ),
  (["--checkpoint=RUN", "--task=sample", "--prompt="], "the prompt is empty"),
  (
    ["--checkpoint=RUN", "--task=sample", "--prompt_file=TMP/empty"],
    "is empty",
  ),
  (
    ["--checkpoint=RUN", "--task=sample", "--prompt_file=TMP/no"],
    "cannot read",
  ),
  (["--checkpoint=RUN", "--task=sample", "--prompt_file=TMP"], "cannot read"),
  (
    ["--checkpoint=RUN", "--task=sample", "--prompt_file=TMP/latin"],
    "not UTF-8",
  ),
  (["--checkpoint=RUN", "--task=sample", "--prompt=\udcff"], "not UTF-8"),
  (
    ["--checkpoint=RUN", "--task=sample", "--tokens=-1"],
    "sample_tokens=-1: give 0",
  ),
  (
    ["--checkpoint=RUN", "--task=sample", "--temperature=-1"],
    "temperature=-1.0: ",
  ),
  (["--checkpoint=RUN", "--task=sample", "--top_p=0"], "top_p=0.0: "),
  (["--checkpoint=RUN", "--task=sample", "--top_k=-3"], "top_k=-3: "),
  (["--checkpoint=RUN", "--task=sample", "--seed=-1"], "seed=-1: "),
  (["--checkpoint=RUN", "--task=sample", "--min_p=2"], "min_p=2.0: "),
  (
    ["--checkpoint=RUN", "--task=sample", "--repetition_penalty=0"],
    "repetition_penalty=0.0: ",
  ),
  (["--checkpoint=RUN", "--task=sample", "--stop="], "a stop string is empty"),
  (
    ["--checkpoint=RUN", "--task=perplexity", "--tensor=2"],
    "perplexity runs on one device",
  ),
  (
    ["--checkpoint=RUN", "--task=sample", "--tensor=4"],
    "does not divide over --tensor = 4; set --tensor to a divisor of 2",
  ),
  (
    ["--checkpoint=RUN", "--task=perplexity", "--lengths=0"],
    "lengths=0: give 1",
  ),
  (["--checkpoint=RUN", "--task=perplexity", "--rows=0"], "rows=0: give 1"),
  (["--checkpoint=RUN", "--task=perplexity", "--rows=x"], "--rows=x"),
  (
    ["--checkpoint=RUN", "--task=throughput", "--contexts=8,x"],
    "--contexts=8,x: give",
  ),
  (
    ["--checkpoint=RUN", "--task=perplexity", "--source=TMP/no"],
    "no such file",
  ),
  (
    ["--checkpoint=RUN", "--task=perplexity", "--source=TMP/one.txt"],
    "give more",
  ),
  (
    ["--checkpoint=RUN", "--task=perplexity", "--out=TMP/empty"],
    "not a folder",
  ),
  (
    ["--checkpoint=RUN", "--task=perplexity", "--out=TMP/empty/x"],
    "not a folder",
  ),
  (["--checkpoint=RUN", "--task=sample", "--promt=x"], "did you mean --prompt"),
]


@pytest.mark.parametrize(
  ("arguments", "message"), COMMANDS, ids=[c[1] for c in COMMANDS]
)
def test_a_command_that_cannot_be(call, trained, tmp_path, arguments, message):
  (tmp_path / "empty").touch()
  (tmp_path / "latin").write_bytes(b"caf\xe9")
  (tmp_path / "one.txt").write_text("x")
  before = sorted(trained.rglob("*"))
  arguments = [
    a.replace("RUN", str(trained)).replace("TMP", str(tmp_path))
    for a in arguments
  ]
  code, out, err = call(*arguments)
  assert code == errors.EXIT_BAD_INPUT
  assert out == ""
  assert err.startswith("error: ") and err.count("\n") == 1
  assert message in err
  assert sorted(trained.rglob("*")) == before
