"""DDP and FSDP2 over two processes, each with kernels in an emulator of its own and tokens of its own."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("numba", reason="the emulator needs numba")
pytest.importorskip("cutlass", reason="kernels need the CuTe DSL")

from tests.mok.test_layer_torch import Block, run, unwrapped

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "runtime"))
import ranks

pytestmark = pytest.mark.emulator
ROUTED = {"moe.routed_gate", "moe.routed_up", "moe.routed_down"}


def tokens(rank):
    x = torch.randn(24 + rank, 64, generator=torch.Generator().manual_seed(3 + rank))
    return x.bfloat16().requires_grad_()


def of_all(tensor):
    """One tensor of each rank."""
    import torch.distributed as dist

    found = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(found, tensor.contiguous())
    return found


def mean(grad):
    """Of both ranks' gradients: halving is exact, so that the sum rounds once whoever divides, and when."""
    first, second = of_all(grad)
    assert not torch.equal(first, second)  # else no reduction could be seen
    return first / 2 + second / 2


def check(out, grads, again, found, alone):
    """Those of ``alone`` are the rank's own, the others both ranks' mean, bit for bit."""
    assert torch.equal(again, out)
    assert found.keys() == grads.keys()
    for name, grad in grads.items():
        if name.startswith("input"):
            assert torch.equal(found[name], grad)
            continue
        average = mean(grad)
        assert not torch.equal(average, grad)
        assert torch.equal(found[name], grad if name in alone else average), name


def ddp(rank, alone):
    from torch.nn.parallel import DistributedDataParallel as DDP

    model, x = Block(shared_intermediate_size=64), tokens(rank)
    out, grads = run(model, x)
    DDP._set_params_and_buffers_to_ignore_for_model(model, sorted(alone))
    again, found = run(DDP(model), x)
    check(out, grads, again, unwrapped(found, "module."), alone)


def fsdp2(rank):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor

    model, x = Block(shared_intermediate_size=64), tokens(rank)
    out, grads = run(model, x)
    routed = set(model.moe.routed_parameters())
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)), ignored_params=routed)
    again, sharded = run(model, x)
    # Half of each dense weight lies on each rank, and the experts where they were.
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, DTensor) == (name not in ROUTED), name
        if name not in ROUTED:
            assert 2 * parameter.to_local().numel() == parameter.numel()
    found = {n: g.full_tensor() if isinstance(g, DTensor) else g for n, g in sharded.items()}
    check(out, grads, again, found, ROUTED)


def _trained(group):
    from mok.tools.emulator import Emulator

    with Emulator("sm_90a", num_sms=4):
        ddp(group.rank, set())
        ddp(group.rank, ROUTED)
        fsdp2(group.rank)
    return True


def test_ddp_and_fsdp2_over_two_processes(tmp_path):
    """In one start of the processes: that, and compiling the emulator, is most of the time."""
    started = ranks.start(_trained, 2, tmp_path, timeout_s=300.0)
    assert ranks.collect(started, limit_s=400.0) == {0: ("ok", True), 1: ("ok", True)}
