"""What one component hands to the next: each argument is the one that is meant, of several that
would be legal. Stubs stand for what a test does not look at."""
import asyncio
import json
import re
import sys
from contextlib import nullcontext
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch

import data
import dist
import errors
import family
import flags
import grpo
import inputs
import model
import plan
import ppo
import rewards
import rollout
import run
from batch import Batch, Completion, Sample
from data import Prompt, Row, Stream
from examples import tiny
from house import module
from log import Log
from plan import Plan, changed
from rewards import Answer
from rollout import Engine, Request, hash_seed
from shapes import shape_of
from worker import Item, Part, Reward

distill = module("distill")
sft = module("sft")
waiting = module("parts.judges.waiting")
lora = module("parts.lora.lora")
turns = module("parts.turns.turns")


def args(**flags):
    return changed(grpo.Args(lr=1e-3), **flags)


def rows(n: int) -> list[Row]:
    return [Row(i, f"p{i}", [i], "a", {}, "rows") for i in range(n)]


def completion(n: int = 3, sampled=None, **more) -> Completion:
    return Completion(np.arange(n, dtype=np.int32), np.zeros(n, np.float32), False, sampled, **more)


class Log0:
    """It measures nothing."""
    def time(self, name):
        return nullcontext()


def world_of(rank: int = 0, size: int = 1) -> dist.World:
    """A rank whose collectives give its own part."""
    world = dist.World(rank, size, rank, size, torch.device("cpu"), None)
    world.gather, world.same_phase = list, lambda name, count: None
    return world


# ---- rollout.py

def engine_of(rank: int = 0, size: int = 1, tp: int = 1) -> Engine:
    engine = object.__new__(Engine)
    engine.world, engine.args, engine.log = world_of(rank, size), rollout.EngineArgs(tp=tp), Log0()
    engine.engines, engine.seed = size // tp, 7
    engine.max_tokens, engine.eos_ids, engine.bar = 9, [4, 6], False
    return engine


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
    made, engine, vllm = [], engine_of(), ModuleType("vllm")
    vllm.SamplingParams = lambda **given: made.append(SimpleNamespace(**given)) or made[-1]
    vllm.TokensPrompt = dict
    monkeypatch.setitem(sys.modules, "vllm", vllm)
    engine.llm = SimpleNamespace(generate=lambda *given, **named: [])
    engine.generate([Request([1], 3, 5), Request([1], 4)], 0.7)
    found = [(p.max_tokens, p.seed, p.temperature, p.stop_token_ids, p.ignore_eos) for p in made]
    assert found == [(5, 3, 0.7, [4, 6], True), (9, 4, 0.7, [4, 6], True)]


def test_each_phase_is_announced_with_the_number_of_its_parts():
    """So that ranks which disagree end, instead of waiting for each other."""
    engine, told = engine_of(), []
    engine.world.same_phase = lambda name, count: told.append((name, count))
    engine.complete = lambda requests, temperature: [completion() for _ in requests]
    samples = engine.sample([Prompt(i, row) for i, row in enumerate(rows(2))], 3, 1.0)
    rewards.score_samples(scorer_of(engine.world)[1], samples, 3)
    micros = Batch(samples).micros(engine.world, range(4), 5, "update")
    assert told == [("rollout", 6), ("reward", 6), ("update", len(micros))] and len(micros) == 4


@pytest.mark.parametrize("rank", range(4))
def test_the_ranks_of_one_engine_share_its_completions(rank):
    engine = engine_of(rank, 4, tp=2)
    engine.generate = lambda requests, temperature: [r.seed for r in requests]
    found = engine.complete([Request([1], i) for i in range(7)], 1.0)
    assert found == [[0, 1], [2, 3], [4, 5], [6]][rank]


