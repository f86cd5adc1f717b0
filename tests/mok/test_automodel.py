"""NeMo Automodel's MoK experts, its file unmodified from pinned commits, on four processes.

One commit knows BF16 alone, a later one MXFP8 as well. The files are not part of this repository: they are
read from MOK_AUTOMODEL_FILE and MOK_AUTOMODEL_MXFP8_FILE, or downloaded. What they import from their own
package are stand-ins, as small as they allow.
"""

from __future__ import annotations

import hashlib
import os
import sys
import types
import urllib.request
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "runtime"))
import ranks

PINNED = {  # precision: (commit, SHA-256 of the file, where it may be given)
    "bf16": (
        "ade4fccc6fbbcde44c34b4e1363bc0313506d300",
        "0f835c7bc6e095d2b4a3a1c9613d61575b17937283ed5290fa373a10ee375e15",
        "MOK_AUTOMODEL_FILE",
    ),
    "mxfp8": (
        "ad5daa283b1dd0b70c1978898a83446f1c28c03b",
        "07a25914a82bd755ae25b3ab370ba4709f739428b92e9d18e7f6491fc6d3c370",
        "MOK_AUTOMODEL_MXFP8_FILE",
    ),
}
URL = (
    "https://raw.githubusercontent.com/NVIDIA-NeMo/Automodel/"
    "{commit}/nemo_automodel/components/moe/mok_experts.py"
)
SIZE, TOKENS, DIM, EXPERTS, TOPK = 4, 9, 256, 8, 2

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", params=PINNED)
def source(request):
    """(text, precision)"""
    commit, digest, variable = PINNED[request.param]
    given, url = os.environ.get(variable), URL.format(commit=commit)
    try:
        text = Path(given).read_bytes() if given else urllib.request.urlopen(url, timeout=10).read()
    except OSError as error:
        pytest.skip(f"Automodel's file cannot be had: {error}")
    assert hashlib.sha256(text).hexdigest() == digest, "not the pinned file"
    return text.decode(), request.param


def load(text, precision_):
    """The module, with stand-ins for what it imports of its package."""

    class MoKBackendConfig:
        precision = precision_

        def build(self):
            from mok.functional import MoKConfig

            return MoKConfig(2, 2, 256, 512, 0.5)

    def safe_import(name, *, msg=None):
        import importlib

        return True, importlib.import_module(name)

    stand_ins = {
        "components.models.common": {"BackendConfig": object, "MoKBackendConfig": MoKBackendConfig},
        "components.moe.config": {"MoEConfig": object},
        "components.moe.state_dict_utils": {"create_dtensor_from_local": lambda t, mesh, rank: t},
        "shared.import_utils": {"safe_import": safe_import},
    }
    for name, content in stand_ins.items():
        module = types.ModuleType(f"nemo_automodel.{name}")
        module.__dict__.update(content)
        sys.modules[module.__name__] = module
    module = types.ModuleType("mok_experts")
    exec(compile(text, "mok_experts.py", "exec"), module.__dict__)
    backend = types.SimpleNamespace(mok=MoKBackendConfig())
    config = types.SimpleNamespace(
        dtype=torch.bfloat16, dim=DIM, moe_inter_dim=DIM, n_shared_experts=1,
        shared_expert_inter_dim=None, expert_activation="swiglu", shared_expert_activation="swiglu",
        expert_bias=False, shared_expert_gate=False, moe_latent_size=None, swiglu_limit=2.0,
        n_routed_experts=EXPERTS,
    )  # fmt: skip
    return module.GroupedExpertsMoK(config, backend)


def inputs():
    """(x, weights, ids, dy of all ranks; shared; routed), the same everywhere."""
    rng = torch.Generator().manual_seed(7)

    def normal(*size, scale=1.0):
        return (torch.randn(size, generator=rng) * scale).bfloat16()

    n = SIZE * TOKENS
    ids = torch.randint(EXPERTS, (n, TOPK), generator=rng)
    weights = torch.rand(n, TOPK, generator=rng)
    tokens = normal(n, DIM), weights, ids, normal(n, DIM)
    shared = [normal(DIM, DIM, scale=0.06) for _ in range(3)]
    return tokens, shared, [normal(EXPERTS, DIM, DIM, scale=0.06) for _ in range(3)]


