"""What one component hands to the next: each argument is the one that is meant, of several that
would be legal."""
import re
from types import SimpleNamespace

import pytest
import torch

import dist
import errors
import fakes
import family
import model
import plan
import rewards
import rollout
import run
import same_policy
from batch import Batch
from data import Prompt
from fakes import args, completion, engine_of, rows, run_of
from rewards import Answer
from rollout import Request, hash_seed
from worker import Part

# ---- rollout.py


def test_a_completion_has_the_seed_of_its_run_purpose_prompt_and_number():
    engine, seen = engine_of(), []
    engine.complete = lambda requests, temperature: (
        seen.append([r.seed for r in requests]) or [completion() for _ in requests])
    prompts = [Prompt(5, rows(1)[0]), Prompt(8, rows(1)[0])]
    for purpose in "train", "eval":
        engine.sample(prompts, 2, 1.0, purpose)
    assert seen == [[hash_seed(7, purpose, position, i) for position in (5, 8) for i in range(2)]
                    for purpose in ("train", "eval")]


def test_a_request_has_its_own_room_and_every_end_token(monkeypatch):
    engine, engine_of_vllm = engine_of(), fakes.without_vllm(monkeypatch)
    engine.llm = engine_of_vllm("")
    engine.generate([Request([1], 3, 5), Request([1], 4)], 0.7)
    found = [(p.max_tokens, p.seed, p.temperature, p.stop_token_ids, p.ignore_eos)
             for p in engine_of_vllm.asked]
    assert found == [(5, 3, 0.7, [4, 6], True), (9, 4, 0.7, [4, 6], True)]


def test_each_phase_is_announced_with_the_number_of_its_parts():
    """So that ranks which disagree end, instead of waiting for each other."""
    engine, told = engine_of(), []
    engine.world.same_phase = lambda name, count: told.append((name, count))
    samples = engine.sample([Prompt(i, row) for i, row in enumerate(rows(2))], 3, 1.0)
    rewards.score_samples(scorer_of(engine.world)[1], samples, 3)
    micros = Batch(samples).micros(engine.world, range(4), 5, "update")
    assert told == [("rollout", 6), ("reward", 6), ("update", len(micros))] and len(micros) == 4


@pytest.mark.parametrize("rank", range(4))
def test_the_ranks_of_one_engine_share_its_completions(rank):
    engine = engine_of(rank, 4, tp=2)
    engine.generate = lambda requests, temperature: [r.seed for r in requests]
    del engine.complete
    found = engine.complete([Request([1], i) for i in range(7)], 1.0)
    assert found == [[0, 1], [2, 3], [4, 5], [6]][rank]


# ---- rewards.py

def scorer_of(world, groups: bool = False):
    """What score_samples needs of a run, and what it asks of its scorer."""
    asked = []

    def ask(items, size):
        asked.append((items, size))
        return [Answer([1.0], None) for _ in items]

    scorer = SimpleNamespace(groups=groups, ask=ask, unanswered=0, warned=False, kind="reward",
                             parts=[Part("exact", 1.0, None)], progress={})
    return asked, SimpleNamespace(world=world, scorer=scorer, log=fakes.Log(),
                                  engine=SimpleNamespace(text=lambda ids: "text"))


def test_what_a_scorer_is_asked_and_what_its_answer_is_worth():
    sampled = torch.tensor([True, False, True]).numpy()  # a reply is in between
    for groups, size, score in ((True, 3, 1.0), (False, 1, 1.0)):
        asked, its = scorer_of(fakes.World(), groups)
        samples = [fakes.sample(done=completion(3, sampled)) for _ in range(6)]
        rewards.score_samples(its, samples, 3)
        (items, of_a_call), = asked
        assert of_a_call == size and {item.tokens for item in items} == {2}
        assert {s.score.total for s in samples} == {score}


# ---- dist.py, run.py

def test_the_ranks_wait_as_long_as_the_flag_says(monkeypatch):
    waits = []
    monkeypatch.setattr(dist.td, "init_process_group", lambda backend, timeout=None, **o: (
        waits.append(timeout)))
    monkeypatch.setattr(dist.td, "new_group", lambda backend, timeout=None: waits.append(timeout))
    monkeypatch.setattr(dist.World, "joined", None)
    dist.join(7.0)
    assert [wait.total_seconds() for wait in waits] == [7.0, 7.0]