def test_an_engine_with_the_adapter_gets_the_base_once_and_keeps_it_asleep(monkeypatch):
    vllm, world, took = ModuleType("vllm"), world_of(), []
    vllm.LLM = lambda folder, **given: SimpleNamespace(**given, reset_prefix_cache=lambda: True)
    world.device = torch.device("cuda")
    monkeypatch.setitem(sys.modules, "vllm", vllm)
    monkeypatch.setattr(Engine, "make_room", lambda self: None)
    monkeypatch.setattr(Engine, "take", lambda self, weights: took.extend(weights))
    monkeypatch.setattr(lora, "Base", lambda it: SimpleNamespace(weights=lambda dtype: ["base"]))
    monkeypatch.setattr(lora, "tensors", lambda lm, device: "adapter")
    monkeypatch.setattr(lora, "put_adapter", lambda llm, config, adapter, sync: (adapter, sync))
    given = dict(tokenizer=None, eos_ids=[], log=None, dtype=torch.float32, max_len=9, max_tokens=5,
                 seed=0, kv_cache=0.0, trained=[])
    kinds = Engine, lora.taking(Engine, {"r": 4, "target_modules": ["q"]})
    whole, engine = (kind("", world, rollout.EngineArgs(), **given) for kind in kinds)
    assert whole.sleep_level == 2 and engine.sleep_level == 1 and engine.llm.enable_sleep_mode
    assert engine.llm.enable_prefix_caching and engine.llm.max_lora_rank == 8
    policy = SimpleNamespace(module=SimpleNamespace(lm=None), weights=lambda dtype: ["merged"])
    for sync in 1, 2:
        engine.bring(policy)
        assert engine.request == ("adapter", sync) and took == ["base"]
    whole.bring(policy)
    engine.load(["other"])
    assert took == ["base", "merged", "other"] and engine.request is None


def test_an_engine_on_a_gpu_sleeps_between_its_turns(monkeypatch):
    """The trainer's weights leave the GPU first; the cache comes when the new weights are there."""
    engine, said = engine_of(), []
    engine.on_gpu, engine.dtype, engine.asleep = True, torch.float32, True
    engine.sleep_level, engine.world.device = 2, torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: said.append("wait"))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: said.append("room"))
    engine.trained = [SimpleNamespace(move=lambda device: said.append(device.type))]
    engine.llm = SimpleNamespace(
        sleep=lambda level: said.append(f"sleep {level}"), wake_up=lambda tags: said.extend(tags),
        collective_rpc=lambda name, kwargs: said.append(name), reset_prefix_cache=lambda: True)
    policy = SimpleNamespace(weights=lambda dtype: iter(()))
    for _ in range(2):
        with engine.generating(policy):
            said.append("generate")
    assert said == 2 * ["cpu", "wait", "room", "weights", "reload_weights", "kv_cache", "generate",
                        "sleep 2", "cuda"]


# ---- rewards.py

def scorer_of(world, groups: bool = False):
    """What score_samples needs of a run, and what it asks of its scorer."""
    asked = []

    def ask(items, size):
        asked.append((items, size))
        return [Answer([1.0], None) for _ in items]

    scorer = SimpleNamespace(groups=groups, ask=ask, unanswered=0, warned=False, kind="reward",
                             parts=[Part("exact", 1.0, None)], progress={})
    return asked, SimpleNamespace(
        world=world, scorer=scorer, engine=SimpleNamespace(text=lambda ids: "text"),
        log=SimpleNamespace(time=Log0().time, say=lambda text: None))


def scored(group: int, groups: bool = False, failed: bool = False):
    """What score_samples asks of a scorer, and the samples."""
    asked, its = scorer_of(world_of(), groups)
    sampled = np.array([True, False, True])  # a reply is in between
    samples = [Sample(Prompt(0, rows(1)[0]), completion(3, sampled, failed=failed))
               for _ in range(2 * group)]
    rewards.score_samples(its, samples, group)
    return asked, samples


def test_a_reward_of_groups_gets_a_group_in_a_call():
    assert [scored(3, groups)[0][0][1] for groups in (True, False)] == [3, 1]


def test_a_reward_sees_the_number_of_sampled_tokens():
    (items, _), = scored(1)[0]
    assert {item.tokens for item in items} == {2}


def test_a_completion_whose_reply_failed_has_no_score():
    assert {s.score.total for s in scored(2, failed=True)[1]} == {None}
    assert {s.score.total for s in scored(2)[1]} == {1.0}


def test_calls_without_a_score_are_counted_and_not_completions():
    scorer = SimpleNamespace(unanswered=0, warned=True, flag="reward")
    nothing = ["no"] * 8  # of two calls
    for count in 2, 4, 6:
        rewards.report(scorer, None, nothing, 2)
        assert scorer.unanswered == count
    with pytest.raises(errors.SettingsError):
        rewards.report(scorer, None, nothing, 2)


