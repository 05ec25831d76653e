"""A checkpoint on real ranks, with a policy and a critic: every bit comes back, on any disk."""
import os
import resource
import shutil
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.distributed.tensor import DTensor, distribute_tensor

import checkpoint
import fakes
import learning
import log
import model
from errors import SettingsError
from house import module
from ranks import results
from settings import changed
from tools import float64

lora = module("parts.lora.lora")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("model")
    learning.make_models(None, str(path))
    return str(path / "tied")


# ---- what the ranks do ----

def make(world, folder):
    """The critic has adapters: of it, only they and its head are saved."""
    args = fakes.args(dtype="float64", weight_decay=0.01)
    adapted = changed(args, lora_rank=2) if lora else args
    kind = model.kinds(adapted, model.config_of(folder)).value_model
    return {"policy": model.Policy(
                float64.build(model.LogprobModel, folder, world, args), world, args),
            "critic": model.Critic(float64.build(kind, folder, world, adapted), world, adapted)}


def learn(trained, step: int) -> None:
    """The gradient depends on the step and the parameter's number alone."""
    for it in trained.values():
        for i, p in enumerate(it.parameters.values()):
            generator = torch.Generator().manual_seed(1000 * step + i)
            g = torch.randn(p.shape, generator=generator).to(p.dtype)
            p.grad = distribute_tensor(g, p.device_mesh, p.placements, src_data_rank=None)
        it.step(1e-2)


def numbers(trained) -> dict:
    return {k: (t.full_tensor() if isinstance(t, DTensor) else t).clone().numpy()
            for k, t in checkpoint.tensors(trained).items()}


def save(world, trained, out, step: int, keep: int, **state) -> str:
    try:
        checkpoint.save(Path(out), world, trained, {"step": step} | state, keep)
    except log.NotWritten as error:
        return str(error)
    return ""


def a_run(world, folder, out, first: int, last: int, save_at: tuple):
    """Steps first..last-1, resumed when first > 0."""
    trained, state = make(world, folder), None
    if first:
        saved = checkpoint.find(Path(out), world)
        assert saved.state["step"] == first, saved
        checkpoint.load(saved, world, trained)
        state = saved.state
    for step in range(first, last):
        learn(trained, step)
        if step + 1 in save_at:
            wrong = save(world, trained, out, step + 1, 9, position=5 * step, settings={"group": 8})
            assert not wrong, wrong
    return state, numbers(trained)


@contextmanager
def limited(size: int):
    """This rank's files cannot grow above `size` bytes."""
    infinite = resource.RLIM_INFINITY
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, infinite))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (infinite, infinite))


def bad_disks(world, folder, out):
    """The second save reaches a limit on one rank, the export on all; then each has a disk of its
    own → what each says, and what is left after it."""
    trained = make(world, folder)
    learn(trained, 0)
    assert not save(world, trained, out, 1, 1)
    with limited(10_000) if world.rank == world.size - 1 else nullcontext():
        full = save(world, trained, out, 2, 1)
    world.barrier()
    left = sorted(os.listdir(out))
    world.barrier()
    again = save(world, trained, out, 3, 1)
    world.barrier()
    after, export_said = sorted(os.listdir(out)), ""
    with limited(300):
        try:
            checkpoint.export_model(trained["policy"], folder, f"{out}/model")
        except log.NotWritten as error:
            export_said = str(error)
    own = save(world, trained, Path(out, f"own-{world.rank}"), 1, 1)
    return SimpleNamespace(full=full, left=left, again=again, after=after, export=export_said,
                           own=own)


def untouched(world, folder, out):
    trained = make(world, folder)
    assert not save(world, trained, out, 1, 1)
    again = make(world, folder)
    learn(again, 0)
    for it in again.values():
        it.optimizer.state.clear()
    checkpoint.load(checkpoint.find(Path(out), world), world, again)
    assert not any(it.optimizer.state[p] for it in again.values() for p in it.module.parameters())
    one, other = numbers(trained), numbers(again)
    assert all((one[k] == other[k]).all() for k in {**one, **other})


