"""Run by torchrun from test_memory.py: measure_phases, with an out-of-memory error in a layer.

worst_case_worker.py FOLDER WHERE RANK CALL
"""
import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent.parent), str(Path(__file__).parent)]
import dist  # noqa: E402, I001  (first: it sets what torch reads)
import torch  # noqa: E402

from preflight import worst_case  # noqa: E402
import learning  # noqa: E402
from trainer import model  # noqa: E402
from preflight import plan  # noqa: E402


class Fails(torch.autograd.Function):
    """The identity, whose backward has no memory."""
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")


def main(folder: str, where: str, rank: str, call: str) -> None:
    world = dist.join(60)
    dist.Stop(world)
    args = learning.arguments(update_tokens=1024, score_tokens=1024, minibatches=2,
                              dtype="float32")
    module = model.build(model.LogprobModel, f"{folder}/untied", world, args.model_args)
    policy = model.Policy(module, world, args.model_args, args.optimizer_args)
    layer, calls = module.lm.model.layers[1], 0
    shipped = layer.forward

    def forward(*a, **k):
        nonlocal calls
        calls += 1
        if world.rank in map(int, rank.split(",")) and calls == int(call):
            if where == "forward":
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")
            return Fails.apply(shipped(*a, **k))
        return shipped(*a, **k)
    layer.forward = forward
    worst_case.measure_phases(plan.Plan(args, world.size, 64, 0), world, learning.VOCAB, policy)
    print("the worst case fits")


if __name__ == "__main__":
    dist.run(main, *sys.argv[1:])
