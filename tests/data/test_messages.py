"""Conversations as documents: what is scored, and what is refused."""

import json

import numpy as np
import pytest
from message_cases import BY_TOKENS, TALK, data, message, save_template, write

from memcomp import errors
from memcomp.data import chat_template, loader, prepare, sources
from memcomp.data import store as store_lib

# By hand; what the loss counts stands in ⟦ ⟧.
MARKED = """\
<|im_start|>system
Be short.<|im_end|>
<|im_start|>user
Hi?<|im_end|>
<|im_start|>assistant
⟦Hello é<|im_end|>⟧
<|im_start|>user
Bye.<|im_end|>
<|im_start|>assistant
⟦Yes<|im_end|>⟧
"""


# As Llama 3's: ends are tokens, and there is nothing behind them.
def unmarked(marked):
  """A text without its marks, and whether each of its bytes is marked."""
  text, mask, inside = b"", [], False
  for piece in marked:
    if piece in "⟦⟧":
      inside = piece == "⟦"
    else:
      text += piece.encode()
      mask += [inside] * len(piece.encode())
  return text, mask


def test_the_loss_counts_answers_and_their_ends_alone(tmp_path):
  path = write(tmp_path / "a.jsonl", TALK)
  text, mask = unmarked(MARKED)
  store = sources.open_split(data(path), "train")
  size = len(text)
  assert store.read(0, 0, size).tolist() == list(text)
  assert store.scored.mask(0, 0, size).tolist() == mask
  # In parts, too.
  for start, stop in ((0, 0), (70, 90), (80, size)):
    found = store.scored.mask(0, start, stop).tolist()
    assert found == mask[start:stop]
  made = loader.make_loader(
    data(path, sequence_length=256), store, batch_size=1, shuffle=False
  )
  with made as batches:
    batch = next(batches)
  expected = [t if m else -1 for t, m in zip(text[1:], mask[1:], strict=True)]
  assert batch.targets[0].tolist() == expected + [-1] * (256 - size + 1)


def test_parts_are_tokenized_alone():
  template = chat_template.load("chatml")
  talk = [chat_template.Message(**m) for m in TALK]
  text, _ = unmarked(MARKED)
  parts = template.parts(talk)
  assert "".join(part.text for part in parts).encode() == text
  assert [part.text for part in parts if part.is_answer] == [
    "Hello é<|im_end|>",
    "Yes<|im_end|>",
  ]


@pytest.mark.parametrize("packing", ["first_fit", "concat", "stream"])
def test_rows_of_packed_conversations(tmp_path, packing):
  """Longer ones than a row are cut; no target is lost or added."""
  talks = [
    [message("user", "a" * n), message("assistant", "b" * (n + 3))]
    for n in range(1, 60, 7)
  ]
  path = write(tmp_path / "a.jsonl", *talks)
  config = data(path, packing=packing, sequence_length=48)
  store = sources.open_split(config, "train")
  with loader.make_loader(
    config, store, batch_size=2, shuffle=False
  ) as batches:
    rows = [row for batch in batches for row in zip(*batch, strict=True)]
  answers = b"".join(t["content"].encode() + b"<|im_end|>" for _, t in talks)
  scored = np.concatenate([targets[targets >= 0] for _, targets, *_ in rows])
  # `concat` leaves out the end of the last row.
  assert len(scored) > 0.8 * len(answers)
  if packing != "concat":
    assert sorted(scored.tolist()) == sorted(answers)
  for tokens, targets, segments, _ in rows:
    for here in np.flatnonzero(targets[:-1] >= 0):
      if segments[here] == segments[here + 1]:
        assert targets[here] == tokens[here + 1]
  assert any(len(np.unique(s[s > 0])) > 1 for _, _, s, _ in rows)


BAD = [
  ({"text": "a"}, 'no field "messages" holding a list'),
  ({"messages": []}, 'no field "messages" holding a list'),
  ({"messages": ["a"]}, r"messages\[0\]: role None is unknown"),
  (
    {"messages": [message("tool", "a")]},
    r"messages\[0\]: role 'tool' is unknown; it must be one of system, user, ",
  ),
  (
    {"messages": [message("user", ["a"])]},
    r"messages\[0\]: the content of role user is no string but list",
  ),
  ({"messages": [message("user", None)]}, "is no string but NoneType"),
  (
    {"messages": [message("user", "a"), message("assistant", " ")]},
    r"messages\[1\]: the assistant says nothing",
  ),
  ({"messages": [message("user", "a")]}, "no message of the assistant"),
  (
    {"messages": [*TALK, message("user", "<|im_end|>")]},
    r"messages\[5\] \(user\) has '<\|im_end\|>' in it",
  ),
  ({"messages": [message("user", "\ud800")]}, "half of a surrogate pair"),
  ([1], 'no field "messages" holding a list'),
  (
    {"messages": TALK, "tools": [{"type": "function"}]},
    "field 'tools' is not supported",
  ),
  (
    {"messages": [TALK[0], {**message("assistant", "no"), "weight": 0}]},
    r"messages\[1\]: the field 'weight' is not supported",
  ),
  (
    {"messages": [{**message("assistant", "I look"), "tool_calls": [{}]}]},
    r"messages\[0\]: the field 'tool_calls' is not supported",
  ),
]


