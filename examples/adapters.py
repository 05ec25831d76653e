"""A reward that was written for verl or for EasyR1, as a reward of this project.

Two lines at the end of its file, or of another file beside it, which imports it:

    from examples.adapters import easyr1, verl
    reward = verl(compute_score)        # then: --reward THAT_FILE.py:reward

For what yours does differently, such as `async def`, copy the five lines.
"""


def verl(compute_score):
    """A function (data_source, solution_str, ground_truth, extra_info) that returns a number, or a
    dict with it as "score"."""
    def reward(completion, answer, data_source=None, extra_info=None):
        found = compute_score(data_source=data_source, solution_str=completion,
                              ground_truth=answer, extra_info=extra_info)
        return found["score"] if isinstance(found, dict) else found
    return reward


def easyr1(compute_score):
    """A function of a list of dicts, those of a prompt, that returns dicts with "overall"."""
    def reward(completions, completion, tokens, answer):  # lists; completions may be messages
        inputs = [dict(zip(("response", "response_length", "ground_truth"), one, strict=True))
                  for one in zip(completion, tokens, answer, strict=True)]
        return [found["overall"] for found in compute_score(inputs)]
    return reward


def easyr1_alone(compute_score):
    """A function of one such dict (reward_type=sequential), that returns one."""
    def reward(completion, tokens, answer):
        return compute_score({"response": completion, "response_length": tokens,
                              "ground_truth": answer})["overall"]
    return reward
