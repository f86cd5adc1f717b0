"""Stand-ins for sonic-moe and quack-kernels, on a CPU."""

from __future__ import annotations

import itertools
import sys
import types
from typing import Any

import torch


def segments(offsets: torch.Tensor) -> list[tuple[int, int]]:
    ends = offsets.tolist()
    return list(itertools.pairwise(ends))


class FakeSonic:
    """The parts of sonic-moe and quack that the adapter uses, with their layouts, in torch."""

    def __init__(self) -> None:
        self.configs: list[Any] = []

    def install(self, monkeypatch: Any) -> None:
        def module(name: str, **members: Any) -> Any:
            found = types.ModuleType(name)
            found.__path__ = []  # type: ignore[attr-defined]
            for key, value in members.items():
                setattr(found, key, value)
            monkeypatch.setitem(sys.modules, name, found)
            return found

        def semantic_value_key(value: Any, seen: Any) -> Any:
            raise TypeError("no fail-closed semantic key")

        def config(**values: Any) -> Any:
            return types.SimpleNamespace(**values)

        module("quack")
        module("quack.gemm_runtime")
        self.identity = module("quack.gemm_runtime.identity", semantic_value_key=semantic_value_key)
        module("quack.gemm_config", GemmConfig=config)
        module(
            "quack.gemm_interface",
            gemm_gated=self.gated,
            gemm_dgated=self.dgated,
            gemm_tuned=types.SimpleNamespace(fn=self.plain),
        )
        module("sonicmoe")
        triton_kernels = module(
            "sonicmoe.functional.triton_kernels", TC_topk_router_metadata_triton=self.metadata
        )
        self.forward = module("sonicmoe.functional.forward", gemm_gated=None, gemm=None)
        self.backward = module("sonicmoe.functional.backward", gemm_dgated=None, gemm=None)
        sizes = [(256, 1), (512, 8), (4096, 1), (1024, 8), (4096, 8)]
        self.reduction = types.SimpleNamespace(
            configs=[types.SimpleNamespace(kwargs={"BLOCK_H": h, "BLOCK_K": k}) for h, k in sizes]
        )
        module(
            "sonicmoe.functional.reduction_over_k_gather", token_gather_sum_kernel=self.reduction
        )
        module("sonicmoe.enums", ActivationType=types.SimpleNamespace(SWIGLU="swiglu"))
        up, down = self.autograd_functions()
        module(
            "sonicmoe.functional",
            _UpProjection=up,
            _DownProjection=down,
            triton_kernels=triton_kernels,
        )

    def metadata(self, ids, experts, frequency, offset, gather, scatter, reverse):
        assert ids.dtype == torch.int32
        flat = ids.flatten().long()
        order = flat.argsort(stable=True)
        frequency.copy_(torch.bincount(flat, minlength=experts))
        offset[0] = 0
        offset[1:] = frequency.cumsum(0)
        gather.copy_(order // ids.shape[1])
        scatter.copy_(order)
        reverse[order] = torch.arange(len(order), dtype=torch.int32)

    def gated(self, a, b, *, config, activation, cu_seqlens_m, A_idx, preact_out, postact_out,
              store_preact):  # fmt: skip
        self.configs.append(config)
        assert activation == "swiglu" and config.cluster_n == 1  # the gather allows no other
        rows = a[A_idx.long()].float()
        for e, (start, end) in enumerate(segments(cu_seqlens_m)):
            h = rows[start:end] @ b[e].float()
            if store_preact:
                preact_out[start:end] = h.bfloat16()
            silu = torch.nn.functional.silu(h[:, 0::2])
            postact_out[start:end] = (silu * h[:, 1::2]).bfloat16()

    def plain(self, a, b, out, *, config, cu_seqlens_m=None, cu_seqlens_k=None, A_idx=None):
        self.configs.append(config)
        if cu_seqlens_m is not None:
            for e, (start, end) in enumerate(segments(cu_seqlens_m)):
                out[start:end] = (a[start:end].float() @ b[e].float()).bfloat16()
        else:
            assert config.cluster_n == 1
            for e, (start, end) in enumerate(segments(cu_seqlens_k)):
                columns = a[:, A_idx[start:end].long()].float()
                out[e] = (columns @ b[start:end].float()).bfloat16()

    def dgated(self, a, b, *, config, PreAct, dx_out, postact_out, colvec_scale, cu_seqlens_m,
               A_idx):  # fmt: skip
        self.configs.append(config)
        rows = a[A_idx.long()].float()
        sums = torch.zeros(len(rows))
        for e, (start, end) in enumerate(segments(cu_seqlens_m)):
            d = rows[start:end] @ b[e].float()
            gate, up = PreAct[start:end, 0::2].float(), PreAct[start:end, 1::2].float()
            sigmoid = torch.sigmoid(gate)
            silu = gate * sigmoid
            weight = colvec_scale[start:end, None]
            sums[start:end] = (silu * up * d).sum(1)
            d_gate = d * weight * up * (sigmoid + silu * (1 - sigmoid))
            both = torch.stack((d_gate, d * weight * silu), -1).flatten(1)
            dx_out[start:end] = both.bfloat16()
            postact_out[start:end] = (silu * up * weight).bfloat16()
        return dx_out, postact_out, sums

    def autograd_functions(self) -> tuple[Any, Any]:
        fake = self

        class Up(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x, w1, b1, offset, routes, topk, gather, scatter, reverse, per_token,
                        varying, activation, inference, concat):  # fmt: skip
                assert b1 is None and per_token is None and not varying and not concat
                assert activation == "swiglu" and routes == len(gather)
                a = x.new_empty(routes, w1.shape[0] // 2)
                h = None if inference else x.new_empty(routes, w1.shape[0])
                fake.forward.gemm_gated(
                    x, w1.permute(2, 1, 0), activation=activation, cu_seqlens_m=offset,
                    A_idx=gather, preact_out=h, postact_out=a, store_preact=not inference,
                )  # fmt: skip
                ctx.save_for_backward(x, w1, offset, gather, reverse)
                ctx.topk = topk
                ctx.mark_non_differentiable(a)
                ctx.set_materialize_grads(False)
                return a, h

            @staticmethod
            def backward(ctx, _, dh):
                x, w1, offset, gather, reverse = ctx.saved_tensors
                dx, dw1 = dh.new_empty(len(dh), x.shape[1]), torch.empty_like(w1)
                fake.backward.gemm(dh, w1.permute(2, 0, 1), out=dx, cu_seqlens_m=offset)
                fake.backward.gemm(
                    x.T, dh, out=dw1.permute(2, 1, 0), cu_seqlens_k=offset, A_idx=gather
                )
                summed = dx[reverse.long()].float().view(len(x), ctx.topk, -1).sum(1)
                return summed.bfloat16(), dw1, *[None] * 12

        class Down(torch.autograd.Function):
            @staticmethod
            def forward(ctx, a, h, w2, b2, scores, offset, tokens, topk, gather, scatter, reverse,
                        per_token, varying, activation):  # fmt: skip
                y = a.new_empty(len(a), w2.shape[0])
                fake.forward.gemm(a, w2.permute(2, 1, 0), out=y, cu_seqlens_m=offset)
                weighted = y[reverse.long()].float().view(tokens, topk, -1) * scores.unsqueeze(2)
                ctx.save_for_backward(h, w2, scores, offset, gather, scatter)
                return weighted.sum(1).bfloat16()

            @staticmethod
            def backward(ctx, dout):
                h, w2, scores, offset, gather, scatter = ctx.saved_tensors
                dh, dw2 = torch.empty_like(h), torch.empty_like(w2)
                a = h.new_empty(len(h), w2.shape[1])
                _, _, sums = fake.backward.gemm_dgated(
                    dout, w2.permute(2, 0, 1), PreAct=h, dx_out=dh, postact_out=a,
                    colvec_scale=scores.flatten()[scatter.long()], cu_seqlens_m=offset,
                    A_idx=gather,
                )  # fmt: skip
                d_scores = torch.empty(scores.numel())
                d_scores[scatter.long()] = sums
                fake.backward.gemm(
                    dout.T, a, out=dw2.permute(2, 0, 1), cu_seqlens_k=offset, A_idx=gather
                )
                return None, dh, dw2, None, d_scores.view_as(scores), *[None] * 9

        return Up, Down
