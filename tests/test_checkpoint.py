"""keeping/checkpoint.py on real gloo ranks, with a policy and a critic of two layers."""
import json
import os
import resource
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

import learning
from ranks import results


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    """A tiny model with tied embeddings, as a Hugging Face folder."""
    path = tmp_path_factory.mktemp("model")
    learning.make_models(None, str(path))
    return str(path / "tied")


# ---- what the ranks do ----

def make(world, folder):
    """The critic has adapters: of it, only they and its head are saved."""
    from trainer import lora, model
    args = model.ModelArgs(dtype="float32"), model.OptimizerArgs(weight_decay=0.01)

    def build(kind, adapters):
        return model.build(kind, folder, world, args[0], adapters=adapters)

    return {"policy": model.Policy(build(model.LogprobModel, None), world, *args),
            "critic": model.Critic(build(model.ValueModel, lora.LoraArgs(2)), world, *args)}


def learn(trained, step: int) -> None:
    """The gradient depends on the step and the parameter's number alone."""
    import torch
    from torch.distributed.tensor import distribute_tensor
    for it in trained.values():
        for i, p in enumerate(it.parameters.values()):
            g = torch.randn(p.shape, generator=torch.Generator().manual_seed(1000 * step + i))
            p.grad = distribute_tensor(g, p.device_mesh, p.placements, src_data_rank=None)
        it.step(1e-2)


def numbers(trained) -> dict:
    """Everything that is saved, whole, as numpy."""
    from torch.distributed.tensor import DTensor

    from keeping import checkpoint
    return {k: (t.full_tensor() if isinstance(t, DTensor) else t).clone().numpy()
            for k, t in checkpoint.tensors(trained).items()}


def save(world, trained, out, step: int, keep: int, **state) -> str | None:
    from keeping import checkpoint
    return checkpoint.save(Path(out), world, trained, {"step": step} | state, keep)


def a_run(world, folder, out, first: int, last: int, save_at: tuple):
    """Steps first..last-1, resumed when first > 0."""
    from keeping import checkpoint
    trained, state = make(world, folder), None
    if first:
        saved, passed = checkpoint.find(Path(out), world)
        assert saved.state["step"] == first and not passed, (saved, passed)
        checkpoint.load(saved, world, trained)
        state = saved.state
    for step in range(first, last):
        learn(trained, step)
        if step + 1 in save_at:
            wrong = save(world, trained, out, step + 1, 9, position=5 * step, settings={"group": 8})
            assert wrong is None, wrong
    return state, numbers(trained)


def full_disk(world, folder, out):
    """The second save reaches a limit on the size of files, on one rank."""
    trained = make(world, folder)
    learn(trained, 0)
    assert save(world, trained, out, 1, 1) is None
    if world.rank == world.size - 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, resource.RLIM_INFINITY))
    wrong = save(world, trained, out, 2, 1)
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    world.barrier()
    left = sorted(os.listdir(out))
    world.barrier()
    again = save(world, trained, out, 3, 1)
    return wrong, left, again, sorted(os.listdir(out)) if world.rank == 0 else None


def full_from_the_start(world, folder, out):
    """The first save, and an export: neither is there, and both say so."""
    from keeping import checkpoint
    trained = make(world, folder)
    resource.setrlimit(resource.RLIMIT_FSIZE, (300, resource.RLIM_INFINITY))
    saved = save(world, trained, out, 1, 1)
    exported = None
    try:
        checkpoint.write(world, trained["policy"].export, folder, f"{out}/model")
    except checkpoint.NotWritten as error:
        exported = str(error)
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    return saved, exported, os.path.exists(f"{out}/model")


def own_disks(world, folder, out):
    """Two machines that share no folder."""
    trained = make(world, folder)
    learn(trained, 0)
    return save(world, trained, Path(out) / str(world.rank), 1, 1)


def untouched(world, folder, out):
    from keeping import checkpoint
    trained = make(world, folder)
    assert save(world, trained, out, 1, 1) is None
    again = make(world, folder)
    learn(again, 0)
    for it in again.values():
        it.optimizer.state.clear()
    checkpoint.load(checkpoint.find(Path(out), world)[0], world, again)
    assert not any(it.optimizer.state[p] for it in again.values() for p in it.module.parameters())
    one, other = numbers(trained), numbers(again)
    assert all((one[k] == other[k]).all() for k in {**one, **other})


