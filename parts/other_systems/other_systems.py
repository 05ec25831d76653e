"""other_systems.py: flags of other systems, and what they are called here."""

OTHERS = {  # the table of docs/use/recipes.md
    "--group": "TRL num_generations, verl rollout.n, OpenRLHF n_samples_per_prompt, EasyR1 "
               "rollout.n",
    "--batch": "verl train_batch_size, OpenRLHF rollout_batch_size rollout.batch_size, EasyR1 "
               "rollout_batch_size",
    "--minibatches (their number)": "TRL steps_per_generation, verl ppo_mini_batch_size, OpenRLHF "
        "train_batch_size train.batch_size, EasyR1 global_batch_size",
    "--update_tokens (in tokens)": "TRL per_device_train_batch_size, verl "
        "ppo_micro_batch_size_per_gpu, OpenRLHF micro_train_batch_size train.micro_batch_size, "
        "EasyR1 micro_batch_size_per_device_for_update",
    "--score_tokens (in tokens)": "verl log_prob_micro_batch_size_per_gpu "
        "log_prob_micro_batch_size, OpenRLHF micro_rollout_batch_size rollout.micro_batch_size, "
        "EasyR1 micro_batch_size_per_device_for_experience",
    "--max_tokens": "TRL max_completion_length, verl max_response_length, OpenRLHF "
        "generate_max_len rollout.max_new_tokens, EasyR1 max_response_length",
    "--lr": "TRL learning_rate, verl optim.lr, OpenRLHF actor_learning_rate, EasyR1 optim.lr",
    "--kl_loss_coef": "TRL beta, EasyR1 kl_coef"}


def theirs(words: list[str]) -> tuple[list[str], list[str]]:
    """A sentence for each of the words that is another system's flag; and the words without them
    and their values."""
    sentences, rest, dropped = [], [], False
    for word in words:
        if word.startswith("--"):
            found = ours(word.partition("=")[0])
            sentences += found
            dropped = bool(found)
        if not dropped:
            rest.append(word)
    return sentences, rest


def ours(flag: str) -> list[str]:
    """A sentence for each of our flags that another system calls so."""
    name = "." + flag[2:].replace("-", "_")  # verl's are long: --actor_rollout_ref.rollout.n
    return [f"{system}'s {flag} is {here} here." for here, names in OTHERS.items()
            for system, *known in map(str.split, names.split(", "))
            if any(name.endswith("." + one) for one in known)]