def test_the_time_of_a_call_grows_with_its_completions():
    async def slow(prompts, completions, **others):
        await asyncio.sleep(0.3)
        return [1.0] * len(completions)

    items = [Item("", "", None, {}, 0, False)] * 4
    loaded = waiting.Loaded([Reward(slow, None, groups=True)], 0.2, 0)
    call = waiting.Call(loaded.rewards, items)
    asyncio.run(waiting.score_all(loaded, [call]))
    assert call.found == [[1.0] * 4]


# ---- data.py, dist.py

def test_each_epoch_has_an_order_of_its_own():
    stream = Stream(rows(9), 3)
    first, second = ([p.row.index for p in stream.next(9)] for _ in range(2))
    assert sorted(first) == sorted(second) == list(range(9)) and first != second


def test_a_prompt_of_exactly_max_prompt_tokens_is_kept(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"prompt": "x" * n}) + "\n" for n in (2, 3, 4)))

    class Letters:
        added_tokens_decoder, chat_template = {}, None
        bos_token = eos_token = eos_token_id = pad_token = None

        def __call__(self, text, **options):
            return {"input_ids": [1] * len(text)}

    found, _ = data.load(str(path), Letters(), data.DataArgs(max_prompt_tokens=3))
    assert [len(row.prompt_ids) for row in found] == [2, 3]


def test_the_ranks_wait_as_long_as_the_flag_says(monkeypatch):
    waits = []
    monkeypatch.setattr(dist.td, "init_process_group", lambda backend, timeout=None, **o: (
        waits.append(timeout)))
    monkeypatch.setattr(dist.td, "new_group", lambda backend, timeout=None: waits.append(timeout))
    monkeypatch.setattr(dist.World, "joined", None)
    dist.join(7.0)
    assert [wait.total_seconds() for wait in waits] == [7.0, 7.0]


def test_a_mistake_of_another_rank_is_raised_here_too():
    world = world_of()
    world.gather = lambda mine: [*mine, "rank 1 has no disk"]
    with pytest.raises(errors.SettingsError, match="rank 1 has no disk"):
        world.together(int)


# ---- files and resume

def run_of(tmp_path, given=None, **inputs):
    """A Run that built nothing."""
    plan = SimpleNamespace(longest=50)
    given = given or args(seed=3, max_tokens=11, steps=6)
    inputs = SimpleNamespace(**{"rows": rows(4), "eval_rows": rows(2), "plan": plan,
                                "kv_cache": 5.0, "source": "", "tokenizer": None,
                                "reference": None, "waits": [], "ends": [4], **inputs})
    return run.Run(given, world_of(), inputs, Log(tmp_path, world_of(), given.steps), {"a": 1},
                   Stream(inputs.rows, given.seed), None,
                   SimpleNamespace(engine=lambda kind, *given: kind), None, None)


def test_the_engine_gets_the_sizes_of_the_plan_and_the_seed_of_the_run(tmp_path, monkeypatch):
    it, made = run_of(tmp_path), []
    monkeypatch.setattr(run, "Engine", lambda *given, **named: made.append(named) or (
        SimpleNamespace(sleep=lambda: None)))
    run.build_engine(it)
    asked = {name: made[0][name] for name in (
        "max_len", "max_tokens", "seed", "kv_cache", "eos_ids")}
    assert asked == {
        "max_len": 50, "max_tokens": 11, "seed": 3, "kv_cache": 5.0, "eos_ids": [4]}


@pytest.mark.parametrize("teacher, source", [(None, "start"), ("x", "teacher")])
def test_all_models_but_the_reference_are_loaded_to_be_trained(tmp_path, monkeypatch, teacher,
                                                               source):
    loaded, script = [], distill if teacher else ppo
    given = changed(script.Args(lr=1e-3), seed=3, **{"teacher": teacher} if teacher else {
        "kl_reward_coef": 0.1, "critic_lr": 1e-3})
    monkeypatch.setattr(model, "build", lambda kind, folder, world, flags, **options: (
        loaded.append((kind, folder, options))))
    monkeypatch.setattr(model, "Policy", lambda *given: SimpleNamespace(beginning=lambda: None))
    monkeypatch.setattr(model, "Critic", lambda *given: None)
    it = run_of(tmp_path, given, source="start", reference=teacher and "teacher")
    run.build_models(given, it.world, it.inputs)
    own = dict(seed=3)
    critic = [] if teacher else [(model.ValueModel, "start", own)]
    assert loaded == [(model.LogprobModel, "start", own), *critic,
                      (model.LogprobModel, source, dict(seed=3, trained=False))]