def resume_past_damage(world, folder, out):
    from keeping import checkpoint
    trained = make(world, folder)
    saved, passed = checkpoint.find(Path(out), world)
    assert saved.state["step"] == 2 and len(passed) == 1
    checkpoint.load(saved, world, trained)
    for step in (3, 4, 5):
        assert save(world, trained, out, step, 2) is None


def found(world, folders):
    from dist import SettingsError
    from keeping import checkpoint
    answers = []
    for folder in folders:
        try:
            saved, passed = checkpoint.find(Path(folder), world)
            answers.append((saved and saved.state["step"], passed))
        except SettingsError as error:
            answers.append(("refused", str(error)))
    return answers


# ---- tests ----

@pytest.fixture(scope="module")
def uninterrupted(folder, tmp_path_factory):
    """Two ranks, 4 steps, a checkpoint after 2 and after 4: (where, what each rank ended with)."""
    out = tmp_path_factory.mktemp("run") / "checkpoints"
    return out, results(2, a_run, folder, str(out), 0, 4, (2, 4))


def test_a_resumed_run_is_bit_for_bit_the_uninterrupted_one(folder, uninterrupted, tmp_path):
    where, whole = uninterrupted
    shutil.copytree(where / "step_2", tmp_path / "step_2")
    resumed = results(2, a_run, folder, str(tmp_path), 2, 4, ())
    for (state, numbers), (_, expected) in zip(resumed, whole, strict=True):
        assert state == {"step": 2, "position": 5, "settings": {"group": 8}}
        assert numbers.keys() == expected.keys() and any(k.endswith("exp_avg_sq") for k in numbers)
        critic = {k.split(".")[-1] for k in numbers if k.startswith("critic.lm")}
        assert critic == {"lora_A", "lora_B", "step", "exp_avg", "exp_avg_sq"}
        assert all((numbers[k] == expected[k]).all() for k in expected)


@pytest.mark.parametrize("ranks", [3, pytest.param(1, marks=pytest.mark.slow)])
def test_resumes_on_another_number_of_ranks(folder, uninterrupted, tmp_path, ranks):
    where, whole = uninterrupted
    shutil.copytree(where / "step_2", tmp_path / "step_2")
    expected = whole[0][1]
    for _, numbers in results(ranks, a_run, folder, str(tmp_path), 2, 4, ()):
        assert all(abs(numbers[k] - expected[k]).max() <= 1e-6 for k in expected)


def test_a_checkpoint_before_any_update_has_no_optimizer_state(folder, tmp_path):
    """All gradients so far may have been skipped."""
    results(1, untouched, folder, str(tmp_path))


def test_the_newest_are_kept_and_those_passed_over_go(folder, uninterrupted, tmp_path):
    where, _ = uninterrupted
    shutil.copytree(where / "step_2", tmp_path / "step_2")
    (tmp_path / "step_9").mkdir()                          # damaged, and newer than the next saves
    (tmp_path / "step_3.partial").mkdir()                  # left by a kill
    results(2, resume_past_damage, folder, str(tmp_path))
    assert sorted(os.listdir(tmp_path)) == ["step_4", "step_5"]


# (a file of a checkpoint, its size after the harm; None: gone): what the sentence then says.
HARMS = {
    ("__0_0.distcp", 1000): "__0_0.distcp is not what was written: 1,000 bytes",
    ("__0_0.distcp", None): "__0_0.distcp is missing",
    (".metadata", 100): ".metadata is not what was written",
    ("state.json", None): "state.json is missing",
    ("state.json", 60): "state.json cannot be read", ("state.json", 0): "state.json cannot be read"}


def hurt(path: Path, file: str, size: int | None) -> None:
    if size is None:
        (path / file).unlink()
    else:
        os.truncate(path / file, size)