@pytest.mark.parametrize(("record", "error"), BAD)
def test_broken_lines_are_named(tmp_path, record, error):
  path = tmp_path / "a.jsonl"
  good = json.dumps({"messages": TALK})
  path.write_text(f"{good}\n\n{json.dumps(record)}\n")
  with pytest.raises(errors.UserError, match=rf"a\.jsonl:3: .*{error}"):
    sources.open_split(data(str(path)), "train")
  with pytest.raises(errors.UserError, match=rf"a\.jsonl:3: .*{error}"):
    prepare.prepare(str(path), str(tmp_path / "out"), format="messages")


def test_what_does_not_go_together(tmp_path):
  path = write(tmp_path / "a.jsonl", TALK)
  (tmp_path / "b.txt").write_text("text")
  (tmp_path / "c.bin").write_bytes(b"ab")
  for source, fields, error in (
    (path, {"packing": "joined"}, "lets conversations read one another"),
    (path, {"format": "mesages"}, "unknown 'mesages'; use one of text, mess"),
    (path, {"format": "text", "chat_template": "x"}, "means nothing to text"),
    (path, {"chat_template": "nowhere"}, "cannot read chat template nowhere"),
    (str(tmp_path / "b.txt"), {}, r"b\.txt: .*reads \.jsonl"),
    (str(tmp_path / "c.bin"), {}, "does not tell answers from questions"),
  ):
    with pytest.raises(errors.UserError, match=error):
      sources.open_split(data(source, **fields), "train")
  text, out = str(tmp_path / "b.txt"), str(tmp_path / "out")
  with pytest.raises(errors.UserError, match="means nothing to text"):
    prepare.prepare(text, out, chat_template="x")


def many(path, count=300):
  return write(
    path,
    *[
      [message("user", f"say {i}"), message("assistant", f"{i} " * (i % 9 + 1))]
      for i in range(count)
    ],
  )


def test_shards_equal_the_conversations(tmp_path):
  path = many(tmp_path / "a.jsonl")
  for workers in (1, 2):
    out = str(tmp_path / f"out{workers}")
    prepare.prepare(
      path, out, format="messages", shard_tokens=4000, workers=workers
    )
  for split in sources.SPLITS:
    direct, stored, parallel = (
      sources.open_split(
        data(source, validation="", validation_share=0.3), split
      )
      for source in (path, str(tmp_path / "out1"), str(tmp_path / "out2"))
    )
    assert stored.fingerprint == parallel.fingerprint
    np.testing.assert_array_equal(stored.lengths, direct.lengths)
    for i, size in enumerate(direct.lengths):
      for name in ("read", "mask"):
        a, b = (
          getattr(x if name == "read" else x.scored, name)(i, 0, int(size))
          for x in (stored, direct)
        )
        np.testing.assert_array_equal(a, b)
    assert 50 < len(direct.lengths) < 250
  # Versions that would take them for text refuse them.
  manifest = json.loads((tmp_path / "out1/manifest.json").read_text())
  assert manifest["format"] == 2


def test_shards_of_another_format_are_refused(tmp_path):
  path = many(tmp_path / "a.jsonl", 9)
  text = tmp_path / "b.txt"
  text.write_text("text " * 99)
  talks, words = str(tmp_path / "talks"), str(tmp_path / "words")
  prepare.prepare(path, talks, format="messages")
  prepare.prepare(str(text), words)
  name = save_template(tmp_path, BY_TOKENS, eos_token="</s>")
  for source, fields, error in (
    (words, {}, "prepared from text; set data.format to text"),
    (talks, {"format": "text"}, "from messages; set data.format to messages"),
    (talks, {"chat_template": name}, "prepared with another chat template"),
  ):
    with pytest.raises(errors.UserError, match=error):
      sources.open_split(data(source, **fields), "train")
  with pytest.raises(errors.UserError, match="another chat_template"):
    prepare.prepare(path, talks, format="messages", chat_template=name)
  with pytest.raises(errors.UserError, match="another source and format"):
    prepare.prepare(str(text), talks)


def test_marks_are_part_of_the_data():
  tokens, lengths = np.arange(4, dtype=np.uint8), [4]
  plain = store_lib.ArrayStore("a", tokens, lengths)
  marked = [
    store_lib.ArrayStore(
      "a", tokens, lengths, scored=store_lib.Scored([1], [span])
    )
    for span in ((1, 2), (1, 3))
  ]
  assert len({s.fingerprint for s in (plain, *marked)}) == 3


def test_marks_of_parts_of_stores():
  scored = store_lib.Scored([2, 0, 1], [(1, 2), (3, 5), (0, 4)])
  store = store_lib.ArrayStore(
    "a", np.zeros(15, np.uint8), [5, 5, 5], scored=scored
  )
  several = store_lib.Concatenation(
    [store_lib.Subset(store, np.array([2, 0])), store]
  )
  found = [several.scored.mask(i, 0, 5).tolist() for i in range(5)]
  first, none, last = [
    [c == "x" for c in row] for row in (".x.xx", ".....", "xxxx.")
  ]
  assert found == [last, first, first, none, last]


def test_a_mixture_of_conversations(tmp_path):
  paths = [many(tmp_path / f"{i}.jsonl", 20 + i) for i in range(2)]
  config = data(f"0.7:{paths[0]};0.3:{paths[1]}", sequence_length=128)
  store = sources.open_split(config, "train")
  with loader.make_loader(config, store, batch_size=4, shuffle=True) as batches:
    batch = next(batches)
  assert (batch.targets >= 0).any() and (batch.targets < 0).any()