def _run(group, source, on_gpu):
    from torch.distributed.device_mesh import init_device_mesh

    device = "cuda" if on_gpu else "cpu"
    mesh = init_device_mesh(device, (SIZE,), mesh_dim_names=("ep",))
    (x, weights, ids, dy), shared, routed = inputs()
    mine = slice(group.rank * TOKENS, (group.rank + 1) * TOKENS)
    local = slice(group.rank * EXPERTS // SIZE, (group.rank + 1) * EXPERTS // SIZE)
    x, weights, ids, dy = (t[mine].to(device) for t in (x, weights, ids, dy))
    experts = load(*source)
    for name, value in zip(("gate", "up", "down"), routed, strict=True):
        parameter = torch.nn.Parameter(value[local].to(device))
        setattr(experts, f"routed_{name}_weights", parameter)
    shared = [torch.nn.Parameter(w.to(device)) for w in shared]
    experts.init_token_dispatcher(mesh)
    x, weights = x.requires_grad_(), weights.requires_grad_()
    output = experts(x, weights, ids, *shared)
    output.backward(dy)
    parts = [output, x.grad, weights.grad]
    parts += [getattr(experts, f"routed_{n}_weights").grad for n in ("gate", "up", "down")]
    assert all(w.grad is not None for w in shared)
    if on_gpu:
        torch.cuda.synchronize()
    found = [t.detach().cpu().float().numpy() for t in parts]
    from mok import functional

    functional.clear_workspace_cache()
    return found


def _emulated(group, source):
    from mok.tools.emulator import Emulator

    with Emulator("sm_90a", num_sms=4):
        return _run(group, source, False)


def _on_gpu(group, source):
    torch.cuda.set_device(group.rank % torch.cuda.device_count())
    return _run(group, source, True)


def alone(device, precision):
    """The same on one rank, by this project's own functions."""
    from mok import functional, mxfp8_quantize
    from mok.config import Config

    (x, weights, ids, dy), shared, routed = inputs()
    config = Config(2, 2, 256, 512)
    there = [t.to(device) for t in (x, weights, *shared, *routed)]
    if precision == "mxfp8":
        there[-3:] = map(mxfp8_quantize, there[-3:])
    with functional.create_workspace(
        config, device=device, max_tokens=len(x), hidden_size=DIM, intermediate_size=DIM,
        num_experts=EXPERTS, topk=TOPK, shared_intermediate_size=DIM, precision=precision,
    ) as made:  # fmt: skip
        schedule = functional.build_schedule(made, config, ids.to(device))
        output, context = functional.forward(config, made, schedule, *there, 2.0)
        grads = functional.backward(config, made, schedule, context, dy.to(device), *there, 2.0)
        made.check()
    return [t.detach().cpu().float() for t in (output, *grads[:5])]


def compare(results, want):
    for k, whole in enumerate(want):
        parts = torch.cat([torch.from_numpy(r[k]) for r in results])
        assert torch.equal(parts, whole), k


@pytest.mark.emulator
@pytest.mark.timeout(3000)
def test_four_processes_in_the_emulator(source, tmp_path):
    emulator = pytest.importorskip("mok.tools.emulator")
    started = ranks.start(_emulated, SIZE, tmp_path, source, timeout_s=1500.0)
    results = ranks.collect(started, limit_s=2400.0)
    assert sorted(results) == list(range(SIZE))
    assert all(state == "ok" for state, _ in results.values()), results
    with emulator.Emulator("sm_90a", num_sms=4):
        compare([results[r][1] for r in range(SIZE)], alone(torch.device("cpu"), source[1]))


@pytest.mark.gpu
def test_four_processes_on_a_gpu(source, tmp_path):
    results = ranks.run_ok(_on_gpu, SIZE, tmp_path, source, timeout_s=120.0)
    compare(results, alone(torch.device("cuda", 0), source[1]))