def test_a_mistake_of_another_rank_is_raised_here_too():
    world = fakes.World()
    world.gather = lambda mine: [*mine, "rank 1 has no disk"]
    with pytest.raises(errors.SettingsError, match="rank 1 has no disk"):
        world.together(int)


def test_the_engine_gets_the_sizes_of_the_plan_and_the_seed_of_the_run(tmp_path, monkeypatch):
    llm = fakes.without_vllm(monkeypatch)
    made = rollout.Engine(run_of(tmp_path, args(seed=3, max_tokens=11)))
    assert (made.max_tokens, made.seed, made.eos_ids) == (11, 3, [4])
    assert {"max_model_len": 50, "kv_cache_memory_bytes": 5}.items() <= llm.options.items()


def models_loaded(tmp_path, monkeypatch, given, reference: str | None) -> list[tuple]:
    """(class, folder, seed, whether it is trained) of each model that a run with these flags
    builds. reference: the folder of the reference model, where it is another."""
    loaded = []
    monkeypatch.setattr(run, "config_of", lambda folder: SimpleNamespace(model_type="llama"))
    monkeypatch.setattr(model, "build", lambda kind, folder, world, args, trained: (
        loaded.append((kind, folder, args.seed, trained))))
    monkeypatch.setattr(model, "Policy", lambda *given: SimpleNamespace(
        reference=lambda load: load()))
    monkeypatch.setattr(model, "Critic", lambda *given: None)
    it = run_of(tmp_path, given)
    it.inputs.reference = reference
    run.build_models(given, it.world, it.inputs)
    return loaded


def test_all_models_but_the_reference_are_loaded_to_be_trained(tmp_path, monkeypatch):
    given = args("ppo", seed=3, kl_reward_coef=0.1, critic_lr=1e-3)
    assert models_loaded(tmp_path, monkeypatch, given, None) == [
        (model.LogprobModel, "start", 3, True), (model.ValueModel, "start", 3, True),
        (model.LogprobModel, "start", 3, False)]


def test_a_resumed_run_is_restored_before_its_policies_are_compared(tmp_path, monkeypatch):
    it, kept = run_of(tmp_path), []
    monkeypatch.setattr(rewards, "Pool", lambda *given: SimpleNamespace(wait=int, progress={}))
    for name, fake in dict(
            build_models=lambda *given: ("policy", None, None),
            Engine=lambda it: SimpleNamespace(sleep=int, of=it.policy),
            extended=lambda place, kind, *given: kind, ask=lambda place, it: None,
            compare_policies=lambda it: kept.append(it.engine)).items():
        monkeypatch.setattr(run, name, fake)
    monkeypatch.setattr(run.dist, "Stop", lambda world: "stop")
    monkeypatch.setattr(run.Run, "restore", lambda it, saved: kept.append(saved))
    for saved, start in (None, 0), (SimpleNamespace(state={"step": 4}), 4):
        made = run.build(it.args, it.world, it.inputs, it.log, {}, saved)
        assert (made.engine.of, made.stop, made.start) == ("policy", "stop", start)
        assert made.trained == {"policy": "policy"}
        assert kept == [saved, made.engine][not saved:]
        kept.clear()


def test_a_rank_on_another_disk_ends_the_run_on_all_ranks(tmp_path):
    it, asked = run_of(tmp_path, args(save_every=2)), []
    it.log.open = lambda *given: (tmp_path / ".lock").touch()
    it.world.any_rank = lambda flag: asked.append(flag) or True  # another rank does not see it
    with pytest.raises(errors.SettingsError, match="a folder that all machines share"):
        run.open_folder(it.log, it.args, it.inputs, 0, {})
    assert asked == [False]


@pytest.mark.parametrize("name, bound", [
    ("dual_clip", 1), ("gpu_memory_utilization", 0)])
def test_a_bound_that_must_be_exceeded_is_refused(name, bound):
    text, *_ = plan.problems(fakes.args(**{name: float(bound)}), 1)
    assert text.startswith(f"--{name} must be more than {bound}")


