"""Weights & Biases: --wandb PROJECT."""
import os

import wandb


class Wandb:
    """A run there, offline if there is no key. Its id has the time when the run began, so a resumed
    run goes on there, and a name that is used again is another run."""

    def __init__(self, folder, *, settings):
        began = "".join(filter(str.isdigit, settings["began"]))
        known = os.environ.get("WANDB_MODE") or wandb.login(prompt=False, verify=False)
        self.run = wandb.init(
            project=settings["wandb"], name=folder.name, resume="allow", dir=folder,
            id=f"{folder.name}-{began}", config=settings, mode=None if known else "offline")
        self.close = self.run.finish

    def __call__(self, step, metrics):
        self.run.log(metrics, step=step)