def newest(world, folder, out, folders):
    """Of each folder the step of the newest checkpoint, or the sentence. None: there is none.
    Then step 9 is saved twice in `out`: SIGTERM may come after the last save."""
    answers = []
    for path in folders:
        try:
            saved = checkpoint.find(Path(path), world)
            answers.append(saved and saved.state["step"])
        except SettingsError as error:
            answers.append(str(error))
    trained = make(world, folder)
    checkpoint.load(checkpoint.find(Path(out), world), world, trained)
    for step in (8, 9, 9, 10, 11):
        assert not save(world, trained, out, step, 2)
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
        assert not lora or critic == {"lora_A", "lora_B", "step", "exp_avg", "exp_avg_sq"}
        assert all((numbers[k] == expected[k]).all() for k in expected)


def test_resumes_on_another_number_of_ranks(folder, uninterrupted, tmp_path):
    where, whole = uninterrupted
    shutil.copytree(where / "step_2", tmp_path / "step_2")
    expected = whole[0][1]
    for _, numbers in results(3, a_run, folder, str(tmp_path), 2, 4, ()):
        assert all(abs(numbers[k] - expected[k]).max() <= 1e-14 for k in expected)


def test_a_checkpoint_before_any_update_has_no_optimizer_state(folder, tmp_path):
    """All gradients so far may have been skipped."""
    results(1, untouched, folder, str(tmp_path))


def test_the_newest_is_found_and_kept_and_what_a_kill_left_goes(folder, uninterrupted, tmp_path):
    """By its number: by its name 9 comes after 10. A state that cannot be read is one sentence."""
    where, _ = uninterrupted
    for old, new in (2, 9), (4, 10):
        shutil.copytree(where / f"step_{old}", tmp_path / f"ten/step_{new}")
    for name in "cut", "gone":
        shutil.copytree(where, tmp_path / name)
    os.truncate(tmp_path / "cut/step_4/state.json", 60)
    (tmp_path / "gone/step_4/state.json").unlink()
    (tmp_path / "nothing/step_2.partial").mkdir(parents=True)
    shutil.copytree(where / "step_2", tmp_path / "out/step_2")
    for left in "step_8.partial", "step_1.gone":
        (tmp_path / "out" / left).mkdir()
    folders = [str(tmp_path / name) for name in ("ten", "cut", "gone", "nothing", "no")]
    for whole, cut, gone, *none in results(2, newest, folder, str(tmp_path / "out"), folders):
        assert whole == 4 and none == [None, None]
        assert "step_4/state.json is damaged" in cut and "Would work: without " in cut
        assert "step_4/state.json cannot be read" in gone
    assert sorted(os.listdir(tmp_path / "out")) == ["step_10", "step_11"]


def test_a_full_disk_leaves_the_old_checkpoint_and_tells_every_rank(folder, tmp_path):
    """It leaves no half of a model. Machines that share no folder are told so."""
    outcomes = results(2, bad_disks, folder, str(tmp_path))
    for said in outcomes:
        assert said.left == ["step_1", "step_2.partial"], said
        assert "step_2.partial/__1_0.distcp cannot be written (" in said.full, said
        assert said.full.endswith("(ulimit -f).") and "\n" not in said.full
        assert not said.again and said.after == ["step_3"]
        assert "some ranks do not see rank 0's" in said.own, said
        assert "all machines share" in said.own
    assert f"{tmp_path}/model cannot be written (" in outcomes[0].export, outcomes
    assert not (tmp_path / "model").exists() and not (tmp_path / "own-0/step_1").exists()


def test_a_run_does_not_go_back_to_fewer_steps(tmp_path, monkeypatch):
    saved = checkpoint.Saved(tmp_path / "step_40", {"step": 40, "settings": {}})
    monkeypatch.setattr(checkpoint, "find", lambda folder, world: saved)

    def newest(steps, only=False):
        args = fakes.args(steps=steps, eval_only=only)
        return checkpoint.newest(args, None, tmp_path, {})

    with pytest.raises(SettingsError, match="--steps 20: .*step_40 .* Would work: --steps 40"):
        newest(20)
    assert newest(40) == newest(20, only=True) == saved


def test_a_checkpoint_that_any_rank_sees_is_not_written_again(tmp_path):
    asked = []
    world = SimpleNamespace(any_rank=lambda flag: asked.append(flag) or True)
    checkpoint.save(tmp_path, world, {}, {"step": 3}, 2)
    assert asked == [False] and not any(tmp_path.iterdir())
