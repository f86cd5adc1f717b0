"""The all-to-all peer computes the layer, on two processes that talk through gloo."""

import os
import socket

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from mok.config import Shape
from mok.reference import forward_loop, random_case
from mok.tools.bench.programs.nccl_torch import NcclTorch

SHAPE = Shape(48, 64, 64, 4, 2)


def expert_by_expert(a, b, offs):
    """What ``_grouped_mm`` computes, also where torch has none for this machine."""
    starts = [0, *offs.tolist()[:-1]]
    return torch.cat(
        [a[s:e] @ b[i] for i, (s, e) in enumerate(zip(starts, offs.tolist(), strict=True))]
    )


def worker(rank: int, size: int, port: int, queue) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=size)
    torch._grouped_mm = lambda a, b, offs: expert_by_expert(a, b, offs)
    case = random_case(SHAPE)
    held = slice(rank * 2, rank * 2 + 2)
    mine = slice(rank * 24, rank * 24 + 24)
    layer = NcclTorch(
        case.routed.gate[held], case.routed.up[held], case.routed.down[held], 4, dist.group.WORLD
    )
    x = case.x[mine].clone().requires_grad_()
    y = layer(x, case.router_weights[mine], case.top_experts[mine])
    y.float().square().sum().backward()
    queue.put((rank, y.detach().float().numpy(), x.grad.float().numpy()))
    dist.barrier()
    dist.destroy_process_group()


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def test_two_ranks_compute_the_layer():
    context = mp.get_context("spawn")
    queue = context.Queue()
    port = free_port()
    processes = [context.Process(target=worker, args=(r, 2, port, queue)) for r in range(2)]
    for p in processes:
        p.start()
    found = dict((r, (y, g)) for r, y, g in (queue.get(timeout=120) for _ in processes))
    for p in processes:
        p.join(60)
        assert p.exitcode == 0
    y = torch.cat([torch.from_numpy(found[r][0]) for r in range(2)])
    grad = torch.cat([torch.from_numpy(found[r][1]) for r in range(2)])
    want = forward_loop(random_case(SHAPE)).float()
    assert (
        (y - want).norm() / want.norm()
    ).item() < 1.2e-2  # rounds at every step, as BF16 torch does
    assert grad.isfinite().all() and grad.norm() > 0


def test_experts_must_divide():
    class Two:
        pass

    weights = torch.zeros(2, 64, 64)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "get_world_size", lambda group: 2)
        with pytest.raises(ValueError, match="each must hold as many"):
            NcclTorch(weights, weights, weights, 5, Two())
