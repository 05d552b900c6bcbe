"""Capacity: the memory is the kernel's, and what is read is the formula's."""

import json

import numpy as np
import pytest

from memcomp import errors
from memcomp.evaluation.capacity import measure, run


def _by_hand(keys, values, query, rule, decay):
  """The paper's (3), (4), (14) with eta 1, one pair after the other."""
  A = np.zeros((keys.shape[1], values.shape[1]))
  for k, v in zip(keys, values, strict=True):
    if rule == "outer":
      write = np.outer(k, v)
    elif rule == "delta":
      write = np.outer(k, v - k @ A)
    else:
      write = np.outer(k, v) - np.outer(v, k)
    A = decay * A + write
  return query @ A


@pytest.mark.parametrize("rule", run.RULES)
@pytest.mark.parametrize("decay", [1.0, 0.9])
def test_what_is_written_is_read(rule, decay):
  rng = np.random.default_rng(3)
  keys, values = (rng.standard_normal((2, 5, 4)) / 2 for _ in range(2))
  queries = rng.standard_normal((2, 8, 4))
  read = measure.written(keys, values, queries, rule=rule, decay=decay, reads=3)
  for row in range(2):
    for t in range(8):
      n = min(t, 5)
      want = _by_hand(
        keys[row, :n], values[row, :n], queries[row, t], rule, decay
      )
      np.testing.assert_allclose(read[row, t], want, atol=2e-6)


def test_orthogonal_keys_are_read_without_error():
  keys, values = measure.draw("orthogonal", 8, 12, np.random.default_rng(0))
  np.testing.assert_allclose(keys[:8] @ keys[:8].T, np.eye(8), atol=1e-12)
  np.testing.assert_allclose(np.linalg.norm(keys, axis=1), 1)
  read = measure.written(
    keys[None, :8],
    values[None, :8],
    np.concatenate([np.zeros((8, 8)), keys[:8]])[None],
    rule="outer",
    decay=1.0,
    reads=8,
  )
  np.testing.assert_allclose(read[0, 8:], values[:8], atol=1e-5)


def test_capacity_is_what_theory_expects():
  """Random keys: the root of the mean square error passes 1 at D + 1."""
  found = measure.first("random", 8, 1.0, seeds=100, seed=0)
  capacities = np.array(found["capacities"])
  assert found["mean"] == capacities.mean() and found["never"] < 3
  assert found["theory"] == 9
  error = found["deviation"] / 10
  # The mean of first passages lies above the passage of the mean square.
  assert 9 - 4 * error < found["mean"] < 16
  assert found["errors"][0] < 1e-6 and found["errors"][40] > 1
  decayed = measure.first("random", 8, 0.9, seeds=100, seed=0)
  assert decayed["mean"] < found["mean"]
  assert measure.first("random", 8, 1.0, seeds=100, seed=0) == found
  assert measure.theory("orthogonal", 64, 1.0) == 128


def test_deviations_are_over_draws():
  found = measure.everything("outer", 8, 16, 1.0, seeds=2, seed=0)
  one, other = (
    measure.everything("outer", 8, 16, 1.0, seeds=1, seed=0),
    measure.first("random", 8, 1.0, seeds=1, seed=0),
  )
  # Of two draws with the first's error: half their difference times sqrt 2.
  half = abs(found["error"] - one["error"])
  assert found["error_deviation"] == pytest.approx(2**0.5 * half)
  assert one["accuracy_deviation"] is one["error_deviation"] is None
  assert other["deviation"] is other["deviation_of_5"] is None


