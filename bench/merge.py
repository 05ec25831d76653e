"""What bfloat16 keeps of a LoRA update that is merged into the weights.

    python examples/smollm2.py && python bench/merge.py runs/smollm2

In every seventh linear layer of a model folder: W is rounded to bfloat16, D is a random update of
rank 16 with ‖D‖ = size · ‖W‖, and what is kept is K = bfloat16(W + D) − W.
"""
import argparse

import torch
from safetensors.torch import load_file


def main(folder: str, rank: int) -> None:
    generator = torch.Generator().manual_seed(0)
    weights = [w.bfloat16().float() for name, w in load_file(f"{folder}/model.safetensors").items()
               if name.endswith("_proj.weight")][::7]
    print("| size | weights that change | part that is kept, <K, D> / <D, D> "
          "| relative error, ‖K − D‖ / ‖D‖ |\n|---|---|---|---|")
    for size in (1e-5, 1e-4, 1e-3, 1e-2):
        found = []
        for w in weights:
            a, b = (torch.randn(n, rank, generator=generator) for n in w.shape)
            d = a @ b.T
            d *= size * w.norm() / d.norm()
            k = (w + d).bfloat16().float() - w
            found.append([(k != 0).float().mean(), (k * d).sum() / d.square().sum(),
                          (k - d).norm() / d.norm()])
        changed, kept, error = torch.tensor(found).mean(0).tolist()
        print(f"| {size:g} | {100 * changed:.1f} % | {100 * kept:.1f} % | {error:.2f} |")
    print(f"\n{len(weights)} layers of {folder}, rank {rank}.")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder")
    parser.add_argument("--rank", type=int, default=16)
    main(**vars(parser.parse_args()))
