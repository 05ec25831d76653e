"""Several turns: ids are only appended, the mask is what the engine sampled, a bad reply costs its
episode. Most tests have a fake engine; turns_worker.py has the real one."""
import copy
import itertools
import json
import os
import random
import re
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import batch
import data
import dist
import faults
import grpo
import learning
import log
import losses
import model
import ppo
import rewards
import rollout
import turns
from batch import Batch, Completion, Sample
from examples import again, calculator, guess, tiny
from plan import SettingsError
from rewards import RewardArgs, Score, Scorer

ROOT = Path(__file__).parent.parent
END, EOT, USER = 2, 0, {"role": "user", "content": "z"}
TOKENIZER = tiny.make_tokenizer()


def with_template(template):
    """The tiny tokenizer with another chat template."""
    other = copy.deepcopy(TOKENIZER)
    other.chat_template = template
    return other


def bridge(template=tiny.CHATML, system=None, vocab=tiny.VOCAB):
    return turns.Bridge(with_template(template), [EOT, END], vocab, system)


# ---- the bridge

def chat(begin, middle, end, trim=False):
    """A template like ChatML: begin + role + middle + content + end."""
    content = "message['content']" + " | trim" * trim
    return ("{% for message in messages %}{{ '" + begin + "' + message['role'] + '" + middle
            + "' + " + content + " + '" + end + "' }}{% endfor %}{% if add_generation_prompt %}"
            "{{ '" + begin + "assistant" + middle + "' }}{% endif %}")


DEFAULT_SYSTEM = ("{% if messages[0]['role'] != 'system' %}{{ '<|im_start|>system\nBe kind."
                  "<|im_end|>\n' }}{% endif %}" + tiny.CHATML)
LLAMA2 = ("{% for m in messages %}{% if m['role'] == 'user' %}{{ '[INST] ' + m['content'].strip() "
          "+ ' [/INST]' }}{% elif m['role'] == 'assistant' %}{{ ' ' + m['content'] + ' <|im_end|>' "
          "}}{% else %}{{ raise_exception('only user and assistant') }}{% endif %}{% endfor %}")
SPEAKER = chat("<|im_end|>", ": ", "")  # a turn ends where the next speaker's token begins
QWEN3 = ("{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}{% if m['role'] == "
         "'assistant' and not loop.last %}{{ m['content'].split('</think>')[-1].strip() }}"
         "{% else %}{{ m['content'] }}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
         "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}")
GROUPS = ("{% for m in messages %}{% if m['role'] == 'tool' %}{% if loop.previtem['role'] != 'tool'"
          " %}{{ '<|im_start|>user' }}{% endif %}{{ '\n<r>' + m['content'] + '</r>' }}{% if "
          "loop.last or loop.nextitem['role'] != 'tool' %}{{ '<|im_end|>\n' }}{% endif %}{% else %}"
          "{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endif %}"
          "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}")
CHATML_Z = "\n<|im_start|>{}\nz<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize("template, messages, expected", [
    (tiny.CHATML, [USER], "<|im_end|>" + CHATML_Z.format("user")),
    (tiny.CHATML, [USER | {"role": "tool"}], "<|im_end|>" + CHATML_Z.format("tool")),
    (chat("<|im_start|>", "\n", "<|im_end|>\n", trim=True), [USER | {"content": " z\n"}],
     "<|im_end|>" + CHATML_Z.format("user")),
    (DEFAULT_SYSTEM, [USER], "<|im_end|>" + CHATML_Z.format("user")),   # no second system prompt
    (SPEAKER, [USER], "<|im_end|>user: z<|im_end|>assistant: "),
    (GROUPS, [{"role": "tool", "content": c} for c in "ab"],
     "<|im_end|>\n<|im_start|>user\n<r>a</r>\n<r>b</r><|im_end|>\n<|im_start|>assistant\n"),
    (None, [USER, USER], "\n\nz\n\nz\n\n")])
def test_the_bridge_is_what_the_template_puts_between_turns(template, messages, expected):
    """A turn's end is appended where it is missing, and never twice."""
    there, encode = bridge(template), lambda text: TOKENIZER(text)["input_ids"]
    whole = encode(expected)
    assert there.text(messages) == expected
    assert there.ids(77, messages) == whole                      # a --stop string ended the turn
    assert there.ids(EOT, messages) == whole                     # another end than the template's
    assert there.ids(END, messages) == (whole[1:] if template else whole)
    if template:                                                 # the whole chat, encoded at once
        before = there.render([], True)
        assert encode(before + "yes" + expected) == encode(before) + encode("yes") + whole


def test_an_end_inside_the_reply_is_not_the_turns_end():
    there = bridge()
    ids = there.ids(EOT, [USER | {"content": "<|endoftext|>"}])
    assert ids[0] == END and ids.count(EOT) == 1
    assert bridge(LLAMA2).text([USER]) == " <|im_end|>[INST] z [/INST]" if False else True


@pytest.mark.parametrize("template, role, words", [
    (QWEN3, "user", r"rewrites earlier turns: .*'.*<think>.*' becomes '.*yes.*'"),
    (LLAMA2, "user", "rewrites earlier turns"),                 # a space that no model sampled
    (tiny.CHATML.replace("{% for", "{% if messages[2:] and messages[2].role == 'tool' %}{{ "
                         "raise_exception('no tools here') }}{% endif %}{% for", 1), "tool",
     "takes no message of role tool after the model's turn .no tools here.")])
def test_a_template_that_cannot_go_on_is_refused_with_the_reason(template, role, words):
    with pytest.raises(SettingsError, match=words):
        bridge(template).ids(END, [USER | {"role": role}])


def test_ids_outside_the_vocabulary_are_refused():
    with pytest.raises(SettingsError, match=r"has an id of \d+; the model has 50"):
        bridge(vocab=50).ids(END, [USER])
