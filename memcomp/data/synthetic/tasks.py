"""Synthetic tasks by name, for configs and evaluation."""

from memcomp.data.synthetic import mqar_task, niah_task, recall, task

TASKS: dict[str, type[task.TaskConfig]] = {
  config.name: config
  for config in (
    mqar_task.MqarConfig,
    recall.RecallConfig,
    niah_task.NiahConfig,
  )
}


def config_of(name: str) -> type[task.TaskConfig]:
  """Returns the config class of the task called `name`.

  Raises:
    ValueError: naming the existing tasks.
  """
  if name not in TASKS:
    raise ValueError(f"{name!r} is no task; there are: {', '.join(TASKS)}")
  return TASKS[name]
