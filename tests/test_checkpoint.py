"""checkpoint.py on real gloo ranks, with a policy and a critic of two layers: save, find, load, and what may go wrong."""
import json
import os
import resource
import shutil
from pathlib import Path

import pytest

from ranks import results

SHAPE = dict(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    """A tiny model with tied embeddings, as a Hugging Face folder."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("model")
    Qwen2ForCausalLM(Qwen2Config(**SHAPE, tie_word_embeddings=True, dtype="float32")).save_pretrained(path)
    return str(path)


# ---- what the ranks do ----------------------------------------------------------------------------------------------

def make(world, folder):
    import torch
    import model
    settings = dict(betas=(0.9, 0.999), weight_decay=0.01, max_grad_norm=1.0)
    return {"policy": model.Policy(model.build(model.Scorer, folder, world, compute=torch.float32), world, **settings),
            "critic": model.Critic(model.build(model.Valuer, folder, world, compute=torch.float32), world, **settings)}


def learn(trained, step: int) -> None:
    """One update of both from a gradient that is a function of the step and the parameter's name alone."""
    import torch
    from torch.distributed.tensor import distribute_tensor
    for it in trained.values():
        for i, p in enumerate(it.module.parameters()):
            g = torch.randn(p.shape, generator=torch.Generator().manual_seed(1000 * step + i))
            p.grad = distribute_tensor(g, p.device_mesh, p.placements, src_data_rank=None)
        it.step(1e-2)


def numbers(trained) -> dict:
    """Everything that is saved, whole, as numpy."""
    import checkpoint
    from torch.distributed.tensor import DTensor
    return {k: (t.full_tensor() if isinstance(t, DTensor) else t).clone().numpy() for k, t in checkpoint.tensors(trained).items()}


def a_run(world, folder, out, first: int, last: int, save_at: tuple, keep: int = 9):
    """Steps first..last-1 (resumed when first > 0), saving after those in save_at → (state found, numbers, random draws)."""
    import random
    import numpy as np
    import torch
    import checkpoint
    trained, state = make(world, folder), None
    random.seed(world.rank), np.random.seed(world.rank), torch.manual_seed(world.rank)
    if first:
        saved, passed = checkpoint.find(Path(out), world)
        assert saved.state["step"] == first and not passed, (saved, passed)
        random.seed(77), np.random.seed(77), torch.manual_seed(77)
        checkpoint.load(saved, world, trained)
        state = saved.state
    for step in range(first, last):
        learn(trained, step)
        random.random(), np.random.rand(), torch.rand(1)
        if step + 1 in save_at:
            said = checkpoint.save(Path(out), world, trained, {"step": step + 1, "position": 5 * step, "settings": {"group": 8}}, keep)
            assert said is None, said
    return state, numbers(trained), (random.random(), np.random.rand(), float(torch.rand(1)))


def full_disk(world, folder, out):
    """The second save meets a limit on the size of files: a real error of the kernel, on one rank only."""
    import checkpoint
    trained = make(world, folder)
    learn(trained, 0)
    assert checkpoint.save(Path(out), world, trained, {"step": 1}, 1) is None
    if world.rank == world.size - 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, resource.RLIM_INFINITY))
    said = checkpoint.save(Path(out), world, trained, {"step": 2}, 1)
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    world.barrier()
    left = sorted(os.listdir(out))
    world.barrier()
    again = checkpoint.save(Path(out), world, trained, {"step": 3}, 1)
    return said, left, again, sorted(os.listdir(out)) if world.rank == 0 else None


def own_disks(world, folder, out):
    """Two machines that share no folder."""
    import checkpoint
    trained = make(world, folder)
    learn(trained, 0)
    return checkpoint.save(Path(out) / str(world.rank), world, trained, {"step": 1}, 1)


def found(world, folders):
    import checkpoint
    from plan import SettingsError
    told = []
    for folder in folders:
        try:
            saved, passed = checkpoint.find(Path(folder), world)
            told.append((saved and saved.state["step"], passed))
        except SettingsError as error:
            told.append(("refused", str(error)))
    return told


# ---- tests ----------------------------------------------------------------------------------------------------------

@pytest.fixture(scope="module")
def uninterrupted(folder, tmp_path_factory):
    """Two ranks, 4 steps, a checkpoint after 2 and after 4: (where, what each rank ended with)."""
    out = tmp_path_factory.mktemp("run") / "checkpoints"
    return out, results(2, a_run, folder, str(out), 0, 4, (2, 4))


def test_a_resumed_run_is_bit_for_bit_the_uninterrupted_one(folder, uninterrupted, tmp_path):
    where, whole = uninterrupted
    shutil.copytree(where / "step_2", tmp_path / "step_2")
    for (state, numbers, draws), (_, expected, expected_draws) in zip(results(2, a_run, folder, str(tmp_path), 2, 4, ()), whole):
        assert state["position"] == 5 and state["settings"] == {"group": 8}
        assert numbers.keys() == expected.keys() and any(k.endswith("exp_avg_sq") for k in numbers)
        assert all((numbers[k] == expected[k]).all() for k in expected)
        assert draws == expected_draws                     # each rank's own generators went on where they were
    assert whole[0][2] != whole[1][2]


@pytest.mark.parametrize("ranks", [3, pytest.param(1, marks=pytest.mark.slow)])
def test_resumes_on_another_number_of_ranks(folder, uninterrupted, tmp_path, ranks):
    where, whole = uninterrupted
    shutil.copytree(where / "step_2", tmp_path / "step_2")
    expected = whole[0][1]
    for _, numbers, _ in results(ranks, a_run, folder, str(tmp_path), 2, 4, ()):
        assert all(abs(numbers[k] - expected[k]).max() <= 1e-6 for k in expected)


