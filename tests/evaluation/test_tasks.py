"""What the tasks make of a run's settings."""

from memcomp.evaluation import load, tasks


def test_a_run_without_a_sample_at_its_end_samples_and_chats(
  trained, monkeypatch, call
):
  opened = load.open_checkpoint(trained)
  opened.config.evaluation.sample_tokens = 0
  asked = []

  def note(checkpoint, settings, *rest):
    asked.append(settings.sample_tokens)

  monkeypatch.setattr(load, "open_checkpoint", lambda *_: opened)
  for task, function in (("sample", "show_sample"), ("chat", "talk")):
    monkeypatch.setattr(tasks, function, note)
    for given in ((), ("--tokens=3",)):
      code, _, err = call(f"--checkpoint={trained}", f"--task={task}", *given)
      assert code == 0, err
  assert asked == [400, 3, 400, 3]
