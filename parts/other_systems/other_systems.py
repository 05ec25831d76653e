"""other_systems.py: flags of other systems, and what they are called here."""
import re
from pathlib import Path

PAGE = Path(__file__).resolve().parents[2] / "docs/use/recipes.md"
OTHERS = {  # the table of docs/use/recipes.md
    "--model": "TRL model_name_or_path, verl model.path, OpenRLHF pretrain, EasyR1 "
               " model.model_path",
    "--data": "TRL dataset_name, verl train_files, OpenRLHF prompt_data, EasyR1 train_files",
    "--eval_data": "verl val_files, EasyR1 val_files",
    "--reward": "TRL reward_funcs, verl custom_reward_function.path, OpenRLHF remote_rm_url, "
                "EasyR1 score_function",
    "--group": "TRL num_generations, verl rollout.n, OpenRLHF n_samples_per_prompt, EasyR1 "
               "rollout.n",
    "--batch": "verl train_batch_size, OpenRLHF rollout_batch_size rollout.batch_size, EasyR1 "
               "rollout_batch_size",
    "--minibatches (their number)": "TRL steps_per_generation, verl ppo_mini_batch_size, OpenRLHF "
        "train_batch_size train.batch_size, EasyR1 global_batch_size",
    "--epochs (over a rollout)": "TRL num_iterations, verl ppo_epochs, EasyR1 ppo_epochs",
    "--update_tokens (in tokens)": "TRL per_device_train_batch_size, verl "
        "ppo_micro_batch_size_per_gpu, OpenRLHF micro_train_batch_size train.micro_batch_size, "
        "EasyR1 micro_batch_size_per_device_for_update",
    "--score_tokens (in tokens)": "verl log_prob_micro_batch_size_per_gpu "
        "log_prob_micro_batch_size, OpenRLHF micro_rollout_batch_size rollout.micro_batch_size, "
        "EasyR1 micro_batch_size_per_device_for_experience",
    "--max_tokens": "TRL max_completion_length, verl max_response_length, OpenRLHF "
        "generate_max_len rollout.max_new_tokens, EasyR1 max_response_length",
    "--max_prompt_tokens": "TRL max_prompt_length, verl max_prompt_length, OpenRLHF "
        "prompt_max_len, EasyR1 max_prompt_length",
    "--steps (an epoch has rows / --batch)": "TRL max_steps num_train_epochs, verl "
        "total_training_steps total_epochs, OpenRLHF num_episodes train.num_episodes, EasyR1 "
        "total_episodes",
    "--lr": "TRL learning_rate, verl optim.lr, OpenRLHF actor_learning_rate, EasyR1 optim.lr",
    "--kl_loss_coef": "TRL beta, verl actor.kl_loss_coef, EasyR1 kl_coef",
    "--kl_reward_coef": "verl kl_ctrl.kl_coef, OpenRLHF init_kl_coef kl.init_coef",
    "--entropy_coef": "verl entropy_coeff, OpenRLHF actor.entropy_coef",
    "--clip_low (and --clip_high)": "TRL epsilon, verl clip_ratio clip_ratio_low, OpenRLHF "
        "eps_clip actor.eps_clip",
    "--clip_high": "TRL epsilon_high, verl clip_ratio_high, OpenRLHF eps_clip_low_high",
    "--dual_clip": "TRL delta, verl clip_ratio_c, OpenRLHF actor.dual_clip",
    "--loss (and --aggregation)": "TRL loss_type, verl loss_mode, OpenRLHF policy_loss_type",
    "--aggregation": "verl loss_agg_mode",
    "--advantage (gae: ppo.py)": "TRL scale_rewards, verl adv_estimator norm_adv_by_std_in_grpo, "
        "OpenRLHF advantage_estimator advantage.estimator, EasyR1 adv_estimator",
    "--eval_every": "TRL eval_steps, verl test_freq, OpenRLHF eval.steps, EasyR1 val_freq",
    "--save_every": "TRL save_steps, verl save_freq, OpenRLHF save_steps ckpt.save_steps, "
                    "EasyR1 save_freq",
    "--name": "TRL output_dir run_name, verl experiment_name, OpenRLHF save_path "
              "ckpt.output_dir, EasyR1 experiment_name",
    "--tp": "TRL vllm_tensor_parallel_size, verl tensor_model_parallel_size, OpenRLHF "
            "vllm_tensor_parallel_size vllm.tensor_parallel_size, EasyR1 "
            "rollout.tensor_parallel_size",
    "--gpu_memory_utilization": "TRL vllm_gpu_memory_utilization, verl "
        "rollout.gpu_memory_utilization, OpenRLHF vllm_gpu_memory_utilization "
        "vllm.gpu_memory_utilization, EasyR1 rollout.gpu_memory_utilization",
    "--checkpointing": "TRL gradient_checkpointing, verl enable_gradient_checkpointing, OpenRLHF "
        "gradient_checkpointing gradient_checkpointing_enable, EasyR1 "
        "enable_gradient_checkpointing",
    "--wandb": "TRL report_to, verl trainer.logger, OpenRLHF use_wandb, EasyR1 trainer.logger"}