def test_theory_is_of_decayed_pairs():
  """The squared error of random pairs passes 1 between 15 and 16 of them."""
  assert measure.theory("random", 16, 0.995) == pytest.approx(15.77, abs=0.005)
  assert measure.theory("random", 64, 0.995) == pytest.approx(50.25, abs=0.005)
  assert measure.theory("random", 16, 1 - 1e-7) == pytest.approx(17, abs=1e-4)
  rng = np.random.default_rng(0)
  keys, values = rng.standard_normal((2, 10_000, 16, 16))
  keys /= np.linalg.norm(keys, axis=2, keepdims=True)
  # Before scaling by what is left of the first pair.
  scores = np.einsum("rd,rid->ri", keys[:, 0], keys) * 0.995 ** -np.arange(16)
  for pairs, low, high in ((15, 0.92, 0.97), (16, 1.0, 1.04)):
    noise = np.einsum("ri,rid->rd", scores[:, 1:pairs], values[:, 1:pairs])
    assert low < (noise**2).mean() / (values[:, 0] ** 2).mean() < high


@pytest.mark.slow
def test_a_run_is_gone_on_with(tmp_path, monkeypatch, capsys):
  monkeypatch.setattr(run, "PAIRS", (1,))
  measured = []

  def counted(kept):
    def call(*task, **how):
      measured.append(task)
      if len(measured) == 5:
        raise KeyboardInterrupt
      return kept(*task, **how)

    return call

  for name in ("first", "everything"):
    monkeypatch.setattr(measure, name, counted(getattr(measure, name)))
  with pytest.raises(KeyboardInterrupt):
    run.run(tmp_path, dims=[8], samples=3)
  written = run.run(tmp_path, dims=[8], samples=3)
  assert len(measured) == 5 + 9 - 4
  slices = json.loads((tmp_path / "capacity.json").read_text())["slices"]
  assert len(slices) == 9 and tmp_path / "capacity.json" in written
  assert {one["rule"] for one in slices} == set(run.RULES)
  table = capsys.readouterr().out
  assert table.count("| 8 |") == 3 + 6
  lines = (tmp_path / "results.md").read_text().splitlines()
  assert len(lines) == 2 + 9 and "256" in lines[2]
  run.run(tmp_path / "again", dims=[8, 8], samples=3)  # the same once
  again = json.loads((tmp_path / "again/capacity.json").read_text())["slices"]
  for one in [*slices, *again]:
    del one["seconds"]
  assert slices == again


def test_the_program(call, tmp_path, monkeypatch):
  monkeypatch.setattr(run, "PAIRS", (1,))
  code, out, err = call(
    "--task=capacity", "--dims=8", "--samples=2", f"--out={tmp_path}"
  )
  assert code == 0, err
  assert "| 8 | wedge | 1 |" in out and "capacity.json\n" in out
  assert "| capacity | of 2 draws |" in out and out.count(" ± ") == 3 * 2
  found = json.loads((tmp_path / "capacity.json").read_text())
  assert {one["draws"] for one in found["slices"]} == {2}
  assert (tmp_path / "capacity.png").exists()


def test_one_draw_has_no_deviation(tmp_path, monkeypatch, capsys):
  monkeypatch.setattr(run, "PAIRS", (1,))
  run.run(tmp_path, dims=[8], samples=1)
  out = capsys.readouterr().out
  assert "| capacity | of 1 draw |" in out and "±" not in out
  assert "+-" not in (tmp_path / "results.md").read_text()


@pytest.mark.parametrize(
  ("flag", "said"),
  [
    ("--checkpoint=RUN", "leave out --checkpoint"),
    ("--gaps=3", "--gaps means nothing to --task=capacity"),
    ("--dims=8,x", "--dims=8,x: give whole numbers"),
  ],
)
def test_flags_that_it_does_not_take(call, flag, said):
  code, _, err = call("--task=capacity", flag)
  assert code == errors.EXIT_BAD_INPUT
  assert said in err and len(err.splitlines()) == 1


def test_bad_flags(tmp_path):
  with pytest.raises(errors.UserError, match="--dims=4"):
    run.run(tmp_path, dims=[4])
  with pytest.raises(errors.UserError, match="--samples=0"):
    run.run(tmp_path, samples=0)
