"""Synthetic tasks by name: the one list that configs and evaluation go by."""

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
  """Returns the configuration of the task called `name`.

  Raises:
    ValueError: naming the tasks there are.
  """
  if name not in TASKS:
    raise ValueError(f"{name!r} is no task; there are: {', '.join(TASKS)}")
  return TASKS[name]
