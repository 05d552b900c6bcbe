"""What was said in a conversation, and what of it the model has not read."""

from typing import Any, NamedTuple

from memcomp import errors
from memcomp.data import chat_template


class Dialogue(NamedTuple):
  """The messages of a conversation, as a value.

  Attributes:
    template: chat template of the model's training.
    messages: messages so far.
    unread: text behind the last answer that the model has not read; all of
      `Template.end` if the answer was cut off.
    held: text that the user's next message begins with.
  """

  template: chat_template.Template
  messages: tuple[chat_template.Message, ...] = ()
  unread: str = ""
  held: str = ""

  def ask(self, line: str) -> tuple["Dialogue", str]:
    """Adds a message of the user, or goes on with an answer that was cut off.

    Args:
      line: the message; if it is empty, the answer goes on.

    Returns:
      The dialogue, and the text to read before the answer.

    Raises:
      UserError: there is nothing to say, or see `Template.ask`.
    """
    content = "\n".join(text for text in (self.held, line) if text)
    if content:
      text = self.unread + self.template.ask(self.messages, content)
      asked = chat_template.Message("user", content)
      return Dialogue(self.template, (*self.messages, asked)), text
    if self.unread != self.template.end:
      raise errors.UserError(
        "there is no answer that was cut off and could go on; type a message"
      )
    return self, ""

  def answered(
    self, content: str, *, ended: bool, again: str = ""
  ) -> "Dialogue":
    """Adds (the next part of) an answer.

    Args:
      content: its text.
      ended: whether the model ended it.
      again: text at the end of the previous part that was held back, because a
        stop string might have begun there. `content` repeats it, unless a stop
        string was completed.
    """
    messages = self.messages
    if messages and messages[-1].role == "assistant":
      before = messages[-1].content.removesuffix(again)
      messages, content = messages[:-1], before + content
    return Dialogue(
      self.template,
      (*messages, chat_template.Message("assistant", content)),
      unread=self.template.rest if ended else self.template.end,
    )

  def to_dict(self) -> dict[str, Any]:
    """Returns it without its template, for JSON."""
    return {
      "messages": [m._asdict() for m in self.messages],
      "unread": self.unread,
      "held": self.held,
    }


def of_dict(
  template: chat_template.Template, saved: dict[str, Any]
) -> Dialogue:
  """Returns the dialogue of a `to_dict`."""
  messages = tuple(chat_template.Message(**m) for m in saved["messages"])
  return Dialogue(template, messages, str(saved["unread"]), str(saved["held"]))
