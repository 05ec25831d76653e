"""chats.py: the chat template uses all of a chat.

A template ignores what it does not know: the text is the same without the tools, the switch or the
message: https://github.com/OpenRLHF/OpenRLHF/issues/1228
"""
from contextlib import suppress

from data import in_template, no_place
from errors import SettingsError

# Keys of a message, in OpenAI's format, that a template need not use; and OpenAI's roles.
MAY_BE_UNUSED = ("role", "content", "name", "tool_call_id", "weight")
ROLES = ("system", "developer", "user", "assistant", "tool", "function")


def check_all_is_used(messages: list[dict], options: dict, tokenizer):
    """Raises a SettingsError if the chat template ignores an option, or an unusual key or role of a
    message: the text is the same without it (a switch: with its opposite; a role: with another
    name). Skipped if the template refuses the whole chat: its own error is clearer (`rendered`)."""
    def text_of(messages=messages, options=options) -> str | None:
        """Renders these messages with these options. None: the template raises an error."""
        with suppress(SettingsError):
            return in_template(messages, tokenizer, options, add_generation_prompt=True)

    whole = text_of()
    if whole is None:
        return
    for key, value in options.items():
        others = [{name: it for name, it in options.items() if name != key}]
        if isinstance(value, bool):  # only the opposite of a switch's default changes the text
            others.append(options | {key: not value})
        if all(text_of(options=other) == whole for other in others):
            raise no_place(key)
    unusual = [key for m in messages for key, value in m.items()
               if key not in MAY_BE_UNUSED and value not in (None, "", [], {})]
    for key in dict.fromkeys(unusual):
        without = [{name: it for name, it in m.items() if name != key} for m in messages]
        if text_of(without) == whole:
            raise no_place(key)
    for role in {m["role"] for m in messages} - {*ROLES}:
        renamed = [m | {"role": "QX7"} if m["role"] == role else m for m in messages]
        text = text_of(renamed)
        # A template that merely copies the role's name writes the same text with any other name.
        if text and text.replace("QX7", role) == whole:
            raise no_place(role)
