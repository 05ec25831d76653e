"""The dates in a chat template are those of the run's clock, in each release of transformers.

The right text is what transformers 5.19 makes of the template when `strftime_now` is a function of
that clock. From 5.23 on a template gets no functions, so `chat_template.render` gives it none.
"""
import json
from datetime import datetime, timezone

import pytest
from hypothesis import given
from hypothesis import strategies as st

import chat_template
from errors import SettingsError
from examples import tiny
from templates import CHAT

CLOCK = datetime(2024, 2, 3, 4, 5, 6, 789, tzinfo=timezone.utc).strftime
DIRECTIVES = [f"%{flag}{letter}" for flag in ("", *"-_0^#EO", "5", "-3", "^_9")
              for letter in "aAbBcCdDeFgGhHIjklmMnpPrRsStTuUVwWxXyYzZ%"]
TOKENIZER = tiny.make_tokenizer()
LLAMA = """{%- if not date_string is defined %}
    {%- if strftime_now is defined %}
        {%- set date_string = strftime_now("%d %b %Y") %}
    {%- else %}
        {%- set date_string = "26 Jul 2024" %}
    {%- endif %}
{%- endif %}
Today Date: {{ date_string }}
{% for m in messages %}{{ m.content }}{% endfor %}"""
WRITTEN = {  # a template and its text, where transformers' function would give it
    "{{ strftime_now('%A, %-d %B %Y, %H:%M') }}": "Saturday, 3 February 2024, 04:05",
    "{{ strftime_now(format='%j') | int + 1 }}": "35",
    "{{ strftime_now('100%% %Y').split(' ') | join('|') }}": "100%|2024",
    "{% set now = strftime_now %}{{ now('%y') ~ now('%%y') }}": "24%y",
    "{% macro day() %}{{ strftime_now('%a') }}{% endmacro %}{% for m in messages[:2] %}"
    "{{ day() }}{% endfor %}": "SatSat",
    "{% macro strftime_now(f) %}own{{ f }}{% endmacro %}{{ strftime_now('%Y') }}": "own%Y",
    "\n\n  {% if strftime_now is defined %}\n  {{ strftime_now('%e') }}\n{% endif %}\n":
        "\n\n   3\n",
    "  {# strftime_now #}{% if true %}x{% endif %}": "x",
    "a\n  {%- if true %} {{ strftime_now('') }}b\n\n{% endif %}": "a b\n\n",
    LLAMA: "Today Date: 03 Feb 2024\n" + "".join(m["content"] for m in CHAT)}


def dated(template, options: dict | None = None, **more) -> str:
    """Returns the text that the run makes of CHAT with this template."""
    tokenizer = tiny.make_tokenizer()
    tokenizer.chat_template, tokenizer.clock, own = template, CLOCK, tokenizer.apply_chat_template

    def only_data(messages, **given):
        assert given == json.loads(json.dumps(given)), "transformers makes texts of functions"
        return own(messages, **given)

    tokenizer.apply_chat_template = only_data
    return chat_template.render(CHAT, tokenizer, options or {}, **more)


@given(pieces=st.lists(st.sampled_from([*DIRECTIVES, "%", "%Q", "%:z", "é", "'", '"', "\\", "\n",
                                        "{{", "}}", "{%", " "]) | st.text("%dY -", max_size=3)))
def test_any_format_is_the_clocks(pieces):
    form = "".join(pieces)
    assert dated("{{ strftime_now(form) }}|{{ strftime_now('%d') }}", {"form": form}) == (
        f"{CLOCK(form)}|03")


@pytest.mark.parametrize("template", WRITTEN)
def test_a_template_is_written_as_with_a_function(template):
    assert dated(template) == WRITTEN[template]


def test_named_templates_have_dates_and_the_row_chooses_one():
    """As in apply_chat_template: by its name, or tool_use where the row has tools."""
    named = {"default": "{{ strftime_now('%d') }}", "rag": "no date",
             "tool_use": "{{ strftime_now('%b') }}{{ tools }}"}
    tools = [{"type": "function"}]
    assert dated(named) == "03"
    assert dated(named, {"tools": tools}) == f"Feb{tools}"
    assert dated(named, {"chat_template": "rag"}) == "no date"
    assert dated(named, {"chat_template": "{{ strftime_now('%Y') }}"}) == "2024"


@pytest.mark.parametrize("template", [
    "{{ strftime_now() }}", "{{ strftime_now(5) }}", "{{ strftime_now('%Y', 1) }}",
    "{{ raise_exception(strftime_now('%Y')) }}", "{{ strftime_now('%Y') }", {"rag": "x"}])
def test_what_a_template_does_wrong_is_one_error(template):
    """It does not end in a loop that asks for a date for ever."""
    with pytest.raises((SettingsError, ValueError), match="chat template"):
        dated(template)


def test_without_a_clock_it_is_now():
    tokenizer = tiny.make_tokenizer()
    tokenizer.chat_template = "{{ strftime_now('%Y-%m-%d') }}"
    before, text, after = datetime.now(), chat_template.render(CHAT, tokenizer, {}), datetime.now()
    assert f"{before:%Y-%m-%d}" <= text <= f"{after:%Y-%m-%d}"