def test_a_resumed_run_is_restored_when_it_is_built(tmp_path, monkeypatch):
    it, kept = run_of(tmp_path), []
    monkeypatch.setattr(flags, "Pool", lambda *given: SimpleNamespace(
        wait=int, progress={}))
    monkeypatch.setattr(run, "try_worst_case", lambda it: None)
    monkeypatch.setattr(run.dist, "Stop", lambda world: "stop")
    monkeypatch.setattr(run, "build_models", lambda *given: ("policy", None, None))
    monkeypatch.setattr(run, "build_engine", lambda it: f"engine of {it.policy}")
    monkeypatch.setattr(run.Run, "restore", lambda it, saved: kept.append(saved))
    monkeypatch.setattr(run, "compare_policies", lambda it: kept.append(it.engine))
    for saved, start in (None, 0), (SimpleNamespace(state={"step": 4}), 4):
        made = run.build(it.args, it.world, it.inputs, it.log, {}, saved)
        assert (made.engine, made.stop, made.start) == ("engine of policy", "stop", start)
        assert made.trained == {"policy": "policy"}
        assert kept == [saved, made.engine][not saved:]  # it is compared as the checkpoint has it
        kept.clear()


def test_a_rank_on_another_disk_ends_the_run_on_all_ranks(tmp_path):
    it, asked = run_of(tmp_path, args(save_every=2)), []
    it.log.open = lambda *given: (tmp_path / ".lock").touch()
    it.inputs.plan.text = str
    it.log.world.any_rank = lambda flag: asked.append(flag) or True  # another rank does not see it
    with pytest.raises(errors.SettingsError, match="a folder that all machines share"):
        run.open_folder(it.log, it.args, it.inputs, 0, {})
    assert asked == [False]


def test_a_missed_grade_is_the_status_of_every_rank(tmp_path, monkeypatch):
    it = run_of(tmp_path, args(export=False, report=False), eval_rows=[])
    it.world.rank, it.log.writing = 1, False
    it.stop, it.engine = SimpleNamespace(agreed=lambda: False), None
    it.world.any_rank = lambda flag: True  # rank 0 missed it
    monkeypatch.setattr(run.Run, "close", lambda it: None)
    assert it.finish() == 1


def compared(gaps: dict, rounding: float = 0.0, max_gap: float | None = None) -> str:
    """The sentence of a run, or of its end."""
    said, bfloat16 = [], rounding > 0
    lm = SimpleNamespace(config=SimpleNamespace(model_type="kind"))
    try:
        run.judge(SimpleNamespace(
            dtype=torch.bfloat16 if bfloat16 else torch.float32,
            log=SimpleNamespace(say=said.append),
            policy=SimpleNamespace(module=SimpleNamespace(lm=lm)),
            args=SimpleNamespace(run_args=SimpleNamespace(max_gap=max_gap))), gaps, rounding)
    except errors.SettingsError as error:
        said.append(str(error))
    return said[0]


def test_the_limit_of_the_comparison_is_what_bfloat16_rounds_in_this_run():
    pair, other = "engine and trainer", "trainer and transformers"
    assert "compared this kind before" in compared({other: 9e-4, pair: 9e-4})
    assert f"{pair} differ " in compared({other: 1e-6, pair: 2e-3})
    assert "compared this kind" in compared({other: 1e-3, pair: 0.011}, rounding=0.0075)
    assert "compared this kind" in compared({pair: 0.004}, rounding=1e-4)  # of few uncertain tokens
    for gaps in {other: 1e-3, pair: 0.02}, {other: 0.02, pair: 1e-3}, {pair: float("inf")}:
        assert re.match(rf"{max(gaps, key=gaps.get)} differ .* than 0.015: 2 roundings of bfloat16",
                        compared(gaps, rounding=0.0075))
    assert "compared this kind" in compared({pair: 0.02}, rounding=0.0075, max_gap=0.03)
    assert "more than --max_gap 0.01" in compared({pair: 0.014}, rounding=0.0075, max_gap=0.01)
    assert "more than 0.15: 2 roundings" in compared({pair: 0.2}, rounding=3.0)


