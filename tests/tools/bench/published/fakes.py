"""Stand-ins for the peers' libraries: their calls and shapes, on one process and the CPU."""

from __future__ import annotations

import contextlib
import types

import torch
from torch import nn


def expert_by_expert(a, b, offs):
    """What ``torch._grouped_mm`` computes, also where torch has none for this machine."""
    ends = offs.tolist()
    starts = [0, *ends[:-1]]
    return torch.cat([a[s:e] @ b[i] for i, (s, e) in enumerate(zip(starts, ends, strict=True))])


class _Order:
    """Rows of (token, k) by expert, each expert's padded with zeros; none for experts elsewhere."""

    def __init__(self, ids, experts, align):
        self.tokens, self.columns, self.counts = [], [], []
        for e in range(experts):
            token, k = (ids == e).nonzero(as_tuple=True)
            pad = -len(token) % align
            self.tokens += [*token.tolist(), *[-1] * pad]
            self.columns += [*k.tolist(), *[-1] * pad]
            self.counts.append(len(token))
        self.index = torch.tensor(self.tokens, dtype=torch.long)
        self.k = torch.tensor(self.columns, dtype=torch.long)
        self.real = (self.index >= 0).unsqueeze(1)

    def expand(self, x):
        return torch.where(self.real, x[self.index.clamp(min=0)], 0)

    def weights(self, router):
        found = router[self.index.clamp(min=0), self.k.clamp(min=0)]
        return torch.where(self.real[:, 0], found, 0)

    def reduce(self, rows, tokens):
        out = torch.zeros(tokens, rows.shape[1], dtype=torch.float32)
        real = self.real[:, 0]
        return out.index_add(0, self.index[real], rows[real].float()).to(rows.dtype)

    def reduce_weights(self, weights, shape):
        out = torch.zeros(shape)
        real = self.real[:, 0]
        return out.index_put((self.index[real], self.k[real]), weights[real].float())


class ElasticBuffer:
    """DeepEP 2: ``dispatch`` and ``combine`` in the expanding layout."""

    calls: list = []  # noqa: RUF012

    def __init__(self, group, num_bytes=None, num_cpu_bytes=0, num_max_tokens_per_rank=0, hidden=0,
                 num_topk=0, use_fp8_dispatch=False, **more):  # fmt: skip
        assert num_max_tokens_per_rank and hidden and num_topk
        self.most, self.hidden = num_max_tokens_per_rank, hidden

    def dispatch(self, x, topk_idx=None, topk_weights=None, num_experts=None,
                 expert_alignment=None, handle=None, do_expand=False, do_zero_padding=False):  # fmt: skip
        assert do_expand and do_zero_padding and not torch.is_grad_enabled()
        assert x.shape[1] == self.hidden and len(x) <= self.most and x.dtype == torch.bfloat16
        self.calls.append("dispatch" if handle is None else "dispatch again")
        if handle is None:
            assert topk_weights.dtype == torch.float32 and topk_idx.dtype == torch.int64
            order = _Order(topk_idx, num_experts, expert_alignment)
            handle = types.SimpleNamespace(
                order=order, num_recv_tokens_per_expert_list=order.counts, shape=topk_idx.shape
            )
            weights = order.weights(topk_weights)
        else:
            assert topk_idx is None
            order, weights = handle.order, None
        return order.expand(x), None, weights, handle, None

    def combine(self, x, handle, topk_weights=None):
        self.calls.append("combine")
        assert len(x) == len(handle.order.tokens)
        tokens = handle.shape[0]
        weights = None
        if topk_weights is not None:
            assert topk_weights.dim() == 1
            weights = handle.order.reduce_weights(topk_weights, handle.shape)
        return handle.order.reduce(x, tokens), weights, None


class _HybridSend(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, probabilities, chosen, local, align):
        assert chosen.dtype == torch.bool and chosen.shape == probabilities.shape
        ids = torch.where(chosen, torch.arange(chosen.shape[1]), -1)
        order = _Order(ids, local, align)
        ctx.order, ctx.shape = order, probabilities.shape
        return order.expand(x), order.weights(probabilities), order

    @staticmethod
    def backward(ctx, rows, weights, _):
        x = ctx.order.reduce(rows, ctx.shape[0])
        return x, ctx.order.reduce_weights(weights, ctx.shape), None, None, None


class _HybridBack(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y, order, tokens):
        ctx.order = order
        return order.reduce(y, tokens)

    @staticmethod
    def backward(ctx, dy):
        return ctx.order.expand(dy), None, None