def test_a_checkpoint_before_any_update_has_no_optimizer_state(folder, tmp_path):
    """The first steps' gradients may all have been skipped; resuming must not invent a state that AdamW would not have."""
    results(1, _saves_untouched, folder, str(tmp_path))


def _saves_untouched(world, folder, out):
    import checkpoint
    trained = make(world, folder)
    assert checkpoint.save(Path(out), world, trained, {"step": 1}, 1) is None
    again = make(world, folder)
    learn(again, 0)
    for it in again.values():
        it.optimizer.state.clear()
    checkpoint.load(checkpoint.find(Path(out), world)[0], world, again)
    assert not any(it.optimizer.state[p] for it in again.values() for p in it.module.parameters())
    assert all((a == b).all() for a, b in zip(numbers(trained).values(), numbers(again).values()))


def test_the_newest_are_kept_and_those_passed_over_go(folder, uninterrupted, tmp_path):
    where, _ = uninterrupted
    shutil.copytree(where / "step_2", tmp_path / "step_2")
    (tmp_path / "step_9").mkdir()                          # damaged, so passed over; newer than what will be saved
    (tmp_path / "step_3.partial").mkdir()                  # left by a kill
    results(2, _resume_past_damage, folder, str(tmp_path))
    assert sorted(os.listdir(tmp_path)) == ["step_4", "step_5"]


def _resume_past_damage(world, folder, out):
    import checkpoint
    trained = make(world, folder)
    saved, passed = checkpoint.find(Path(out), world)
    assert saved.state["step"] == 2 and len(passed) == 1
    checkpoint.load(saved, world, trained)
    for step in (3, 4, 5):
        assert checkpoint.save(Path(out), world, trained, {"step": step}, 2) is None


HARMS = {"flip": "__1_0.distcp is not what was written", "cut": "__0_0.distcp is not what was written: 1,000 bytes", "lose": "__0_0.distcp is missing",
         "state": "state.json is not what was written", "unsealed": "manifest.json is missing", "garbled": "manifest.json cannot be read"}


def test_a_damaged_checkpoint_is_passed_over_with_a_sentence(uninterrupted, tmp_path):
    where, _ = uninterrupted
    for harm in HARMS:
        for name in ("newest", "all"):
            for step in (2, 4):
                shutil.copytree(where / f"step_{step}", tmp_path / f"{harm}-{name}" / f"step_{step}")
            hurt(tmp_path / f"{harm}-{name}" / "step_4", harm)
        hurt(tmp_path / f"{harm}-all" / "step_2", harm)
    (tmp_path / "nothing" / "step_2.partial").mkdir(parents=True)
    newest, every = ([str(tmp_path / f"{harm}-{name}") for harm in HARMS] for name in ("newest", "all"))
    for told in results(2, found, [*newest, *every, str(tmp_path / "nothing"), str(tmp_path / "nowhere")]):
        for (step, passed), tells in zip(told, HARMS.values()):
            assert step == 2 and len(passed) == 1 and "step_4 is passed over" in passed[0] and tells in passed[0]
        for (kind, text), tells in zip(told[len(HARMS):], HARMS.values()):
            assert kind == "refused" and "step_2" in text and "step_4" in text and text.count(tells) == 2
        assert told[-2:] == [(None, []), (None, [])]


def hurt(path: Path, harm: str) -> None:
    if harm == "flip":
        data = bytearray((path / "__1_0.distcp").read_bytes())
        data[len(data) // 2] ^= 1
        (path / "__1_0.distcp").write_bytes(data)
    elif harm == "cut":
        os.truncate(path / "__0_0.distcp", 1000)
    elif harm == "lose":
        (path / "__0_0.distcp").unlink()
    elif harm == "state":
        (path / "state.json").write_text((path / "state.json").read_text().replace('"step": ', '"step":1'))
    elif harm == "unsealed":
        (path / "manifest.json").unlink()
    elif harm == "garbled":
        (path / "manifest.json").write_text("{")


@pytest.mark.parametrize("ranks", [2, pytest.param(1, marks=pytest.mark.slow)])
def test_a_full_disk_leaves_the_old_checkpoint_and_tells_every_rank(folder, tmp_path, ranks):
    outcomes = results(ranks, full_disk, folder, str(tmp_path))
    assert all(said for said, *_ in outcomes) and "GiB are free" in outcomes[0][0], outcomes
    assert all(left == ["step_1"] for _, left, *_ in outcomes), outcomes
    assert outcomes[0][2] is None and outcomes[0][3] == ["step_3"]


def test_machines_that_share_no_folder_are_told_so_and_no_checkpoint_is_called_whole(folder, tmp_path):
    said = results(2, own_disks, folder, str(tmp_path))
    assert said[0].startswith(said[1]) and "__1_0.distcp is not in rank 0's" in said[0] and "one shared folder" in said[0], said
    assert not (tmp_path / "0/step_1").exists()


def test_settings_that_cannot_change_are_refused_and_others_listed(tmp_path):
    import checkpoint
    from plan import SettingsError
    was = dict(model="tiny", group=8, lr=1e-3, steps=10, betas=(0.9, 0.99), name="a", reward=("exact",))
    saved = checkpoint.Saved(tmp_path, {"settings": json.loads(json.dumps(was))})
    assert checkpoint.compare(saved, was | {"name": "b"}) == []
    assert checkpoint.compare(saved, was | {"lr": 1e-4, "steps": 20, "fresh": 1}) == ["lr 0.0001 (was 0.001)", "steps 20 (was 10)", "fresh 1 (was None)"]
    with pytest.raises(SettingsError, match="group was 8 and is now 4; reward was .*exact.* and is now .*gsm8k"):
        checkpoint.compare(saved, was | {"group": 4, "reward": ("gsm8k",), "lr": 1.0})
