"""Documents of the tasks beside, made here."""

import datasets

ANIMALS = ["fox", "owl", "hare", "otter", "mole", "crow", "wren", "newt"]


def _whole(documents):
  return {"test": datasets.Dataset.from_list(documents)}


def choices(**unused):
  return _whole(
    [
      {
        "question": f"{'Many animals. ' * (i % 3)}Which one is number {i}?",
        "choices": [ANIMALS[(i + j) % 8] * (1 + j) for j in range(2 + i % 3)],
        "answer": i % 2,
      }
      for i in range(7)
    ]
  )


def last_words(**unused):
  return _whole(
    [
      {"text": f"{'On and on. ' * i}line {i} of document", "word": str(i)}
      for i in range(5)
    ]
  )


def pages(**unused):
  return _whole(
    [{"page": " ".join(ANIMALS[: 1 + i]) * (1 + 5 * i)} for i in range(5)]
  )


def questions(**unused):
  return _whole(
    [
      {
        "question": f"{'So. ' * i}How many is {i} and {i}?",
        "answer": str(2 * i),
      }
      for i in range(5)
    ]
  )