def hybrid_ep_dispatch(x, routing_map, probs, group, num_local_experts, num_permuted_tokens=None,
                       pad_multiple=None):  # fmt: skip
    """Megatron-Core's, on one process."""
    rows, weights, order = _HybridSend.apply(
        x, probs, routing_map, num_local_experts, pad_multiple or 1
    )
    align = pad_multiple or 1
    counts = torch.tensor([-(-n // align) * align for n in order.counts])
    return rows, weights, None, counts, (order, len(x))


def hybrid_ep_combine(x, handle, num_permuted_tokens, pad_multiple, fused=False):
    assert num_permuted_tokens == len(x)
    return _HybridBack.apply(x, *handle)


class GroupedLinear(nn.Module):
    """Transformer Engine's; in the autocast its precision is noted, not changed."""

    def __init__(self, num_gemms, in_features, out_features, bias=True, params_dtype=None,
                 device="cuda"):  # fmt: skip
        super().__init__()
        assert not bias and params_dtype == torch.bfloat16
        self.num_gemms = num_gemms
        for i in range(num_gemms):
            weight = torch.zeros(out_features, in_features, dtype=params_dtype, device=device)
            self.register_parameter(f"weight{i}", nn.Parameter(weight))

    def forward(self, rows, m_splits):
        assert sum(m_splits) == len(rows) and len(m_splits) == self.num_gemms
        if STATE["mxfp8"]:
            assert all(n % 32 == 0 for n in m_splits)
        weights = [getattr(self, f"weight{i}") for i in range(self.num_gemms)]
        return torch.cat([a @ w.T for a, w in zip(rows.split(m_splits), weights, strict=True)])


STATE = {"mxfp8": False, "entered": 0, "resets": 0}


@contextlib.contextmanager
def autocast(enabled, recipe):
    assert enabled and recipe == "mxfp8 blocks"
    STATE.update(mxfp8=True, entered=STATE["entered"] + 1)
    yield
    STATE["mxfp8"] = False


def fp8_autocast(enabled, fp8_recipe):
    return autocast(enabled, fp8_recipe)


def weighted_bias_swiglu_impl(y, bias, weights):
    """Megatron's SwiGLU, which applies the router's weights."""
    assert bias is None and weights.shape == (len(y), 1)
    gate, up = y.chunk(2, dim=-1)
    return (nn.functional.silu(gate) * up * weights).to(y.dtype)


def module(name, **contents):
    found = types.ModuleType(name)
    vars(found).update(contents)
    return found


def install(monkeypatch, *names, older=False):
    """Put the stand-ins into ``sys.modules``."""
    import sys

    te_calls = {"fp8_autocast": fp8_autocast} if older else {"autocast": autocast}
    te = module("transformer_engine.pytorch", GroupedLinear=GroupedLinear, **te_calls)
    a2a = module(
        "megatron.core.transformer.moe.fused_a2a",
        hybrid_ep_dispatch=hybrid_ep_dispatch, hybrid_ep_combine=hybrid_ep_combine,
        reset_hybrid_ep_buffer=lambda: STATE.update(resets=STATE["resets"] + 1),
    )  # fmt: skip
    swiglu = module(
        "megatron.core.fusions.fused_bias_swiglu",
        weighted_bias_swiglu_impl=weighted_bias_swiglu_impl,
    )
    groups = {
        "deep_ep": [module("deep_ep", ElasticBuffer=ElasticBuffer)],
        "te": [
            module("transformer_engine", pytorch=te), te,
            module("transformer_engine.common"),
            module("transformer_engine.common.recipe", MXFP8BlockScaling=lambda: "mxfp8 blocks"),
        ],
        "megatron": [
            module("megatron"), module("megatron.core"), module("megatron.core.transformer"),
            module("megatron.core.transformer.moe", fused_a2a=a2a), a2a,
            module("megatron.core.fusions"), swiglu,
        ],
        "torchao": [
            module("torchao"), module("torchao.prototype"),
            module("torchao.prototype.moe_training"),
            module(
                "torchao.prototype.moe_training.mxfp8_grouped_mm",
                _to_mxfp8_then_scaled_grouped_mm=expert_by_expert,
            ),
        ],
    }  # fmt: skip
    for name in names:
        for each in groups[name]:
            monkeypatch.setitem(sys.modules, each.__name__, each)