def test_a_damaged_checkpoint_is_passed_over_with_a_sentence(uninterrupted, tmp_path):
    where, _ = uninterrupted
    names = []
    for harmed in ((4,), (2, 4)):
        for i, harm in enumerate(HARMS):
            names.append(f"{i}-{len(harmed)}")
            shutil.copytree(where, tmp_path / names[-1])
            for step in harmed:
                hurt(tmp_path / names[-1] / f"step_{step}", *harm)
    (tmp_path / "nothing" / "step_2.partial").mkdir(parents=True)
    names += ["nothing", "nowhere"]
    for answers in results(2, found, [str(tmp_path / name) for name in names]):
        for (step, passed), words in zip(answers, HARMS.values(), strict=False):
            assert step == 2 and len(passed) == 1
            assert "step_4 is passed over" in passed[0] and words in passed[0], passed
        for (kind, text), words in zip(answers[len(HARMS):], HARMS.values(), strict=False):
            assert kind == "refused" and "step_2" in text and "step_4" in text
            assert text.count(words) == 2, text
        assert answers[-2:] == [(None, []), (None, [])]


@pytest.mark.parametrize("ranks", [2, pytest.param(1, marks=pytest.mark.slow)])
def test_a_full_disk_leaves_the_old_checkpoint_and_tells_every_rank(folder, tmp_path, ranks):
    outcomes = results(ranks, full_disk, folder, str(tmp_path))
    assert all(wrong for wrong, *_ in outcomes) and "GiB are free" in outcomes[0][0], outcomes
    assert all(left == ["step_1"] for _, left, *_ in outcomes), outcomes
    assert f"(__{ranks - 1}_0.distcp: " in f"({outcomes[0][0]}", outcomes
    assert outcomes[0][0].endswith("; checkpoints there: step_1"), outcomes
    assert outcomes[0][2] is None and outcomes[0][3] == ["step_3"]


def test_a_disk_that_is_full_from_the_start(folder, tmp_path):
    """The message once said that the last checkpoint stands, though there was none."""
    saved, exported, there = results(2, full_from_the_start, folder, str(tmp_path / "x"))[0]
    assert "_0.distcp: " in saved and saved.endswith("free there; checkpoints there: none"), saved
    assert exported and not there, exported


def test_machines_that_share_no_folder_are_told_so(folder, tmp_path):
    wrong = results(2, own_disks, folder, str(tmp_path))
    assert wrong[0].startswith(wrong[1]) and "one shared folder" in wrong[0], wrong
    assert "__1_0.distcp is not in rank 0's" in wrong[0], wrong
    assert not (tmp_path / "0/step_1").exists()


def test_settings_that_cannot_change_are_refused_and_others_listed(tmp_path):
    from dist import SettingsError
    from keeping import checkpoint
    was = dict(script="grpo", model="tiny", group=8, lr=1e-3, betas=(0.9, 0.99), reward=("exact",))
    saved = checkpoint.Saved(tmp_path, {"settings": json.loads(json.dumps(was))})
    assert checkpoint.compare(saved, was) == []
    new = {"lr": 1e-4, "fresh": 1}
    assert checkpoint.compare(saved, was | new) == ["lr 0.0001 (was 0.001)", "fresh 1 (was None)"]
    words = "group was 8 and is now 4; reward was .*exact.* and is now .*gsm8k"
    with pytest.raises(SettingsError, match=words):
        checkpoint.compare(saved, was | {"group": 4, "reward": ("gsm8k",), "lr": 1.0})
    with pytest.raises(SettingsError, match="script was grpo and is now ppo"):
        checkpoint.compare(saved, was | {"script": "ppo"})


def test_a_run_does_not_go_back_to_fewer_steps(tmp_path, monkeypatch):
    from dist import SettingsError
    from keeping import checkpoint

    saved = checkpoint.Saved(tmp_path / "step_40", {"step": 40, "settings": {}})
    monkeypatch.setattr(checkpoint, "find", lambda folder, world: (saved, []))

    def newest(steps, only=False):
        args = SimpleNamespace(steps=steps, eval_args=SimpleNamespace(eval_only=only))
        return checkpoint.newest(args, None, tmp_path, {})

    with pytest.raises(SettingsError, match="--steps 20: .*step_40 .* Would work: --steps 40"):
        newest(20)
    assert newest(40) == newest(20, only=True) == (saved, [f"resumed from {saved.path}"])


def test_a_checkpoint_before_the_first_step_leaves_adamw_without_a_state():
    """--offload optimizer moves the moments of each state that is there."""
    import torch

    from keeping import checkpoint

    weight = torch.nn.Parameter(torch.zeros(2))
    it = SimpleNamespace(parameters={"w": weight}, optimizer=torch.optim.AdamW([weight]))
    assert [*checkpoint.tensors({"policy": it})] == ["policy.w"] and not it.optimizer.state
