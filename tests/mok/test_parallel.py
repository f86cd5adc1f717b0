"""Expert parallelism inside data parallelism: host parts on gloo, and the arithmetic in the emulator."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from mok import parallel
from mok.errors import GroupError
from mok.layer import MoELayer
from mok.runtime.group import Group

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "runtime"))
import ranks

H, I, E, K = 64, 64, 7, 2


class Processes(Group):
    """A group of several processes, as far as making a layer asks."""

    def __init__(self, size, rank):
        super().__init__(size, (rank,), None)


def model(size, rank):
    """A layer between two linear ones, the same on any number of ranks."""
    torch.manual_seed(11)
    layer = MoELayer(
        H, I, E, K, router="softmax", shared_intermediate_size=64, max_tokens=8,
        group=Processes(size, rank) if size > 1 else None,
    )  # fmt: skip
    torch.manual_seed(12)
    return torch.nn.Sequential(torch.nn.Linear(8, H), layer, torch.nn.Linear(H, 8))


def whole(size):
    """Every expert's gradient and the others', as one process has them."""
    reference = model(1, 0)
    rng = torch.Generator().manual_seed(5)
    return {n: torch.randn(p.shape, generator=rng) for n, p in reference.named_parameters()}


def give(module, size, rank, scale=1.0):
    for name, parameter in module.named_parameters():
        grad = whole(size)[name]
        if name.split(".")[-1] in parallel.ROUTED:
            experts = parallel._experts(module[1])
            grad = grad[experts[0] : experts[-1] + 1]
        parameter.grad = (grad * scale).to(parameter.dtype)


def _mesh(group):
    mesh = parallel.expert_mesh(2)
    import torch.distributed as dist

    module = model(2, mesh.rank)
    # Each of the four processes has a quarter of the batch: shared gradients differ by process, routed
    # ones are sums over an expert group.
    for name, parameter in module.named_parameters():
        routed = name.split(".")[-1] in parallel.ROUTED
        parameter.grad = torch.full_like(parameter, float(10 * mesh.copy if routed else group.rank))
    parallel.reduce_gradients(module, mesh)
    seen = {n: {float(v) for v in p.grad.unique()} for n, p in module.named_parameters()}
    give(module, 2, mesh.rank)
    norm = parallel.clip_grad_norm(module, 3.0, mesh)
    after = parallel.clip_grad_norm(module, 3.0, mesh)
    sizes = dist.get_world_size(mesh.expert), dist.get_world_size(mesh.replica)
    return (mesh.rank, mesh.copy), sizes, seen, float(norm), float(after)


def test_two_by_two(tmp_path):
    results = ranks.run_ok(_mesh, 4, tmp_path)
    assert [r[0] for r in results] == [(0, 0), (1, 0), (0, 1), (1, 1)]
    want = sum(g.double().to(p.dtype).double().square().sum() for g, p in zip(
        whole(1).values(), model(1, 0).parameters(), strict=True)).sqrt()  # fmt: skip
    for _, sizes, seen, norm, after in results:
        assert sizes == (2, 2)
        for name, values in seen.items():
            routed = name.split(".")[-1] in parallel.ROUTED
            # Routed: (0 + 10) / 4, over the copies only. Others: (0 + 1 + 2 + 3) / 4.
            assert values == ({2.5} if routed else {1.5}), name
        assert norm == results[0][3] and norm == pytest.approx(float(want), rel=1e-5)
        assert after == pytest.approx(3.0, rel=2e-3)


def _uneven(group):
    with pytest.raises(GroupError, match="divide"):
        parallel.expert_mesh(2)
    return True


def test_ranks_that_do_not_fit(tmp_path):
    assert ranks.run_ok(_uneven, 3, tmp_path) == [True] * 3
    with pytest.raises(GroupError, match="init_process_group"):
        parallel.expert_mesh(1)


# ---------------------------------------------------------------------- checkpoints


def _save(group, folder):
    import torch.distributed.checkpoint as dcp

    dcp.save(parallel.expert_state(model(group.size, group.rank)), checkpoint_id=folder)
    return True


def _load(group, folder):
    import torch.distributed.checkpoint as dcp

    module = model(group.size, group.rank)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.fill_(torch.nan)
    dcp.load(parallel.expert_state(module), checkpoint_id=folder)
    saved = model(1, 0).state_dict()
    experts = parallel._experts(module[1])
    for name, value in module.state_dict().items():
        want = saved[name]
        if name.split(".")[-1] in parallel.ROUTED:
            want = want[experts[0] : experts[-1] + 1]
        assert torch.equal(value, want), name
    return experts


def test_checkpoints_move_between_numbers_of_ranks(tmp_path):
    """Saved on four ranks, of which the experts are not evenly many; loaded on one, two and three."""
    folder = str(tmp_path / "checkpoint")
    ranks.run_ok(_save, 4, tmp_path / "save", folder)
    for size in (1, 2, 3):
        found = ranks.run_ok(_load, size, tmp_path / f"load{size}", folder)
        assert [e for part in found for e in part] == list(range(E))


# ---------------------------------------------------------------------- the same gradients


@pytest.mark.emulator
def test_two_copies_of_two_ranks_are_one_rank_on_the_whole_batch():
    """EP 2 x DP 2: the sum over copies of FP32 gradients differs from EP 1's by one rounding."""
    emulator = pytest.importorskip("mok.tools.emulator", reason="the emulator needs numba")
    from mok import functional
    from mok.config import Shape
    from mok.reference import random_case, random_gradient
    from tests.helpers_layer import SMALL, Layer

    case = random_case(Shape(80, 64, 64, 4, 2), seed=4)
    dy = random_gradient(case)

    def gradients(part, size):
        import dataclasses

        mine = dataclasses.replace(
            case, x=case.x[part], top_experts=case.top_experts[part],
            router_weights=case.router_weights[part],
        )  # fmt: skip
        with Layer(mine, size) as layer:
            result = layer(save_context=True)
            found = functional.backward(
                SMALL, layer.workspace, result.schedule, result.context,
                layer.each(layer.split(dy[part])), *layer.arguments(mine),
                grad_dtype=torch.float32,
            )  # fmt: skip
        return [torch.cat(g) if isinstance(g, list) else g for g in found[:5]]

    with emulator.Emulator("sm_90a", num_sms=6):
        one = gradients(slice(0, 80), 1)
        copies = [gradients(slice(0, 40), 2), gradients(slice(40, 80), 2)]
    for k in (0, 1):  # d_x, d_router_weights: of tokens, so the same bits
        assert torch.equal(torch.cat([c[k] for c in copies]), one[k])
    for k in (2, 3, 4):  # of experts: two FP32 sums added, where EP 1 has one
        total = copies[0][k] + copies[1][k]
        scale = one[k].abs().amax()
        assert (total - one[k]).abs().max() <= 2**-20 * scale