# ---- plan, turns, model

@pytest.mark.parametrize("flags, old, reference", [
    ({}, False, False), (dict(kl_loss_coef=0.1), False, True), (dict(epochs=2), True, False),
    (dict(minibatches=2), True, False), (dict(engine_correction="mask"), True, False),
    (dict(kl_reward_coef=0.1), True, True)])
def test_a_pass_that_nothing_needs_is_not_made(flags, old, reference):
    assert (args(**flags).needs_old_logprobs, args(**flags).needs_reference) == (old, reference)


def test_the_plan_says_that_the_data_has_fewer_rows_than_a_batch():
    texts = [Plan(args(batch=8, max_tokens=9), 1, n, 0).text() for n in (3, 8)]
    assert "(--batch 8, but --data has only 3)" in texts[0] and "--batch" not in texts[1]


@pytest.mark.parametrize("script", [grpo, sft])
def test_generated_rows_follow_the_seed(script):
    lm = SimpleNamespace(config=SimpleNamespace(model_type="qwen2"))
    it = inputs.ModelFiles(None, tiny.make_tokenizer(), None, lm, [2])
    found = [script.Args(data="tiny").load_rows("data", seed, it, [])
             for seed in (0, 1, 0)]
    texts = [[row.columns for row in rows] for rows in found]
    assert texts[0] == texts[2] != texts[1]


def test_a_dual_clip_of_1_is_refused():
    assert plan.problems(args(dual_clip=1.0), 1) == ["--dual_clip must be more than 1 (got 1.0)."]
    assert not plan.problems(args(dual_clip=1.5), 1)


def test_what_offload_names_moves(monkeypatch):
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

def test_ranks_share_parameters_and_moments():
    shape = shape_of("tiny")
    one, four = (plan.Memory(Plan(args(), ranks, 64, 0), shape, 80 * plan.GIB).parts
                 for ranks in (1, 4))
    for name in "weights", "gradients", "moments":
        assert one[name][1] == 4 * four[name][1] > 0


def test_a_rank_has_whole_experts():
    shape = shape_of("Qwen3-30B-A3B")
    found = plan.Memory(Plan(args(), 3, 64, 0), shape, 80 * plan.GIB)
    assert found.parts["weights"][1] == pytest.approx(4 * shape.params * 43 / 128)


def test_an_engine_of_several_ranks_gets_the_requests_of_all_of_them():
    plans = [Plan(args(batch=8, group=4, tp=tp), 4, 64, 0) for tp in (1, 2, 4)]
    assert [plan.requests for plan in plans] == [8, 16, 32]


def test_a_reply_is_put_behind_the_system_message_of_the_run(tmp_path, monkeypatch):
    made = []
    monkeypatch.setattr(turns, "ReplyPool", lambda *given: SimpleNamespace(
        wait=lambda: None, close=lambda: None, needs=[], methods=[]))
    monkeypatch.setattr(turns, "Bridge", lambda *given: made.append(given) or SimpleNamespace(
        ids=lambda last, messages: []))
    turns.check(args(system="S", reply="r.py:f"), "tokenizer", [4], 9, [])
    assert made == [("tokenizer", [4], 9, "S")]


@pytest.mark.parametrize("wanted", [True, False])
def test_the_layers_are_recomputed_if_the_flag_says_so(monkeypatch, wanted):
    seen = []

    class Stop(Exception):
        pass

    class Kind(model.Model):
        def __init__(self, lm, chunk):
            super().__init__()
            self.family = family.Family(None)

    def shard(root, layers, mesh, compute, master, checkpointing, offload):
        seen.append((checkpointing, offload))
        raise Stop

    lm = torch.nn.Sequential(torch.nn.ModuleList())
    lm.config = SimpleNamespace(model_type="llama")
    monkeypatch.setattr(model, "skeleton", lambda *given, **named: lm)
    monkeypatch.setattr(model, "names_in_files", lambda *given: {})
    monkeypatch.setattr(model, "init_device_mesh", lambda *given, **named: None)
    monkeypatch.setattr(model, "shard", shard)
    with pytest.raises(Stop):
        model.build(Kind, "", world_of(), model.ModelArgs(checkpointing=wanted))
    assert seen == [(wanted, False)]
