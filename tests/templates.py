"""Chat templates for tests, a chat, and tokenizers that have them."""
import json

from tokenizers.processors import TemplateProcessing

from examples import tiny

ROLE, SAID = "{{ m['role'] }}", "{{ m['content'] }}"
CHAT = json.loads(r"""[
    {"role": "user", "content": "Sort 31"},
    {"role": "assistant", "content": "13"},
    {"role": "user", "content": " what\n\nelse? "},
    {"role": "assistant", "content": "true or false\n  <b>yes</b>"},
    {"role": "user", "content": "no"},
    {"role": "assistant", "content": "é 99"}]""")


def template(other: str, assistant: str, header: str, before: str = "", tail: str = "") -> str:
    """Returns a chat template. The text in «» of `assistant` is what the assistant says:
    transformers' {% generation %} in a reference, nothing in what is tested."""
    return (before + "{% for m in messages %}{% if m['role'] == 'assistant' %}" + assistant
            + "{% else %}" + other + "{% endif %}{% endfor %}{% if add_generation_prompt %}"
            + header + "{% else %}" + tail + "{% endif %}")


def processed(tokenizer, before: list[str], after: list[str]):
    """Makes a tokenizer put these tokens around each text, as a tokenizer.json can say."""
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=" ".join([*before, "$A", *after]), special_tokens=[
            (t, tokenizer.convert_tokens_to_ids(t)) for t in {*before, *after}])
    return tokenizer


def tokenizer_of(controls: str, text: str):
    """Returns tiny's tokenizer with these control tokens, the last of which is its EOS, and this
    template, without its «». A control token at its begin is put before each text, as Llama's and
    Mistral's do."""
    made, controls = tiny.make_tokenizer(), controls.split()
    made.add_special_tokens({"additional_special_tokens": controls, "eos_token": controls[-1]})
    made.chat_template = text.replace("«", "").replace("»", "")
    return processed(made, controls[:1], []) if text.startswith(controls[0]) else made


def with_traits(opens: bool, drops: bool, trims: bool, ends: bool):
    """Returns a tokenizer whose template opens a thought where the model is asked, drops thoughts,
    trims what is said, and ends turns."""
    said = "m['content']" + ".split('</think>')[-1]" * drops
    return tokenizer_of("<|im_start|> <|im_end|>", template(
        f"<|im_start|>{ROLE}\n{SAID}<|im_end|>\n",
        f"<|im_start|>assistant\n{{{{ {said}{' | trim' * trims} }}}}{'<|im_end|>' * ends}\n",
        "<|im_start|>assistant\n" + "<think>\n" * opens))