ELSEWHERE = {  # what is no flag of a script
    r"(num|n)?_?gpus(_per_node)?|nproc(_per_node)?|num_processes|world_size":
        "the number of ranks is torchrun's: torchrun --nproc_per_node {value} {script}",
    "nnodes|num_nodes|num_machines":
        "the number of machines is torchrun's: torchrun --nnodes {value} … {script}",
    r"config(_(file|path|name))?|cfg|yaml": "there are no config files: flags stand on the command "
        "line, and {script} --help lists them",
    "deepspeed|fsdp|accelerate|ds_config": "FSDP2 is always on, and has no file of its own"}


def theirs(words: list[str], script: str = "grpo.py") -> tuple[list[str], list[str]]:
    """Returns a sentence for each of the words that is another system's flag (`--NAME VALUE`,
    `--NAME=VALUE`, or as verl and EasyR1 have it NAME=VALUE); and the words without them and their
    values."""
    sentences, rest, dropped = [], [], False
    for word, after in zip(words, [*words[1:], "--"], strict=True):
        flag, equals, value = word.partition("=")
        dashed, found = word.startswith("--"), []
        if dashed or equals and re.fullmatch(r"\+{0,2}[A-Za-z_][\w.]*", flag):
            value = value if equals else "" if after.startswith("--") else after
            found = ours(flag) or in_the_page(flag) or elsewhere(flag, value, script)
            sentences += found
        if dashed:
            dropped = bool(found)
        if not dropped and not found:
            rest.append(word)
    return sentences, rest


def last(flag: str) -> str:
    """Returns the name of a flag, as a part of a dotted name: verl's are long."""
    return "." + flag.lstrip("-+").replace("-", "_")


def ours(flag: str) -> list[str]:
    """Returns a sentence if other systems have the flag: what it is called here."""
    found = []
    for here, names in OTHERS.items():
        known = [system for system, *theirs in map(str.split, names.split(", "))
                 if any(last(flag).endswith("." + one) for one in theirs)]
        if known:
            whose = " and ".join(f"{system}'s" for system in known)
            whose = whose.replace(" and ", ", ", len(known) - 2)
            found.append(f"{whose} {'' if found else flag + ' '}is {here}")
    return [", ".join(found) + " here."] if found else []


def in_the_page(flag: str) -> list[str]:
    """Returns a sentence if the page's table of errors has the flag: what to use here."""
    page = PAGE.read_text() if PAGE.exists() else ""
    table = page.partition("## Errors of other systems")[2].partition("\n## ")[0]
    for words, here in re.findall(r"^\| (.+) \| (.+) \|$", table, re.M):
        if any(last(flag).endswith("." + word) for word in re.findall(r"`(\w+)`", words)):
            return [f"{flag}: " + re.sub(r"\[(.+?)\]\(.*?\)", r"\1", here).replace("`", "")]
    return []


def elsewhere(flag: str, value: str, script: str) -> list[str]:
    """Returns a sentence for a flag of ELSEWHERE."""
    name = last(flag).rpartition(".")[2]
    return [f"{flag}: {said.format(value=value or 'N', script=script)}."
            for known, said in ELSEWHERE.items() if re.fullmatch(known, name)]