def compared(gaps: dict, rounding: float = 0.0, max_gap: float | None = None) -> str:
    """The sentence of a run, or of its end."""
    log, bfloat16 = fakes.Log(), rounding > 0
    lm = SimpleNamespace(config=SimpleNamespace(model_type="kind"))
    try:
        same_policy.judge(SimpleNamespace(
            dtype=torch.bfloat16 if bfloat16 else torch.float32, log=log,
            policy=SimpleNamespace(module=SimpleNamespace(lm=lm)),
            args=SimpleNamespace(run_args=SimpleNamespace(max_gap=max_gap))), gaps, rounding)
    except errors.SettingsError as error:
        log.say(str(error))
    return log.said[0]


def test_the_limit_of_the_comparison_is_what_bfloat16_rounds_in_this_run():
    pair, other = "engine and trainer", "trainer and transformers"
    assert "compared this kind before" in compared({other: 1e-3, pair: 1e-3})
    assert f"{pair} differ " in compared({other: 1e-6, pair: 2e-3})
    assert "compared this kind" in compared({other: 1e-3, pair: 0.011}, rounding=0.0075)
    assert "compared this kind" in compared({pair: 0.004}, rounding=1e-4)  # of few uncertain tokens
    for gaps in {other: 1e-3, pair: 0.02}, {other: 0.02, pair: 1e-3}, {pair: float("inf")}:
        assert re.match(rf"{max(gaps, key=gaps.get)} differ .* than 0.015: 2 roundings of bfloat16",
                        compared(gaps, rounding=0.0075))
    assert "compared this kind" in compared({pair: 0.02}, rounding=0.0075, max_gap=0.03)
    assert "more than --max_gap 0.01" in compared({pair: 0.014}, rounding=0.0075, max_gap=0.01)
    assert "more than 0.15: 2 roundings" in compared({pair: 0.2}, rounding=3.0)


# ---- plan.py, model.py

@pytest.mark.parametrize("flags, old, reference", [
    ({}, False, False), (dict(kl_loss_coef=0.1), False, True), (dict(epochs=2), True, False),
    (dict(minibatches=2), True, False), (dict(engine_correction="mask"), False, False),
    (dict(kl_reward_coef=0.1), True, True)])
def test_a_pass_that_nothing_needs_is_not_made(flags, old, reference):
    assert (args(**flags).needs_old_logprobs, args(**flags).needs_reference) == (old, reference)


def test_what_offload_names_moves():
    moved, p = [], torch.nn.Parameter(torch.zeros(2))
    module = torch.nn.Linear(1, 1)
    module.to = moved.append
    for names, count in ((), 0), (("optimizer",), 0), (("params", "optimizer"), 1):
        it = object.__new__(model.Trained)
        it.module, it.moving, it.optimizer = module, names, torch.optim.AdamW([p])
        moment = torch.zeros(2)
        it.optimizer.state[p] = {"exp_avg": moment, "exp_avg_sq": moment, "step": 1}
        it.move(torch.device("meta"))
        assert moved == [torch.device("meta")] * count
        there = it.optimizer.state[p]["exp_avg_sq"].device.type
        assert there == ("meta" if "optimizer" in names else "cpu")


@pytest.mark.parametrize("wanted", [True, False])
def test_the_layers_are_recomputed_if_the_flag_says_so(monkeypatch, wanted):
    seen, lm = [], torch.nn.Sequential(torch.nn.ModuleList())
    lm.config = SimpleNamespace(model_type="llama")

    class Kind(model.Model):
        def __init__(self, lm, args):
            torch.nn.Module.__init__(self)
            self.family = family.Family(None)

    def shard(root, layers, mesh, compute, master, checkpointing, offload):
        seen.append((checkpointing, offload))
        raise StopIteration  # the rest needs weights

    for name, fake in dict(skeleton=lambda *given, **named: lm, shard=shard,
                           names_in_files=lambda *given: {},
                           init_device_mesh=lambda *given, **named: None).items():
        monkeypatch.setattr(model, name, fake)
    with pytest.raises(StopIteration):
        model.build(Kind, "", fakes.World(), args(checkpointing=wanted))
    assert seen == [(wanted, False)]
