"""TensorBoard.    pip install tensorboard; tensorboard --logdir runs"""
from torch.utils.tensorboard import SummaryWriter


class TensorBoard:
    def __init__(self, folder, *, settings):
        self.writer = SummaryWriter(folder / "tensorboard")
        self.close = self.writer.close

    def __call__(self, step, metrics):
        for name, value in metrics.items():
            self.writer.add_scalar(name, value, step)
        self.writer.flush()
