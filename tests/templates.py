"""Chat templates for tests, a chat, and tokenizers that have them."""
from examples import tiny
from learning import begin_with

# The text in «» is what the assistant says: transformers' {% generation %} in the reference,
# nothing in what is tested.
TURN = ("{% for m in messages %}{% if m['role'] == 'assistant' %}ASSISTANT{% else %}OTHER{% endif "
        "%}{% endfor %}{% if add_generation_prompt %}HEADER{% else %}TAIL{% endif %}")


def template(other: str, assistant: str, header: str, before: str = "", tail: str = "") -> str:
    return before + TURN.replace("OTHER", other).replace("ASSISTANT", assistant).replace(
        "HEADER", header).replace("TAIL", tail)


ROLE, SAID = "{{ m['role'] }}", "{{ m['content'] }}"
CHAT = [{"role": "user", "content": "Sort 31"}, {"role": "assistant", "content": "13"},
        {"role": "user", "content": " what\n\nelse? "},
        {"role": "assistant", "content": "true or false\n  <b>yes</b>"},
        {"role": "user", "content": "no"}, {"role": "assistant", "content": "é 99"}]


def tokenizer_of(controls: str, text: str):
    made, controls = tiny.make_tokenizer(), controls.split()
    made.add_special_tokens({"additional_special_tokens": controls, "eos_token": controls[-1]})
    made.chat_template = text.replace("«", "").replace("»", "")
    if text.startswith(controls[0]):  # Llama's and Mistral's put it before each text, not only
        begin_with(made, controls[0])  # before a chat
    return made


def with_traits(opens: bool, drops: bool, trims: bool, ends: bool):
    """A tokenizer whose template opens a thought where the model is asked, drops thoughts, trims
    what is said, ends turns."""
    said = "m['content']" + ".split('</think>')[-1]" * drops
    return tokenizer_of("<|im_start|> <|im_end|>", template(
        f"<|im_start|>{ROLE}\n{SAID}<|im_end|>\n",
        f"<|im_start|>assistant\n{{{{ {said}{' | trim' * trims} }}}}{'<|im_end|>' * ends}\n",
        "<|im_start|>assistant\n" + "<think>\n" * opens))
